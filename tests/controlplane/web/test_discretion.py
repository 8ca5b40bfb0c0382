from __future__ import annotations

import logging

import pytest

from controlplane.web.discretion import LinksHidden


@pytest.mark.parametrize(
    ("message", "arguments", "logged"),
    [
        ("%s: %s", ("Bad Request", "/a/approve.s3cret/"), "Bad Request: /a/…"),
        ("Forbidden: https://t.example/a/s3cret/", (), "Forbidden: https://t.example/a/…"),
        ("Forbidden: %s", ("/welcome/MQ/c4x-5ec/",), "Forbidden: /welcome/…"),
        ("Not Found: %s", ("/incidents/7/",), "Not Found: /incidents/7/"),
    ],
)
def test_a_log_line_holds_no_link_that_acts(
    message: str, arguments: tuple[str, ...], logged: str
) -> None:
    record = logging.LogRecord("django.request", 30, "f", 1, message, arguments, None)
    assert LinksHidden().filter(record)
    assert record.getMessage() == logged

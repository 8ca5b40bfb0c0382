"""What the command line may say, and what is said of the rest."""

from __future__ import annotations

import pytest

from engine.router.__main__ import parse
from engine.router.config import RouterConfig, Upstream


def test_an_engine_is_named_by_its_address_and_weighs_100_unless_told() -> None:
    config = parse(
        ["--engine", "http://h:1/", "--engine", "b@http://h:2=20", "--spare", "http://h"]
    )
    assert config.engines == (
        Upstream("h:1", "http://h:1", 100),
        Upstream("b", "http://h:2", 20),
        Upstream("h:80", "http://h", 100, spare=True),
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--engine", "h:1"], "engine: got 'h:1', want [NAME@]http://HOST:PORT[=WEIGHT]"),
        (["--engine", "http://h:x"], "engine: got 'http://h:x'"),
        (["--engine", "http://h=101"], "engine: weight '101' of h:80, allowed: 0 to 100"),
        (["--engine", "a b@http://h"], "engine: name 'a b', want"),
        (["--engine", "http://h", "--engine", "http://h"], "engines: name 'h:80' is there twice"),
        (["--engine", "http://h", "--port", "70000"], "port: got 70000, allowed: 0 to 65535"),
        (["--engine", "http://h", "--silence-s-max", "0"], "silence_s_max: got 0.0, allowed"),
        (["--spare", "http://h"], "required: --engine"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(arguments)
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_spare_engines_alone_are_none() -> None:
    with pytest.raises(ValueError, match="all are spare"):
        RouterConfig(engines=(Upstream("a", "http://a", 100, spare=True),))

"""Every endpoint called as its schema says, and as it does not: never a failure of ours, and every
answer is in the schema."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from django.core.wsgi import get_wsgi_application
from django.urls import URLPattern, URLResolver, get_resolver
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from rest_framework.views import APIView
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from schemathesis.openapi import from_wsgi

from controlplane.accounts.schema import openapi
from tests.api.conftest import Household, household

pytestmark = pytest.mark.django_db

CHECKS = [
    not_a_server_error,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
]


@pytest.fixture
def house(settings: Any) -> Household:
    settings.TRIMTAB_API_REQUESTS_PER_MIN = 1_000_000
    settings.SECURE_SSL_REDIRECT = False
    return household("acme")


LIMITS = settings(
    max_examples=4,
    deadline=None,
    phases=[Phase.generate],
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def test_every_answer_is_in_the_schema_and_none_is_our_failure(house: Household) -> None:
    """Requests as every endpoint takes them and as it does not, also for things that are there."""
    schema = from_wsgi("/api/v1/schema/", get_wsgi_application())
    called = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        called.add(f"{operation.method.upper()} {operation.path}")
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            cases = operation.as_strategy(generation_mode=mode)
            # Some endpoints take nothing that could be wrong.
            with contextlib.suppress(Unsatisfiable):
                given(case=cases)(LIMITS(lambda case: call(house, case)))()
    assert len(called) == sum(len(methods) for methods in openapi()["paths"].values())


def call(house: Household, case: Any) -> None:
    token = house.agent if case.path.startswith("/api/v1/agent/") else house.api
    headers = {"Authorization": f"Bearer {token}"}
    case.call_and_validate(headers=headers, checks=CHECKS)
    if case.path_parameters:
        case.path_parameters = house.path_parameters(case.path, list(case.path_parameters))
        case.call_and_validate(headers=headers, checks=CHECKS)


def views(patterns: list[Any], prefix: str = "") -> list[tuple[str, type[APIView]]]:
    """Every REST view with its address."""
    found = []
    for pattern in patterns:
        if isinstance(pattern, URLResolver):
            found += views(pattern.url_patterns, f"{prefix}{pattern.pattern}")
        elif isinstance(pattern, URLPattern):
            view = getattr(pattern.callback, "view_class", None)
            if view is not None and issubclass(view, APIView):
                found.append((f"{prefix}{pattern.pattern}", view))
    return found


def test_every_method_of_every_endpoint_says_what_it_takes_and_answers(
    capfd: pytest.CaptureFixture[str],
) -> None:
    openapi.cache_clear()
    spec = openapi()
    assert capfd.readouterr().err == "", "the schema was made with a complaint"
    assert spec["openapi"] == "3.1.0"
    operations = {(path, method) for path, methods in spec["paths"].items() for method in methods}
    ids = [one["operationId"] for path in spec["paths"].values() for one in path.values()]
    assert len(ids) == len(set(ids))
    found = views(get_resolver().url_patterns)
    assert len(found) >= 20
    assert len(operations) == sum(
        1
        for _, view in found
        for method in ("get", "post", "put", "patch", "delete")
        if hasattr(view, method)
    )
    for path, method in operations:
        answers = spec["paths"][path][method]["responses"]
        assert "default" in answers, f"{method} {path} says nothing of errors"
        good = [status for status in answers if status.startswith("2")]
        assert good, f"{method} {path} says nothing of its answer"
        for status in good:
            assert ("content" in answers[status]) == (status != "204"), f"{method} {path} {status}"
        if method in ("put", "patch"):
            assert "requestBody" in spec["paths"][path][method], f"{method} {path}"

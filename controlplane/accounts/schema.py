"""How the OpenAPI schema of /api/v1/ is made from what endpoints declare (rest.py)."""

from __future__ import annotations

from functools import cache
from typing import Any

from django.utils import translation
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.openapi import AutoSchema


class Schema(AutoSchema):
    """One operation. Its id is the method and the view's name: getIncidents, putObjectiveBySlug."""

    def get_operation_id(self) -> str:
        return f"{self.method.lower()}{type(self.view).__name__}"

    def get_serializer_name(self, serializer: Any, direction: str) -> str:
        return type(serializer).__name__.removesuffix("Shape")

    def get_summary(self) -> str:
        """The docstring's first line."""
        return str(self.get_description() or "").partition("\n")[0]


class Bearer(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """`Authorization: Bearer tt_…`, with the scopes a token may have."""

    target_class = "controlplane.accounts.authentication.BearerToken"
    name = "token"

    def get_security_definition(self, auto_schema: AutoSchema) -> dict[str, Any]:
        return {
            "type": "http",
            "scheme": "bearer",
            "description": "`trimtab token create --kind api`. Its scopes: read for GET, act for "
            "what starts, ends or allows an action, write for everything else.",
        }


@cache
def openapi() -> dict[str, Any]:
    """The schema, OpenAPI 3.1, in English; made once in the life of a process."""
    with translation.override("en"):
        generator = SchemaGenerator()  # type: ignore[no-untyped-call]
        schema: dict[str, Any] = generator.get_schema(public=True)  # type: ignore[no-untyped-call]
    _loosened(schema)
    return schema


def _loosened(part: object) -> None:
    """What may be anything may be null: "one of anything and null" would refuse it, being both."""
    if isinstance(part, dict):
        if part.get("oneOf") == [{}, {"type": "null"}]:
            del part["oneOf"]
        for inner in part.values():
            _loosened(inner)
    elif isinstance(part, list):
        for inner in part:
            _loosened(inner)

"""/api/v1/ and /api/v1/schema/: the REST API to read, and the same for programs (OpenAPI 3.1)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.http import require_safe

from controlplane.accounts.schema import openapi
from controlplane.web.access import TenantRequest, page, send

METHODS = ("get", "post", "put", "patch", "delete")
NESTING_MAX = 3


@dataclass(frozen=True)
class Row:
    """A parameter or a field: `name` is dotted for one inside another, `[]` marks a list."""

    name: str
    kind: str
    required: bool
    about: str


@dataclass(frozen=True)
class Operation:
    """One method of one address."""

    id: str
    method: str
    path: str
    summary: str
    about: str
    parameters: list[Row]
    body: list[Row]
    answers: list[tuple[str, list[Row]]]


@require_safe
def schema(request: HttpRequest) -> HttpResponse:
    """For anyone: it says what may be asked, nothing of what would be answered."""
    return JsonResponse(openapi())


@page
def reference(request: TenantRequest) -> HttpResponse:
    context = {
        "nouns": nouns(openapi()),
        "url": settings.TRIMTAB_PUBLIC_URL,
        "errors": list(Fields(openapi()).of({"$ref": "#/components/schemas/Error"})),
        "page_state": "none",
    }
    return send(request, "reference.html", context)


def nouns(spec: Mapping[str, Any]) -> dict[str, list[Operation]]:
    """Operations by the first word of their address, in the schema's order."""
    found: dict[str, list[Operation]] = defaultdict(list)
    for path, methods in spec["paths"].items():
        for method in METHODS:
            if method in methods:
                one = _operation(spec, path, method, methods[method])
                found[path.removeprefix("/api/v1/").partition("/")[0]].append(one)
    return dict(found)


def _operation(
    spec: Mapping[str, Any], path: str, method: str, said: Mapping[str, Any]
) -> Operation:
    fields = Fields(spec)
    summary, _, about = said.get("description", "").replace("`", "").partition("\n")
    parameters = [
        Row(p["name"], fields.kind(p["schema"]), p.get("required", False), p.get("description", ""))
        for p in said.get("parameters", ())
    ]
    return Operation(
        id=said["operationId"],
        method=method.upper(),
        path=path,
        summary=summary.removesuffix("."),
        about=about.strip(),
        parameters=parameters,
        body=list(fields.of(_json(said.get("requestBody", {})))),
        answers=[
            (status, list(fields.of(_json(answer))))
            for status, answer in said["responses"].items()
            if status != "default"
        ],
    )


def _json(carrier: Mapping[str, Any]) -> Mapping[str, Any]:
    content: Mapping[str, Any] = carrier.get("content", {}).get("application/json", {})
    found: Mapping[str, Any] = content.get("schema", {})
    return found


class Fields:
    """Reads JSON schemas, following references, into rows."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.components: Mapping[str, Any] = spec["components"]["schemas"]

    def of(self, schema: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[Row]:
        """Every field of an object, those of objects inside it after it."""
        whole = self.resolved(schema)
        required = whole.get("required", ())
        for name, part in whole.get("properties", {}).items():
            about = part.get("description", "") if "$ref" not in part else ""
            yield Row(f"{prefix}{name}", self.kind(part), name in required, about)
            inner, mark = self.resolved(part), ""
            if inner.get("type") == "array":
                inner, mark = self.resolved(inner["items"]), "[]"
            if depth < NESTING_MAX and "properties" in inner:
                yield from self.of(inner, f"{prefix}{name}{mark}.", depth + 1)

    def resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """The schema behind references; of alternatives, the one that is not null."""
        while True:
            if "$ref" in schema:
                schema = self.components[schema["$ref"].rpartition("/")[2]]
                continue
            choices = [
                one
                for key in ("allOf", "oneOf", "anyOf")
                for one in schema.get(key, ())
                if one.get("type") != "null"
            ]
            if not choices:
                return schema
            schema = choices[0]

    def kind(self, schema: Mapping[str, Any]) -> str:
        """Its type in words: `string (uuid)`, `list of number or null`, `open | closed`."""
        whole = self.resolved(schema)
        if "enum" in whole:
            return " | ".join(str(value) for value in whole["enum"] if value is not None)
        kinds = whole.get("type", "any")
        kinds = [kinds] if isinstance(kinds, str) else list(kinds)
        words = []
        for kind in kinds:
            if kind == "array":
                words.append(f"list of {self.kind(whole['items'])}")
            elif kind == "null":
                words.append("null")
            else:
                form = whole.get("format")
                words.append(f"{kind} ({form})" if form and form != "double" else kind)
        return " or ".join(words)

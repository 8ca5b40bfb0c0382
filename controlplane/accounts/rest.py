"""What the endpoints of every noun share: shapes, queries and pages.

An endpoint declares the query it takes and the shape it answers with; what is checked, what is sent
and what the schema (schema.py) says are then one thing. Who may call is in authentication.py.

    class IncidentQuery(ListQuery):
        state = choice(Incident.State.values)

    class Incidents(APIView):
        @documented(query=IncidentQuery, answer=list_of("incidents", IncidentShape))
        def get(self, request: Request) -> Response:
            asked = IncidentQuery.of(request)
            rows = incidents_query(request_tenant(request), state=asked.get("state"))
            page = page_of(rows, asked, by=("-opened_at", "id"))
            return listed("incidents", page, IncidentShape)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

from django.core import signing
from django.db.models import Field, Model, Q, QuerySet
from django.utils.text import format_lazy
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from drf_spectacular.utils import extend_schema, inline_serializer
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.accounts.authentication import ApiError

LIMIT_DEFAULT = 50
LIMIT_MAX = 200
CURSOR_CHARS_MAX = 1_000
TEXT_CHARS_MAX = 200

T = TypeVar("T")
M = TypeVar("M", bound=Model)
F = TypeVar("F", bound=Callable[..., Any])


class Shape(serializers.Serializer[Any]):
    """What a body or an answer looks like. Answers are made by it, so the schema cannot lie."""

    @classmethod
    def read(cls, request: Request) -> dict[str, Any]:
        """The body's fields, checked. Raises ApiError 400 for what is no object or has a field
        nobody declared, ValidationError (which names the field) for one that does not fit."""
        body, given = body_of(request), cls(data=request.data)
        for name in body:
            if name not in given.fields:
                known = ", ".join(given.fields)
                raise invalid(name, body[name], _("no such field, only %s") % known)
        given.is_valid(raise_exception=True)
        return dict(given.validated_data)


class ErrorDetail(Shape):
    code = serializers.CharField(help_text="for programs")
    message = serializers.CharField(help_text="for people: the thing, the value, what is allowed")
    param = serializers.CharField(allow_null=True, help_text="the field at fault, if one is")


class Error(Shape):
    """Every answer that is not what was asked for, whatever went wrong."""

    error = ErrorDetail()


# --- what may be asked ----------------------------------------------------------------------------


class Query(serializers.Serializer[Any]):
    """The query parameters of an endpoint, declared once."""

    @classmethod
    def of(cls, request: Request) -> dict[str, Any]:
        """What was asked, parsed. Raises ApiError 400 naming the parameter, its value and what is
        allowed; a parameter nobody declared is a slip of the pen, not ignored."""
        query = cls(data=request.query_params.dict())
        for name, values in request.query_params.lists():
            if name not in query.fields:
                known = ", ".join(sorted(query.fields)) or _("none")
                raise invalid(name, values[-1], _("no such parameter, only %s") % known)
            if len(values) > 1:
                raise invalid(name, values, _("to be given once"))
        if not query.is_valid():
            name, details = next(iter(query.errors.items()))
            raise invalid(name, request.query_params.get(name, ""), str(details[0]))
        return dict(query.validated_data)


class ListQuery(Query):
    """What every list takes."""

    limit = serializers.IntegerField(
        min_value=1, max_value=LIMIT_MAX, default=LIMIT_DEFAULT, help_text="rows in the answer"
    )
    cursor = serializers.CharField(
        required=False, max_length=CURSOR_CHARS_MAX, help_text="`next` of the answer before"
    )


def choice(allowed: Collection[str], **options: Any) -> serializers.ChoiceField:
    """A query parameter that is one of a few words."""
    words = format_lazy("{}: {}", gettext_lazy("allowed"), ", ".join(allowed))
    return serializers.ChoiceField(
        choices=list(allowed), required=False, error_messages={"invalid_choice": words}, **options
    )


def text(**options: Any) -> serializers.CharField:
    """A query parameter that is a name, as stored."""
    return serializers.CharField(
        required=False, max_length=TEXT_CHARS_MAX, trim_whitespace=False, **options
    )


def moment(**options: Any) -> serializers.DateTimeField:
    """A query parameter that is an RFC 3339 time; without a zone, UTC."""
    return serializers.DateTimeField(required=False, **options)


def invalid(param: str, value: object, allowed: str) -> ApiError:
    """400: the parameter, its value, and what is allowed."""
    shown = value if len(repr(value)) <= TEXT_CHARS_MAX else f"{str(value)[:TEXT_CHARS_MAX]}…"
    words = _("%(param)s=%(value)r: %(allowed)s")
    return ApiError(
        400, "invalid", words % {"param": param, "value": shown, "allowed": allowed}, param=param
    )


def body_of(request: Request) -> dict[str, Any]:
    """The JSON object sent. Raises ApiError 400 for any other body."""
    if not isinstance(request.data, dict):
        raise ApiError(400, "invalid", _("The body must be a JSON object."))
    return dict(request.data)


# --- pages ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Page(Generic[T]):
    """Rows, and where the next page begins; None at the end."""

    rows: Sequence[T]
    next: str | None


def page_of(rows: QuerySet[M], asked: Mapping[str, Any], *, by: Sequence[str]) -> Page[M]:
    """The rows after `asked`'s cursor, at most its limit, ordered by the columns `by`.

    By key, not by number: rows that come or go between two pages shift nothing, and the thousandth
    page costs what the first does. Together the columns must be unique, and none may be NULL.
    Raises ApiError 400 for a cursor that is not this list's.
    """
    of = f"{rows.model._meta.label} {' '.join(by)}"
    if "cursor" in asked:
        rows = rows.filter(_after(by, cursor_read(asked["cursor"], of=of)))
    found = list(rows.order_by(*by)[: asked["limit"] + 1])
    if len(found) <= asked["limit"]:
        return Page(found, None)
    last = found[asked["limit"] - 1]
    values = [_text_of(last, name.removeprefix("-")) for name in by]
    return Page(found[:-1], cursor_make(values, of=of))


def cursor_make(values: Sequence[str], *, of: str) -> str:
    """The key of a page's last row, signed, so that only what we gave comes back."""
    return signing.dumps(list(values), salt=f"cursor of {of}")


def cursor_read(cursor: str, *, of: str) -> list[str]:
    """Raises ApiError 400 for a cursor that `cursor_make` did not make for the same list."""
    try:
        values: list[str] = signing.loads(cursor, salt=f"cursor of {of}")
    except signing.BadSignature:
        raise invalid("cursor", cursor, _("allowed: `next` of an earlier answer")) from None
    return values


def _text_of(row: Model, column: str) -> str:
    field = row._meta.get_field(column)
    assert isinstance(field, Field), f"{column} is no column of its own"
    return field.value_to_string(row)


def _after(by: Sequence[str], values: Sequence[str]) -> Q:
    after = Q()
    same: dict[str, str] = {}
    for name, value in zip(by, values, strict=True):
        column = name.removeprefix("-")
        beyond = "lt" if name.startswith("-") else "gt"
        after |= Q(**same, **{f"{column}__{beyond}": value})
        same[column] = value
    return after


def listed(noun: str, page: Page[Any], shape: type[Shape]) -> Response:
    """The answer of a list: `{"<noun>": […], "next": cursor or null}`."""
    return Response({noun: shape(page.rows, many=True).data, "next": page.next})


@cache
def list_of(noun: str, shape: type[Shape]) -> Any:
    """The shape of `listed`, for the schema: IncidentsPage for incidents."""
    name = f"{noun.capitalize()}Page"
    after = serializers.CharField(allow_null=True, help_text="cursor of the next page; null: none")
    return inline_serializer(name, {noun: shape(many=True), "next": after})


# --- the schema -----------------------------------------------------------------------------------


def documented(
    *,
    answer: Any,
    status: int = 200,
    also: Mapping[int, Any] | None = None,
    body: type[Shape] | None = None,
    query: type[Query] | None = None,
) -> Callable[[F], F]:
    """Says in the schema what a method takes and answers; None as `answer` is an empty body.

    `also` holds other good answers by status; all bad ones have the error shape.
    """
    return extend_schema(
        request=body,
        parameters=[query] if query else [],
        responses={status: answer, **(also or {}), "default": Error},
    )

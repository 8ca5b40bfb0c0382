"""REST of channels, silences and deliveries. No answer holds an address, or a secret but once."""

from __future__ import annotations

from typing import Any, ClassVar
from uuid import UUID

from django.http import Http404
from django.urls import path
from django.utils import timezone
from django.utils.translation import gettext as _
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.accounts.audit import actor_of
from controlplane.accounts.authentication import ApiError, request_tenant
from controlplane.accounts.rest import (
    ListQuery,
    Shape,
    body_of,
    choice,
    documented,
    invalid,
    list_of,
    listed,
    moment,
    page_of,
    text,
)  # fmt: skip
from controlplane.alerts import selectors, services
from controlplane.alerts.channel import ChannelError, channels
from controlplane.alerts.models import Channel, Delivery, Silence
from controlplane.alerts.secrecy import masked
from controlplane.diagnosis.models import Severity


class ChannelShape(Shape):
    id = serializers.UUIDField()
    name = serializers.CharField()
    kind = serializers.CharField(help_text="webhook or a chat service")
    url = serializers.SerializerMethodField(help_text="host only: the rest is a secret")
    signed = serializers.SerializerMethodField(help_text="whether messages carry a signature")
    severity_min = serializers.ChoiceField(choices=Severity.values)
    remind_minutes = serializers.IntegerField(help_text="0: every incident is told once")
    enabled = serializers.BooleanField()
    created_at = serializers.DateTimeField()

    def get_url(self, channel: Channel) -> str:
        return masked(channel.url)

    def get_signed(self, channel: Channel) -> bool:
        return bool(channel.secret)


class ChannelMadeShape(ChannelShape):
    secret = serializers.CharField(help_text="to verify signatures with; shown this once")


class ChannelBody(Shape):
    """What makes or changes a channel; a change leaves out what stays."""

    name = serializers.CharField(required=False, max_length=services.NAME_CHARS_MAX)
    kind = serializers.CharField(required=False, default="webhook")
    url = serializers.CharField(required=False, max_length=services.URL_CHARS_MAX)
    secret = serializers.CharField(
        required=False, allow_blank=True, max_length=services.SECRET_CHARS_MAX
    )
    severity_min = serializers.ChoiceField(required=False, choices=Severity.values)
    remind_minutes = serializers.IntegerField(
        required=False, min_value=0, max_value=services.REMIND_MINUTES_MAX
    )
    enabled = serializers.BooleanField(required=False)


class SilenceShape(Shape):
    id = serializers.UUIDField()
    service = serializers.CharField(help_text='"" fits every service')
    objective = serializers.CharField(help_text='slug; "" fits every objective')
    engine = serializers.CharField(help_text='"" fits every engine')
    reason = serializers.CharField()
    by = serializers.CharField()
    created_at = serializers.DateTimeField()
    until = serializers.DateTimeField()
    ended_at = serializers.DateTimeField(allow_null=True, help_text="when ended before its time")


class SilenceBody(Shape):
    """At least one of service, objective and engine."""

    service = serializers.CharField(required=False, max_length=services.NAME_CHARS_MAX)
    objective = serializers.CharField(required=False, max_length=services.NAME_CHARS_MAX)
    engine = serializers.CharField(required=False, max_length=services.NAME_CHARS_MAX)
    reason = serializers.CharField(max_length=services.REASON_CHARS_MAX)
    until = serializers.DateTimeField(help_text="within 30 days")


class DeliveryShape(Shape):
    id = serializers.UUIDField(help_text="what the receiver saw as webhook-id")
    channel = serializers.CharField(source="channel.name")
    incident = serializers.UUIDField(source="incident_id", allow_null=True)
    event = serializers.ChoiceField(choices=Delivery.Event.values)
    state = serializers.ChoiceField(choices=Delivery.State.values)
    silence = serializers.UUIDField(source="silence_id", allow_null=True)
    title = serializers.CharField(source="message.title")
    text = serializers.CharField(source="message.text")
    attempts = serializers.IntegerField()
    status = serializers.IntegerField(source="last_status", allow_null=True)
    error = serializers.CharField(source="last_error")
    permanent = serializers.BooleanField(
        allow_null=True, help_text="whether the last error is for good; null: there was none"
    )
    created_at = serializers.DateTimeField()
    next_try_at = serializers.SerializerMethodField(help_text="null once nothing will be tried")
    sent_at = serializers.DateTimeField(allow_null=True)

    def get_next_try_at(self, delivery: Delivery) -> str | None:
        pending = delivery.state == Delivery.State.PENDING
        return delivery.next_try_at.isoformat() if pending else None


class SilenceQuery(ListQuery):
    active = serializers.BooleanField(required=False, allow_null=True, default=None)


class DeliveryQuery(ListQuery):
    state = choice(Delivery.State.values)
    event = choice(Delivery.Event.values)
    channel = text(help_text="its name")
    incident = serializers.UUIDField(required=False)
    since = moment(help_text="made at this time or later")


class Channels(APIView):
    """Where messages go, by name. Messages carry links that act, so making one takes that scope."""

    scope_to_write = "act"

    @documented(query=ListQuery, answer=list_of("channels", ChannelShape))
    def get(self, request: Request) -> Response:
        """The channels, by name."""
        rows = selectors.channels_of(request_tenant(request))
        return listed("channels", page_of(rows, ListQuery.of(request), by=("name",)), ChannelShape)

    @documented(body=ChannelBody, answer=ChannelMadeShape, status=201)
    def post(self, request: Request) -> Response:
        """Make a channel. A secret made for it is in this answer and in no other."""
        spec = body_of(request)
        try:
            made, secret = services.channel_create(
                tenant=request_tenant(request), spec=spec, by=actor_of(request), now=timezone.now()
            )
        except ChannelError as error:
            raise refused(error) from None
        return Response({**ChannelShape(made).data, "secret": secret}, status=201)


class ChannelById(APIView):
    """One channel."""

    scope_to_write = "act"

    @documented(answer=ChannelShape)
    def get(self, request: Request, channel_id: UUID) -> Response:
        """The channel of that id."""
        return Response(ChannelShape(channel_of(request, channel_id)).data)

    @documented(body=ChannelBody, answer=ChannelShape)
    def patch(self, request: Request, channel_id: UUID) -> Response:
        """Change the given fields; a channel keeps its kind."""
        channel, spec = channel_of(request, channel_id), body_of(request)
        try:
            changed = services.channel_update(
                channel=channel, spec=spec, by=actor_of(request), now=timezone.now()
            )
        except ChannelError as error:
            raise refused(error) from None
        return Response(ChannelShape(changed).data)

    @documented(answer=None, status=204)
    def delete(self, request: Request, channel_id: UUID) -> Response:
        """Remove the channel, what was still to be sent there, and its log."""
        channel = channel_of(request, channel_id)
        services.channel_remove(channel=channel, by=actor_of(request), now=timezone.now())
        return Response(status=204)


class ChannelTest(APIView):
    """A message that says it is a test."""

    @documented(answer=DeliveryShape)
    def post(self, request: Request, channel_id: UUID) -> Response:
        """Send a test, now and once. 200 also when it was refused: see `state` and `error`.

        409 while another of the tenant is under way.
        """
        channel, by = channel_of(request, channel_id), actor_of(request)
        try:
            delivery = services.channel_test(channel=channel, by=by, now=timezone.now())
        except ChannelError as error:
            raise ApiError(409, "conflict", str(error)) from None
        return Response(DeliveryShape(delivery).data)


class ChannelKinds(APIView):
    """What a channel can be."""

    class KindShape(Shape):
        kind = serializers.CharField(source="slug")
        title = serializers.CharField(source="label")
        address = serializers.CharField(help_text="what an address looks like")
        signs = serializers.BooleanField(help_text="whether it takes a secret to sign with")

    @documented(answer=list_of("kinds", KindShape))
    def get(self, request: Request) -> Response:
        """Every kind of channel there is."""
        shown = self.KindShape(list(channels().values()), many=True).data
        return Response({"kinds": shown, "next": None})


class Silences(APIView):
    """Who does not want to hear of what, until when, and why."""

    @documented(query=SilenceQuery, answer=list_of("silences", SilenceShape))
    def get(self, request: Request) -> Response:
        """The silences, newest first; `active` true: those that hold now."""
        tenant, asked = request_tenant(request), SilenceQuery.of(request)
        rows = selectors.silences_of(tenant)
        if asked["active"] is not None:
            held = selectors.silences_active(tenant.pk, timezone.now()).values("pk")
            rows = rows.filter(pk__in=held) if asked["active"] else rows.exclude(pk__in=held)
        page = page_of(rows, asked, by=("-created_at", "-id"))
        return listed("silences", page, SilenceShape)

    @documented(body=SilenceBody, answer=SilenceShape, status=201)
    def post(self, request: Request) -> Response:
        """Keep quiet about a scope. What is held back is in the log; what outlasts it is told."""
        spec, by = body_of(request), actor_of(request)
        if "until" in spec:
            try:
                spec["until"] = serializers.DateTimeField().to_internal_value(spec["until"])
            except serializers.ValidationError:
                raise invalid("until", spec["until"], _("wanted: an RFC 3339 time")) from None
        try:
            made = services.silence_create(
                tenant=request_tenant(request), spec=spec, by=by, now=timezone.now()
            )
        except ChannelError as error:
            raise refused(error) from None
        return Response(SilenceShape(made).data, status=201)


class SilenceById(APIView):
    """One silence."""

    @documented(answer=SilenceShape)
    def get(self, request: Request, silence_id: UUID) -> Response:
        """The silence of that id."""
        return Response(SilenceShape(silence_of(request, silence_id)).data)

    @documented(answer=SilenceShape)
    def delete(self, request: Request, silence_id: UUID) -> Response:
        """End it now; it stays in the list. What still burns is told within a pass."""
        ended = services.silence_end(
            silence=silence_of(request, silence_id), by=actor_of(request), now=timezone.now()
        )
        return Response(SilenceShape(ended).data)


class Deliveries(APIView):
    """What was said to whom, and what came of it."""

    names: ClassVar[dict[str, str]] = {
        "channel": "channel__name", "since": "created_at__gte", "incident": "incident_id",
    }  # fmt: skip

    @documented(query=DeliveryQuery, answer=list_of("deliveries", DeliveryShape))
    def get(self, request: Request) -> Response:
        """The log, newest first."""
        asked = DeliveryQuery.of(request)
        filters: dict[str, Any] = {
            self.names.get(key, key): value
            for key, value in asked.items()
            if key not in ("limit", "cursor")
        }
        rows = selectors.deliveries_of(request_tenant(request)).filter(**filters)
        return listed("deliveries", page_of(rows, asked, by=("-created_at", "-id")), DeliveryShape)


def refused(error: ChannelError) -> ApiError:
    return ApiError(400, "invalid", str(error), param=error.param)


def channel_of(request: Request, channel_id: UUID) -> Channel:
    channel = selectors.channels_of(request_tenant(request)).filter(pk=channel_id).first()
    if channel is None:
        raise Http404(_("No channel has the id %(id)s.") % {"id": channel_id})
    return channel


def silence_of(request: Request, silence_id: UUID) -> Silence:
    silence = selectors.silences_of(request_tenant(request)).filter(pk=silence_id).first()
    if silence is None:
        raise Http404(_("No silence has the id %(id)s.") % {"id": silence_id})
    return silence


urlpatterns = [
    path("channels/", Channels.as_view(), name="api-channels"),
    path("channels/<uuid:channel_id>/", ChannelById.as_view(), name="api-channel"),
    path("channels/<uuid:channel_id>/test/", ChannelTest.as_view(), name="api-channel-test"),
    path("channel-kinds/", ChannelKinds.as_view(), name="api-channel-kinds"),
    path("silences/", Silences.as_view(), name="api-silences"),
    path("silences/<uuid:silence_id>/", SilenceById.as_view(), name="api-silence"),
    path("deliveries/", Deliveries.as_view(), name="api-deliveries"),
]

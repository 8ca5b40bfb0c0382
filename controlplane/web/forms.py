"""The forms of the pages. Whether what is filled in fits is the services' to say; a form asks for
it, reads it, and shows beside each field what was wrong with it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django import forms
from django.contrib.auth.forms import AuthenticationForm, PasswordChangeForm, SetPasswordForm
from django.core.exceptions import ValidationError
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

from controlplane.accounts.members import NAME_CHARS_MAX as MEMBER_CHARS_MAX
from controlplane.accounts.models import Membership, Token
from controlplane.accounts.throttle import Buckets
from controlplane.actions.orders import REASON_CHARS_MAX as WHY_CHARS_MAX
from controlplane.alerts import services as alerts
from controlplane.alerts.channel import channels
from controlplane.alerts.models import Channel
from controlplane.diagnosis.models import Severity

TRIES_PER_MIN = 10  # at a password
# Words for what the services know by number.
LASTING: dict[str, tuple[timedelta, Promise]] = {
    "1h": (timedelta(hours=1), _("1 hour")),
    "4h": (timedelta(hours=4), _("4 hours")),
    "1d": (timedelta(days=1), _("1 day")),
    "7d": (timedelta(days=7), _("7 days")),
    "30d": (timedelta(days=30), _("30 days")),
}
FREEZES: dict[str, tuple[timedelta | None, Promise]] = {
    "0": (None, _("until it is lifted")),
    "30": (timedelta(minutes=30), _("30 minutes")),
    "60": (timedelta(hours=1), _("1 hour")),
    "240": (timedelta(hours=4), _("4 hours")),
    "1440": (timedelta(days=1), _("24 hours")),
}


class PageForm(forms.Form):
    """A form; `id_prefix` keeps the ids of several on one page apart."""

    def __init__(self, data: Any = None, *, id_prefix: str = "id", **options: Any) -> None:
        super().__init__(data, auto_id=f"{id_prefix}_%s", label_suffix="", **options)

    def refuse(self, param: str | None, message: str) -> None:
        """Puts a service's refusal beside the field it names, or above the form."""
        self.add_error(param if param in self.fields else None, message)

    def refuse_each(self, error: ValidationError) -> None:
        """The same for an error that names several."""
        for param, messages in error.message_dict.items():
            for message in messages:
                self.refuse(param, message)


class FreezeForm(PageForm):
    reason = forms.CharField(label=_("Why?"), max_length=200)
    minutes = forms.ChoiceField(
        label=_("For how long?"), choices=[(key, words) for key, (_for, words) in FREEZES.items()]
    )


class ChangeForm(PageForm):
    """A person's change of one knob. `expected_config_version`: what the page showed; `key` makes
    sending the form twice one change."""

    knob = forms.ChoiceField(label=_("Knob"))
    value = forms.CharField(label=_("Value"), max_length=40)
    how = forms.ChoiceField(
        label=_("How"),
        choices=[
            ("trial", _("on trial: judged by what it does, and undone if it does harm")),
            ("at_once", _("at once: kept without being judged")),
        ],
        initial="trial",
        widget=forms.RadioSelect,
    )
    why = forms.CharField(
        label=_("Why?"), required=False, max_length=WHY_CHARS_MAX, help_text=_("for the ledger")
    )
    expected_config_version = forms.IntegerField(
        min_value=0, max_value=2**63 - 1, widget=forms.HiddenInput
    )
    key = forms.CharField(max_length=100, widget=forms.HiddenInput)

    def refuse(self, param: str | None, message: str) -> None:
        super().refuse("value" if param and param.startswith("values") else param, message)


def _kinds() -> list[tuple[str, str]]:
    return [(slug, kind.label) for slug, kind in channels().items()]


class ChannelForm(PageForm):
    name = forms.CharField(label=_("Name"), max_length=alerts.NAME_CHARS_MAX)
    kind = forms.ChoiceField(label=_("Kind"), choices=_kinds, initial="webhook")
    url = forms.CharField(
        label=_("Address"),
        max_length=alerts.URL_CHARS_MAX,
        widget=forms.TextInput({"autocomplete": "off", "spellcheck": "false"}),
        help_text=_("Whoever has it can post there: it is kept, and never shown again."),
    )
    secret = forms.CharField(
        label=_("Secret to sign with"),
        required=False,
        max_length=alerts.SECRET_CHARS_MAX,
        widget=forms.PasswordInput({"autocomplete": "off"}),
        help_text=_("Left empty, a webhook gets one made for it."),
    )
    severity_min = forms.ChoiceField(
        label=_("Hears of"),
        choices=[
            (Severity.TICKET, _("everything")),
            (Severity.PAGE, _("what cannot wait (page)")),
        ],
    )
    remind_minutes = forms.IntegerField(
        label=_("Reminds every"), initial=60, help_text=_("minutes; 0: says it once")
    )

    def spec(self) -> dict[str, Any]:
        """What was filled in, as the services take it; an empty secret is none given."""
        given = dict(self.cleaned_data)
        return {name: value for name, value in given.items() if name != "secret" or value}


class ChannelEditForm(ChannelForm):
    """Of a channel that is there: its kind stays, and so do address and secret left empty.

    `made_secret` is the one made at the person's word, to be shown this once.
    """

    enabled = forms.BooleanField(label=_("Switched on"), required=False)
    signing = forms.ChoiceField(label=_("Signature"), required=False, widget=forms.RadioSelect)
    field_order = (
        "name", "url", "signing", "secret", "severity_min", "remind_minutes", "enabled",
    )  # fmt: skip

    def __init__(self, data: Any = None, *, channel: Channel, **options: Any) -> None:
        super().__init__(data, **options)
        kind = channels().get(channel.kind)
        self.made_secret = ""
        self.secret_new = kind.secret_new if kind is not None else str
        del self.fields["kind"]
        for name in ("url", "secret"):
            self.fields[name].required = False
            self.fields[name].help_text = _("Left empty, it stays as it is.")
        self.fields["secret"].label = _("Another secret to sign with")
        ways = [("", _("as it is")), ("new", _("with a new secret, made here"))]
        if not self.secret_new():
            ways.pop()  # the service makes them
        if channel.secret:
            ways.append(("none", _("not signed any more")))
        self.fields["signing"].choices = ways  # type: ignore[attr-defined]
        if kind is not None and not kind.signs:
            del self.fields["signing"], self.fields["secret"]
        elif len(ways) == 1:
            del self.fields["signing"]

    def clean(self) -> dict[str, Any]:
        given = super().clean() or {}
        if given.get("signing") and given.get("secret"):
            self.refuse("secret", str(_("Either this one, or what is chosen above.")))
        return given

    def spec(self) -> dict[str, Any]:
        given = super().spec()
        signing = given.pop("signing", "")
        if signing == "new":
            self.made_secret = self.secret_new()
        if signing:
            given["secret"] = self.made_secret
        return {name: value for name, value in given.items() if name != "url" or value}


class SilenceForm(PageForm):
    """About what fits all of those chosen."""

    service = forms.ChoiceField(label=_("Service"), required=False)
    objective = forms.ChoiceField(label=_("Objective"), required=False)
    engine = forms.ChoiceField(label=_("Engine"), required=False)
    lasts = forms.ChoiceField(
        label=_("For how long?"), choices=[(key, words) for key, (_for, words) in LASTING.items()]
    )
    reason = forms.CharField(label=_("Why?"), max_length=alerts.REASON_CHARS_MAX)

    def __init__(
        self, data: Any = None, *, choices: dict[str, list[tuple[str, str]]], **options: Any
    ) -> None:
        super().__init__(data, **options)
        for name, offered in choices.items():
            self.fields[name].choices = [("", _("any")), *offered]  # type: ignore[attr-defined]


class TokenForm(PageForm):
    name = forms.CharField(label=_("What is it for?"), max_length=100)
    kind = forms.ChoiceField(label=_("Kind"), choices=Token.Kind.choices, initial=Token.Kind.API)
    scopes = forms.MultipleChoiceField(
        label=_("May"),
        required=False,
        choices=Token.Scope.choices,
        widget=forms.CheckboxSelectMultiple,
        help_text=_("for the kind API; the others have one door each"),
    )


class RoleForm(PageForm):
    role = forms.ChoiceField(label=_("Role"), choices=Membership.Role.choices)


class MemberForm(PageForm):
    name = forms.CharField(
        label=_("Name"),
        max_length=MEMBER_CHARS_MAX,
        widget=forms.TextInput({"autocomplete": "off", "autocapitalize": "none"}),
        help_text=_("to sign in with: letters, digits and @ . + - _"),
    )
    role = forms.ChoiceField(
        label=_("Role"), choices=Membership.Role.choices, initial=Membership.Role.VIEWER
    )


class SignInForm(AuthenticationForm):
    """Django's, with TRIES_PER_MIN tries at each name from each address, until one is right."""

    error_messages = {
        **AuthenticationForm.error_messages,
        "invalid_login": _("Name and password do not match. Passwords know upper from lower case."),
    }
    _tries = Buckets()

    def clean(self) -> dict[str, Any]:
        assert self.request is not None
        address = self.request.META.get("REMOTE_ADDR", "")
        caller = f"{address} {self.cleaned_data.get('username', '')}"
        if self._tries.take(caller, TRIES_PER_MIN) is not None:
            raise ValidationError(_("Too many tries at this name: wait a few seconds."))
        given = super().clean()
        if self.get_user() is not None:
            self._tries.refill(caller)
        return given


class OwnPasswordForm(PasswordChangeForm):
    """Django's, without the focus it takes and the colons it adds; with TRIES_PER_MIN tries at the
    old one, for somebody else may sit at a page that was left open."""

    _tries = Buckets()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, label_suffix="", **options)
        self.fields["old_password"].widget.attrs.pop("autofocus", None)

    def clean_old_password(self) -> str:
        caller = str(self.user.pk)
        if self._tries.take(caller, TRIES_PER_MIN) is not None:
            raise ValidationError(_("Too many tries: wait a few seconds."))
        given: str = super().clean_old_password()
        self._tries.refill(caller)
        return given


class ChosenPasswordForm(SetPasswordForm):  # type: ignore[type-arg]
    """The same for who has none to give yet."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, label_suffix="", **options)

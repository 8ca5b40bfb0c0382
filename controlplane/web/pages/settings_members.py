"""/settings/members/: who belongs to the tenant, what each may do, and how somebody comes in."""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings
from django.core.exceptions import ValidationError
from django.http import Http404, HttpResponse
from django.shortcuts import redirect
from django.utils import timezone

from controlplane.accounts.members import (
    MEMBERS_PER_TENANT_MAX,
    LastOwner,
    MemberError,
    member_activate,
    member_add,
    member_change,
    member_deactivate,
    member_remove,
    password_link,
)
from controlplane.accounts.models import Membership, Tenant
from controlplane.accounts.selectors import members_of
from controlplane.web.access import TenantRequest, owner_form_page, owner_order, send
from controlplane.web.forms import MemberForm, RoleForm


@owner_form_page
def member_list(request: TenantRequest) -> HttpResponse:
    """A POST lets somebody in; the link to choose a password is on the page that answers alone."""
    if request.method != "POST":
        return _shown(request)
    form = MemberForm(request.POST)
    if form.is_valid():
        try:
            actor = request.user.get_username()
            member = member_add(tenant=request.tenant, actor=actor, **form.cleaned_data)
            return _shown(request, link_of=member, status=201)
        except ValidationError as error:
            form.refuse_each(error)
    return _shown(request, add=form, status=400)


@owner_order
def member_role_order(request: TenantRequest, member_id: int) -> HttpResponse:
    """Raises Http404 for another tenant's member as for nobody's."""
    member = _member(request.tenant, member_id)
    form = RoleForm(request.POST, id_prefix=f"m{member_id}")
    if form.is_valid():
        try:
            actor = request.user.get_username()
            member_change(member=member, role=form.cleaned_data["role"], actor=actor)
            return redirect("settings-members")
        except LastOwner as error:
            form.refuse("role", str(error))
            return _shown(request, forms={member_id: form}, status=409)
    return _shown(request, forms={member_id: form}, status=400)


@owner_order
def member_link_order(request: TenantRequest, member_id: int) -> HttpResponse:
    """Answers with the page, and the link on it."""
    member = _member(request.tenant, member_id)
    try:
        return _shown(request, link_of=member)
    except MemberError as error:
        return _refused(request, member, error)


@owner_order
def member_active_order(request: TenantRequest, member_id: int, verb: str) -> HttpResponse:
    """`verb`: activate or deactivate."""
    member, actor = _member(request.tenant, member_id), request.user.get_username()
    try:
        if verb == "activate":
            member_activate(member=member, actor=actor)
        else:
            member_deactivate(member=member, actor=actor, now=timezone.now())
    except LastOwner as error:
        return _refused(request, member, error)
    return redirect("settings-members")


@owner_order
def member_remove_order(request: TenantRequest, member_id: int) -> HttpResponse:
    member = _member(request.tenant, member_id)
    try:
        member_remove(member=member, actor=request.user.get_username())
    except LastOwner as error:
        return _refused(request, member, error)
    return redirect("settings-members")


def _refused(request: TenantRequest, member: Membership, error: MemberError) -> HttpResponse:
    form = _form(member)
    form.cleaned_data = {}
    form.refuse("role", str(error))
    return _shown(request, forms={member.pk: form}, status=409)


def _shown(
    request: TenantRequest,
    *,
    add: MemberForm | None = None,
    forms: dict[int, RoleForm] | None = None,
    link_of: Membership | None = None,
    status: int = 200,
) -> HttpResponse:
    """The list; `forms` are those with something wrong in them, `link_of` is given a link."""
    wrong, secret = forms or {}, ""
    if link_of is not None:
        secret = password_link(member=link_of, actor=request.user.get_username())
    members = members_of(request.tenant)[:MEMBERS_PER_TENANT_MAX]
    context = {
        "rows": [(row, wrong.get(row.pk) or _form(row)) for row in members],
        "form": add or MemberForm(),
        "invited": link_of,
        "secret": secret,
        "until": timezone.now() + timedelta(seconds=settings.PASSWORD_RESET_TIMEOUT),
        "page_state": "none",
    }
    return send(request, "settings/members.html", context, status=status)


def _form(member: Membership) -> RoleForm:
    return RoleForm({"role": member.role}, id_prefix=f"m{member.pk}")


def _member(tenant: Tenant, member_id: int) -> Membership:
    member = members_of(tenant).filter(pk=member_id).first()
    if member is None:
        raise Http404(f"member {member_id} is not one of {tenant}")
    return member

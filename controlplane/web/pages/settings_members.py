"""/settings/members/: who belongs to the tenant, and what each may do."""

from __future__ import annotations

from django.http import Http404, HttpResponse
from django.shortcuts import redirect

from controlplane.accounts.models import Membership, Tenant
from controlplane.accounts.selectors import members_of
from controlplane.accounts.services import MemberConflict, member_change, member_remove
from controlplane.web.access import TenantRequest, owner_order, page, send
from controlplane.web.forms import RoleForm

MEMBERS_MAX = 500


@page
def member_list(request: TenantRequest) -> HttpResponse:
    return _shown(request)


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
        except MemberConflict as error:
            form.refuse("role", str(error))
            return _shown(request, {member_id: form}, 409)
    return _shown(request, {member_id: form}, 400)


@owner_order
def member_remove_order(request: TenantRequest, member_id: int) -> HttpResponse:
    member = _member(request.tenant, member_id)
    try:
        member_remove(member=member, actor=request.user.get_username())
    except MemberConflict as error:
        form = _form(member)
        form.cleaned_data = {}
        form.refuse("role", str(error))
        return _shown(request, {member_id: form}, 409)
    return redirect("settings-members")


def _shown(
    request: TenantRequest, forms: dict[int, RoleForm] | None = None, status: int = 200
) -> HttpResponse:
    """The list; `forms` are those with something wrong in them."""
    wrong = forms or {}
    members = members_of(request.tenant)
    rows = [(row, wrong.get(row.pk) or _form(row)) for row in members[:MEMBERS_MAX]]
    context = {
        "rows": rows,
        "more": max(0, members.count() - MEMBERS_MAX),
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

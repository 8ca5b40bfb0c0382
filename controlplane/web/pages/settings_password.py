"""/settings/password/ changes one's own password; at /welcome/<who>/<token>/ one is chosen."""

from __future__ import annotations

from typing import Any, cast

from django.contrib.auth import update_session_auth_hash
from django.contrib.auth.forms import SetPasswordForm
from django.contrib.auth.models import User
from django.contrib.auth.views import PasswordResetConfirmView
from django.http import HttpResponse
from django.shortcuts import redirect
from django.urls import reverse, reverse_lazy

from controlplane.accounts.members import password_changed
from controlplane.accounts.selectors import membership_of
from controlplane.web.access import TenantRequest, own_form_page, send
from controlplane.web.forms import ChosenPasswordForm, OwnPasswordForm


@own_form_page
def password(request: TenantRequest) -> HttpResponse:
    """Every other place one was signed in at is signed out."""
    user = cast(User, request.user)
    form, status = OwnPasswordForm(user), 200
    if request.method == "POST":
        form, status = OwnPasswordForm(user, request.POST), 400
        if form.is_valid():
            form.save()
            update_session_auth_hash(request, user)
            password_changed(user=user, how="by the one before")
            return redirect(f"{reverse('settings-password')}?changed=1")
    context = {"form": form, "changed": "changed" in request.GET, "page_state": "none"}
    return send(request, "settings/password.html", context, status=status)


class ChoosePassword(PasswordResetConfirmView):
    """For whoever has the link; whose account it is is signed in by it. Answers 410 when the link
    was used, has ended, or its owner may not come in any more."""

    template_name = "password.html"
    form_class = ChosenPasswordForm
    post_reset_login = True
    success_url = reverse_lazy("overview")

    def get_user(self, uidb64: str) -> User | None:
        user = super().get_user(uidb64)
        return user if membership_of(user) else None

    def form_valid(self, form: SetPasswordForm[Any]) -> HttpResponse:
        response = super().form_valid(form)
        password_changed(user=cast(User, self.user), how="by a link")
        return response

    def render_to_response(self, context: dict[str, Any], **options: Any) -> HttpResponse:
        status = 410 if not self.validlink else 400 if context["form"].is_bound else 200
        return super().render_to_response(context, status=status, **options)

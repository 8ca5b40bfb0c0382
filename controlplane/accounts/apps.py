from django.apps import AppConfig


class AccountsConfig(AppConfig):
    name = "controlplane.accounts"
    default_auto_field = "django.db.models.BigAutoField"

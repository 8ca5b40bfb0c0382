from django.apps import AppConfig


class DiagnosisConfig(AppConfig):
    name = "controlplane.diagnosis"
    default_auto_field = "django.db.models.BigAutoField"

"""All settings, read once from the environment (TRIMTAB_…).

A wrong value stops the start with its name, the value and what is allowed; docs/settings.md is the
table of them. State lives below TRIMTAB_HOME; nothing else is written.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from django.core.exceptions import ImproperlyConfigured

T = TypeVar("T")


def env(name: str, default: str, parse: Callable[[str], T], allowed: str) -> T:
    """The parsed value of an environment variable. Raises ImproperlyConfigured naming all three."""
    text = os.environ.get(name, default)
    try:
        return parse(text)
    except ValueError as error:
        raise ImproperlyConfigured(f"{name}={text!r}: {error}. Allowed: {allowed}.") from None


def number(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = float(text)
        if not low <= value <= high:
            raise ValueError("out of range")
        return value

    return parse


def flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("not a flag")
    return text == "1"


def http_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("not an http(s) address")
    return text.rstrip("/")


def secret_key(home: Path) -> str:
    """TRIMTAB_SECRET_KEY, or one made at the first start and kept in TRIMTAB_HOME, mode 600."""
    given = os.environ.get("TRIMTAB_SECRET_KEY", "")
    if given:
        return given
    path = home / "secret_key"
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text().strip()
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_urlsafe(64))
    return path.read_text().strip()


BASE_DIR = Path(__file__).resolve().parent.parent

# Where state lives and how the world reaches us
TRIMTAB_HOME = Path(os.environ.get("TRIMTAB_HOME", BASE_DIR / "var")).resolve()
TRIMTAB_HOME.mkdir(parents=True, exist_ok=True, mode=0o700)
TRIMTAB_WEB_PORT = int(env("TRIMTAB_WEB_PORT", "8000", number(1, 65535), "a port, 1 to 65535"))
TRIMTAB_PUBLIC_URL = env(
    "TRIMTAB_PUBLIC_URL",
    f"http://127.0.0.1:{TRIMTAB_WEB_PORT}",
    http_url,
    "an http or https address",
)
TRIMTAB_OTLP_PORT = int(env("TRIMTAB_OTLP_PORT", "4318", number(1, 65535), "a port, 1 to 65535"))
TRIMTAB_OTLP_GRPC_PORT = int(
    env("TRIMTAB_OTLP_GRPC_PORT", "4317", number(0, 65535), "a port, 1 to 65535, or 0 for none")
)
TRIMTAB_BIND = os.environ.get("TRIMTAB_BIND", "127.0.0.1")

# Time (docs/settings.md): how often the loop looks, and how wide its windows are
TRIMTAB_SCRAPE_S = env("TRIMTAB_SCRAPE_S", "5", number(0.5, 60), "seconds, 0.5 to 60")
TRIMTAB_CONTROL_WINDOW_S = env(
    "TRIMTAB_CONTROL_WINDOW_S", "15", number(2, 300), "seconds, 2 to 300"
)
TRIMTAB_ACTION_TTL_S = env("TRIMTAB_ACTION_TTL_S", "90", number(5, 3600), "seconds, 5 to 3,600")
if TRIMTAB_CONTROL_WINDOW_S < 2 * TRIMTAB_SCRAPE_S:
    raise ImproperlyConfigured(
        f"TRIMTAB_CONTROL_WINDOW_S={TRIMTAB_CONTROL_WINDOW_S:g}: a control window needs at least "
        f"two scrapes of TRIMTAB_SCRAPE_S={TRIMTAB_SCRAPE_S:g}"
    )
# What policies may say at most: auto, or propose (explain, tell, propose, and change nothing)
TRIMTAB_AUTOPILOT = env("TRIMTAB_AUTOPILOT", "1", flag, "0 (propose) or 1 (act)")
TRIMTAB_RETENTION_DAYS = int(env("TRIMTAB_RETENTION_DAYS", "30", number(1, 400), "days, 1 to 400"))

TRIMTAB_API_REQUESTS_PER_MIN = int(
    env("TRIMTAB_API_REQUESTS_PER_MIN", "1200", number(1, 1_000_000), "requests, 1 to 1,000,000")
)

# Django
SECRET_KEY = secret_key(TRIMTAB_HOME)
DEBUG = env("TRIMTAB_DEBUG", "0", flag, "0 or 1")
ALLOWED_HOSTS = [
    urlsplit(TRIMTAB_PUBLIC_URL).hostname or "",
    *filter(None, os.environ.get("TRIMTAB_ALLOWED_HOSTS", "127.0.0.1,localhost").split(",")),
]
CSRF_TRUSTED_ORIGINS = [TRIMTAB_PUBLIC_URL]

HTTPS = TRIMTAB_PUBLIC_URL.startswith("https://")
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = SECURE_SSL_REDIRECT = HTTPS
SECURE_HSTS_SECONDS = 31_536_000 if HTTPS else 0
SECURE_HSTS_INCLUDE_SUBDOMAINS = SECURE_HSTS_PRELOAD = HTTPS
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if HTTPS else None
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"

INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_htmx",
    "template_partials",
    "rest_framework",
    "drf_spectacular",
    "controlplane.accounts",
    "tracing",
    "slo",
    "controlplane.fleet",
    "controlplane.diagnosis",
    "controlplane.actions",
    "controlplane.alerts",
    "controlplane.web",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "controlplane.web.middleware.ContentSecurityPolicy",
    "servestatic.middleware.ServeStaticMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "controlplane.web.middleware.CurrentTenant",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
]

ROOT_URLCONF = "controlplane.urls"
ASGI_APPLICATION = "controlplane.asgi.application"
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "overview"
LOGOUT_REDIRECT_URL = "login"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

# SQLite in WAL mode: readers never wait for the loop, a kill loses nothing committed. IMMEDIATE
# takes the write lock at the start, so two writers queue instead of failing half-way.
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": TRIMTAB_HOME / "db.sqlite3",
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;",
        },
    }
}

STATIC_URL = "/static/"
NODE_MODULES = BASE_DIR / "node_modules"
STATICFILES_DIRS = [
    ("vendor/htmx", NODE_MODULES / "htmx.org" / "dist"),
    ("vendor/uplot", NODE_MODULES / "uplot" / "dist"),
    ("vendor/inter", NODE_MODULES / "@fontsource-variable" / "inter" / "files"),
]
SERVESTATIC_USE_FINDERS = True
SERVESTATIC_USE_MANIFEST = False
SERVESTATIC_AUTOREFRESH = False

LANGUAGE_CODE = "en"
# locale/ holds the catalogue of each but English.
LANGUAGES = [("en", "English"), ("zh-hans", "简体中文")]
LANGUAGE_COOKIE_NAME = "language"
LANGUAGE_COOKIE_AGE = 31_536_000
LANGUAGE_COOKIE_SAMESITE = "Lax"
LANGUAGE_COOKIE_SECURE = HTTPS
LOCALE_PATHS = [BASE_DIR / "locale"]
USE_I18N = True
USE_TZ = True
TIME_ZONE = "UTC"

AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator"},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "controlplane.accounts.authentication.BearerToken",
        "rest_framework.authentication.SessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["controlplane.accounts.authentication.InTenant"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["controlplane.accounts.parsers.StrictJson"],
    "DEFAULT_THROTTLE_CLASSES": ["controlplane.accounts.throttle.RequestsPerMinute"],
    "DEFAULT_SCHEMA_CLASS": "controlplane.accounts.schema.Schema",
    "DEFAULT_METADATA_CLASS": None,  # the schema is at one address, not behind OPTIONS
    "EXCEPTION_HANDLER": "controlplane.accounts.authentication.error_response",
    "UNAUTHENTICATED_USER": None,
}
SPECTACULAR_SETTINGS = {
    "TITLE": "Trimtab",
    "DESCRIPTION": "Every noun of the control plane: what is promised, how it stands, what went "
    "wrong and why, what was changed and what came of it.",
    "VERSION": "1",
    "OAS_VERSION": "3.1.0",
    "SCHEMA_PATH_PREFIX": "/api/v1",
    "LICENSE": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
    "SERVERS": [{"url": TRIMTAB_PUBLIC_URL}],
    "ENUM_GENERATE_CHOICE_DESCRIPTION": False,
    "POSTPROCESSING_HOOKS": [],  # words allowed stand where they are, not under made-up names
}
DATA_UPLOAD_MAX_MEMORY_SIZE = 2 * 1024 * 1024

# Celery: an in-memory broker wakes work up; what must survive a kill is an outbox in the database
CELERY_BROKER_URL = os.environ.get("TRIMTAB_BROKER_URL", "memory://embedded/")
if CELERY_BROKER_URL.startswith("memory:"):
    # Nobody wakes the worker there: it looks whether there is work, once a second by default, and
    # so long would every pass of the loop and every message wait.
    CELERY_BROKER_TRANSPORT_OPTIONS = {"polling_interval": 0.1}
CELERY_TASK_IGNORE_RESULT = True
CELERY_TIMEZONE = "UTC"
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_WORKER_REDIRECT_STDOUTS = False

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "line": {"format": "%(asctime)s %(levelname).1s %(name)s: %(message)s"},
    },
    "filters": {"links": {"()": "controlplane.web.discretion.LinksHidden"}},
    "handlers": {
        "console": {"class": "logging.StreamHandler", "formatter": "line", "filters": ["links"]}
    },
    "root": {"handlers": ["console"], "level": os.environ.get("TRIMTAB_LOG_LEVEL", "INFO")},
    "loggers": {
        "celery": {"level": "WARNING"},
        # Their lines quote addresses, and a chat channel's address is its secret.
        "apprise": {"level": "CRITICAL"},
        "httpx": {"level": "WARNING"},
        "httpcore": {"level": "WARNING"},
        "uvicorn.access": {"level": "WARNING"},
    },
}

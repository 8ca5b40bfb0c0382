"""The project's own settings over a throw-away TRIMTAB_HOME, as tests run them."""

import os
import tempfile

os.environ["TRIMTAB_HOME"] = tempfile.mkdtemp(prefix="trimtab-test-")
os.environ.setdefault("TRIMTAB_LOG_LEVEL", "WARNING")

from controlplane.settings import *  # noqa: F403

PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

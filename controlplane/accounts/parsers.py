"""The one way a JSON body comes in: bounded, and nothing in it that cannot be kept or shown again.

JSON can spell what no store and no page can take: half a surrogate pair, numbers beyond a float's
range, nesting beyond the interpreter's stack. Let in, each fails later, for everyone who looks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import IO, Any

from django.utils.translation import gettext as _
from rest_framework.parsers import BaseParser

from controlplane.accounts.authentication import ApiError

NESTING_MAX = 32


class StrictJson(BaseParser):
    """JSON of at most `bytes_max` bytes. Raises ApiError 413 or 400."""

    media_type = "application/json"
    bytes_max = 2 * 1024 * 1024

    def parse(
        self,
        stream: IO[Any],
        media_type: str | None = None,
        parser_context: Mapping[str, Any] | None = None,
    ) -> Any:
        body = stream.read(self.bytes_max + 1)
        if len(body) > self.bytes_max:
            words = _("The body is over %d bytes, which is the most.")
            raise ApiError(413, "too_large", words % self.bytes_max)
        try:
            message = json.loads(body)
            _nesting_check(message)
            json.dumps(message, ensure_ascii=False, allow_nan=False).encode()
        except RecursionError:
            raise _invalid(_("nested too deep")) from None
        except UnicodeError:
            raise _invalid(_("a text in it is not Unicode")) from None
        except ValueError as error:
            raise _invalid(str(error)) from None
        return message


def _nesting_check(message: object) -> None:
    level = [message]
    for _depth in range(NESTING_MAX):
        level = [
            child
            for box in level
            if isinstance(box, dict | list)
            for child in (box.values() if isinstance(box, dict) else box)
        ]
    if level:
        raise RecursionError


def _invalid(reason: str) -> ApiError:
    return ApiError(400, "invalid_json", _("The body is not JSON we can take: %s.") % reason)

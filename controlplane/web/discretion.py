"""What a log line must not hold: an address that acts for whoever has it."""

from __future__ import annotations

import logging
import re

LINK = re.compile(r"/(a|welcome)/[^\s'\"]+")


class LinksHidden(logging.Filter):
    """Cuts the token out of `/a/<token>/` and `/welcome/<who>/<token>/`: Django logs the path of
    every refusal, and a link that was refused once may still be good."""

    def filter(self, record: logging.LogRecord) -> bool:
        said = record.getMessage()
        if "/a/" in said or "/welcome/" in said:
            record.msg, record.args = LINK.sub(r"/\1/…", said), ()
        return True

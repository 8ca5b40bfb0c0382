"""What a log line must not hold: an address that acts for whoever has it."""

from __future__ import annotations

import logging
import re

LINK = re.compile(r"/a/[^/\s'\"]+")


class LinksHidden(logging.Filter):
    """Cuts the token out of `/a/<token>/`: Django logs the path of every refusal, and a link that
    was refused once may still be good."""

    def filter(self, record: logging.LogRecord) -> bool:
        said = record.getMessage()
        if "/a/" in said:
            record.msg, record.args = LINK.sub("/a/…", said), ()
        return True

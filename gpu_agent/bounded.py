"""An HTTP answer that may be endless, slow or cut off: so many bytes, in such time; and why there
is none."""

from __future__ import annotations

import http.client
import time


def body_read(response: http.client.HTTPResponse, *, bytes_max: int, timeout_s: float) -> bytes:
    """The whole body. Raises OSError when it is too large, too slow, or broke off."""
    deadline = time.monotonic() + timeout_s
    body = bytearray()
    while chunk := response.read1(65_536):
        body += chunk
        if len(body) > bytes_max:
            raise OSError(f"answer above {bytes_max} bytes")
        if time.monotonic() > deadline:
            raise OSError(f"answer not complete within {timeout_s} s")
    if response.length:
        raise OSError(f"answer broke off, {response.length} bytes short")
    response.close()  # read1 does not notice the end itself, and a kept connection waits for it
    return bytes(body)


def why(error: Exception) -> str:
    """The reason in words, without the number of the system's error."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__

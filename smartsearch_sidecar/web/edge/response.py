"""The bytes of an answer: its head, the constant ones, and what stands for one already sent."""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Final

from smartsearch_sidecar import errors

# The stages of a lost answer, as `on_lost` is told them.
BEFORE_WRITE: Final = "before_write"
AT_WRITE: Final = "at_write"
AFTER_WRITE: Final = "after_write"

BAD_MESSAGE: Final = (
    b'{"error":{"code":"bad_message",'
    b'"message":"The bytes received are not an HTTP/1.1 request that this server takes.",'
    b'"retryable":false}}'
)
INTERNAL_ERROR: Final = (
    b'{"error":{"code":"internal_error",'
    b'"message":"The sidecar failed while answering; its log names the place.",'
    b'"retryable":false}}'
)
HANDED_OVER: Final = "An answer has begun on this request; a second one cannot follow."
CLOSE: Final = b"Connection: close\r\n\r\n"  # how the head of a connection's last answer ends


class Reply:
    """What a handler returns after it has handed its answer over.

    It stands where aiohttp expects a response, and tells it whether the connection goes on.
    """

    __slots__ = ("keep_alive",)

    def __init__(self, keep_alive: bool) -> None:
        self.keep_alive = keep_alive


KEPT: Final = Reply(True)
CLOSED: Final = Reply(False)


@lru_cache(maxsize=256)
def _opening(status: int, content_type: str) -> bytes:
    return (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {content_type}\r\n"
        "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nContent-Length: "
    ).encode("ascii")


@lru_cache(maxsize=1)
def _date(second: int) -> bytes:
    return f"\r\nDate: {formatdate(second, usegmt=True)}\r\n".encode("ascii")


def response_head(
    status: int,
    length: int,
    *,
    content_type: str = "application/json",
    close: bool,
    extra: Mapping[str, str] | None = None,
) -> bytes:
    """The status line and headers of an answer of ``length`` bytes.

    Args:
        close: must be true where the request's ``keep_alive`` is false; HTTP/1.0 is always closed.
        extra: further headers, made of our own constants and never of a caller's text.

    Raises:
        InvariantBroken: a header of ``extra`` holds a control character.
    """
    more = "".join(f"{name}: {value}\r\n" for name, value in extra.items()) if extra else ""
    if more and not more.replace("\r\n", "", len(extra or ())).isprintable():
        raise errors.INTERNAL_ERROR("A header of an answer holds a control character.")
    return b"%b%d%b%b%b" % (
        _opening(status, content_type),
        length,
        _date(int(time.time())),  # RFC 9110, 6.6.1, demands it of a server with a clock
        more.encode("ascii"),
        CLOSE if close else b"\r\n",
    )

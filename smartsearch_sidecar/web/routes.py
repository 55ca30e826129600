<<<<<<< helper
"""Targets and capabilities, the checks of a body's headers, and the one table of statuses.
=======
"""Who may ask what: targets, the order of the edge's checks, and how a failure is answered.
>>>>>>> errors

Targets are compared as the bytes sent, never decoded: a percent-encoded or absolute form of a right
path is another path.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

import orjson

from smartsearch_sidecar import errors


def status_of(exc: errors.SidecarError) -> int:
    """The HTTP status of a failure; 500 for one that no request should meet."""
    return exc.failure.answer.status or 500


def error_payload(exc: errors.SidecarError) -> bytes:
    """The JSON body of an error answer. Its sentence is constant and holds nothing of a request."""
    told = exc.failure.answer
    message = exc.message if exc.failure.says_more else told.sentence
    return orjson.dumps({"error": {"code": told.code, "message": message, "retryable": False}})


@dataclass(frozen=True, slots=True)
class Target:
    """An authenticated request target: whose capability, and the segments after it."""

    internal: bool
    segments: tuple[str, ...]
    query: str


class Capabilities:
    """The two secrets of a run, compared in time that does not depend on how much is right."""

    def __init__(self, execute: str, internal: str) -> None:
        self._execute = execute.encode()
        self._internal = internal.encode()
        self._execute_target = b"/" + self._execute + b"/execute"
        self.capability_marker = b"/" + self._execute + b"/"

    def is_execute(self, raw_target: str) -> bool:
        """Exactly the rollout's path."""
        return hmac.compare_digest(
            raw_target.encode("utf-8", "surrogateescape"), self._execute_target
        )

    def read(self, raw_target: str) -> Target:
        """Splits a target; raises ``Unauthorized`` without a hint which part was wrong."""
        path, _, query = raw_target.partition("?")
        whole = raw_target.split("/")
        parts = path.split("/")
        execute = hmac.compare_digest(_second(whole), self._execute)
        internal = hmac.compare_digest(_second(parts), self._internal)
        if parts[0] == "" and internal:
            return Target(True, tuple(parts[2:]), query)
        # A rollout's query string belongs to the segment it stands in: it is never served.
        if whole[0] == "" and execute and len(whole) == 3:
            return Target(False, (whole[2],), "")
        raise errors.UNAUTHORIZED("wrong or no capability")


def _second(parts: list[str]) -> bytes:
    return (parts[1] if len(parts) > 1 else "").encode("utf-8", "surrogateescape")


def declared_length(transfer_encoding: bool, lengths: list[str], bytes_max: int) -> int:
    """The body's length in bytes.

    Raises ``InvalidBody`` unless it is declared exactly once in decimal digits, ``BodySize``
    outside 1 to ``bytes_max``.
    """
    if transfer_encoding or len(lengths) != 1:
        raise errors.INVALID_BODY("the body's length is not declared exactly once")
    text = lengths[0]
    if not (text.isascii() and text.isdigit()):
        raise errors.INVALID_BODY("Content-Length is not a decimal number")
    digits = text.lstrip("0")
    if not digits or len(digits) > 12 or int(digits) > bytes_max:
        raise errors.BODY_SIZE(f"the body is empty or over {bytes_max} bytes")
    return int(digits)


def require_json(content_type: str) -> None:
    """Raises ``ContentType`` unless the media type, parameters aside, is ``application/json``."""
    if content_type == "application/json":
        return
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise errors.CONTENT_TYPE("the media type is not application/json")

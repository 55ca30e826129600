"""The two secrets of a run: which request holds one, in which spelling, and whose it is.

One spelling is served. Slashes that are doubled or stand at the end mean nothing, since a client
joins `sandbox_url` and its route in its own way; everything else is compared as the bytes sent. A
request that holds a capability in any other spelling is not served, and is no stranger's either:
a rollout that is told 401 trains on that text.

Secrets are compared in time that does not depend on how much is right: whole words, by digest.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import re
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote_to_bytes

from smartsearch_sidecar import errors

SHORTEST: Final = 32  # of a capability, in characters
LONGEST: Final = 128
_ALPHABET: Final = string.ascii_letters + string.digits + "_-"
DECODINGS: Final = 3  # a client, a proxy and a server behind it may each encode once
# What a capability is made of stays, all else becomes a space. By tables, since it is asked of all
# that strangers send.
_WORDS: Final = bytes(byte if chr(byte) in _ALPHABET else 32 for byte in range(256))
_SLASHES: Final = re.compile(r"/{2,}")


@dataclass(frozen=True, slots=True)
class Target:
    """An authenticated request target: whose capability, and the segments after it."""

    internal: bool
    segments: tuple[str, ...]
    query: str


class Capabilities:
    """Execute capability and internal capability of one run."""

    def __init__(self, execute: str, internal: str) -> None:
        self._execute = execute.encode()
        self._internal = internal.encode()
        self._lowered = (self._execute.lower(), self._internal.lower())
        self._execute_target = b"/" + self._execute + b"/execute"
        # How a rollout's and a trainer's client begin a request.
        self._openings = (b"POST /%b/" % self._execute, b"POST /%b/" % self._internal)
        self.execute_prefix = b"/" + self._execute + b"/"

    def is_execute(self, raw_target: str) -> bool:
        """Exactly the rollout's path."""
        return hmac.compare_digest(_bytes(raw_target), self._execute_target)

    def shown(self, data: bytes) -> tuple[bool, bool]:
        """Whether bytes of a connection hold the execute, the internal capability as whole words.

        The first bytes of a client's request decide at once; all others are searched.
        """
        rollout, trainer = self._openings
        if hmac.compare_digest(data[: len(rollout)], rollout):
            return True, False
        if hmac.compare_digest(data[: len(trainer)], trainer):
            return False, True
        execute = internal = False
        for word in _long_words(data):
            execute |= hmac.compare_digest(word, self._execute)
            internal |= hmac.compare_digest(word, self._internal)
        return execute, internal

    def read(self, raw_target: str) -> Target:
        """Splits a target; raises ``Unauthorized`` without a hint which part was wrong."""
        path, mark, query = raw_target.partition("?")
        first, *parts = _SLASHES.sub("/", path).split("/")
        given = _bytes(parts[0] if parts else "")
        execute = hmac.compare_digest(given, self._execute)
        internal = hmac.compare_digest(given, self._internal)
        segments = tuple(parts[1:-1] if len(parts) > 2 and not parts[-1] else parts[1:])
        if not first and internal:
            return Target(True, segments, query)
        # A rollout's query string belongs to the segment it stands in: it is never served.
        if not first and execute and len(segments) == 1 and "/" not in query:
            return Target(False, (segments[0] + mark + query,), "")
        raise errors.UNAUTHORIZED("wrong or no capability")

    def carried(self, raw_target: str, headers: Mapping[str, str]) -> bool:
        """Whether a request that is not served holds a capability, anywhere and in any spelling:
        in another case, percent-encoded, beside other characters, in a query or a header.

        ``Referer`` aside: a browser names the page there from which it asks for something else.
        """
        texts = [raw_target]
        texts.extend(value for name, value in headers.items() if name.lower() != "referer")
        return any(self._held(spelling) for text in texts for spelling in _spellings(_bytes(text)))

    def _held(self, spelling: bytes) -> bool:
        found = False
        for word in _long_words(spelling.lower() + b" "):
            for one in self._lowered:
                # At either end: a client that forgets a slash glues its route to it.
                found |= hmac.compare_digest(word[: len(one)], one)
                found |= hmac.compare_digest(word[-len(one) :], one)
        return found


def _long_words(data: bytes) -> list[bytes]:
    """Words that may be or hold a capability. One at the end of the bytes is not whole yet."""
    spaced = data.translate(_WORDS)
    words = spaced.split()
    if not spaced.endswith(b" "):
        del words[-1:]
    return [word for word in words if len(word) >= SHORTEST]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _spellings(data: bytes) -> Iterator[bytes]:
    """A text as sent, and each further text that its decodings give."""
    yield data
    if data[:6].lower() == b"basic ":  # what a client makes of http://CAPABILITY@host/
        try:
            data = base64.b64decode(data[6:])
        except binascii.Error:
            return
        yield data
    for _ in range(DECODINGS):
        decoded = unquote_to_bytes(data)
        if decoded == data:
            return
        data = decoded
        yield data

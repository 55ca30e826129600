"""Requests outside the domain in which the two services agree, each with what either does.

The row tests walk this table; the generated sequences draw from it. ``http_parser`` is what
Python's ``http.server`` and the parser we use read differently in the same bytes; nothing here is a
request that a trainer's client sends.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from tests.fakes.served import INTERNAL_CAPABILITY, native_body
from tests.parity.wire import CAPABILITY, JSON_TYPE, TARGET, message

BODY = json.dumps(native_body("Ada Lovelace")).encode()
SIZE = len(BODY)


@dataclass(frozen=True)
class Outcome:
    """Of one request to a run that is open: status, ``error.code``, and the latch's cause if it
    closes. No status: the connection ends without a status line; ``unheard``: it may, for the
    client has left, and whether it is still told so is a matter of one turn of the loop.
    """

    status: int | None
    code: str | None = None
    cause: str | None = None
    unheard: bool = False


ANSWERED = Outcome(200)
NO_ANSWER = Outcome(None)
STRANGER = Outcome(401, "unauthorized")
NOT_FOUND = Outcome(404, "not_found", "http_not_found")
INVALID_BODY = Outcome(400, "invalid_body", "http_invalid_body")
BODY_SIZE = Outcome(413, "body_size", "http_body_size")
CONTENT_TYPE = Outcome(415, "content_type", "http_content_type")
CUT_JSON = Outcome(400, "invalid_request", "http_invalid_request")
REFUSED = Outcome(400, "bad_message", "http_bad_message")
REFUSED_STRANGER = Outcome(400, "bad_message")


@dataclass(frozen=True)
class Odd:
    """A request, the row it belongs to, and what the reference and we make of it.

    ``half_close``: the client ends its side after the last byte.
    """

    request: bytes
    row: str
    theirs: Outcome
    ours: Outcome
    half_close: bool = False


def _headers(*lines: str, length: str | None = "", body: bytes = BODY) -> bytes:
    return message(body, headers=(JSON_TYPE, *lines), length=length)


def _target(target: str) -> bytes:
    return message(BODY, target=target)


def _line(old: str, new: str) -> bytes:
    return message(BODY).replace(old.encode(), new.encode("latin-1"), 1)


def _many_headers(count: int) -> str:
    return "\r\n".join(f"X{number}: y" for number in range(count))


_PARSER: dict[str, tuple[bytes, Outcome, Outcome]] = {
    # --- the request line -------------------------------------------------------------------------
    "lower-case method": (_line("POST", "post"), Outcome(501), REFUSED),
    "an unknown method": (_line("POST", "FOO"), Outcome(501), REFUSED),
    "HTTP/0.9": (_line("HTTP/1.1", "HTTP/0.9"), NO_ANSWER, ANSWERED),
    "HTTP/1.2": (_line("HTTP/1.1", "HTTP/1.2"), ANSWERED, REFUSED),
    "HTTP/2.0": (_line("HTTP/1.1", "HTTP/2.0"), NO_ANSWER, ANSWERED),
    "HTTP/3.0": (_line("HTTP/1.1", "HTTP/3.0"), NO_ANSWER, REFUSED),
    "no version": (_line(" HTTP/1.1", ""), NO_ANSWER, ANSWERED),
    "lower-case version": (_line("HTTP/1.1", "http/1.1"), NO_ANSWER, REFUSED),
    "a word more": (_line("HTTP/1.1", "HTTP/1.1 x"), NO_ANSWER, REFUSED),
    "a tab between": (_line(" HTTP", "\tHTTP"), ANSWERED, REFUSED),
    "a space before": (_line("POST", " POST"), ANSWERED, REFUSED),
    "a space behind": (_line("HTTP/1.1\r", "HTTP/1.1 \r"), ANSWERED, REFUSED),
    "an empty line before": (b"\r\n" + message(BODY), NO_ANSWER, ANSWERED),
    "line feeds alone": (message(BODY).replace(b"\r\n", b"\n"), ANSWERED, REFUSED),
    "a target in Latin-1": (_line("/execute ", "/ex\xe9cute "), NOT_FOUND, REFUSED),
    "a target of 9,000": (_target(f"/{CAPABILITY}/{'x' * 9000}"), NOT_FOUND, REFUSED),
    "a target of 70,000": (_target(f"/{CAPABILITY}/{'x' * 70_000}"), Outcome(414), REFUSED),
    "an asterisk": (_target("*"), STRANGER, REFUSED_STRANGER),
    # --- header lines -----------------------------------------------------------------------------
    "no Host": (message(BODY).replace(b"Host: x\r\n", b""), ANSWERED, REFUSED),
    "two Hosts": (_headers("Host: y"), ANSWERED, REFUSED),
    "two media types": (_headers("Content-Type: text/plain"), ANSWERED, REFUSED),
    "two User-Agents": (_headers("User-Agent: a", "User-Agent: b"), ANSWERED, REFUSED),
    "a media type with a no-break space": (
        message(BODY, headers=(JSON_TYPE + "\xa0",)),
        ANSWERED,
        CONTENT_TYPE,
    ),
    "a folded header": (_headers("X: a\r\n b"), ANSWERED, REFUSED),
    "a NUL in a header": (_headers("X: \x00"), ANSWERED, REFUSED),
    "a header without a name": (_headers(": y"), ANSWERED, REFUSED),
    "a header without a colon": (_headers("no colon"), INVALID_BODY, REFUSED),
    "a space before the colon": (_headers("X : y"), INVALID_BODY, REFUSED),
    "a header of 9,000": (_headers("X: " + "y" * 9000), ANSWERED, REFUSED),
    "a header of 66,000": (_headers("X: " + "y" * 66_000), Outcome(431), REFUSED),
    "110 headers": (_headers(_many_headers(107)), Outcome(431), ANSWERED),
    "140 headers": (_headers(_many_headers(137)), Outcome(431), REFUSED),
    # --- the declared length ----------------------------------------------------------------------
    "a length with a space behind": (_headers(length=f"{SIZE} "), INVALID_BODY, ANSWERED),
    "a length with a sign": (_headers(length=f"+{SIZE}"), INVALID_BODY, REFUSED),
    "a negative length": (_headers(length="-1", body=b""), INVALID_BODY, REFUSED),
    "a hexadecimal length": (_headers(length=hex(SIZE)), INVALID_BODY, REFUSED),
    "a length of no digits": (_headers("Content-Length:", length=None), INVALID_BODY, REFUSED),
    "a superscript length": (_headers(length="\xb2"), NO_ANSWER, REFUSED),
    "a length of 30 digits": (_headers(length="9" * 30), BODY_SIZE, REFUSED),
    "a length of 5,000 digits": (_headers(length="9" * 5000), NO_ANSWER, REFUSED),
    "the length twice": (_headers(f"Content-Length: {SIZE}"), INVALID_BODY, REFUSED),
    "the length listed twice": (_headers(length=f"{SIZE}, {SIZE}"), INVALID_BODY, REFUSED),
    "an empty Transfer-Encoding": (_headers("Transfer-Encoding: "), ANSWERED, INVALID_BODY),
    "chunked with a length": (_headers("Transfer-Encoding: chunked"), INVALID_BODY, REFUSED),
    "another Transfer-Encoding": (
        _headers("Transfer-Encoding: gzip", length=None),
        INVALID_BODY,
        REFUSED,
    ),
    # --- bytes beyond the request -----------------------------------------------------------------
    "a body behind length 0": (_headers(length="0"), BODY_SIZE, REFUSED),
    "a body without a length": (_headers(length=None), INVALID_BODY, REFUSED),
    "a body longer than declared": (_headers(length=str(SIZE - 1)), CUT_JSON, REFUSED),
    "bytes behind the body": (message(BODY) + b"xx", ANSWERED, REFUSED),
    "bytes behind CONNECT": (
        _line("POST", "CONNECT"),
        Outcome(501),
        Outcome(405, "method_not_allowed", "http_bad_message"),
    ),
    # --- no request at all ------------------------------------------------------------------------
    "one word": (b"hello\r\n\r\n", NO_ANSWER, REFUSED_STRANGER),
    "a TLS greeting": (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", NO_ANSWER, REFUSED_STRANGER),
}

_CUT = message(BODY)
_CUT_OFF: dict[str, tuple[bytes, str, Outcome, Outcome]] = {
    "cut off in the request line": (
        _CUT[: len(TARGET)],
        "http_parser",
        NO_ANSWER,
        Outcome(None, None, "http_bad_message"),
    ),
    "cut off in the headers": (
        _CUT[: _CUT.index(b"Content-Le")],
        "http_parser",
        INVALID_BODY,
        Outcome(None, None, "http_bad_message"),
    ),
    "cut off in the body": (
        _CUT[:-2],
        "short_body",
        CUT_JSON,
        Outcome(None, None, "http_invalid_body"),
    ),
    "cut off in white space behind the JSON": (
        message(BODY + b"  ")[:-1],
        "short_body",
        ANSWERED,
        Outcome(None, None, "http_invalid_body"),
    ),
    "whole, but its client sends no more": (
        _CUT,
        "half_closed",
        ANSWERED,
        Outcome(502, "response_undelivered", "response_undelivered", unheard=True),
    ),
}

_TARGETS: dict[str, tuple[str, Outcome, Outcome]] = {
    "a slash behind": (f"{TARGET}/", STRANGER, ANSWERED),
    "two slashes between": (f"/{CAPABILITY}//execute", STRANGER, ANSWERED),
    "slashes everywhere": (f"//{CAPABILITY}//execute//", STRANGER, ANSWERED),
    "a word before the slash": (f"x/{CAPABILITY}/execute", ANSWERED, REFUSED),
    "a scheme before the slash": (f"http:/{CAPABILITY}/execute", ANSWERED, REFUSED),
    "a word before another route": (f"x/{CAPABILITY}/other", NOT_FOUND, REFUSED),
    "no slash": (f"{CAPABILITY}/execute", STRANGER, REFUSED),
}

_OWN_ROUTES: dict[str, tuple[str, Outcome]] = {
    "a probe": ("/livez", Outcome(405, "method_not_allowed")),
    "the other probe": ("/readyz", Outcome(405, "method_not_allowed")),
    "the operator's health": (
        f"/{INTERNAL_CAPABILITY}/health",
        Outcome(405, "method_not_allowed"),
    ),
    "an operator's slip": (f"/{INTERNAL_CAPABILITY}/other", Outcome(404, "not_found")),
    "the internal URL in sandbox_url": (f"/{INTERNAL_CAPABILITY}/execute", NOT_FOUND),
    "an operator's bad request": (
        f"/{INTERNAL_CAPABILITY}/latch",
        Outcome(400, "operator_request"),
    ),
}

ODD: dict[str, Odd] = {
    **{
        name: Odd(data, "http_parser", theirs, ours)
        for name, (data, theirs, ours) in _PARSER.items()
    },
    **{
        name: Odd(data, row, theirs, ours, half_close=True)
        for name, (data, row, theirs, ours) in _CUT_OFF.items()
    },
    **{
        name: Odd(_target(target), "raw_target", theirs, ours)
        for name, (target, theirs, ours) in _TARGETS.items()
    },
    **{
        name: Odd(_target(target), "over_http", STRANGER, ours)
        for name, (target, ours) in _OWN_ROUTES.items()
    },
}


def names_of(row: str) -> list[str]:
    """The entries of a row."""
    return [name for name, odd in ODD.items() if odd.row == row]

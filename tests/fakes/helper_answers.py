"""What a reward helper may do wrong: answers that are not to be used, and worse than answers."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web


def _in(answer: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Changes what both protocols have, each under its own name; ``None`` removes a count."""
    text, finish, model = (changes.pop(key, ...) for key in ("text", "finish", "model"))
    place = answer["meta_info"] if "meta_info" in answer else answer["choices"][0]
    if text is not ...:
        (answer if "meta_info" in answer else place)["text"] = text
    if finish is not ...:
        as_object = "meta_info" in answer and isinstance(finish, str)
        place["finish_reason"] = {"type": finish} if as_object else finish
    if model is not ... and "model" in answer:
        answer["model"] = model
    counts = answer["meta_info"] if "meta_info" in answer else answer["usage"]
    for key, value in changes.items():
        if value is None:
            counts.pop(key, None)
        else:
            counts[key] = value
    return answer


def _without(answer: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in answer.items() if key not in keys}


WRONG: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    "empty": lambda answer: _in(answer, text="", completion_tokens=1),
    "blank": lambda answer: _in(answer, text=" \n\t ", completion_tokens=3),
    "no_text": lambda answer: _in(answer, text=None),
    "text_number": lambda answer: _in(answer, text=1),
    "surrogate": lambda answer: _in(answer, text="<answer>\ud800"),
    "overlong": lambda answer: _in(answer, text="1 " * 2049, completion_tokens=2049),
    "abort": lambda answer: _in(answer, finish="abort"),
    "unfinished": lambda answer: _in(answer, finish=None),
    "odd_finish": lambda answer: _in(answer, finish=7),
    "no_usage": lambda answer: _without(answer, "meta_info", "usage"),
    "no_output_count": lambda answer: _in(answer, completion_tokens=None),
    "no_input_count": lambda answer: _in(answer, prompt_tokens=None),
    "negative_count": lambda answer: _in(answer, completion_tokens=-1),
    "bool_count": lambda answer: _in(answer, completion_tokens=True),
    "float_count": lambda answer: _in(answer, completion_tokens=4.0),
    "text_count": lambda answer: _in(answer, completion_tokens="4"),
    "other_model": lambda answer: _in(answer, model="Qwen/Qwen3-0.6B"),
    "no_model": lambda answer: _without(answer, "model"),
    "no_choice": lambda answer: answer | {"choices": []},
    "two_choices": lambda answer: answer | {"choices": answer.get("choices", []) * 2},
}
"""By name: what each does to a good answer, of either protocol."""


# --- worse than a wrong answer ------------------------------------------------------------------


def as_json(value: Any, *, status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.json_response(value, status=status)


def _raw(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


async def _error_500(
    _request: web.Request, answer: dict[str, Any], _stopping: asyncio.Event
) -> web.StreamResponse:
    return as_json(answer, status=500)


async def _busy_503(
    _request: web.Request, answer: dict[str, Any], _stopping: asyncio.Event
) -> web.StreamResponse:
    return as_json({"error": {"message": "queue is full"}}, status=503)


async def _busy_429(
    _request: web.Request, _answer: dict[str, Any], _stopping: asyncio.Event
) -> web.StreamResponse:
    return as_json({"error": {"message": "too many requests"}}, status=429)


async def _redirect(
    request: web.Request, _answer: dict[str, Any], _stopping: asyncio.Event
) -> web.StreamResponse:
    return web.Response(status=307, headers={"Location": str(request.url)})


async def _html(
    _request: web.Request, _answer: dict[str, Any], _stopping: asyncio.Event
) -> web.StreamResponse:
    return web.Response(text="<html>Please log in</html>", content_type="text/html")


async def _json_as_text(
    _request: web.Request, answer: dict[str, Any], _stopping: asyncio.Event
) -> web.StreamResponse:
    return web.Response(text=json.dumps(answer), content_type="text/plain")


async def _gzip(
    _request: web.Request, answer: dict[str, Any], _stopping: asyncio.Event
) -> web.StreamResponse:
    raw = gzip.compress(json.dumps(answer).encode())
    return web.Response(
        body=raw, content_type="application/json", headers={"Content-Encoding": "gzip"}
    )


async def _bad_json(
    _request: web.Request, answer: dict[str, Any], _stopping: asyncio.Event
) -> web.StreamResponse:
    return _raw(json.dumps(answer).encode()[:-1])


async def _twice_a_key(
    _request: web.Request, answer: dict[str, Any], _stopping: asyncio.Event
) -> web.StreamResponse:
    raw = json.dumps(answer).encode()
    return _raw(
        raw.replace(b'"completion_tokens": ', b'"completion_tokens": 0, "completion_tokens": ')
    )


async def _nan(
    _request: web.Request, answer: dict[str, Any], _stopping: asyncio.Event
) -> web.StreamResponse:
    return as_json(answer | {"score": float("nan")})


async def _not_utf8(
    _request: web.Request, answer: dict[str, Any], _stopping: asyncio.Event
) -> web.StreamResponse:
    return _raw(json.dumps(answer).encode("utf-16"))


async def _deep(
    _request: web.Request, _answer: dict[str, Any], _stopping: asyncio.Event
) -> web.StreamResponse:
    return _raw(b"[" * 200_000 + b"]" * 200_000)


async def _list(
    _request: web.Request, answer: dict[str, Any], _stopping: asyncio.Event
) -> web.StreamResponse:
    return as_json([answer])


async def _huge(
    request: web.Request, _answer: dict[str, Any], _stopping: asyncio.Event
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    while True:  # without an end: only a bound of the client's ends it
        await response.write(b" " * 65536)


async def _hang(
    _request: web.Request, answer: dict[str, Any], stopping: asyncio.Event
) -> web.StreamResponse:
    await stopping.wait()
    return as_json(answer)


async def _drip(
    request: web.Request, _answer: dict[str, Any], stopping: asyncio.Event
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    while not stopping.is_set():
        await response.write(b" ")
        await asyncio.sleep(0.01)
    return response


async def _lost(
    request: web.Request, _answer: dict[str, Any], _stopping: asyncio.Event
) -> web.StreamResponse:
    """FIN instead of an answer."""
    if request.transport is not None:
        request.transport.close()
    return web.Response()


async def _reset(
    request: web.Request, _answer: dict[str, Any], _stopping: asyncio.Event
) -> web.StreamResponse:
    """RST instead of an answer."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


async def _cut(
    request: web.Request, answer: dict[str, Any], _stopping: asyncio.Event
) -> web.StreamResponse:
    """The connection is lost in the middle of the body."""
    raw = json.dumps(answer).encode()
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.content_length = len(raw)
    await response.prepare(request)
    await response.write(raw[: len(raw) // 2])
    if request.transport is not None:
        request.transport.close()
    return response


async def _garbage(
    request: web.Request, _answer: dict[str, Any], _stopping: asyncio.Event
) -> web.StreamResponse:
    """Bytes that are not HTTP."""
    if request.transport is not None:
        request.transport.write(b"\x16\x03\x01 not http at all\r\n\r\n")
        request.transport.close()
    return web.Response()


MISBEHAVIOUR: Mapping[
    str, Callable[[web.Request, dict[str, Any], asyncio.Event], Awaitable[web.StreamResponse]]
] = {
    "error_500": _error_500,
    "busy_503": _busy_503,
    "busy_429": _busy_429,
    "redirect": _redirect,
    "html": _html,
    "json_as_text": _json_as_text,
    "gzip": _gzip,
    "bad_json": _bad_json,
    "twice_a_key": _twice_a_key,
    "nan": _nan,
    "not_utf8": _not_utf8,
    "deep": _deep,
    "list": _list,
    "huge": _huge,
    "hang": _hang,
    "drip": _drip,
    "lost": _lost,
    "reset": _reset,
    "cut": _cut,
    "garbage": _garbage,
}
"""By name: each is given the request, the good answer, and an event that ends what hangs."""

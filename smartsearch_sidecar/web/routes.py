"""What every route does with a request: read its body, answer it, refuse it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.search.repeats import Answer, Ask
from smartsearch_sidecar.web.edge.request import EdgeRequest, Reply, response_head
from smartsearch_sidecar.web.ready import ServedRun

PARSE_ON_LOOP_BYTES_MAX: Final = 65_536  # strict parsing of more holds the loop for milliseconds

T = TypeVar("T")


async def read_body(request: EdgeRequest, bytes_max: int, seconds: float) -> bytes:
    """The JSON body, at most ``bytes_max`` bytes, within ``seconds``.

    Raises:
        InvalidBody: its length is not declared exactly once, in decimal digits, or it does not
            arrive whole in time.
        BodySize: it is empty or too large.
        ContentType: it is not declared as ``application/json``, parameters aside.
    """
    headers = request.headers
    lengths = headers.getall("Content-Length", [])
    if "Transfer-Encoding" in headers or len(lengths) != 1:
        raise errors.INVALID_BODY("the body's length is not declared exactly once")
    if not (lengths[0].isascii() and lengths[0].isdigit()):
        raise errors.INVALID_BODY("Content-Length is not a decimal number")
    digits = lengths[0].lstrip("0")
    if not digits or len(digits) > 12 or int(digits) > bytes_max:
        raise errors.BODY_SIZE(f"the body is empty or over {bytes_max} bytes")
    media = headers.get("Content-Type", "")
    if media != "application/json" and (
        media.partition(";")[0].strip().lower() != "application/json"
    ):
        raise errors.CONTENT_TYPE("the media type is not application/json")
    return await request.body(int(digits), seconds)


async def parse(body: bytes, rule: Callable[[bytes], T]) -> T:
    """What ``rule`` makes of the body; off the loop where the body is large."""
    if len(body) > PARSE_ON_LOOP_BYTES_MAX:
        return await asyncio.to_thread(rule, body)
    return rule(body)


def answer(
    request: EdgeRequest,
    payload: bytes,
    *,
    status: int = 200,
    content_type: str = "application/json",
    extra: Mapping[str, str] | None = None,
) -> Reply:
    """Hand over an answer whose loss does not matter to the run."""
    close = not request.keep_alive
    head = response_head(status, len(payload), content_type=content_type, close=close, extra=extra)
    return request.deliver(head, payload)


def answer_json(request: EdgeRequest, status: int, value: Any) -> Reply:
    """The same, of a value."""
    return answer(request, orjson.dumps(value), status=status)


def may_repeat(request: EdgeRequest, run: ServedRun, route: str, body: bytes) -> Ask | None:
    """The request as one that may repeat another, where the run gives lost answers again."""
    repeats = run.service.repeats
    if repeats is None:
        return None
    key = request.headers.get("Idempotency-Key", "")
    return repeats.ask((route, key, body), request.began, request.left_at)


def answer_search(request: EdgeRequest, run: ServedRun, found: Answer, route: str) -> Reply:
    """Hand a rollout its answer; if its client has not taken it, the loss is recorded."""
    number, others, ask = found.number, found.others, found.ask
    run.observer.requests[route, "ok" if number is not None else "declined"] += 1
    run.observer.service.observe(asyncio.get_running_loop().time() - request.began)
    head = response_head(200, len(found.payload), close=not request.keep_alive)
    if ask is not None:
        ask.repeats.over(ask)
    return request.deliver(
        head, found.payload, lambda stage: run.service.undelivered(number, stage, others, ask)
    )


def refuse(request: EdgeRequest, exc: errors.SidecarError) -> Reply:
    """Hand over the error answer of a failure's row; 500 for one that no request should meet."""
    return request.refuse(exc.failure.answer.status or 500, error_payload(exc))


def error_payload(exc: errors.SidecarError) -> bytes:
    """The JSON body of an error answer; without what a request said."""
    told = exc.failure.answer
    message = exc.message if exc.failure.says_more else told.sentence
    return orjson.dumps({"error": {"code": told.code, "message": message, "retryable": False}})

"""The rows of the table that are met at the edge: one test each, against both services."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fakes.served import native_body
from tests.fakes.until import until
from tests.parity.bodies import DEEP_CALL
from tests.parity.messages import BODY, names_of
from tests.parity.messages import ODD as MESSAGES
from tests.parity.play import Step, differs
from tests.parity.retriever import Held
from tests.parity.sides import Reference, needs_reference, ours, pair, reference
from tests.parity.wire import (
    CAPABILITY,
    NOTHING,
    TARGET,
    asking,
    exchange,
    message,
    read_answer,
)
from tests.web.rawclient import RawClient

pytestmark = needs_reference

ADDRESS = "127.0.0.1"


METHODS = ("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE")
STRANGERS = "/" + "x" * 43 + "/execute"


@pytest.mark.parametrize(
    ("method", "target"),
    [
        *((method, TARGET) for method in METHODS),
        # An answer with a body, one without, and a method that brings a body itself.
        *((method, STRANGERS) for method in METHODS[:3]),
        *(pytest.param(method, STRANGERS, marks=pytest.mark.soak) for method in METHODS[3:]),
    ],
)
async def test_differs_methods(tmp_path: Path, method: str, target: str) -> None:
    """Any method but POST is 501 there; here 405 and the end, and 401 for a stranger."""
    step = Step(message(BODY, method=method, target=target))
    moment = await differs(tmp_path, step, "methods")
    assert moment.ours.status == (405 if target == TARGET else 401)
    assert moment.our_cause == ("http_method_not_allowed" if target == TARGET else None)


@pytest.mark.parametrize(
    "target",
    [
        f"/{CAPABILITY.upper()}/execute",
        f"/%65{CAPABILITY[1:]}/execute",
        f"http://127.0.0.1/{CAPABILITY}/execute",
        f"/{CAPABILITY}",
        f"/execute?{CAPABILITY}",
    ],
)
async def test_differs_capability_elsewhere(tmp_path: Path, target: str) -> None:
    """A capability in another spelling or place: a stranger there, and a failed rollout here."""
    moment = await differs(tmp_path, Step(message(BODY, target=target)), "capability_elsewhere")
    assert not moment.their_state.latched


async def _odd(tmp_path: Path, name: str) -> None:
    odd = MESSAGES[name]
    await differs(tmp_path, Step(odd.request, odd=name), odd.row)


@pytest.mark.parametrize("name", names_of("http_parser"))
async def test_differs_http_parser(tmp_path: Path, name: str) -> None:
    """What no HTTP client sends is read by two parsers, each in the way the table says."""
    await _odd(tmp_path, name)


@pytest.mark.parametrize("name", names_of("raw_target"))
async def test_differs_raw_target(tmp_path: Path, name: str) -> None:
    """Slashes within a path, and a word before it, are told apart there and not here."""
    await _odd(tmp_path, name)


@pytest.mark.parametrize("name", names_of("short_body"))
async def test_differs_short_body(tmp_path: Path, name: str) -> None:
    """A body whose client ends early is read as far as it came there, and refused here."""
    await _odd(tmp_path, name)


@pytest.mark.parametrize("name", names_of("half_closed"))
async def test_differs_half_closed(tmp_path: Path, name: str) -> None:
    """A client that ends its side is answered there, and has left here."""
    await _odd(tmp_path, name)


async def test_differs_late_body(tmp_path: Path) -> None:
    """A body that does not come is the retriever's fault there, and the client's here."""
    late = message(BODY)[:-10]
    with reference(tmp_path / "reference", patience=0.1) as theirs:
        said = await exchange(theirs.port, late)
        assert (said.status, said.code) == (502, "retrieval_failed")
        assert theirs.state().cause == "http_retrieval_failed"
    async with ours(tmp_path, server__body_seconds=0.1) as mine:
        said = await exchange(mine.port, late)
        assert (said.status, said.code) == (400, "invalid_body")
        assert (await mine.state()).cause == "http_invalid_body"


async def test_differs_lost_client(tmp_path: Path) -> None:
    """A client that left: there its attempt is not consumed, here it is, and the cause is named."""
    with reference(tmp_path / "reference", Held()) as theirs:
        await _leave_during_the_search(theirs.port, theirs.retriever)
        await until(lambda: has_latched(theirs))
        state = theirs.state()
        assert (state.cause, state.consumed) == ("http_retrieval_failed", False)
        assert (state.attempts, state.responses) == (1, 1)
    async with ours(tmp_path, Held()) as mine:
        await _leave_during_the_search(mine.port, mine.retriever)
        await until(lambda: mine.run.service.run.state.closed)
        state = await mine.state()
        assert (state.cause, state.consumed) == ("response_undelivered", True)
        assert (state.attempts, state.responses) == (1, 1)


def has_latched(theirs: Reference) -> bool:
    """Whether the reference has failed, its file about it whole: another thread writes that."""
    try:
        return theirs.state().latched
    except json.JSONDecodeError:
        return False


async def _leave_during_the_search(port: int, retriever: Held) -> None:
    client = await RawClient.connect((ADDRESS, port))
    await client.send(asking("Ada"))
    await until(retriever.entered.is_set)
    client.reset()
    retriever.release.set()


@pytest.mark.parametrize(
    "body",
    [
        b"\xef\xbb\xbf" + BODY,
        BODY.decode().encode("utf-16"),
        BODY.decode().encode("utf-16-le"),
        BODY.decode().encode("utf-16-be"),
        BODY.decode().encode("utf-32"),
    ],
    ids=["mark", "utf-16", "utf-16-le", "utf-16-be", "utf-32"],
)
async def test_differs_utf8_only(tmp_path: Path, body: bytes) -> None:
    """Another encoding, or a byte-order mark, is read there and refused here."""
    moment = await differs(tmp_path, Step(message(body), body=body), "utf8_only")
    assert (moment.theirs.status, moment.our_cause) == (200, "http_invalid_request")


async def test_surrogates_as_bytes_latch_under_another_cause(tmp_path: Path) -> None:
    """Surrogates spelled as bytes are JSON there and no UTF-8 here; both refuse the body."""
    body = b'{"env": "\xed\xa0\x80", "call": ""}'
    moment = await differs(tmp_path, Step(message(body), body=body), "utf8_only")
    assert moment.theirs.status == 400
    assert moment.their_state.cause == "invalid_native_request"


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"call": DEEP_CALL}, 200),
        ({"call": "wikipedia_search(query=" + "[" * 199 + ", top_n=5)"}, 502),
        ({"more": json.loads("[" * 65 + "]" * 65)}, 400),
    ],
    ids=["call", "open brackets", "body"],
)
async def test_differs_nesting(tmp_path: Path, change: dict[str, object], status: int) -> None:
    """What is nested deeper than our bounds is left to the interpreter there."""
    body = json.dumps({**native_body("x"), **change}).encode()
    moment = await differs(tmp_path, Step(message(body), body=body), "nesting")
    assert (moment.theirs.status, moment.ours.status) == (status, 400)


async def test_differs_kept_connections(tmp_path: Path) -> None:
    """A second request on a connection is never read there, and answered here."""
    async with pair(tmp_path) as both:
        for port, kept in [(both.reference.port, False), (both.ours.port, True)]:
            client = await RawClient.connect((ADDRESS, port))
            await client.send(asking("one"))
            assert (await read_answer(client)).status == 200
            await client.send(asking("two"))
            again = await read_answer(client)
            client.close()
            assert (again.status == 200) is kept
            assert (again == NOTHING) is not kept


async def test_differs_connections_max(tmp_path: Path) -> None:
    """Connections are without number there; here one over the bound is closed and latches."""
    with reference(tmp_path / "reference") as theirs:
        idle = [await RawClient.connect((ADDRESS, theirs.port)) for _ in range(20)]
        assert (await exchange(theirs.port, asking("Ada"))).status == 200
        for client in idle:
            client.close()
    async with ours(tmp_path, server__connections_max=2) as mine:
        kept = [await RawClient.connect((ADDRESS, mine.port)) for _ in range(2)]
        for client in kept:  # each has shown the capability: none of them makes room
            await client.send(asking("Ada"))
            assert (await read_answer(client)).status == 200
        assert await exchange(mine.port, asking("Ada")) == NOTHING
        for client in kept:
            client.close()
        await until(lambda: mine.run.service.run.state.closed)
        assert (await mine.state()).cause == "http_busy"


async def test_differs_error_body(tmp_path: Path) -> None:
    """An error says here that trying again is no use, in sentences of our own."""
    async with pair(tmp_path) as both:
        theirs = await exchange(both.reference.port, asking(""))
        mine = await exchange(both.ours.port, asking(""))
    assert theirs.value["error"].keys() == {"code", "message"}
    assert mine.value["error"].keys() == {"code", "message", "retryable"}
    assert mine.value["error"]["retryable"] is False
    assert theirs.code == mine.code

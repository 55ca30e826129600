"""An aiohttp is served when it gives what the edge leans on, and named where it does not."""

from __future__ import annotations

import ast
import asyncio
import functools
import inspect
import select
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import http, http_parser, web, web_protocol
from packaging.requirements import Requirement

from smartsearch_sidecar import errors
from smartsearch_sidecar.web.edge import runtime
from smartsearch_sidecar.web.edge.connection import EdgeConnection, EdgeServer
from smartsearch_sidecar.web.edge.request import EdgeRequest
from smartsearch_sidecar.web.edge.runtime import (
    AIOHTTP_BELOW,
    AIOHTTP_FROM,
    AIOHTTP_TESTED,
    EXCHANGES,
    GIVEN_CONSTANTS,
    LEANED_ON,
    OURS,
    check_runtime,
)
from smartsearch_sidecar.web.edge.server import listen
from tests.fakes.raised import raises
from tests.web.rawclient import Recorder

ROOT = Path(__file__).resolve().parents[2]
EDGE = ROOT / "smartsearch_sidecar" / "web" / "edge"
REMEDY = f"pip install aiohttp=={AIOHTTP_TESTED}"

NAMES = [(owner, name, why) for (owner, _), rows in LEANED_ON.items() for name, why in rows.items()]
REPLACED = {
    (owner, name): list(inspect.signature(replaced).parameters)[1:]
    for owner, name, _ in NAMES
    if inspect.isfunction(replaced := vars(OURS.get(owner, object)).get(name))
}

Patch = pytest.MonkeyPatch


async def refusal() -> str:
    """The sentence this aiohttp is refused by."""
    with raises(errors.NOT_AVAILABLE) as caught:
        await check_runtime()
    return str(caught.value)


# --- versions -------------------------------------------------------------------------------------


async def test_a_patch_release_is_served() -> None:
    """A release of the range that the suite has not seen is served, since the names are there."""
    for version in (aiohttp.__version__, AIOHTTP_TESTED, "3.14.6", "3.14.99", "3.14.6.post1"):
        await check_runtime(version)


async def test_a_release_outside_the_range_is_refused() -> None:
    """An older release and the next minor are refused by a sentence with version and remedy."""
    for version in ("3.14.4", "3.13.5", "3.15.0", "3.15.0a1", "4.0.0"):
        with raises(errors.NOT_AVAILABLE) as caught:
            await check_runtime(version)
        assert f"aiohttp {version} is installed" in str(caught.value)
        assert "3.14.5 up to, not including, 3.15" in str(caught.value)
        assert REMEDY in str(caught.value)


def test_range_is_that_of_the_project() -> None:
    """What is checked at start and what an installer is told are one range."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (asked,) = [one for one in map(Requirement, project["dependencies"]) if one.name == "aiohttp"]
    first, below = (".".join(map(str, bound)) for bound in (AIOHTTP_FROM, AIOHTTP_BELOW))
    assert {str(one) for one in asked.specifier} == {f">={first}", f"<{below}"}
    assert asked.specifier.contains(AIOHTTP_TESTED)


# --- the parser and the system --------------------------------------------------------------------


async def test_the_parser_in_python_is_refused_with_its_own_remedy(monkeypatch: Patch) -> None:
    """Without its C parser aiohttp takes malformed requests, and it cannot be installed away."""
    monkeypatch.setattr(http, "HttpRequestParser", http_parser.HttpRequestParserPy)
    assert "unset AIOHTTP_NO_EXTENSIONS" in await refusal()


async def test_a_system_without_rdhup_is_refused(monkeypatch: Patch) -> None:
    """Where the kernel cannot say that a client has left, losses would pass unseen."""
    monkeypatch.delattr(select, "POLLRDHUP")
    assert "serve on Linux" in await refusal()


# --- the names ------------------------------------------------------------------------------------


def without(monkeypatch: Patch, of: str, name: str) -> None:
    """Take one name away from aiohttp, as a release without it would."""
    owners: dict[str, Any] = {
        "web_protocol": web_protocol,
        "http": http,
        "Server": web.Server,
        "RequestHandler": web.RequestHandler,
        "BaseRequest": web.BaseRequest,
        "StreamReader": aiohttp.StreamReader,
        "StreamWriter": http.StreamWriter,
    }
    owner = owners[of]
    if isinstance(owner, type):
        find: Any = owner.__getattribute__
        hidden = functools.partial(hide, name, find)
        monkeypatch.setattr(owner, "__getattribute__", lambda self, asked: hidden(self, asked))
    else:
        monkeypatch.delattr(owner, name)


def hide(hidden: str, find: Callable[[Any, str], Any], found: Any, name: str) -> Any:
    """Attribute lookup that does not find one name, except where aiohttp itself looks."""
    asked_by = sys._getframe(2).f_globals["__name__"]
    if name == hidden and not asked_by.startswith("aiohttp"):
        raise AttributeError(name)
    return find(found, name)


@pytest.mark.parametrize(
    "owner, name, why", [row for row in NAMES if row[0] != "RawRequestMessage"]
)
async def test_a_name_that_is_gone_is_named(
    monkeypatch: Patch, owner: str, name: str, why: str
) -> None:
    """Each name of the table is missed, with its place and the remedy."""
    without(monkeypatch, owner, name)
    said = await refusal()
    assert f"{owner}.{name} is not there" in said
    assert why in said
    assert REMEDY in said


@pytest.mark.parametrize("name", [name for owner, name, _ in NAMES if owner == "RawRequestMessage"])
async def test_a_field_of_a_message_that_is_gone_is_named(monkeypatch: Patch, name: str) -> None:
    """The parser's messages are made in C; a parser whose messages lack a field is refused."""

    class Other:
        def __init__(self, message: Any) -> None:
            self.message = message

        def __getattr__(self, asked: str) -> Any:
            if asked == name:
                raise AttributeError(asked)
            return getattr(self.message, asked)

    monkeypatch.setattr(web.RequestHandler, "data_received", replacing_messages(Other))
    assert f"RawRequestMessage.{name} is not there" in await refusal()


def replacing_messages(other: Callable[[Any], Any]) -> Callable[[Any, bytes], None]:
    """A ``data_received`` that puts other messages into the queue."""
    parse = web.RequestHandler.data_received

    def data_received(handler: Any, data: bytes) -> None:
        parse(handler, data)
        found = [(other(message), payload) for message, payload in handler._messages]
        handler._messages.clear()
        handler._messages.extend(found)

    return data_received


@pytest.mark.parametrize("of, name", REPLACED)
async def test_other_parameters_are_named(monkeypatch: Patch, of: str, name: str) -> None:
    """A function that takes one thing more would be called, or call ours, with what is unknown."""
    owner = {"RequestHandler": web.RequestHandler, "BaseRequest": web.BaseRequest}[of]
    wanted = REPLACED[of, name]
    taken = [*wanted, "further"]
    changed: dict[str, Any] = {}
    exec(f"def changed({', '.join(['self', *taken])}=None): ...", changed)  # noqa: S102 - a made-up release
    monkeypatch.setattr(owner, name, changed["changed"])
    said = await refusal()
    assert f"{of}.{name} takes ({', '.join(taken)}), not ({', '.join(wanted)})" in said


def test_what_is_replaced_is_looked_at() -> None:
    """No function that we replace, or that replaces ours, is left out for want of a row."""
    assert {f"{of}.{name}" for of, name in REPLACED} == {
        *("RequestHandler.start", "RequestHandler.eof_received", "RequestHandler.handle_error"),
        *("RequestHandler.connection_made", "RequestHandler.connection_lost"),
        *("RequestHandler.data_received", "RequestHandler.finish_response"),
        *("RequestHandler.log_exception", "BaseRequest._prepare_hook", "BaseRequest._cancel"),
    }


async def test_a_new_attribute_of_a_request_is_named(monkeypatch: Patch) -> None:
    """Our requests do without aiohttp's constructor, so all that it sets must be known."""
    make = web.BaseRequest.__init__

    def making(request: Any, *args: Any, **options: Any) -> None:
        make(request, *args, **options)
        vars(request)["_deadline"] = 1.0

    monkeypatch.setattr(web.BaseRequest, "__init__", making)
    assert "BaseRequest._deadline is new" in await refusal()


async def test_a_constant_that_is_no_longer_asked_for_is_no_fault(monkeypatch: Patch) -> None:
    """Our requests give constants for what no route reads; a release may stop setting them."""
    make = web.BaseRequest.__init__

    def making(request: Any, *args: Any, **options: Any) -> None:
        make(request, *args, **options)
        for name in GIVEN_CONSTANTS:
            del vars(request)[name]

    monkeypatch.setattr(web.BaseRequest, "__init__", making)
    await check_runtime()


async def test_an_option_that_is_gone_is_named(monkeypatch: Patch) -> None:
    """A connection that cannot be made with our options is refused, not served without them."""
    make = web.RequestHandler.__init__

    def making(handler: Any, manager: Any, *, loop: Any, access_log: Any = None) -> None:
        make(handler, manager, loop=loop, access_log=access_log)

    monkeypatch.setattr(web.RequestHandler, "__init__", making)
    said = await refusal()
    assert "TypeError" in said
    assert "unexpected keyword argument" in said


@pytest.mark.process
def test_without_a_name_the_package_still_says_so() -> None:
    """A name that an import would miss is refused by the sentence too, not by an ImportError."""
    program = """
import asyncio
from aiohttp import web_protocol
del web_protocol._ErrInfo
from smartsearch_sidecar import errors
from smartsearch_sidecar.web.edge.connection import EdgeServer
from smartsearch_sidecar.web.edge.server import listen

async def main():
    server = EdgeServer(
        None, observer=None, capabilities=None, keepalive_seconds=1, connections_max=1
    )
    try:
        await listen(server, None)
    except errors.UsageError as exc:
        print(exc)

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30
    )
    assert "web_protocol._ErrInfo is not there" in done.stdout
    assert REMEDY in done.stdout


def test_every_private_name_leaned_on_is_in_the_table() -> None:
    """The room uses no private name of aiohttp's that the check does not look for."""
    known = {name for _, name, _ in NAMES} | GIVEN_CONSTANTS
    ours = {name for kind in (EdgeConnection, EdgeRequest) for name in kind.__slots__}
    ours.add("_settled")  # of EdgeServer, which has no slots
    for path in EDGE.glob("*.py"):
        tree = ast.parse(path.read_bytes())
        nodes = list(ast.walk(tree))
        defined = {
            node.name
            for node in nodes
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
        own = (ours | defined) - known
        used = {
            node.attr
            for node in nodes
            if isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
        }
        assert used <= known | own, f"{path.name}: {used - known - own}"


# --- how the names behave -------------------------------------------------------------------------


def deaf(handler: Any, data: bytes) -> None:
    """A ``data_received`` that hears nothing."""


def late(handler: Any, data: bytes) -> None:
    """A ``data_received`` that drops the last request of a segment."""
    PARSE(handler, data)
    if len(handler._messages) > 1:
        handler._messages.pop()


def lowered(handler: Any, data: bytes) -> None:
    """A ``data_received`` that parses a target other than the one sent."""
    PARSE(handler, data.replace(b"/%63?x/", b"/c?x/"))


def sleepy(handler: Any, data: bytes) -> None:
    """A ``data_received`` that leaves a waiting connection asleep."""
    waiter, handler._waiter = handler._waiter, None
    PARSE(handler, data)
    handler._waiter = waiter


def unstopped(handler: Any, data: bytes) -> None:
    """A ``data_received`` that goes on after the end."""
    handler._force_close = False
    PARSE(handler, data)


def tailless(handler: Any, data: bytes) -> None:
    """A ``data_received`` that drops what stands behind an upgrade."""
    PARSE(handler, data)
    handler._message_tail = b""


def early(handler: Any, data: bytes) -> None:
    """A ``data_received`` that calls a body whole before it is."""
    PARSE(handler, data)
    for _, payload in handler._messages:
        payload.feed_eof()


def hasty(handler: Any, data: bytes) -> None:
    """A ``data_received`` that queues headers that are not whole."""
    PARSE(handler, WHOLE if data == b"P" else data)


PARSE = web.RequestHandler.data_received
WHOLE = runtime.WHOLE
OTHERWISE: tuple[tuple[Callable[[Any, bytes], None], str], ...] = (
    (deaf, "IndexError"),  # there is no request to look at
    (late, "two requests in one segment are answered"),
    (early, "a body in two segments is waited for"),
    (hasty, "headers in two segments are waited for"),
    (lowered, "a target is kept as sent"),
    (sleepy, "a request wakes a connection"),
    (unstopped, "RequestHandler._force_close stops the parsing"),
    (tailless, "bytes behind a request to upgrade are told"),
)
REFUSED = [(promise, sent[0]) for promise, sent, _, _ in EXCHANGES if "refuses it" in promise]


@pytest.mark.parametrize("otherwise, said", OTHERWISE, ids=lambda one: getattr(one, "__name__", ""))
async def test_a_name_that_behaves_otherwise_is_named(
    monkeypatch: Patch, otherwise: Callable[[Any, bytes], None], said: str
) -> None:
    """A name that is there and does something else is refused by what no longer holds."""
    monkeypatch.setattr(web.RequestHandler, "data_received", otherwise)
    sentence = await refusal()
    assert said in sentence
    assert REMEDY in sentence


@pytest.mark.parametrize("promise, refused", REFUSED, ids=[promise for promise, _ in REFUSED])
async def test_a_parser_that_takes_more_is_refused(
    monkeypatch: Patch, promise: str, refused: bytes
) -> None:
    """Each form of bytes that the handlers rely on the parser to refuse is looked at."""

    def lenient(handler: Any, data: bytes) -> None:
        PARSE(handler, WHOLE if data == refused else data)

    monkeypatch.setattr(web.RequestHandler, "data_received", lenient)
    assert f"this does not hold: {promise}" in await refusal()


def test_every_exchange_has_a_release_that_breaks_it() -> None:
    """No row of the table of exchanges stands untried."""
    tried = {said for _, said in OTHERWISE} | {promise for promise, _ in REFUSED} | HOOKS.keys()
    for promise, *_ in EXCHANGES:
        assert any(one in promise for one in tried), promise


# --- one exchange ---------------------------------------------------------------------------------


@pytest.mark.both_loops
async def test_requests_and_answers_pass() -> None:
    """The exchange through our own classes holds with the aiohttp installed, and leaves nothing."""
    before = asyncio.all_tasks()
    await check_runtime()
    assert asyncio.all_tasks() == before


# A hook that is no longer called, by the promise that is broken then.
HOOKS: dict[str, tuple[type, type, str]] = {
    "a request wakes a connection": (EdgeConnection, web.RequestHandler, "finish_response"),
    "a stream is sent": (EdgeRequest, web.BaseRequest, "_prepare_hook"),
    "a crash is answered": (EdgeConnection, web.RequestHandler, "handle_error"),
}


async def test_hooks_that_aiohttp_no_longer_calls_are_seen(monkeypatch: Patch) -> None:
    """A release whose connections stop calling what we replace is refused before it listens."""
    server = EdgeServer(
        answered,
        observer=Recorder(),
        capabilities=None,
        keepalive_seconds=1.0,
        connections_max=1,
    )
    for promise, (ours, stock, name) in HOOKS.items():
        with monkeypatch.context() as patched:
            patched.setattr("smartsearch_sidecar.web.edge.server._CHECKED", set())
            patched.setattr(ours, name, getattr(stock, name))
            if name == "handle_error":
                patched.setattr(EdgeConnection, "log_exception", lambda self, *args, **kw: None)
            with socket.socket() as sock:
                sock.bind(("127.0.0.1", 0))
                with raises(errors.NOT_AVAILABLE) as caught:
                    await listen(server, sock)
        assert f"this does not hold: {promise}" in str(caught.value)
        assert REMEDY in str(caught.value)


async def test_a_release_that_waits_for_ever_is_refused(monkeypatch: Patch) -> None:
    """Some releases set no deadline before the first request: silence would hold a connection."""
    made = web.RequestHandler.connection_made

    def connection_made(handler: Any, transport: asyncio.BaseTransport) -> None:
        made(handler, transport)
        handler._keepalive_handle.cancel()
        handler._keepalive_handle = None

    monkeypatch.setattr(web.RequestHandler, "connection_made", connection_made)
    with raises(errors.NOT_AVAILABLE, match="stays silent is never closed"):
        await check_runtime()


async def answered(request: EdgeRequest) -> Any:
    """A handler that no request reaches."""
    raise NotImplementedError


def test_every_exchange_asks_for_its_report() -> None:
    """Each row says what is told and what is answered; faults and a crash are among them."""
    assert [told for *_, told in EXCHANGES if told] == [
        ("malformed",),
        ("crashed by LookupError",),
        *[("malformed",)] * len(REFUSED),
    ]

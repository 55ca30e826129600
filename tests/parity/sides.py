"""The two services, each served for real, and what is seen of each after every request."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import json
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from smartsearch_sidecar.ledger.export import export_reference
from smartsearch_sidecar.retrieval.plugin import open_plugin
from tests.fakes.served import INTERNAL_CAPABILITY, Served, served
from tests.parity.retriever import GOOD, Scripted, choose
from tests.parity.wire import CAPABILITY, exchange

LIMIT = 10_000
OWN_WORDS = {"error", "error_type", "message"}  # each side's own sentences
HEALTH = f"GET /{INTERNAL_CAPABILITY}/health HTTP/1.1\r\nHost: x\r\n\r\n".encode()

needs_reference = pytest.mark.skipif(
    importlib.util.find_spec("agentinputlab") is None,
    reason="the reference is not installed: pip install --no-deps agentinputlab==0.1.0a1",
)


@dataclass(frozen=True)
class State:
    """A run as its operator sees it, in words both sides share.

    ``healthy`` is what the reference's health check returns, ``None`` where it refuses. ``cause``
    is why the run failed: a word that both use, ``attempt failed``, or ``in memory only`` for the
    failures of which the reference writes nothing down.
    """

    healthy: tuple[tuple[str, Any], ...] | None
    latched: bool
    attempts: int
    responses: int
    cause: str | None
    consumed: bool
    searches: int


# --- the reference --------------------------------------------------------------------------------


@dataclass
class Reference:
    """The reference, served in threads of its own.

    ``crashes`` is what its handlers raised; ``refusing`` is set once it is about to write a refusal
    down, for which it takes the lock that spans a search.
    """

    service: Any
    server: ThreadingHTTPServer
    retriever: Any
    directory: Path
    crashes: list[BaseException | None] = field(default_factory=list)
    refusing: threading.Event = field(default_factory=threading.Event)

    @property
    def port(self) -> int:
        return int(self.server.server_address[1])

    def state(self) -> State:
        failed, cause, consumed = bool(self.service.failed), None, False
        rejected = self.directory / "transport-rejected.json"
        # Nothing is admitted after a failed attempt: it is the last one.
        if (self.directory / f"failed-{self.service.attempts:06d}.json").exists():
            cause, consumed = "attempt failed", True
        elif rejected.exists():
            value = json.loads(rejected.read_bytes())
            cause, consumed = value["code"], value["retrieval_attempt_consumed"]
        elif failed:
            cause = "in memory only"
        return State(
            self._healthy(),
            failed,
            self.service.attempts,
            self.service.responses,
            cause,
            consumed,
            len(self.retriever.searches),
        )

    def _healthy(self) -> tuple[tuple[str, Any], ...] | None:
        try:
            return tuple(sorted(self.service.assert_healthy().items()))
        except Exception as error:
            if type(error).__name__ != "ExternalDependencyError":
                raise
            return None

    def files(self) -> dict[str, Any]:
        return read_files(self.directory)

    def slots_free(self) -> int:
        """Of its eight: it does not expose them, so they are read out of its handler's closure."""
        post: Any = self.server.RequestHandlerClass.do_POST  # type: ignore[attr-defined]
        capacity = post.__closure__[post.__code__.co_freevars.index("capacity")].cell_contents
        return int(capacity._value)


def tools() -> Any:
    """The reference's module."""
    return importlib.import_module("agentinputlab.recipes.smartsearch_grpo_tools")


def teacher() -> Any:
    """The reference's module of helper answers and limits."""
    return importlib.import_module("agentinputlab.recipes.smartsearch_teacher")


@contextlib.contextmanager
def reference(
    directory: Path, retriever: Any = None, *, limit: int = LIMIT, patience: float | None = None
) -> Iterator[Reference]:
    """Serves the reference; ``patience`` replaces its ten seconds for a slow client."""
    module, retriever = tools(), retriever or Scripted()
    service = module.SmartSearchGRPORetrievalService(
        retriever, output_root=directory, max_retrieval_calls=limit
    )
    server = module.make_smartsearch_grpo_retrieval_server(service, capability=CAPABILITY)
    if patience is not None:
        server.RequestHandlerClass = _impatient(server.RequestHandlerClass, patience)
    side = Reference(service, server, retriever, directory)
    _watch(side)
    thread = threading.Thread(target=server.serve_forever, args=(0.002,), daemon=True)
    thread.start()
    try:
        yield side
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _watch(side: Reference) -> None:
    serve_one, refuse = side.server.process_request_thread, side.service.reject_transport

    def outlived(*request: Any) -> None:
        try:
            serve_one(*request)
        except SystemExit as error:  # a retriever's; it ends the thread without an answer
            side.crashes.append(error)

    def refused(code: str) -> None:
        side.refusing.set()
        refuse(code)

    server: Any = side.server
    server.process_request_thread = outlived
    server.handle_error = lambda *_: side.crashes.append(sys.exc_info()[1])
    side.service.reject_transport = refused


def _impatient(handler: Any, seconds: float) -> Any:
    class Impatient(handler):  # type: ignore[misc]  # the class is made by the reference
        def setup(self) -> None:
            super().setup()
            self.connection.settimeout(seconds)

    return Impatient


# --- ours -----------------------------------------------------------------------------------------


@dataclass
class Ours:
    """The sidecar, served in this process; ``cause`` is the latch's own, with its number."""

    run: Served
    retriever: Any
    exported: Path
    cause: dict[str, Any] | None = None

    @property
    def port(self) -> int:
        return self.run.port

    async def state(self) -> State:
        said = await exchange(self.port, HEALTH)
        health = said.value
        cause = self.cause = health["cause"]
        healthy = None
        if said.status == 200:
            names = ("retrieval_attempts", "retrieval_identity_sha256", "retrieval_responses")
            healthy = tuple((name, health[name]) for name in names)
        return State(
            healthy,
            health["state"] == "failed",
            health["retrieval_attempts"],
            health["retrieval_responses"],
            None if cause is None else _shared_word(cause),
            cause is not None and cause["attempt_consumed"],
            len(self.retriever.searches),
        )

    async def files(self) -> dict[str, Any]:
        """Ends the run and exports it in the reference's layout."""
        await self.run.stop()
        await asyncio.to_thread(export_reference, self.run.directory, self.exported)
        return read_files(self.exported)


def _shared_word(cause: dict[str, Any]) -> str:
    word = str(cause["cause"])
    if cause["number"] is not None:
        return "attempt failed" if word != "response_undelivered" else word
    if word in {"quota_exhausted", "identity_changed"}:
        return "in memory only"
    return "http_retrieval_failed" if word == "retrieval_failed" else word


@contextlib.asynccontextmanager
async def ours(
    directory: Path,
    retriever: Any = None,
    *,
    limit: int = LIMIT,
    profile: str = "reference",
    **keys: Any,
) -> AsyncIterator[Ours]:
    """Serves the sidecar with a plugged-in retriever."""
    retriever = retriever or Scripted()
    provider = await open_plugin(choose(retriever))
    async with served(
        directory / "run", provider=provider, profile=profile, execute__max_calls=limit, **keys
    ) as run:
        yield Ours(run, retriever, directory / "exported")


# --- both -----------------------------------------------------------------------------------------


def read_files(directory: Path) -> dict[str, Any]:
    """Every file of a layout by name, parsed, without the sides' own sentences."""
    found = {}
    for path in sorted(directory.iterdir()):
        value = json.loads(path.read_bytes())
        found[path.name] = {key: item for key, item in value.items() if key not in OWN_WORDS}
    return found


@dataclass
class Pair:
    """Both services with the same limits and the same plans."""

    reference: Reference
    ours: Ours

    def play(self, plan: Any) -> None:
        self.reference.retriever.play(plan)
        self.ours.retriever.play(plan)

    def rest(self) -> None:
        """Back to a retriever without faults: our health check asks it who it is."""
        self.play(GOOD)


@contextlib.asynccontextmanager
async def pair(directory: Path, *, limit: int = LIMIT) -> AsyncIterator[Pair]:
    """A new pair of services under ``directory``."""
    with reference(directory / "reference", limit=limit) as theirs:
        async with ours(directory, limit=limit) as mine:
            yield Pair(theirs, mine)

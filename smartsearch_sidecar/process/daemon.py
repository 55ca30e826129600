"""The process: built once from a configuration, closed in reverse, and what its exit code says.

Order of building: run directory and lock, socket, listener (``/livez`` answers, ``/readyz`` does
not), provider and guard (what answers), rewards (what scores), the run (its claim names both),
service and scoring, ``endpoints.json``. Closing goes the other way: listener, work in flight,
connections, provider, ``run.closed``, writer, files. Apart from the command: that one starts fast.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import KW_ONLY, asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
import structlog
import uvloop
from pydantic import SecretStr

from smartsearch_sidecar import errors
from smartsearch_sidecar.client import Endpoints
from smartsearch_sidecar.config import Config
from smartsearch_sidecar.contract.execute import TOP_N, ExecuteRules
from smartsearch_sidecar.gate import health
from smartsearch_sidecar.gate.sources import FileSources
from smartsearch_sidecar.ledger.disk import Disk
from smartsearch_sidecar.ledger.file import ENDPOINTS, RunFiles
from smartsearch_sidecar.ledger.receipt import CheckpointReceipt
from smartsearch_sidecar.ledger.recorder import Run
from smartsearch_sidecar.ledger.recovery import Reopened
from smartsearch_sidecar.ledger.start import MIB, begin, take_directory
from smartsearch_sidecar.ledger.writer import wall_clock
from smartsearch_sidecar.metrics import Observer
from smartsearch_sidecar.process.logs import configure_logs
from smartsearch_sidecar.process.sockets import bind, last_descriptors, take_descriptors
from smartsearch_sidecar.retrieval.guard import CachedSearch, Guard
from smartsearch_sidecar.retrieval.provider import (
    Progress,
    Provider,
    WatchesItself,
    open_configured,
)
from smartsearch_sidecar.run.record import RunClosed
from smartsearch_sidecar.run.slots import Slots
from smartsearch_sidecar.scoring.service import Scoring
from smartsearch_sidecar.search.repeats import Repeats
from smartsearch_sidecar.search.service import Service, ServicePolicy
from smartsearch_sidecar.stalls import Stalls
from smartsearch_sidecar.web.app import App
from smartsearch_sidecar.web.capabilities import Capabilities
from smartsearch_sidecar.web.edge.connection import EdgeServer
from smartsearch_sidecar.web.edge.server import drain, listen
from smartsearch_sidecar.web.ready import ServedRun

if TYPE_CHECKING:
    from smartsearch_sidecar.cluster.bus import Connect
    from smartsearch_sidecar.gate.cluster import ClusterRun
    from smartsearch_sidecar.scoring.build import Rewards

EXIT_FINE = 0
EXIT_LATCHED = 4

DRAIN_GRACE_SECONDS = 2.0  # beyond the request deadline: what a settlement and its sync may take
CONNECTIONS_CLOSE_SECONDS = 1.0
LOOK_SECONDS = 1.0  # for descriptors

OnReady = Callable[[Endpoints, Service], None]


@dataclass(slots=True)
class Parts:
    """A run, assembled; ``scoring`` and ``rewards`` where rewards are on, ``facts`` as claimed,
    ``cluster_run`` where the run has other nodes.
    """

    run: Run
    service: Service
    facts: dict[str, Any]
    cluster_run: ClusterRun | None
    scoring: Scoring | None = None
    rewards: Rewards | None = None
    sources: FileSources | None = None
    watching: list[asyncio.Task[None]] = field(default_factory=list)

    async def close(self) -> None:
        """Ends what runs beside the requests; the writer is the daemon's to close, last."""
        for task in self.watching:
            task.cancel()
        if self.watching:
            await asyncio.wait(self.watching)
        if self.scoring is not None:
            await self.scoring.close()
        if self.rewards is not None:
            await self.rewards.helper.close()
        if self.sources is not None:
            self.sources.close()
        await self.service.retrieval.close()


@dataclass(eq=False, repr=False)
class Daemon:
    """One served run. Raises ``ConfigError`` without a run directory.

    ``disk``, ``provider`` and ``connect`` (to the run's other nodes) may be given by a test or a
    program that embeds this; ``on_ready`` is told once; ``resume`` continues the run of an existing
    directory, which has given ``receipt``; ``trainer_stopped`` says that no trainer was at work
    since it was stopped.
    """

    config: Config
    _: KW_ONLY
    disk: Disk | None = None
    provider: Provider | None = None
    resume: bool = False
    receipt: CheckpointReceipt | None = None
    trainer_stopped: bool = False
    progress: Progress | None = None
    on_ready: OnReady | None = None
    connect: Connect | None = None

    def __post_init__(self) -> None:
        config = self.config
        directory = config.run.needed_directory()
        self.files = RunFiles(directory, disk=self.disk, sync=config.ledger.sync)
        self._log = structlog.get_logger("daemon")
        self._stop = asyncio.Event()
        self.port: int | None = None
        self.probe_port: int | None = None
        self._edges: list[EdgeServer] = []
        self._listeners: list[asyncio.Server] = []
        self._watch: asyncio.Task[None] | None = None
        server = config.server
        given = server.execute_capability, server.internal_capability
        self.secrets = tuple(map(_capability, given))
        """The capabilities, to mask them in each log line."""
        self.observer = Observer()
        self.stalls = Stalls()
        self.app = App(
            Capabilities(*self.secrets),
            body_bytes_max=config.execute.body_bytes_max,
            body_seconds=server.body_seconds,
            deadline_seconds=config.execute.deadline_seconds,
            routes=config.execute.routes,
            retrieve_topk=config.execute.retrieve_topk,
            declines_calls=config.execute.on_invalid_call == "decline",
            observer=self.observer,
            about={"run": self.files.directory.name, "profile": config.profile},
        )

    def stop(self) -> None:
        """Asks for an orderly end; callable from a signal handler of the loop."""
        self._stop.set()

    async def run(self) -> int:
        """Serves until told to stop. Returns the exit code.

        Raises ``UsageError`` where it could not begin; then nothing of the run is left behind.
        """
        loop = asyncio.get_running_loop()
        before = loop.get_exception_handler()
        loop.set_exception_handler(self._loop_failed)
        self.stalls.loop.start()
        try:
            return await self._run()
        finally:
            self.stalls.loop.stop()
            loop.set_exception_handler(before)

    def _loop_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Memory that runs out where no request is served: what was lost there is not known."""
        if isinstance(exc := context.get("exception"), MemoryError):
            self.app.crashed(exc)
        else:
            loop.default_exception_handler(context)

    async def _run(self) -> int:
        try:
            # Listening first: reading a long history or a large index must not silence `/livez`.
            port = await self._listen()
            found = await asyncio.to_thread(
                take_directory,
                self.files,
                resume=self.resume,
                receipt=self.receipt,
                trainer_stopped=self.trainer_stopped,
                progress=self.progress,
            )
            try:
                parts = await self._assemble(found)
            except BaseException:
                await asyncio.to_thread(self.files.abandon)
                raise
        except BaseException:
            self._close_listeners()
            raise
        # Before the file that says so: a client that finds the address must find it answering.
        edge = self._edges[0]
        self.app.serve(
            ServedRun(
                service=parts.service,
                directory=self.files.directory,
                scoring=parts.scoring,
                observer=self.observer,
                connections=lambda: edge.open,
                facts=parts.facts,
                cluster_run=parts.cluster_run,
            )
        )
        host = self.config.server.host
        base = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        endpoints = Endpoints(*(f"{base}/{capability}" for capability in self.secrets))
        value = {**asdict(endpoints), "pid": os.getpid()}
        text = orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        try:
            await asyncio.to_thread(self.files.replace, ENDPOINTS, text)
        except OSError as exc:
            await self._wind_down(parts)
            raise errors.RUN_DIRECTORY(
                f"{ENDPOINTS} cannot be written in {self.files.directory}: {exc.strerror or exc}; "
                "no client could find the run, so it is not served"
            ) from None
        self._log.info("serving", run=str(self.files.directory), profile=self.config.profile)
        if self.on_ready is not None:
            self.on_ready(endpoints, parts.service)
        await self._stop.wait()
        await self._wind_down(parts)
        return EXIT_LATCHED if parts.run.state.closed else EXIT_FINE

    async def _listen(self) -> int:
        """The port, once it answers. Both listeners are bound first, before the index loads, so
        that a taken port is told at once.
        """
        given = self.config.server
        connections_max = take_descriptors(given.connections_max)
        edge = partial(
            EdgeServer,
            observer=self.app,
            keepalive_seconds=given.idle_seconds,
            descriptors_max=last_descriptors(),
            loop_watch=self.stalls.loop,
        )
        served = edge(
            self.app.handle,
            capabilities=self.app.capabilities,
            connections_max=connections_max,
        )
        wanted = [(served, given.host, given.port)]
        if given.probe_port is not None:
            # It knows no capability: all that connect to it are strangers.
            probed = edge(self.app.handle_probe, capabilities=None, connections_max=1)
            wanted.append((probed, given.probe_host or given.host, given.probe_port))
        self._edges = [one for one, _, _ in wanted]
        with ExitStack() as bound:
            sockets = [bound.enter_context(bind(host, port)) for _, host, port in wanted]
            ports: list[int] = [sock.getsockname()[1] for sock in sockets]
            bound.callback(self._close_listeners)
            for one, sock in zip(self._edges, sockets, strict=True):
                self._listeners.append(await listen(one, sock))
            bound.pop_all()
        self._watch = asyncio.create_task(self._look_often(), name="descriptors")
        self.port, self.probe_port = ports[0], ports[1] if len(ports) > 1 else None
        return ports[0]

    async def _assemble(self, found: Reopened | None) -> Parts:
        """Opens provider and rewards, claims or resumes the run, and builds what serves it.

        What was opened is closed again where a later step fails. Raises ``UsageError`` or another
        named error with a sentence for the operator.
        """
        config, files = self.config, self.files
        opened = self.provider or await open_configured(config, self.progress)
        rewards: Rewards | None = None
        cluster_run: ClusterRun | None = None
        try:
            guard = _guard(opened, config, self.stalls)
            await guard.claim_identity()
            facts: dict[str, Any] = {
                "retrieval": guard.identity,
                "retrieval_identity_sha256": guard.identity_sha256,
            }
            # Imported where wanted: a run without them does not load their modules.
            if config.cluster is not None:
                from smartsearch_sidecar.gate.cluster import ClusterRun

                cluster_run = await ClusterRun.reach(config, self.connect)
            if config.reward.enabled:
                from smartsearch_sidecar.scoring.build import open_rewards

                rewards = await open_rewards(config, self.stalls)
                facts["reward"] = rewards.facts
                begun = found is not None and found.begun
                await rewards.remember(files.directory if begun else None, cluster_run)
            join = None if cluster_run is None else partial(cluster_run.join, facts)
            observer = self.observer
            run = await begin(
                files,
                config,
                found,
                facts,
                observer=observer,
                stalls=self.stalls,
                join=join,
                quota=cluster_run,
            )
        except BaseException:
            if cluster_run is not None:
                await cluster_run.withdraw()
            if rewards is not None:
                await rewards.helper.close()
            await opened.close()
            raise
        own = None if rewards is None else rewards.answers.add
        on_answer = own if cluster_run is None else cluster_run.on_answer
        parts = Parts(run, _service(config, run, guard, on_answer), facts, cluster_run)
        if cluster_run is not None:
            await cluster_run.begin(parts.service)
        if rewards is not None:
            parts.rewards, parts.scoring = rewards, rewards.scoring(run)
            parts.service.sources = parts.sources = FileSources(run, rewards.look)
            self._beside(parts, rewards.watch(run), "the watch of the helper")
        self.stalls.unanswered = self._edges[0].oldest_began
        self._beside(parts, health.watch(parts.service), "the watch for what is late")
        return parts

    def _beside(self, parts: Parts, work: Coroutine[Any, Any, None], name: str) -> None:
        """Runs a watch of the run beside its requests; without it the run does not go on."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (exc := task.exception()) is not None:
                failure = errors.INTERNAL_ERROR(f"{name} ended in {type(exc).__name__}")
                parts.run.recorder.close_latch(failure.closes_as, detail=failure.message)

        task = asyncio.create_task(work, name=name)
        task.add_done_callback(ended)
        parts.watching.append(task)

    async def _wind_down(self, parts: Parts) -> None:
        run, slots, scoring = parts.run, parts.service.slots, parts.scoring
        self._log.info("stopping", in_service=slots.in_service, waiting=slots.waiting)
        deaf_from = wall_clock()
        parts.service.stopping = True
        self._close_listeners()
        limit = self.config.execute.deadline_seconds + DRAIN_GRACE_SECONDS
        try:
            async with asyncio.timeout(limit):
                await slots.wait_idle()
                if scoring is not None:
                    await scoring.slots.wait_idle()
        except TimeoutError:
            self._log.error("work in flight did not end in time", seconds=limit)
        await self.app.close()
        for edge in self._edges:
            await drain(edge, CONNECTIONS_CLOSE_SECONDS)
        try:
            await parts.close()
        except Exception as exc:  # noqa: BLE001 - a provider may raise anything; all is recorded
            self._log.error("what answered could not be closed", reason=type(exc).__name__)
        asked = self.observer.asked
        parts.service.stopping = False
        if parts.service.repeats is not None:
            parts.service.repeats.end()
        if parts.cluster_run is not None:
            parts.cluster_run.ending(deaf_from if asked or run.state.coverage.heard else None)
        try:
            end = (run.state.closed, run.state.usage(), deaf_from, asked)
            await run.recorder.post_for_receipt(RunClosed(*end))
        except errors.LedgerFailed as failure:
            self._log.error("the end could not be recorded", reason=failure.message)
        if parts.cluster_run is not None:
            await parts.cluster_run.leave()
        await run.writer.close()
        await asyncio.to_thread(self._close_files)
        cause = run.state.cause
        self._log.info("stopped", latched=cause.cause if cause else None)

    async def _look_often(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for edge in self._edges:
                edge.descriptors_max = last_descriptors()
            if not self.app.look():
                return  # told once

    def _close_listeners(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        for listener in self._listeners:
            listener.close()

    def _close_files(self) -> None:
        try:
            self.files.remove(ENDPOINTS)
        except OSError as exc:
            self._log.error("a dead address is left behind", file=ENDPOINTS, reason=exc.strerror)
        finally:
            self.files.close()


def _guard(provider: Provider, config: Config, stalls: Stalls) -> Guard:
    return Guard(
        provider,
        top_n=TOP_N,
        retries=config.retrieval.retries,
        drop_tagged=config.retrieval.on_protocol_tag == "drop",
        watch_drift=config.retrieval.on_drift == "latch",
        stalls=stalls,
    )


def _service(
    config: Config, run: Run, guard: Guard, on_answer: Callable[[str, str], None] | None
) -> Service:
    if isinstance(guard.provider, WatchesItself):
        guard.provider.on_fault = lambda fault: run.recorder.close_latch(
            fault.closes_as, detail=fault.message
        )
    execute = config.execute
    waited = run.observer.waited["execute"].observe
    return Service(
        run=run,
        slots=Slots(execute.slots, execute.waiting_max, waited=waited),
        retrieval=CachedSearch(guard, cache_bytes=config.retrieval.cache_mib * MIB),
        policy=ServicePolicy(
            rules=ExecuteRules(
                execute.environment,
                frozenset(execute.accepted_environment_sha256),
                declines_calls=execute.on_invalid_call == "decline",
            ),
            deadline_seconds=execute.deadline_seconds,
            decline=execute.on_invalid_query == "decline",
            latch_undelivered=execute.on_undelivered != "record",
            emptied_share_max=config.retrieval.emptied_share_max,
        ),
        on_answer=on_answer,
        repeats=Repeats(run, execute.deadline_seconds)
        if execute.on_undelivered == "replay"
        else None,
    )


def _capability(given: SecretStr | None) -> str:
    """The configured capability, or 43 fresh URL-safe characters."""
    return secrets.token_urlsafe(32) if given is None else given.get_secret_value()


def serve_until_stopped(
    config: Config,
    *,
    resume: bool = False,
    receipt: CheckpointReceipt | None = None,
    trainer_stopped: bool = False,
    progress: Progress | None = None,
    on_ready: OnReady | None = None,
    pretty_logs: bool = False,
) -> int:
    """Runs a daemon on uvloop in this thread until SIGTERM or SIGINT; returns the exit code."""

    async def main() -> int:
        daemon = Daemon(
            config,
            resume=resume,
            receipt=receipt,
            trainer_stopped=trainer_stopped,
            progress=progress,
            on_ready=on_ready,
        )
        configure_logs(daemon.secrets, pretty=pretty_logs)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, daemon.stop)
        return await daemon.run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())

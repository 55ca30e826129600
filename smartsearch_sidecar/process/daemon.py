"""The process: built once from a configuration, closed in reverse, and what its exit code says.

Order of building: run directory and lock, socket, listener (``/livez`` answers, ``/readyz`` does
not), provider, claim, writer, service, ``endpoints.json``. Closing goes the other way: listener,
work in flight, connections, provider, ``run.closed``, writer, files.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import uvloop

from smartsearch_sidecar import errors
from smartsearch_sidecar.client import Endpoints
from smartsearch_sidecar.config import Config
from smartsearch_sidecar.ledger.file import ENDPOINTS, Disk, RunFiles
from smartsearch_sidecar.ledger.recorder import Run
from smartsearch_sidecar.ledger.recovery import Reopened
from smartsearch_sidecar.ledger.start import take_directory
from smartsearch_sidecar.metrics import Observer
from smartsearch_sidecar.process import logs
from smartsearch_sidecar.process.build import Parts, assemble
from smartsearch_sidecar.process.endpoints import (
    bind,
    endpoints_json,
    raise_descriptor_limit,
    served_at,
)
from smartsearch_sidecar.retrieval.provider import Provider
from smartsearch_sidecar.retrieval.registry import Progress
from smartsearch_sidecar.run.record import RunClosed
from smartsearch_sidecar.search.service import Service
from smartsearch_sidecar.web.app import App
from smartsearch_sidecar.web.edge.server import EdgeServer, drain, listen
from smartsearch_sidecar.web.ready import ServedRun
from smartsearch_sidecar.web.routes import Capabilities

EXIT_FINE = 0
EXIT_LATCHED = 4

DRAIN_GRACE_SECONDS = 2.0  # beyond the request deadline: what a settlement and its sync may take
CONNECTIONS_CLOSE_SECONDS = 1.0


if TYPE_CHECKING:
    from smartsearch_sidecar.cluster.bus import Connect

OnReady = Callable[[Endpoints, Service], None]


class Daemon:
    """One served run."""

    def __init__(
        self,
        config: Config,
        *,
        disk: Disk | None = None,
        provider: Provider | None = None,
        resume: bool = False,
        progress: Progress | None = None,
        on_ready: OnReady | None = None,
        connect: Connect | None = None,
    ) -> None:
        """``disk``, ``provider`` and ``connect`` (to the run's other nodes) may be given by who
        embeds or tests; ``on_ready`` is told once; ``resume`` continues the run of an existing
        directory.

        Raises ``ConfigError`` without a run directory.
        """
        if config.run.directory is None:
            raise errors.CONFIG_INVALID("run.directory is not set: name it, or pass --run-dir")
        self.config = config
        self.files = RunFiles(Path(config.run.directory), disk=disk, sync=config.ledger.sync)
        self._provider = provider
        self._resume = resume
        self._progress = progress
        self._on_ready = on_ready
        self._connect = connect
        self._log = structlog.get_logger("daemon")
        self._stop = asyncio.Event()
        self.port: int | None = None
        self.probe_port: int | None = None
        self._probes: EdgeServer | None = None
        server = config.server
        self._execute = _capability(server.execute_capability)
        self._internal = _capability(server.internal_capability)
        self.observer = Observer()
        self.app = App(
            Capabilities(self._execute, self._internal),
            body_bytes_max=config.execute.body_bytes_max,
            body_seconds=server.body_seconds,
            deadline_seconds=config.execute.deadline_seconds,
            routes=config.execute.routes,
            retrieve_topk=config.execute.retrieve_topk,
            observer=self.observer,
            about={"run": self.files.directory.name, "profile": config.profile},
        )

    @property
    def secrets(self) -> tuple[str, str]:
        """What no log line may hold."""
        return self._execute, self._internal

    def stop(self) -> None:
        """Asks for an orderly end; callable from a signal handler of the loop."""
        self._stop.set()

    async def run(self) -> int:
        """Serves until told to stop. Returns the exit code.

        Raises ``UsageError`` where it could not begin; then nothing of the run is left behind.
        """
        server = self._edge()
        listening: list[asyncio.Server] = []
        try:
            # Listening first: reading a long history or a large index must not silence `/livez`.
            self.port = await self._listen(server, listening)
            found = await asyncio.to_thread(
                take_directory, self.files, resume=self._resume, progress=self._progress
            )
            parts = await self._assemble(found)
        except BaseException:
            _close_listeners(listening)
            raise
        service = parts.service
        # Before the file that says so: who finds the address must find it answering.
        self.app.serve(self._served(parts, server))
        endpoints = served_at(self.config.server.host, self.port, self._execute, self._internal)
        try:
            await asyncio.to_thread(self.files.replace, ENDPOINTS, endpoints_json(endpoints))
        except OSError as exc:
            await self._wind_down(parts, server, listening)
            raise errors.RUN_DIRECTORY(
                f"{ENDPOINTS} cannot be written in {self.files.directory}: {exc.strerror or exc}; "
                "nobody could find the run, so it is not served"
            ) from None
        self._log.info("serving", run=str(self.files.directory), profile=self.config.profile)
        if self._on_ready is not None:
            self._on_ready(endpoints, service)
        await self._stop.wait()
        await self._wind_down(parts, server, listening)
        return EXIT_LATCHED if parts.run.state.closed else EXIT_FINE

    # --- building ---------------------------------------------------------------------------------

    def _edge(self) -> EdgeServer:
        return EdgeServer(
            self.app.handle,
            observer=self.app,
            capability_marker=self.app.capability_marker,
            keepalive_seconds=self.config.server.idle_seconds,
            connections_max=self.config.server.connections_max,
        )

    async def _assemble(self, found: Reopened | None) -> Parts:
        try:
            return await assemble(
                self.config,
                self.files,
                found,
                provider=self._provider,
                progress=self._progress,
                observer=self.observer,
                connect=self._connect,
            )
        except BaseException:
            await asyncio.to_thread(self.files.abandon)
            raise

    def _served(self, parts: Parts, server: EdgeServer) -> ServedRun:
        return ServedRun(
            service=parts.service,
            scoring=parts.scoring,
            observer=self.observer,
            connections=lambda: server.open,
            oldest_began=server.oldest_began,
            facts=parts.facts,
            cluster_run=parts.cluster_run,
        )

    async def _listen(self, server: EdgeServer, listening: list[asyncio.Server]) -> int:
        """Binds both listeners before the index loads, so that a taken port is told at once."""
        given = self.config.server
        main = bind(given.host, given.port)
        probe = None
        if given.probe_port is not None:
            try:
                probe = bind(given.probe_host or given.host, given.probe_port)
            except BaseException:
                main.close()
                raise
        port: int = main.getsockname()[1]
        listening.append(await listen(server, main))
        if probe is not None:
            self._probes = probes = EdgeServer(
                self.app.handle_probe,
                observer=self.app,
                capability_marker=self.app.capability_marker,
                keepalive_seconds=given.idle_seconds,
                connections_max=given.connections_max,
            )
            self.probe_port = probe.getsockname()[1]
            listening.append(await listen(probes, probe))
        return port

    # --- closing ----------------------------------------------------------------------------------

    async def _wind_down(
        self, parts: Parts, server: EdgeServer, listening: list[asyncio.Server]
    ) -> None:
        service, scoring = parts.service, parts.scoring
        self._log.info(
            "stopping", in_service=service.slots.in_service, waiting=service.slots.waiting
        )
        _close_listeners(listening)
        limit = self.config.execute.deadline_seconds + DRAIN_GRACE_SECONDS
        try:
            async with asyncio.timeout(limit):
                await service.slots.wait_idle()
                if scoring is not None:
                    await scoring.slots.wait_idle()
        except TimeoutError:
            self._log.error("work in flight did not end in time", seconds=limit)
        await self.app.close()
        await drain(server, CONNECTIONS_CLOSE_SECONDS)
        if self._probes is not None:
            await drain(self._probes, CONNECTIONS_CLOSE_SECONDS)
        try:
            await parts.close()
        except Exception as exc:  # noqa: BLE001 - a provider may raise anything; all is recorded
            self._log.error("what answered could not be closed", reason=type(exc).__name__)
        if parts.cluster_run is not None:
            parts.cluster_run.ending()
        await self._record_end(parts.run)
        if parts.cluster_run is not None:
            await parts.cluster_run.leave()
        await parts.run.writer.close()
        await asyncio.to_thread(self._close_files)
        cause = parts.run.state.cause
        self._log.info("stopped", latched=cause.cause if cause else None)

    def _close_files(self) -> None:
        try:
            self.files.remove(ENDPOINTS)
        except OSError as exc:
            self._log.error("a dead address is left behind", file=ENDPOINTS, reason=exc.strerror)
        finally:
            self.files.close()

    async def _record_end(self, run: Run) -> None:
        end = RunClosed(run.state.closed, run.state.usage())
        try:
            await run.recorder.post_for_receipt(end)
        except errors.LedgerFailed as failure:
            self._log.error("the end could not be recorded", reason=failure.message)


def _close_listeners(listening: list[asyncio.Server]) -> None:
    for server in listening:
        server.close()


def _capability(given: object) -> str:
    """The configured capability, or 43 fresh URL-safe characters."""
    reveal = getattr(given, "get_secret_value", None)
    return str(reveal()) if reveal is not None else secrets.token_urlsafe(32)


def serve_until_stopped(
    config: Config,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    on_ready: OnReady | None = None,
    on_built: Callable[[Daemon], None] | None = None,
    pretty_logs: bool = False,
) -> int:
    """Runs a daemon on uvloop in this thread until SIGTERM or SIGINT; returns the exit code.

    ``on_built`` is handed the daemon before it serves (to stop it); ``on_ready`` what it serves.
    """

    async def main() -> int:
        daemon = Daemon(config, resume=resume, progress=progress, on_ready=on_ready)
        if on_built is not None:
            on_built(daemon)
        logs.configure(daemon.secrets, pretty=pretty_logs)
        raise_descriptor_limit(config.server.connections_max)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, daemon.stop)
        return await daemon.run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())

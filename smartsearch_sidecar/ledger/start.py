"""From a run directory to a ``Run``: a new one begins, or an old one goes on.

Two halves, because a run may only be claimed once its provider has said who it is:
``take_directory`` holds the directory (and reads the history of one that is resumed), ``begin``
claims and records. Apart from the daemon, its one user: the ledger here, the process there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from smartsearch_sidecar import errors
from smartsearch_sidecar.config import Config
from smartsearch_sidecar.ledger.claim import build_claim
from smartsearch_sidecar.ledger.file import CLAIM, ENDPOINTS, RunFiles
from smartsearch_sidecar.ledger.reader import Progress
from smartsearch_sidecar.ledger.recorder import Recorder
from smartsearch_sidecar.ledger.resume import Reopened, reopen, require_same_claim
from smartsearch_sidecar.ledger.run import Run
from smartsearch_sidecar.ledger.verify import describe_previous
from smartsearch_sidecar.ledger.writer import Writer
from smartsearch_sidecar.metrics import Observer
from smartsearch_sidecar.run.line import claim_digest
from smartsearch_sidecar.run.record import RunClaimed, SplitQuotas
from smartsearch_sidecar.run.shared_quota import SharedQuota
from smartsearch_sidecar.run.state import RunState

MIB = 1024 * 1024

Join = Callable[[bytes, bool], Awaitable[None]]
"""Takes this node's place among the run's: its claim, and whether that is a new one."""


def take_directory(
    files: RunFiles, *, resume: bool, progress: Progress | None = None
) -> Reopened | None:
    """Makes the directory, or reads the run in it; returns what was found there. Blocking.

    ``resume`` starts the run where the directory is missing, so that a supervisor needs one
    command; ``progress`` is told bytes of its journal read, and in all. Raises
    ``RunDirectoryError``, or ``LedgerCorrupt`` where the history is none of ours.
    """
    if not resume or not files.directory.exists():
        files.create()
        return None
    files.resume()
    try:
        found = reopen(files, progress=progress)
        files.remove(ENDPOINTS)  # a killed process left it, and its port may be another program's
        return found
    except OSError as exc:
        files.close()
        raise _unwritable(files, exc) from None
    except BaseException:
        files.close()
        raise


def _unwritable(files: RunFiles, exc: OSError) -> errors.UsageError:
    return errors.RUN_DIRECTORY(
        f"run directory {files.directory} cannot be written: {exc.strerror or exc}"
    )


def claimed(config: Config, claim: bytes) -> RunClaimed:
    """The first record: the quotas the fold holds the run to."""
    reward = cluster = None
    if config.reward.enabled:
        reward = {
            "train": SplitQuotas.of(config.reward),
            "validation": SplitQuotas.of(config.reward.validation),
        }
    if config.cluster is not None:
        cluster = {"run_id": config.cluster.run_id, "node": config.cluster.node}
    return RunClaimed(config.execute.max_calls, claim_digest(claim), reward, cluster)


async def begin(
    files: RunFiles,
    config: Config,
    found: Reopened | None,
    claim_facts: dict[str, Any],
    *,
    observer: Observer | None = None,
    join: Join | None = None,
    quota: SharedQuota | None = None,
) -> Run:
    """Claims a new run, or continues one, and returns it with its writer running.

    ``claim_facts`` are the identities the claim names. A restart that finds something unsettled, or
    no end, closes the latch here, before anything can be asked. ``join`` comes before anything is
    written. Raises ``RunDirectoryError`` where the directory was claimed for something else,
    ``LedgerFailed`` where nothing can be recorded, and what ``join`` raises.
    """
    previous = None
    if config.run.previous is not None and (found is None or not found.claim):
        previous = await asyncio.to_thread(describe_previous, config.run.previous)
    claim = build_claim(config, claim_facts, previous)
    if found is not None and found.claim:
        require_same_claim(files.directory, found.claim, claim)
        claim = found.claim
        if join is not None:
            await join(claim, False)
    else:
        if join is not None:
            await join(claim, True)
        try:
            await asyncio.to_thread(files.create_only, CLAIM, claim)
        except OSError as exc:
            raise _unwritable(files, exc) from None
    begun = found is not None and found.begun
    heard = observer or Observer()
    recorder: Recorder
    writer = Writer(
        files,
        seq=found.seq if found is not None else 0,
        head=found.head if found is not None and begun else claim_digest(claim),
        segment_bytes_max=config.ledger.segment_mib * MIB,
        on_failure=lambda failure: recorder.ledger_failed(failure),
        on_batch=heard.batch,
    )
    state = found.state if found is not None else RunState()
    recorder = Recorder(state, writer)
    writer.start()
    try:
        first = found.resumed() if found is not None and begun else claimed(config, claim)
        await recorder.post_for_receipt(first)
        if found is not None:
            await _close_if_broken(recorder, found, config)
    except BaseException:
        await writer.close()  # before the caller lets go of the files
        raise
    return Run(state, recorder, writer, quota, heard)


async def _close_if_broken(recorder: Recorder, found: Reopened, config: Config) -> None:
    cause = found.cause(config.run.on_unclean_restart)
    log = structlog.get_logger("opening")
    log.info("resumed", clean=found.clean, ending=found.ending.value, torn_bytes=found.torn_bytes)
    if cause is not None:
        recorder.close_latch(
            cause.cause, number=cause.number, consumed=cause.attempt_consumed, detail=cause.detail
        )
        await recorder.latch_durable()

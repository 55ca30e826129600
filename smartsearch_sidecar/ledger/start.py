"""From a run directory to a recorder: a new run begins, or one that was goes on.

Two halves, because a run may only be claimed once its provider has said who it is:
``take_directory`` holds the directory (and reads the history of one that is resumed), ``begin``
claims and records.
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
from smartsearch_sidecar.ledger.recorder import Recorder, Told
from smartsearch_sidecar.ledger.resume import Reopened, reopen, require_same_claim
from smartsearch_sidecar.ledger.verify import describe_previous
from smartsearch_sidecar.ledger.writer import Observe, Writer
from smartsearch_sidecar.run.record import Kind, claim_digest
from smartsearch_sidecar.run.reward_state import quotas_of
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
        files.remove(ENDPOINTS)  # a killed process left it: nobody is to be sent to its port
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


def claimed_data(config: Config, claim: bytes) -> dict[str, Any]:
    """The data of ``run.claimed``: the quotas the fold holds the run to."""
    data: dict[str, Any] = {
        "max_calls": config.execute.max_calls,
        "claim_sha256": claim_digest(claim),
    }
    if config.reward.enabled:
        data["reward"] = {
            "train": quotas_of(config.reward),
            "validation": quotas_of(config.reward.validation),
        }
    if config.cluster is not None:
        data["cluster"] = {"run_id": config.cluster.run_id, "node": config.cluster.node}
    return data


async def begin(
    files: RunFiles,
    config: Config,
    found: Reopened | None,
    claim_facts: dict[str, Any],
    *,
    observe: Observe | None = None,
    told: Told | None = None,
    join: Join | None = None,
) -> Recorder:
    """Claims a new run, or continues one, and returns its recorder with the writer running.

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
    recorder: Recorder
    writer = Writer(
        files,
        seq=found.seq if found is not None else 0,
        head=found.head if found is not None and begun else claim_digest(claim),
        segment_bytes_max=config.ledger.segment_mib * MIB,
        on_failure=lambda failure: recorder.ledger_failed(failure),
        observe=observe,
    )
    recorder = Recorder(found.state if found is not None else RunState(), writer, told=told)
    writer.start()
    try:
        if found is None or not begun:
            await recorder.record(Kind.RUN_CLAIMED, None, claimed_data(config, claim))
        else:
            await recorder.record(Kind.RUN_RESUMED, None, found.resumed_data())
        if found is not None:
            await _close_if_broken(recorder, found, config)
    except BaseException:
        await writer.close()  # before the caller lets go of the files
        raise
    return recorder


async def _close_if_broken(recorder: Recorder, found: Reopened, config: Config) -> None:
    cause = found.cause(config.run.on_unclean_restart)
    log = structlog.get_logger("opening")
    log.info("resumed", clean=found.clean, ending=found.ending.value, torn_bytes=found.torn_bytes)
    if cause is not None and not recorder.state.closed:
        recorder.close_latch(
            cause.cause, number=cause.number, consumed=cause.attempt_consumed, detail=cause.detail
        )
        await recorder.latch_durable()

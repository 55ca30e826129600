"""From a run directory to a ``Run``: a new one begins, or an old one goes on.

Two halves, because a run may only be claimed once its provider has said who it is:
``take_directory`` holds the directory (and reads the history of one that is resumed), ``begin``
claims and records. Apart from the daemon, its one user: the ledger here, the process there.
"""

from __future__ import annotations

import asyncio
import platform
import secrets
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import orjson
import structlog

from smartsearch_sidecar import __version__, errors
from smartsearch_sidecar.config import Config
from smartsearch_sidecar.ledger.file import CLAIM, ENDPOINTS, RunFiles
from smartsearch_sidecar.ledger.reader import Progress
from smartsearch_sidecar.ledger.receipt import CheckpointReceipt
from smartsearch_sidecar.ledger.recorder import Recorder, Run, SharedQuota
from smartsearch_sidecar.ledger.recovery import Reopened, reopen, require_same_claim
from smartsearch_sidecar.ledger.verify import describe_previous
from smartsearch_sidecar.ledger.writer import Writer
from smartsearch_sidecar.metrics import Observer
from smartsearch_sidecar.run.line import FORMAT, claim_digest
from smartsearch_sidecar.run.record import RunClaimed, SplitQuotas
from smartsearch_sidecar.run.state import RunState
from smartsearch_sidecar.stalls import Stalls

MIB = 1024 * 1024

Join = Callable[[bytes, bool], Awaitable[None]]
"""Takes this node's place among the run's: its claim, and whether that is a new one."""


def take_directory(
    files: RunFiles,
    *,
    resume: bool,
    receipt: CheckpointReceipt | None = None,
    trainer_stopped: bool = False,
    progress: Progress | None = None,
) -> Reopened | None:
    """Makes the directory, or reads the run in it; returns what was found there. Blocking.

    ``resume`` starts the run where the directory is missing, so that a supervisor needs one
    command; ``receipt`` is one that the run resumed has to have given, and ``trainer_stopped`` says
    that no trainer was at work since it was stopped. Raises ``RunDirectoryError``, or
    ``LedgerCorrupt`` where the history is damaged or not the receipt's.
    """
    if not resume or not files.directory.exists():
        if receipt is not None:
            raise errors.RUN_DIRECTORY(
                f"the receipt is of a run, and there is no {files.directory} to resume: its "
                "history is lost; name its directory, or begin a new run without the receipt"
            )
        files.create()
        return None
    files.resume()
    try:
        found = reopen(files, receipt=receipt, trainer_stopped=trainer_stopped, progress=progress)
        files.remove(ENDPOINTS)  # a killed process left it, and its port may be another program's
        return found
    except BaseException as exc:
        files.close()
        if isinstance(exc, OSError):
            raise _unwritable(files, exc) from None
        raise


def _unwritable(files: RunFiles, exc: OSError) -> errors.UsageError:
    return errors.RUN_DIRECTORY(
        f"run directory {files.directory} cannot be written: {exc.strerror or exc}"
    )


def claimed(config: Config, claim: bytes) -> RunClaimed:
    """The first record: the quotas the fold holds the run to."""
    reward = cluster = None
    if config.reward.enabled:
        train = config.reward
        reward = {"train": SplitQuotas.of(train), "validation": SplitQuotas.of(train.validation)}
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
    stalls: Stalls | None = None,
    join: Join | None = None,
    quota: SharedQuota | None = None,
) -> Run:
    """Claims a new run, or continues one, and returns it with its writer running.

    ``claim_facts`` are the identities the claim names. A restart that finds something unsettled, no
    end, or a gap for which nothing answers closes the latch here, before anything can be asked.
    ``join`` comes before anything is written. Raises what it raises, ``RunDirectoryError`` where
    the directory was claimed for something else, ``LedgerFailed`` where nothing can be recorded.
    """
    fresh = found is None or not found.claim
    claim = await _claim_of(files, config, found, claim_facts)
    files.lock_run(claim_digest(claim))
    if join is not None:
        await join(claim, fresh)
    if fresh:
        try:
            await asyncio.to_thread(files.create_only, CLAIM, claim)
        except OSError as exc:
            raise _unwritable(files, exc) from None
    old = found if found is not None and found.begun else None
    heard = observer or Observer()
    writer = Writer(
        files,
        seq=0 if old is None else old.seq,
        head=claim_digest(claim) if old is None else old.head,
        segment_bytes_max=config.ledger.segment_mib * MIB,
        stall_seconds=config.ledger.stall_seconds,
        on_failure=lambda failure: recorder.ledger_failed(failure),
        on_batch=heard.batch,
    )
    state = RunState() if found is None else found.state
    recorder = Recorder(state, writer)
    writer.start()
    try:
        first = claimed(config, claim) if old is None else old.resumed()
        await recorder.post_for_receipt(first)
        # Behind the first record: who finds the room and no record knows that a history is lost.
        await writer.in_turn(files.set_room_aside)
        if found is not None:
            await _close_if_broken(recorder, found, config)
    except BaseException as exc:
        await writer.close()  # before the caller lets go of the files
        if isinstance(exc, OSError):
            raise _unwritable(files, exc) from None
        raise
    return Run(state, recorder, writer, quota, heard, stalls or Stalls())


async def _claim_of(
    files: RunFiles, config: Config, found: Reopened | None, facts: Mapping[str, Any]
) -> bytes:
    """The claim of the run that goes on, or a new one, which is not written yet."""
    if found is not None and found.claim:
        require_same_claim(files.directory, found.claim, build_claim(config, facts))
        return found.claim
    previous = None
    if config.run.previous is not None:
        previous = await asyncio.to_thread(describe_previous, config.run.previous)
    return build_claim(config, facts, previous)


async def _close_if_broken(recorder: Recorder, found: Reopened, config: Config) -> None:
    cause = found.cause(config.run.on_unclean_restart, judged=config.judged)
    log = structlog.get_logger("opening")
    log.info("resumed", clean=found.clean, ending=found.ending.value, torn_bytes=found.torn_bytes)
    if cause is not None:
        recorder.close_latch(
            cause.cause, number=cause.number, consumed=cause.attempt_consumed, detail=cause.detail
        )
        await recorder.latch_durable()


_PACKAGES = ("aiohttp", "orjson", "tantivy", "uvloop")


def build_claim(
    config: Config, facts: Mapping[str, Any], previous: Mapping[str, Any] | None = None
) -> bytes:
    """The bytes of ``claim.json``; no capability, no reference answer.

    ``facts`` are the identities of what answers (``retrieval`` and, with rewards, ``reward``);
    ``previous`` describes the run this one goes on from.
    """
    execute = config.execute
    value = {
        "format": FORMAT,
        "run_id": secrets.token_hex(16),
        "created_at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        **facts,
        "max_retrieval_calls": execute.max_calls,
        "environment": execute.environment,
        "accepted_environment_sha256": sorted(execute.accepted_environment_sha256),
        "arbitrary_code_execution": False,
        "profile": config.profile,
        "nodes": config.run.nodes,
        "config_sha256": config.digest(),
        "config": config.public(),
        "versions": versions(),
    }
    if previous is not None:
        value["previous"] = dict(previous)
    return orjson.dumps(
        value, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE
    )


@cache
def versions() -> Mapping[str, str]:
    """What this process runs on, to explain a difference later."""
    found = {"smartsearch_sidecar": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found

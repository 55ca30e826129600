"""From ``[reward]`` to a ``Scoring``: verified source, references, helper, answers of this run.

Two halves, as in ``ledger/start.py``: ``open_rewards`` learns the identities a claim names, before
anything is claimed; ``Rewards.scoring`` builds what serves, once there is a ``Run``.

Apart from ``process/daemon.py``, its one user: a run without rewards never imports it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import structlog

from smartsearch_sidecar import errors
from smartsearch_sidecar.config import Config
from smartsearch_sidecar.contract.execute import QueryProblem, declined_result
from smartsearch_sidecar.daemon_threads import DaemonThreads
from smartsearch_sidecar.ledger.recorded_queries import RecordedRun
from smartsearch_sidecar.ledger.recorder import Run
from smartsearch_sidecar.reward.helper import HelperClient
from smartsearch_sidecar.reward.provenance import DECLINED_CALL, AnswerDigests
from smartsearch_sidecar.reward.references import References
from smartsearch_sidecar.reward.scorer import Scorer
from smartsearch_sidecar.reward.source import VerifiedSource, verify_checkout, verify_file
from smartsearch_sidecar.run.record import (
    ClientQuery,
    RetrievalAnswered,
    RetrievalDeclined,
    RetrievalFailed,
    RetrievalRequested,
)
from smartsearch_sidecar.run.slots import Slots
from smartsearch_sidecar.scoring.helper_calls import HelperDispatch, MeteredCalls
from smartsearch_sidecar.scoring.rows import Preparation
from smartsearch_sidecar.scoring.service import Scoring
from smartsearch_sidecar.stalls import Stalls

IDENTITY_SECONDS = 60.0  # how often the helper is asked who it is, besides in every answer


class Learns(Protocol):
    """What knows the answers of other nodes."""

    async def learn(self, answers: AnswerDigests, own: Iterator[tuple[str, str]]) -> None:
        """Adds them, and query and result of this node's ``own``, to ``answers``; goes on."""
        ...


@dataclass(slots=True)
class Rewards:
    """What a run's rewards are made of, verified and open."""

    config: Config
    source: VerifiedSource
    scorer: Scorer
    references: References
    helper: HelperClient
    facts: dict[str, Any]
    answers: AnswerDigests

    def scoring(self, run: Run) -> Scoring:
        """What serves ``/reward``; the state of ``run`` must have been claimed or resumed."""
        section = self.config.reward
        waited = run.observer.waited["reward"].observe
        binding = hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()
        dispatch = HelperDispatch(
            self.helper,
            concurrency=section.helper.concurrency,
            seed=section.seed,
            retries=section.helper.retries,
        )
        return Scoring(
            run=run,
            slots=Slots(section.slots, section.waiting_max, waited=waited),
            scorer=self.scorer,
            preparation=Preparation(self.references, self.answers, binding, section),
            calls=MeteredCalls(run, dispatch),
            section=section,
            threads=DaemonThreads(section.slots, "the scorer", errors.SCORER_FAILED),
        )

    async def remember(self, directory: Path | None, cluster_run: Learns | None) -> None:
        """Learns the answers of this run before a restart, by the journal in ``directory``, and
        those of other nodes.
        """
        own = iter(()) if directory is None else recorded_answers(directory)
        if cluster_run is not None:
            await cluster_run.learn(self.answers, own)
        else:
            await asyncio.to_thread(self._remember, own)

    def _remember(self, own: Iterator[tuple[str, str]]) -> None:
        for query, result in own:
            self.answers.add(query, result)

    def look(self) -> None:
        """Looks whether scorer and references are what the run was claimed with; blocking. Raises
        ``SOURCE_CHANGED`` or ``REFERENCES_CHANGED``.
        """
        self.source.recheck()
        self.references.recheck()

    async def watch(self, run: Run) -> None:
        """Asks the helper who it is until cancelled; another model closes the latch."""
        log = structlog.get_logger("rewards")
        while not run.state.closed:
            await asyncio.sleep(IDENTITY_SECONDS)
            try:
                await self.helper.check_identity()
            except errors.HelperIdentity as exc:
                run.recorder.close_latch(exc.closes_as, detail=exc.message)
            except errors.HelperFault as exc:
                # Unreachable between scores is no failure of the run: the next score will tell.
                log.warning("the helper could not be asked who it is", reason=exc.message)


async def open_rewards(config: Config, stalls: Stalls) -> Rewards:
    """Verifies source and references and asks the helper who it is.

    Raises ``UsageError`` where a file is not what it must be, ``HelperFault`` where the helper is
    not there or is another.
    """
    section = config.reward
    source = await asyncio.to_thread(_verified, config)
    references = await asyncio.to_thread(
        References.load, section.references.train, section.references.validation
    )
    for key in ("url", "model", "model_sha256"):
        _needed(getattr(section.helper, key), f"reward.helper.{key}")
    helper = HelperClient(section.helper, stalls=stalls)
    try:
        scorer = await asyncio.to_thread(Scorer, source)
        identity = await helper.identity()
    except BaseException:
        await helper.close()
        raise
    facts = {
        "source": dict(source.binding),
        "references_sha256": references.digest,
        "helper": dict(identity),
        "seed": section.seed,
    }
    answers = AnswerDigests(config.execute.max_calls + 1)  # and one for what is declined
    return Rewards(config, source, scorer, references, helper, facts, answers)


def _verified(config: Config) -> VerifiedSource:
    section = config.reward
    if section.checkout is not None:
        source = verify_checkout(section.checkout)
    else:
        source = verify_file(
            _needed(section.source, "reward.source"),
            _needed(section.source_sha256, "reward.source_sha256"),
        )
    source.refuse_overlap(config.run.needed_directory())
    return source


T = TypeVar("T")


def _needed(value: T | None, key: str) -> T:
    if value is None:
        raise errors.CONFIG_INVALID(f"{key} is not set, and rewards need it (reward.enabled)")
    return value


def recorded_answers(directory: Path) -> Iterator[tuple[str, str]]:
    """Query and text of each answer of a run that a rollout may hold, read from its journal."""
    run = RecordedRun(directory, None)
    asked: dict[int, str] = {}
    for line in run.scan:
        record = line.record
        if isinstance(record, RetrievalRequested):
            if not isinstance(record.asked, ClientQuery) or record.asked.route != "retrieve":
                asked[record.number] = run.query(record.asked)
        elif isinstance(record, RetrievalFailed):
            asked.pop(record.number, None)
        elif isinstance(record, RetrievalAnswered) and record.number in asked:
            documents = record.documents()
            query = asked.pop(record.number)
            yield query, "\n\n".join(document["contents"] for document in documents)
        elif isinstance(record, RetrievalDeclined) and record.reason == QueryProblem.invalid_call:
            yield DECLINED_CALL, declined_result(record.reason)

"""The state of a run: what is admitted, counted and closed. No I/O, no time, no randomness.

Theory. A run is OPEN until its first failure and CLOSED from then on for good; the first cause
wins. Every change is a record, and the state is nothing but the fold of the records in order:
``fold`` serves the running process, resume, verify and the operator's page alike. A decision is
made by reading the state (``admit_search``), written down as a record, folded at once, and handed
to the writer in the same step of the loop, so that the order of folding is that of the journal.

Numbers: searches, scores and helper calls each have a series of their own, counted from 1 without
gaps in the order of admission. A number is never used twice, also not across a restart. Scores and
helper calls are numbered per split (``train``, ``validation``), each with its own quotas.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from smartsearch_sidecar import errors
from smartsearch_sidecar.run.helper_budget import Meter, Reservation
from smartsearch_sidecar.run.record import (
    Cause,
    CheckpointAccepted,
    CheckpointRefused,
    DeliveryLost,
    HelperAnswered,
    HelperFailed,
    HelperRequested,
    LatchClosed,
    Record,
    RetrievalAnswered,
    RetrievalDeclined,
    RetrievalFailed,
    RetrievalRequested,
    RewardAnswered,
    RewardFailed,
    RewardRequested,
    RewardReused,
    RunClaimed,
    RunClosed,
    RunResumed,
)

VERDICT_WINDOW = 200  # the share of verdicts not understood is taken over so many, DESIGN section 3


class Phase(enum.StrEnum):
    """The latch: OPEN until the first failure, then CLOSED for good."""

    OPEN = "open"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Score:
    """A reward this run has given: what a reuse repeats."""

    split: str
    number: int
    reward: float


@dataclass(slots=True)
class Scores:
    """The rewards of a run: quotas and usage per split, what was given, what verdicts said.

    ``given`` has the reward of each key (``reward.requested``); ``keys`` those of the scores that
    are admitted and not settled.
    """

    splits: dict[str, Meter] = field(default_factory=dict)
    given: dict[str, Score] = field(default_factory=dict)
    reused: int = 0
    failed: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    policy_blocks: int = 0
    broken_blocks: int = 0
    window: deque[bool] = field(default_factory=lambda: deque(maxlen=VERDICT_WINDOW))
    keys: dict[tuple[str, int], str] = field(default_factory=dict)

    @property
    def settled(self) -> bool:
        """No score and no helper call of any split is without its settlement."""
        return all(meter.settled for meter in self.splits.values())

    @property
    def unparsed_share(self) -> float:
        """Verdicts of the last ``VERDICT_WINDOW`` that were neither 0 nor 1, as a share of all
        places of the window: the first few of a run cannot close it.
        """
        return sum(self.window) / VERDICT_WINDOW

    def usage(self) -> dict[str, dict[str, int]]:
        """The reference's seven counters, per split."""
        return {name: meter.usage() for name, meter in self.splits.items()}

    def meter(self, split: str) -> Meter:
        """The quotas of a split. Raises ``LedgerCorrupt`` where it was never claimed."""
        found = self.splits.get(split)
        if found is None:
            raise errors.LEDGER_CORRUPT(f"no split named {split!r:.40} was claimed")
        return found


@dataclass(slots=True)
class RunState:
    """The fold of a run's records. Equal histories give equal states.

    ``searching`` holds the numbers of searches admitted and not yet settled; a run with any of them
    is pending, and a restart that finds any closes the latch.
    """

    max_calls: int = 0
    phase: Phase = Phase.OPEN
    cause: Cause | None = None
    attempts: int = 0
    responses: int = 0
    failed: int = 0
    declined: int = 0
    lost: int = 0
    searching: set[int] = field(default_factory=set)
    cache: Counter[str] = field(default_factory=Counter)
    dropped_passages: int = 0
    declined_by: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    closed_cleanly: bool = False
    checkpoints_accepted: int = 0
    checkpoints_refused: int = 0
    checkpoint_steps: Counter[int] = field(default_factory=Counter)
    claim_sha256: str = ""
    scores: Scores = field(default_factory=Scores)

    # --- decisions --------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """The latch is closed."""
        return self.phase is Phase.CLOSED

    @property
    def settled(self) -> bool:
        """Nothing admitted is without its settlement."""
        return not self.searching and self.scores.settled

    def refuse_closed(self) -> None:
        """Raises ``LatchClosed`` once the run has failed."""
        if self.closed:
            raise errors.LATCH_CLOSED("the run has failed and answers nothing more")

    def admit_search(self) -> int:
        """The number the next search gets. Raises ``LatchClosed`` or ``QuotaExhausted``.

        Nothing is counted here: the ``retrieval.requested`` record with this number does that.
        """
        self.refuse_closed()
        if self.attempts >= self.max_calls:
            raise errors.QUOTA_EXHAUSTED(
                f"the run's {self.max_calls} searches (execute.max_calls) are used up"
            )
        return self.attempts + 1

    def admit_call(self, split: str) -> Reservation | Literal["wait"]:
        """The reservation that the split's next helper call gets, or ``"wait"``.

        Raises ``LatchClosed`` or ``QuotaExhausted``. A run that has failed spends nothing more,
        also not for a score that was admitted before.
        """
        self.refuse_closed()
        return self.scores.splits[split].admit()

    def usage(self) -> dict[str, Any]:
        """What the run has used so far, as ``run.closed``, checkpoints and receipts state it."""
        used: dict[str, Any] = {
            "retrieval_attempts": self.attempts,
            "retrieval_responses": self.responses,
            "retrieval_failed": self.failed,
            "retrieval_declined": self.declined,
        }
        if self.scores.splits:
            used["reward"] = self.scores.usage()
        return used

    # --- the fold ---------------------------------------------------------------------------------

    def fold(self, record: Record) -> None:
        """Applies one record. Raises ``LedgerCorrupt`` for one that cannot follow this state."""
        step = self._STEPS[type(record)]
        self.closed_cleanly = False
        try:
            step(self, record)
        except errors.InvariantBroken as exc:
            raise errors.LEDGER_CORRUPT(exc.message) from None
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as exc:
            raise errors.LEDGER_CORRUPT(
                f"a {record.kind} record lacks what the fold reads ({type(exc).__name__}: {exc})"
            ) from None

    def _require_open(self, record: Record) -> None:
        if self.closed:
            raise errors.LEDGER_CORRUPT(f"a {record.kind} record comes after the latch was closed")

    def _require_counts(self, record: Record, stated: Mapping[str, Any]) -> None:
        """A record that states the usage states ours; one of a later version may state more."""
        for name, own in self.usage().items():
            if stated.get(name, own) != own:
                raise errors.LEDGER_CORRUPT(
                    f"a {record.kind} record states {name} {stated[name]!r:.40}, "
                    f"the records before it {own}"
                )

    def _claimed(self, record: RunClaimed) -> None:
        self.max_calls = record.max_calls
        self.claim_sha256 = record.claim_sha256
        for name, quotas in (record.reward or {}).items():
            self.scores.splits[name] = Meter(
                max_calls=quotas.max_helper_calls,
                max_output_tokens=quotas.max_output_tokens,
                max_scores=quotas.max_scores,
                section="reward" if name == "train" else f"reward.{name}",
            )

    def _resumed(self, record: RunResumed) -> None:
        self.restarts += 1

    def _run_closed(self, record: RunClosed) -> None:
        self._require_counts(record, record.usage)
        self.closed_cleanly = True

    # Searches.

    def _requested(self, record: RetrievalRequested) -> None:
        self._require_open(record)
        if self.attempts >= self.max_calls:
            raise errors.LEDGER_CORRUPT(
                f"search {record.number} was admitted over the quota of {self.max_calls}"
            )
        if record.number != self.attempts + 1:
            raise errors.LEDGER_CORRUPT(
                f"search {record.number} was admitted after search {self.attempts}"
            )
        self.attempts = record.number
        self.searching.add(record.number)

    def _settle(self, number: int) -> None:
        if number not in self.searching:
            raise errors.LEDGER_CORRUPT(f"search {number} was settled without being open")
        self.searching.remove(number)

    def _answered(self, record: RetrievalAnswered) -> None:
        self._settle(record.number)
        self.responses += 1
        self.cache[record.cache] += 1
        self.dropped_passages += len(record.dropped or ())

    def _failed(self, record: RetrievalFailed) -> None:
        self._settle(record.number)
        self.failed += 1

    def _declined(self, record: RetrievalDeclined) -> None:
        self._require_open(record)
        if record.number != self.declined + 1:
            raise errors.LEDGER_CORRUPT(
                f"declined query {record.number} came after declined query {self.declined}"
            )
        self.declined = record.number
        self.declined_by[record.reason] += 1

    def _lost(self, record: DeliveryLost) -> None:
        if record.number is not None and not 0 < record.number <= self.attempts:
            raise errors.LEDGER_CORRUPT(
                f"an answer to search {record.number} was never to be given"
            )
        self.lost += 1

    # Rewards.

    def _score_requested(self, record: RewardRequested) -> None:
        self._require_open(record)
        scores = self.scores
        scores.meter(record.split).on_score_requested(record.number)
        scores.keys[record.split, record.number] = record.key
        scores.policy_blocks += record.policy_blocks or 0
        scores.broken_blocks += len(record.broken_blocks or ())

    def _score_answered(self, record: RewardAnswered) -> None:
        scores = self.scores
        scores.meter(record.split).on_score_answered(record.number)
        key = scores.keys.pop((record.split, record.number))
        scores.given.setdefault(key, Score(record.split, record.number, float(record.reward)))
        for verdict in record.verdicts:
            scores.verdicts[verdict] += 1
            scores.window.append(verdict == "other")

    def _score_failed(self, record: RewardFailed) -> None:
        self.scores.meter(record.split).on_score_failed(record.number)
        self.scores.keys.pop((record.split, record.number), None)
        self.scores.failed += 1

    def _score_reused(self, record: RewardReused) -> None:
        self.scores.meter(record.split)
        self.scores.reused += 1

    def _call_requested(self, record: HelperRequested) -> None:
        self._require_open(record)
        self.scores.meter(record.split).on_requested(record.number)

    def _call_answered(self, record: HelperAnswered) -> None:
        meter = self.scores.meter(record.split)
        meter.on_answered(record.number, record.input_tokens, record.output_tokens)

    def _call_failed(self, record: HelperFailed) -> None:
        meter = self.scores.meter(record.split)
        meter.on_failed(record.number, record.usage, sent=record.sent)

    # Latch and checkpoints.

    def _latched(self, record: LatchClosed) -> None:
        if self.closed:
            raise errors.LEDGER_CORRUPT("the latch was closed twice")
        self.phase = Phase.CLOSED
        self.cause = record.cause

    def _accepted(self, record: CheckpointAccepted) -> None:
        self._require_open(record)
        if not self.settled:
            raise errors.LEDGER_CORRUPT("a checkpoint was accepted while work was unsettled")
        self._require_counts(record, record.usage)
        self.checkpoints_accepted += 1
        self.checkpoint_steps[record.step] += 1

    def _refused(self, record: CheckpointRefused) -> None:
        self.checkpoints_refused += 1

    _STEPS: ClassVar[Mapping[type[Record], Callable[[RunState, Any], None]]] = {
        RunClaimed: _claimed,
        RunResumed: _resumed,
        RunClosed: _run_closed,
        RetrievalRequested: _requested,
        RetrievalAnswered: _answered,
        RetrievalFailed: _failed,
        RetrievalDeclined: _declined,
        DeliveryLost: _lost,
        RewardRequested: _score_requested,
        RewardAnswered: _score_answered,
        RewardFailed: _score_failed,
        RewardReused: _score_reused,
        HelperRequested: _call_requested,
        HelperAnswered: _call_answered,
        HelperFailed: _call_failed,
        LatchClosed: _latched,
        CheckpointAccepted: _accepted,
        CheckpointRefused: _refused,
    }

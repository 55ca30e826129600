"""The state of a run: what is admitted, counted and closed. No I/O, no time, no randomness.

Theory. A run is OPEN until its first failure and CLOSED from then on for good; the first cause
wins. Every change is a record, and the state is nothing but the fold of the records in order:
``fold`` serves the running process, resume, verify and the operator's page alike. A decision is
made by reading the state (``admit_search``), written down as a record, folded at once, and handed
to the writer in the same step of the loop, so that the order of folding is that of the journal.

Numbers: searches, scores and helper calls each have a series of their own, counted from 1 without
gaps in the order of admission. A number is never used twice, also not across a restart.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from smartsearch_sidecar import errors
from smartsearch_sidecar.run.record import Kind, Record
from smartsearch_sidecar.run.reward_state import SCORE_ADMISSIONS, SCORE_KINDS, Scores


class Phase(enum.StrEnum):
    """The latch: OPEN until the first failure, then CLOSED for good."""

    OPEN = "open"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Cause:
    """Why the latch closed: what ``latch.closed`` and ``latch.json`` say.

    ``number`` is the attempt it belongs to, if any; ``attempt_consumed`` whether that attempt
    counts against the quota; ``detail`` a sentence for the operator.
    """

    cause: str
    number: int | None
    attempt_consumed: bool
    detail: str

    def as_data(self) -> dict[str, Any]:
        """The JSON value of ``latch.closed``."""
        return {
            "cause": self.cause,
            "number": self.number,
            "attempt_consumed": self.attempt_consumed,
            "detail": self.detail,
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Cause:
        """Reads what ``as_data`` wrote; further keys are ignored."""
        return cls(
            cause=str(data["cause"]),
            number=data.get("number"),
            attempt_consumed=bool(data.get("attempt_consumed")),
            detail=str(data.get("detail", "")),
        )


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
        step = self._STEPS.get(record.kind)
        if step is None:
            raise errors.LEDGER_CORRUPT(f"no rule folds a {record.kind} record")
        self.closed_cleanly = False
        try:
            step(self, record)
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

    def _claimed(self, record: Record) -> None:
        self.max_calls = int(record.data["max_calls"])
        self.claim_sha256 = str(record.data["claim_sha256"])
        self.scores.claim(record.data.get("reward", {}))

    def _resumed(self, record: Record) -> None:
        self.restarts += 1

    def _run_closed(self, record: Record) -> None:
        self._require_counts(record, record.data)
        self.closed_cleanly = True

    def _requested(self, record: Record) -> None:
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

    def _settle(self, record: Record) -> None:
        if record.number is None or record.number not in self.searching:
            raise errors.LEDGER_CORRUPT(f"search {record.number} was settled without being open")
        self.searching.remove(record.number)

    def _answered(self, record: Record) -> None:
        self._settle(record)
        self.responses += 1
        self.cache[record.data["cache"]] += 1
        self.dropped_passages += len(record.data.get("dropped", ()))

    def _failed(self, record: Record) -> None:
        self._settle(record)
        self.failed += 1

    def _declined(self, record: Record) -> None:
        self._require_open(record)
        if record.number != self.declined + 1:
            raise errors.LEDGER_CORRUPT(
                f"declined query {record.number} came after declined query {self.declined}"
            )
        self.declined = record.number
        self.declined_by[record.data["reason"]] += 1

    def _lost(self, record: Record) -> None:
        if record.number is not None and not 0 < record.number <= self.attempts:
            raise errors.LEDGER_CORRUPT(
                f"an answer to search {record.number} was never to be given"
            )
        self.lost += 1

    def _scored(self, record: Record) -> None:
        if record.kind in SCORE_ADMISSIONS:
            self._require_open(record)
        self.scores.fold(record)

    def _latched(self, record: Record) -> None:
        if self.closed:
            raise errors.LEDGER_CORRUPT("the latch was closed twice")
        self.phase = Phase.CLOSED
        self.cause = Cause.from_data(record.data)

    def _checkpoint(self, record: Record) -> None:
        if record.kind == Kind.CHECKPOINT_ACCEPTED:
            self._require_open(record)
            if not self.settled:
                raise errors.LEDGER_CORRUPT("a checkpoint was accepted while work was unsettled")
            self._require_counts(record, record.data.get("usage", {}))
            self.checkpoints_accepted += 1
            self.checkpoint_steps[int(record.data["step"])] += 1
        else:
            self.checkpoints_refused += 1

    _STEPS: ClassVar[Mapping[str, Callable[[RunState, Record], None]]] = {
        Kind.RUN_CLAIMED.value: _claimed,
        Kind.RUN_RESUMED.value: _resumed,
        Kind.RUN_CLOSED.value: _run_closed,
        Kind.RETRIEVAL_REQUESTED.value: _requested,
        Kind.RETRIEVAL_ANSWERED.value: _answered,
        Kind.RETRIEVAL_FAILED.value: _failed,
        Kind.RETRIEVAL_DECLINED.value: _declined,
        Kind.DELIVERY_LOST.value: _lost,
        **dict.fromkeys(SCORE_KINDS, _scored),
        Kind.LATCH_CLOSED.value: _latched,
        Kind.CHECKPOINT_ACCEPTED.value: _checkpoint,
        Kind.CHECKPOINT_REFUSED.value: _checkpoint,
    }

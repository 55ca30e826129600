"""The state of a run: what is admitted, counted and closed. No I/O, no time, no randomness.

Theory. A run is open until its first failure and closed from then on for good; the first cause
wins. Every change is a record, and the state is nothing but the fold of the records in order:
``fold`` serves the running process, resume, verify and the operator's page alike. A decision is
made by reading the state (``admit_search``), written down as a record, folded at once, and handed
to the writer in the same step of the loop, so that the order of folding is that of the journal.

Numbers: searches, scores and helper calls each have a series of their own, counted from 1 without
gaps in the order of admission. A number is never used twice, also not across a restart. Scores and
helper calls are numbered per split (``train``, ``validation``), each with its own quotas
(``scores.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from smartsearch_sidecar import errors
from smartsearch_sidecar.run import record as kinds
from smartsearch_sidecar.run.coverage import Coverage, Emptied
from smartsearch_sidecar.run.record import Cause, Record
from smartsearch_sidecar.run.scores import Meter, Scores, settle

_WHILE_OPEN = frozenset(
    {
        kinds.RetrievalRequested,
        kinds.RetrievalDeclined,
        kinds.RewardRequested,
        kinds.HelperRequested,
        kinds.CheckpointAccepted,
    }
)
"""What a run that has failed admits no more."""


@dataclass(slots=True)
class RunState:
    """The fold of a run's records. Equal histories give equal states.

    ``searching`` holds the numbers of searches admitted and not yet settled, ``awaited`` those of
    lost answers (the first is 1) whose client is to ask again; a run with any of them is pending,
    and a restart that finds any closes the latch.
    """

    max_calls: int = 0
    cause: Cause | None = None
    attempts: int = 0
    responses: int = 0
    failed: int = 0
    declined: int = 0
    lost: int = 0
    repeated: int = 0
    awaited: set[int] = field(default_factory=set)
    searching: set[int] = field(default_factory=set)
    cache: Counter[str] = field(default_factory=Counter)
    dropped_passages: int = 0
    emptied: Emptied = field(default_factory=Emptied)
    retries: int = 0
    declined_by: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    closed_cleanly: bool = False
    coverage: Coverage = field(default_factory=Coverage)
    checkpoints_accepted: int = 0
    checkpoints_refused: int = 0
    checkpoint_steps: Counter[int] = field(default_factory=Counter)
    claim_sha256: str = ""
    scores: Scores = field(default_factory=Scores)

    @property
    def closed(self) -> bool:
        return self.cause is not None

    @property
    def settled(self) -> bool:
        """Nothing admitted is without its settlement."""
        return not self.searching and not self.awaited and self.scores.settled

    @property
    def searches(self) -> int:
        """What rollouts asked for: searches admitted and queries declined."""
        return self.attempts + self.declined

    def refuse_closed(self) -> None:
        if self.closed:
            raise errors.LATCH_CLOSED("the run has failed and answers nothing more")

    def admit_search(self) -> int:
        """The next search's number, not counted yet: its ``retrieval.requested`` record does that.

        Raises ``LatchClosed`` or ``QuotaExhausted``.
        """
        self.refuse_closed()
        if self.attempts >= self.max_calls:
            raise errors.QUOTA_EXHAUSTED(
                f"the run's {self.max_calls} searches (execute.max_calls) are used up"
            )
        return self.attempts + 1

    def admit_calls(self, split: str, wanted: int) -> range:
        """The numbers that the split's next helper calls get, as ``Meter.admit`` gives them.

        Raises ``LatchClosed`` or ``QuotaExhausted``. A run that has failed spends no tokens, also
        not for a score that was admitted before.
        """
        self.refuse_closed()
        return self.scores.splits[split].admit(wanted)

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
        self.fold_all((record,))

    def fold_all(self, records: Iterable[Record]) -> None:
        """``fold`` for records in order."""
        for record in records:
            kind = type(record)
            self.closed_cleanly = False
            try:
                if self.cause is not None and kind in _WHILE_OPEN:
                    raise errors.LEDGER_CORRUPT(
                        f"a {record.kind} record comes after the latch was closed"
                    )
                if (of_scores := Scores.STEPS.get(kind)) is not None:
                    of_scores(self.scores, record)
                else:
                    self._STEPS[kind](self, record)
            except errors.InvariantBroken as exc:
                raise errors.LEDGER_CORRUPT(exc.message) from None
            except kinds.MISREAD as exc:
                raise errors.LEDGER_CORRUPT(
                    f"a {record.kind} record lacks what the fold reads "
                    f"({type(exc).__name__}: {exc})"
                ) from None

    def _require_counts(self, record: Record, stated: Mapping[str, Any]) -> None:
        """A record that states the usage states ours; one of a later version may state more."""
        for name, own in self.usage().items():
            if stated.get(name, own) != own:
                raise errors.LEDGER_CORRUPT(
                    f"a {record.kind} record states {name} {stated[name]!r:.40}, "
                    f"the records before it {own}"
                )

    def _claimed(self, record: kinds.RunClaimed) -> None:
        self.max_calls = record.max_calls
        self.claim_sha256 = record.claim_sha256
        for name, quotas in (record.reward or {}).items():
            section = "reward" if name == "train" else f"reward.{name}"
            calls, tokens = quotas.max_helper_calls, quotas.max_output_tokens
            meter = Meter(calls, tokens, max_scores=quotas.max_scores, section=section)
            self.scores.splits[name] = meter

    def _resumed(self, record: kinds.RunResumed) -> None:
        self.restarts += 1
        self.coverage.on_resumed(record, self.scores.judged)

    def _run_closed(self, record: kinds.RunClosed) -> None:
        self._require_counts(record, record.usage)
        self.coverage.on_closed(record)
        self.closed_cleanly = True

    def _requested(self, record: kinds.RetrievalRequested) -> None:
        number, before, most = record.number, self.attempts, self.max_calls
        if before >= most:
            raise errors.LEDGER_CORRUPT(f"search {number} was admitted over the quota of {most}")
        if number != before + 1:
            raise errors.LEDGER_CORRUPT(f"search {number} was admitted after search {before}")
        self.attempts = number
        self.searching.add(number)

    def _answered(self, record: kinds.RetrievalAnswered) -> None:
        settle(self.searching, record.number, "search")
        self.responses += 1
        self.cache[record.cache] += 1
        self.dropped_passages += len(record.dropped or ())
        self.emptied.add(emptied=record.emptied is True, repeated=record.cache != "miss")
        self.retries += (record.tries or 1) - 1

    def _failed(self, record: kinds.RetrievalFailed) -> None:
        settle(self.searching, record.number, "search")
        self.failed += 1

    def _declined(self, record: kinds.RetrievalDeclined) -> None:
        if record.number != self.declined + 1:
            raise errors.LEDGER_CORRUPT(
                f"declined query {record.number} came after declined query {self.declined}"
            )
        self.declined = record.number
        self.declined_by[record.reason] += 1

    def _require_asked(self, number: int | None) -> None:
        if number is not None and not 0 < number <= self.attempts:
            raise errors.LEDGER_CORRUPT(f"an answer to search {number} was never to be given")

    def _lost(self, record: kinds.DeliveryLost) -> None:
        self._require_asked(record.number)
        self.lost += 1
        if record.awaits_repeat:
            self.awaited.add(self.lost)

    def _repeated(self, record: kinds.DeliveryRepeated) -> None:
        self._require_asked(record.number)
        settle(self.awaited, record.loss, "lost answer")
        self.repeated += 1

    def _latched(self, record: kinds.LatchClosed) -> None:
        if self.closed:
            raise errors.LEDGER_CORRUPT("the latch was closed twice")
        self.cause = record.cause

    def _accepted(self, record: kinds.CheckpointAccepted) -> None:
        if not self.settled:
            raise errors.LEDGER_CORRUPT("a checkpoint was accepted while work was unsettled")
        self._require_counts(record, record.usage)
        if record.nodes is None:
            gaps = self.coverage.since_accepted(self.scores.judged)
            own = {
                "gaps": gaps,
                "searches": self.searches,
                "result_blocks": self.scores.result_blocks(),
            }
            for name, value in own.items():
                if getattr(record, name) not in (None, value):
                    raise errors.LEDGER_CORRUPT(
                        f"a {record.kind} record states other {name} than the records before it"
                    )
        self.coverage.on_accepted(record, self.searches)
        self.checkpoints_accepted += 1
        self.checkpoint_steps[record.step] += 1

    def _refused(self, record: kinds.CheckpointRefused) -> None:
        self.checkpoints_refused += 1

    _STEPS: ClassVar[Mapping[type[Record], Callable[[RunState, Any], None]]] = {
        kinds.RunClaimed: _claimed,
        kinds.RunResumed: _resumed,
        kinds.RunClosed: _run_closed,
        kinds.RetrievalRequested: _requested,
        kinds.RetrievalAnswered: _answered,
        kinds.RetrievalFailed: _failed,
        kinds.RetrievalDeclined: _declined,
        kinds.DeliveryLost: _lost,
        kinds.DeliveryRepeated: _repeated,
        kinds.LatchClosed: _latched,
        kinds.CheckpointAccepted: _accepted,
        kinds.CheckpointRefused: _refused,
    }

"""The state of a run: what is admitted, counted and closed. No I/O, no time, no randomness.

Theory. A run is open until its first failure and closed from then on for good; the first cause
wins. Every change is a record, and the state is nothing but the fold of the records in order:
``fold`` serves the running process, resume, verify and the operator's page alike. A decision is
made by reading the state (``admit_search``), written down as a record, folded at once, and handed
to the writer in the same step of the loop, so that the order of folding is that of the journal.

Numbers: searches, scores and helper calls each have a series of their own, counted from 1 without
gaps in the order of admission. A number is never used twice, also not across a restart. Scores and
helper calls are numbered per split (``train``, ``validation``), each with its own quotas
(``quotas.py``).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from smartsearch_sidecar import errors
from smartsearch_sidecar.run import record as kinds
from smartsearch_sidecar.run.coverage import Coverage, Emptied
from smartsearch_sidecar.run.quotas import Meter, settle
from smartsearch_sidecar.run.record import Cause, Record

VERDICT_WINDOW = 200  # the share of verdicts not understood is taken over so many, DESIGN section 3


@dataclass(frozen=True, slots=True)
class Score:
    """A reward this run has given: what a reuse repeats."""

    split: str
    number: int
    reward: float


@dataclass(slots=True)
class Scores:
    """The rewards of a run: quotas and usage per split, what was given, what verdicts said.

    ``given`` has the reward of each key (``reward.requested``); ``keys`` those of open scores.
    ``judged_blocks`` are result blocks that were looked up, ``unjudged_searches`` calls that were
    shown without one, both by split.
    """

    splits: dict[str, Meter] = field(default_factory=dict)
    given: dict[str, Score] = field(default_factory=dict)
    reused: int = 0
    failed: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    judged_blocks: Counter[str] = field(default_factory=Counter)
    unjudged_searches: Counter[str] = field(default_factory=Counter)
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

    @property
    def unjudged_split(self) -> str | None:
        """A split of which no block was ever judged, though its rollouts show searches of this run.

        A rollout that never searched shows none, nor does one that a pinned client wrote: there a
        block follows each call that was answered.
        """
        for split, meter in self.splits.items():
            shown = meter.score_responses and self.unjudged_searches[split]
            if shown and not self.judged_blocks[split]:
                return split
        return None

    def usage(self) -> dict[str, dict[str, int]]:
        return {name: meter.usage() for name, meter in self.splits.items()}

    @property
    def judged(self) -> int:
        """Result blocks that were looked up, of both splits."""
        return self.judged_blocks.total()

    def result_blocks(self) -> dict[str, int]:
        """Result blocks of scored rollouts; broken ones are judged ones."""
        return {"judged": self.judged, "policy": self.policy_blocks, "broken": self.broken_blocks}

    def meter(self, split: str) -> Meter:
        """The quotas of a split. Raises ``LedgerCorrupt`` where it was never claimed."""
        found = self.splits.get(split)
        if found is None:
            raise errors.LEDGER_CORRUPT(f"no split named {split!r:.40} was claimed")
        return found


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
        step = self._STEPS[type(record)]
        self.closed_cleanly = False
        try:
            step(self, record)
        except errors.InvariantBroken as exc:
            raise errors.LEDGER_CORRUPT(exc.message) from None
        except kinds.MISREAD as exc:
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
        self._require_open(record)
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
        self._require_open(record)
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

    def _score_requested(self, record: kinds.RewardRequested) -> None:
        self._require_open(record)
        scores = self.scores
        scores.meter(record.split).on_score_requested(record.number)
        scores.keys[record.split, record.number] = record.key
        scores.judged_blocks[record.split] += record.judged_blocks or 0
        scores.unjudged_searches[record.split] += record.unjudged_searches or 0
        scores.policy_blocks += record.policy_blocks or 0
        scores.broken_blocks += len(record.broken_blocks or ())

    def _score_answered(self, record: kinds.RewardAnswered) -> None:
        scores = self.scores
        scores.meter(record.split).on_score_answered(record.number)
        key = scores.keys.pop((record.split, record.number))
        scores.given.setdefault(key, Score(record.split, record.number, float(record.reward)))
        for verdict in record.verdicts:
            scores.verdicts[verdict] += 1
            scores.window.append(verdict in ("other", "empty"))

    def _score_failed(self, record: kinds.RewardFailed) -> None:
        self.scores.meter(record.split).on_score_failed(record.number)
        self.scores.keys.pop((record.split, record.number), None)
        self.scores.failed += 1

    def _score_reused(self, record: kinds.RewardReused) -> None:
        self.scores.meter(record.split)  # raises where the split was never claimed
        self.scores.reused += 1

    def _call_requested(self, record: kinds.HelperRequested) -> None:
        self._require_open(record)
        self.scores.meter(record.split).on_requested(record.number)

    def _call_answered(self, record: kinds.HelperAnswered) -> None:
        meter = self.scores.meter(record.split)
        meter.on_answered(record.number, record.input_tokens, record.output_tokens)

    def _call_failed(self, record: kinds.HelperFailed) -> None:
        meter = self.scores.meter(record.split)
        meter.on_failed(record.number, record.usage, sent=record.sent)

    def _latched(self, record: kinds.LatchClosed) -> None:
        if self.closed:
            raise errors.LEDGER_CORRUPT("the latch was closed twice")
        self.cause = record.cause

    def _accepted(self, record: kinds.CheckpointAccepted) -> None:
        self._require_open(record)
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
        kinds.RewardRequested: _score_requested,
        kinds.RewardAnswered: _score_answered,
        kinds.RewardFailed: _score_failed,
        kinds.RewardReused: _score_reused,
        kinds.HelperRequested: _call_requested,
        kinds.HelperAnswered: _call_answered,
        kinds.HelperFailed: _call_failed,
        kinds.LatchClosed: _latched,
        kinds.CheckpointAccepted: _accepted,
        kinds.CheckpointRefused: _refused,
    }

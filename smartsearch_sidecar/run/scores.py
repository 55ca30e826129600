"""The rewards of a run: quotas of a split, what it has spent and given. No I/O, no time.

Every helper call goes through three moments, each of them a record:

    requested ─┬─ answered        its measured tokens take the place of its reservation
               ├─ failed, usage   the same: a wrong, empty or over-long answer was paid for
               ├─ failed          what it cost is unknown: the reservation stays for good
               └─ failed, unsent  it was never sent: the reservation is given back

A reservation is the most a call may write (``cap`` tokens), and it is made when the call is sent.
So ``output_tokens + unknown_output_token_reservations`` always bounds what can have been spent, and
it never exceeds the quota while the helper keeps to the cap; a helper that does not is counted
honestly and failed by ``reward/helper.py``. A call whose reservation does not fit waits while
others are unsettled, because most of them turn out cheaper than reserved; the quota is exhausted
only when none is. Waiting ends: no call is admitted past one that waits for room of the same size,
and every unsettled call is settled in one of the four ways above. Calls are counted and never given
back, so a used-up number of calls is exhausted at once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from smartsearch_sidecar import errors
from smartsearch_sidecar.run import record as kinds
from smartsearch_sidecar.run.record import Record

MAX_NEW_TOKENS: Final = 2048
"""Output tokens a single helper call may write: the pinned scorer's own ``max_new_tokens``."""
VERDICT_WINDOW: Final = 200
"""The share of verdicts not understood is taken over so many."""
_COUNTERS: Final = (
    *("score_attempts", "score_responses", "model_attempts", "model_responses"),
    *("input_tokens", "output_tokens", "unknown_output_token_reservations"),
)


@dataclass(slots=True)
class Meter:
    """Quotas and usage of one split (``train`` or ``validation``); the seven counters are the
    reference's, with its names.

    Args:
        max_calls: helper calls the split may send, failed ones included.
        max_output_tokens: output tokens it may spend, reservations included.
        cap: output tokens reserved per call.
        max_scores: rollouts it may score, failed ones included; ``None`` for no bound.
        section: where a person finds the quotas, for messages.
    """

    max_calls: int
    max_output_tokens: int
    cap: int = MAX_NEW_TOKENS
    max_scores: int | None = None
    section: str = "reward"
    score_attempts: int = 0
    score_responses: int = 0
    model_attempts: int = 0
    model_responses: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    unknown_output_token_reservations: int = 0
    unsettled: set[int] = field(default_factory=set)
    scoring: set[int] = field(default_factory=set)

    def admit(self, wanted: int = 1) -> range:
        """The numbers that the next calls get, of ``wanted`` as many as fit now; none of them fits
        where they must wait. Changes nothing. Raises ``QuotaExhausted`` where no wait helps.
        """
        if self.model_attempts >= self.max_calls:
            raise errors.QUOTA_EXHAUSTED(
                f"the split's {self.max_calls} helper calls ({self.section}.max_helper_calls) "
                "are used up"
            )
        room = (self.max_output_tokens - self.committed_output_tokens) // self.cap
        fitting = min(wanted, self.max_calls - self.model_attempts, room)
        if fitting > 0 or self.unsettled:
            return range(self.model_attempts + 1, self.model_attempts + 1 + max(0, fitting))
        raise errors.QUOTA_EXHAUSTED(
            f"another helper call may write {self.cap} tokens, and of the split's "
            f"{self.max_output_tokens} ({self.section}.max_output_tokens) "
            f"{self.committed_output_tokens} are spent or may have been"
        )

    def admit_scores(self, count: int) -> range:
        """The numbers of the next ``count`` scores, all or none. Raises ``QuotaExhausted``."""
        used = self.score_attempts
        if self.max_scores is not None and used + count > self.max_scores:
            raise errors.QUOTA_EXHAUSTED(
                f"{count} more scores do not fit into {self.section}.max_scores "
                f"({self.max_scores}, {used} used)"
            )
        return range(used + 1, used + 1 + count)

    @property
    def committed_output_tokens(self) -> int:
        """Output tokens measured, plus those that calls of unknown usage may have written."""
        return self.output_tokens + self.unknown_output_token_reservations

    @property
    def settled(self) -> bool:
        """No score and no helper call is without its settlement."""
        return not self.unsettled and not self.scoring

    def usage(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _COUNTERS}

    # The fold, a method a record. Raises ``InvariantBroken`` for what cannot have happened.

    def on_requested(self, number: int) -> None:
        over = self.committed_output_tokens + self.cap > self.max_output_tokens
        if number != self.model_attempts + 1 or number > self.max_calls or over:
            raise errors.INTERNAL_ERROR(
                f"helper call {number} was requested after call {self.model_attempts}, or over the "
                "quota"
            )
        self.model_attempts = number
        self.unknown_output_token_reservations += self.cap
        self.unsettled.add(number)

    def on_answered(self, number: int, input_tokens: int, output_tokens: int) -> None:
        """``helper.answered``: the call's measured tokens take the place of its reservation."""
        if any(type(count) is not int or count < 0 for count in (input_tokens, output_tokens)):
            raise errors.INTERNAL_ERROR(f"helper call {number} has token counts that count nothing")
        settle(self.unsettled, number, "helper call")
        self.model_responses += 1
        self.input_tokens += input_tokens
        self.output_tokens += output_tokens
        self.unknown_output_token_reservations -= self.cap

    def on_failed(
        self, number: int, usage: tuple[int, int] | None = None, *, sent: bool = True
    ) -> None:
        """``helper.failed``; ``sent=False``: it was recorded and then not sent."""
        if usage is not None:
            if not sent:
                raise errors.INTERNAL_ERROR(f"helper call {number} was measured but never sent")
            self.on_answered(number, *usage)
            return
        settle(self.unsettled, number, "helper call")
        if not sent:
            self.unknown_output_token_reservations -= self.cap

    def on_score_requested(self, number: int) -> None:
        used_up = self.max_scores is not None and self.score_attempts >= self.max_scores
        if number != self.score_attempts + 1 or used_up:
            raise errors.INTERNAL_ERROR(
                f"score {number} was requested after score {self.score_attempts}, or over the quota"
            )
        self.score_attempts = number
        self.scoring.add(number)

    def on_score_answered(self, number: int) -> None:
        self.on_score_failed(number)
        self.score_responses += 1

    def on_score_failed(self, number: int) -> None:
        settle(self.scoring, number, "score")


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

    # The fold, a method a kind of record.

    def on_score_requested(self, record: kinds.RewardRequested) -> None:
        self.meter(record.split).on_score_requested(record.number)
        self.keys[record.split, record.number] = record.key
        self.judged_blocks[record.split] += record.judged_blocks or 0
        self.unjudged_searches[record.split] += record.unjudged_searches or 0
        self.policy_blocks += record.policy_blocks or 0
        self.broken_blocks += len(record.broken_blocks or ())

    def on_score_answered(self, record: kinds.RewardAnswered) -> None:
        self.meter(record.split).on_score_answered(record.number)
        key = self.keys.pop((record.split, record.number))
        self.given.setdefault(key, Score(record.split, record.number, float(record.reward)))
        for verdict in record.verdicts:
            self.verdicts[verdict] += 1
            self.window.append(verdict in ("other", "empty"))

    def on_score_failed(self, record: kinds.RewardFailed) -> None:
        self.meter(record.split).on_score_failed(record.number)
        self.keys.pop((record.split, record.number), None)
        self.failed += 1

    def on_score_reused(self, record: kinds.RewardReused) -> None:
        self.meter(record.split)  # raises where the split was never claimed
        self.reused += 1

    def on_call_requested(self, record: kinds.HelperRequested) -> None:
        self.meter(record.split).on_requested(record.number)

    def on_call_answered(self, record: kinds.HelperAnswered) -> None:
        meter = self.meter(record.split)
        meter.on_answered(record.number, record.input_tokens, record.output_tokens)

    def on_call_failed(self, record: kinds.HelperFailed) -> None:
        meter = self.meter(record.split)
        meter.on_failed(record.number, record.usage, sent=record.sent)

    STEPS: ClassVar[Mapping[type[Record], Callable[[Scores, Any], None]]] = {
        kinds.RewardRequested: on_score_requested,
        kinds.RewardAnswered: on_score_answered,
        kinds.RewardFailed: on_score_failed,
        kinds.RewardReused: on_score_reused,
        kinds.HelperRequested: on_call_requested,
        kinds.HelperAnswered: on_call_answered,
        kinds.HelperFailed: on_call_failed,
    }


def settle(open_numbers: set[int], number: int, what: str) -> None:
    """Takes a number from the open ones. Raises ``InvariantBroken`` where it is none of them."""
    if number not in open_numbers:
        raise errors.INTERNAL_ERROR(f"{what} {number} was settled without being open")
    open_numbers.remove(number)

"""What a split may spend on the helper, and what it has spent: rules without I/O, time or asyncio.

Theory. Every helper call goes through three moments, each of them a record of the ledger:

    requested ─┬─ answered        its measured tokens take the place of its reservation
               ├─ failed, usage   the same: a wrong, empty or over-long answer was paid for
               ├─ failed          what it cost is unknown: the reservation stays for good
               └─ failed, unsent  it was never sent: the reservation is given back

A reservation is the most a call may write (``cap`` tokens), and it is made when the call is sent.
So at every moment ``output_tokens + unknown_output_token_reservations`` bounds what can have been
spent, and it never exceeds the quota as long as the helper keeps to the cap; a helper that does not
is counted honestly and failed by ``reward/helper.py``.

A call whose reservation does not fit has to wait while others are unsettled, because most of them
will turn out cheaper than reserved; the token quota is exhausted only when none is. Waiting ends:
nothing is admitted past a call that waits for room of the same size, and every unsettled call is
settled in one of the four ways above. Calls are counted and never given back, so a used-up number
of calls is exhausted at once.

The state is a plain value, and the fold of records: ``admit`` decides and changes nothing, and the
record of what was decided is then folded (``on_requested``, ``on_answered``, ``on_failed``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from smartsearch_sidecar import errors

MAX_NEW_TOKENS: Final = 2048
"""Output tokens a single helper call may write: the pinned scorer's own ``max_new_tokens``."""

WAIT: Final = "wait"
"""What ``admit`` answers while a reservation does not fit but still may."""


class Usage(NamedTuple):
    """Tokens of one helper call, as the helper measured them."""

    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """A call that may be sent: its number in the split's series, the output tokens kept for it."""

    number: int
    output_tokens: int


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

    # --- decisions: nothing changes ---------------------------------------------------------------

    def admit(self) -> Reservation | Literal["wait"]:
        """The reservation the next call would get, or ``"wait"``. Changes nothing.

        Raises ``QuotaExhausted`` where waiting cannot help.
        """
        if self.model_attempts >= self.max_calls:
            raise errors.QUOTA_EXHAUSTED(
                f"the split's {self.max_calls} helper calls ({self.section}.max_helper_calls) "
                "are used up"
            )
        if self._fits():
            return Reservation(self.model_attempts + 1, self.cap)
        if self.unsettled:
            return WAIT
        raise errors.QUOTA_EXHAUSTED(
            f"another helper call may write {self.cap} tokens, and of the split's "
            f"{self.max_output_tokens} ({self.section}.max_output_tokens) "
            f"{self.committed_output_tokens} are spent or may have been"
        )

    def admit_scores(self, count: int) -> range:
        """The numbers the next ``count`` scores get, all of them or none. Changes nothing.

        Raises ``QuotaExhausted``.
        """
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
        """The seven counters, with the reference's names and in its order."""
        return {
            "score_attempts": self.score_attempts,
            "score_responses": self.score_responses,
            "model_attempts": self.model_attempts,
            "model_responses": self.model_responses,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "unknown_output_token_reservations": self.unknown_output_token_reservations,
        }

    # --- the fold: one method per record, `InvariantBroken` for what cannot have happened ---------

    def on_requested(self, number: int) -> None:
        """``helper.requested``: call ``number`` is about to be sent."""
        if number != self.model_attempts + 1:
            raise errors.INTERNAL_ERROR(
                f"helper call {number} was requested after call {self.model_attempts}"
            )
        if not self._fits():
            raise errors.INTERNAL_ERROR(
                f"helper call {number} was requested although no quota was left for it"
            )
        self.model_attempts = number
        self.unknown_output_token_reservations += self.cap
        self.unsettled.add(number)

    def on_answered(self, number: int, input_tokens: int, output_tokens: int) -> None:
        """``helper.answered``: the call's measured tokens take the place of its reservation."""
        self._measured(number, Usage(input_tokens, output_tokens))

    def on_failed(
        self, number: int, usage: tuple[int, int] | None = None, *, sent: bool = True
    ) -> None:
        """``helper.failed``: with measured usage a response like any other; without, lost.

        ``sent=False`` is for a call that was recorded and then not sent (``HelperNotSent``).
        """
        if usage is not None:
            if not sent:
                raise errors.INTERNAL_ERROR(f"helper call {number} was measured but never sent")
            self._measured(number, Usage(*usage))
            return
        self._close(number)
        if not sent:
            self.unknown_output_token_reservations -= self.cap

    def on_score_requested(self, number: int) -> None:
        """``reward.requested``: score ``number`` begins."""
        if number != self.score_attempts + 1 or self._scores_used_up():
            raise errors.INTERNAL_ERROR(
                f"score {number} was requested after score {self.score_attempts}, or over the quota"
            )
        self.score_attempts = number
        self.scoring.add(number)

    def on_score_answered(self, number: int) -> None:
        """``reward.answered``: the score has a reward."""
        self._close_score(number)
        self.score_responses += 1

    def on_score_failed(self, number: int) -> None:
        """``reward.failed``: the score never gets one."""
        self._close_score(number)

    # --- inside -----------------------------------------------------------------------------------

    def _fits(self) -> bool:
        return (
            self.model_attempts < self.max_calls
            and self.committed_output_tokens + self.cap <= self.max_output_tokens
        )

    def _scores_used_up(self) -> bool:
        return self.max_scores is not None and self.score_attempts >= self.max_scores

    def _measured(self, number: int, usage: Usage) -> None:
        if any(type(count) is not int or count < 0 for count in usage):
            raise errors.INTERNAL_ERROR(f"helper call {number} has token counts that count nothing")
        self._close(number)
        self.model_responses += 1
        self.input_tokens += usage.input_tokens
        self.output_tokens += usage.output_tokens
        self.unknown_output_token_reservations -= self.cap

    def _close(self, number: int) -> None:
        if number not in self.unsettled:
            raise errors.INTERNAL_ERROR(f"helper call {number} was settled without being open")
        self.unsettled.remove(number)

    def _close_score(self, number: int) -> None:
        if number not in self.scoring:
            raise errors.INTERNAL_ERROR(f"score {number} was settled without being open")
        self.scoring.remove(number)

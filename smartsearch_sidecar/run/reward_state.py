"""The reward side of a run's state: per split quotas, usage, scores, verdicts. No I/O, no time.

Folded from the same records as ``runstate.py``. Each split (``train``, ``validation``) has quotas
and two series of numbers of its own: scores and helper calls.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from smartsearch_sidecar import errors
from smartsearch_sidecar.run.helper_budget import Meter
from smartsearch_sidecar.run.record import Kind, Record

VERDICT_WINDOW = 200  # the share of verdicts not understood is taken over so many, DESIGN section 3


@dataclass(frozen=True, slots=True)
class Score:
    """A reward this run has given: what a reuse repeats."""

    split: str
    number: int
    reward: float


@dataclass(slots=True)
class Scores:
    """The fold of ``reward.*`` and ``helper.*`` records."""

    splits: dict[str, Meter] = field(default_factory=dict)
    given: dict[str, Score] = field(default_factory=dict)
    reused: int = 0
    failed: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    policy_blocks: int = 0
    broken_blocks: int = 0
    _window: deque[bool] = field(default_factory=lambda: deque(maxlen=VERDICT_WINDOW))
    _keys: dict[tuple[str, int], str] = field(default_factory=dict)

    @property
    def settled(self) -> bool:
        """No score and no helper call of any split is without its settlement."""
        return all(meter.settled for meter in self.splits.values())

    @property
    def unparsed_share(self) -> float:
        """Verdicts of the last ``VERDICT_WINDOW`` that were neither 0 nor 1, as a share of all
        places of the window: the first few of a run cannot close it.
        """
        return sum(self._window) / VERDICT_WINDOW

    def usage(self) -> dict[str, dict[str, int]]:
        """The reference's seven counters, per split."""
        return {name: meter.usage() for name, meter in self.splits.items()}

    def claim(self, quotas: Mapping[str, Mapping[str, int]]) -> None:
        """Sets the splits up from ``run.claimed``."""
        for name, quota in quotas.items():
            self.splits[name] = Meter(
                max_calls=int(quota["max_helper_calls"]),
                max_output_tokens=int(quota["max_output_tokens"]),
                max_scores=int(quota["max_scores"]),
                section="reward" if name == "train" else f"reward.{name}",
            )

    def fold(self, record: Record) -> None:
        """Applies one record. Raises ``LedgerCorrupt`` for one that cannot follow this state."""
        try:
            self._STEPS[record.kind](self, record)
        except errors.InvariantBroken as exc:
            raise errors.LEDGER_CORRUPT(exc.message) from None

    def _meter(self, record: Record) -> Meter:
        name = record.data["split"]
        if name not in self.splits:
            raise errors.LEDGER_CORRUPT(f"no split named {name!r:.40} was claimed")
        return self.splits[name]

    def _requested(self, record: Record) -> None:
        self._meter(record).on_score_requested(_number(record))
        self._keys[record.data["split"], _number(record)] = record.data["key"]
        self.policy_blocks += record.data.get("policy_blocks", 0)
        self.broken_blocks += len(record.data.get("broken_blocks", ()))

    def _answered(self, record: Record) -> None:
        split, number = record.data["split"], _number(record)
        self._meter(record).on_score_answered(number)
        key = self._keys.pop((split, number))
        self.given.setdefault(key, Score(split, number, float(record.data["reward"])))
        for verdict in record.data["verdicts"]:
            self.verdicts[verdict] += 1
            self._window.append(verdict == "other")

    def _failed(self, record: Record) -> None:
        self._meter(record).on_score_failed(_number(record))
        self._keys.pop((record.data["split"], _number(record)), None)
        self.failed += 1

    def _reused(self, record: Record) -> None:
        self._meter(record)
        self.reused += 1

    def _helper_requested(self, record: Record) -> None:
        self._meter(record).on_requested(_number(record))

    def _helper_answered(self, record: Record) -> None:
        data = record.data
        self._meter(record).on_answered(
            _number(record), data["input_tokens"], data["output_tokens"]
        )

    def _helper_failed(self, record: Record) -> None:
        usage = record.data["usage"]
        measured = None if usage is None else (int(usage[0]), int(usage[1]))
        self._meter(record).on_failed(_number(record), measured, sent=record.data["sent"])

    _STEPS: ClassVar[Mapping[str, Callable[[Scores, Record], None]]] = {
        Kind.REWARD_REQUESTED.value: _requested,
        Kind.REWARD_ANSWERED.value: _answered,
        Kind.REWARD_FAILED.value: _failed,
        Kind.REWARD_REUSED.value: _reused,
        Kind.HELPER_REQUESTED.value: _helper_requested,
        Kind.HELPER_ANSWERED.value: _helper_answered,
        Kind.HELPER_FAILED.value: _helper_failed,
    }


SCORE_KINDS: Final = frozenset(Scores._STEPS)  # noqa: SLF001 - the table of this very module
SCORE_ADMISSIONS: Final = frozenset({Kind.REWARD_REQUESTED.value, Kind.HELPER_REQUESTED.value})


def _number(record: Record) -> int:
    if record.number is None:
        raise errors.LEDGER_CORRUPT(f"a {record.kind} record has no number")
    return record.number


def quotas_of(section: Any) -> dict[str, int]:
    """The three quotas of a configuration section, as ``run.claimed`` records them."""
    return {
        "max_scores": section.max_scores,
        "max_helper_calls": section.max_helper_calls,
        "max_output_tokens": section.max_output_tokens,
    }

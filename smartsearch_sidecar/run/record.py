"""Every kind of record a journal may hold: one frozen class a kind, and its data as JSON.

A decision is made as one of these values, and stays one on its way through state, ledger and
metrics. The fields of a class are the keys of its data, in the order in which they are declared. A
field whose default is ``None`` is left out while it is ``None``. Keys that a class does not know
are ignored when it is read: ``Line.data`` still has them.

``number`` is no part of the data. It counts within the record's own series: searches, declined
queries, helper calls of a split, scores of a split, checkpoints.

``line.py`` has the line that a record is written as. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.run.json_values import Data

CLASSES: Final[dict[str, type[Record]]] = {}
"""The class of each kind. Kinds are read by other people's scripts: add, never rename."""


class Record(Data):
    """One decision."""

    __slots__ = ()
    BESIDE = frozenset({"number"})
    kind: ClassVar[str]
    if TYPE_CHECKING:  # at run time it would be taken for the default of a field

        @property
        def number(self) -> int | None: ...

    def __init_subclass__(cls, kind: str | None = None) -> None:
        # A class with slots is made twice: by its statement, and without the word by `dataclass`.
        if kind is not None:
            cls.kind = kind
        CLASSES[cls.kind] = cls


@dataclass(frozen=True, slots=True)
class Cause(Data):
    """Why the latch closed: what ``latch.closed`` and ``latch.json`` say.

    ``number`` is the attempt it belongs to, if any; ``attempt_consumed`` whether that attempt
    counts against the quota; ``detail`` a sentence for the operator.
    """

    cause: str
    number: int | None
    attempt_consumed: bool
    detail: str

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        """Reads what ``to_data`` wrote, or as much of it as ``latch.json`` holds."""
        consumed, detail = bool(data.get("attempt_consumed")), str(data.get("detail", ""))
        return cls(str(data["cause"]), data.get("number"), consumed, detail)


@dataclass(frozen=True, slots=True)
class SplitQuotas(Data):
    """What one split may use: rollouts to score, helper calls, output tokens of the helper."""

    max_scores: int
    max_helper_calls: int
    max_output_tokens: int

    @classmethod
    def of(cls, section: Any) -> Self:
        return cls(section.max_scores, section.max_helper_calls, section.max_output_tokens)


@dataclass(frozen=True, slots=True)
class NativeCall(Data):
    """What ``/execute`` was asked: ``env`` and ``call`` verbatim, and the query in ``call``.

    ``query`` is the text the policy wrote, not stripped, and empty where it has no UTF-8 form. It
    is ``None`` in journals of versions that did not record it.
    """

    env: str
    call: str
    query: str | None = None

    def to_data(self) -> dict[str, Any]:
        # Written out: this one is on the way of every search.
        if self.query is None:
            return {"env": self.env, "call": self.call}
        return {"env": self.env, "call": self.call, "query": self.query}


@dataclass(frozen=True, slots=True)
class ClientQuery(Data):
    """What another trainer's client asked: the route's segment, the query verbatim, how many
    passages. ``item`` of ``items`` says which query of a batch it is, counted from 1.
    """

    route: str
    query: str
    top_n: int
    item: int | None = None
    items: int | None = None


Asked = NativeCall | ClientQuery
"""What a search, or a declined query, was asked for."""


def _asked_of(data: Mapping[str, Any]) -> Asked:
    if "route" in data:
        return ClientQuery(*ClientQuery.values_of(data))
    return NativeCall(data["env"], data["call"], data.get("query"))


@dataclass(frozen=True, slots=True)
class RunClaimed(Record, kind="run.claimed"):
    """The first record: the quotas that the fold holds the run to.

    ``reward`` has those of each split where rewards are on; ``cluster`` names run and node where a
    run has many nodes.
    """

    max_calls: int
    claim_sha256: str
    reward: Mapping[str, SplitQuotas] | None = None
    cluster: Mapping[str, Any] | None = None
    number: ClassVar[None] = None

    def to_data(self) -> dict[str, Any]:
        data = super(RunClaimed, self).to_data()
        if self.reward is not None:
            data["reward"] = {split: quotas.to_data() for split, quotas in self.reward.items()}
        return data

    @classmethod
    def values_of(cls, data: Mapping[str, Any]) -> list[Any]:
        max_calls, claim, reward, cluster = super(RunClaimed, cls).values_of(data)
        if reward is not None:
            reward = {
                name: SplitQuotas(*SplitQuotas.values_of(quotas)) for name, quotas in reward.items()
            }
        return [max_calls, claim, reward, cluster]


@dataclass(frozen=True, slots=True)
class RunResumed(Record, kind="run.resumed"):
    """How a run that goes on was found: ``unsettled`` are the searches it had admitted and not
    answered; ``torn_bytes`` were trimmed into the file ``set_aside``.

    From ``gap_from`` to ``gap_to`` no process served the run, and ``trainer_stopped`` is whether
    the resume was told that the trainer stood still meanwhile. Older journals lack the three.
    """

    clean: bool
    ending: str
    torn_bytes: int
    set_aside: str | None
    unsettled: tuple[int, ...]
    gap_from: str | None = None
    gap_to: str | None = None
    trainer_stopped: bool | None = None
    number: ClassVar[None] = None


@dataclass(frozen=True, slots=True)
class RunClosed(Record, kind="run.closed"):
    """An orderly end. ``usage`` is ``RunState.usage`` at that moment.

    From ``deaf_from`` on the process took no connection; ``asked`` is whether a rollout, a trainer
    or its gate had asked it anything. Older journals lack both.
    """

    latched: bool
    usage: Mapping[str, Any]
    deaf_from: str | None = None
    asked: bool | None = None
    number: ClassVar[None] = None

    def to_data(self) -> dict[str, Any]:
        end = {"deaf_from": self.deaf_from, "asked": self.asked}
        said = {name: value for name, value in end.items() if value is not None}
        return {"latched": self.latched, **self.usage, **said}

    @classmethod
    def values_of(cls, data: Mapping[str, Any]) -> list[Any]:
        usage = dict(data)
        end = [usage.pop(name, None) for name in ("deaf_from", "asked")]
        return [bool(usage.pop("latched")), usage, *end]


@dataclass(frozen=True, slots=True)
class RetrievalRequested(Record, kind="retrieval.requested"):
    """Search ``number`` is admitted."""

    number: int
    asked: Asked

    def to_data(self) -> dict[str, Any]:
        return self.asked.to_data()

    @classmethod
    def values_of(cls, data: Mapping[str, Any]) -> list[Any]:
        return [_asked_of(data)]


@dataclass(frozen=True, slots=True)
class RetrievalAnswered(Record, kind="retrieval.answered"):
    """What search ``number`` found.

    ``documents_json`` is the JSON list of ``{"id", "contents", "score"}``, recorded as
    ``documents`` before all else; ``None`` where a line was read without them. ``cache`` is
    ``miss``, ``shared`` or ``hit``; ``took_us`` are microseconds; ``dropped`` names the passages
    left out, with the reason; ``emptied`` is true where no passage was left; ``tries`` are the
    calls to the provider, where it took more than one.
    """

    number: int
    documents_json: bytes | None
    cache: str
    took_us: int
    dropped: tuple[Mapping[str, str], ...] | None = None
    emptied: bool | None = None
    tries: int | None = None

    def to_json(self) -> bytes:
        # The documents are spliced in unread: a cached search's are encoded once, recorded often.
        encoded = super(RetrievalAnswered, self).to_json()
        if self.documents_json is None:
            return encoded
        return b'{"documents":' + self.documents_json + b"," + encoded[1:]

    def documents(self) -> list[dict[str, Any]]:
        """The documents as values. Raises ``LedgerCorrupt`` where the record holds no list."""
        value = None if self.documents_json is None else orjson.loads(self.documents_json)
        if type(value) is not list:
            raise errors.LEDGER_CORRUPT("an answer without documents")
        return value

    def to_data(self) -> dict[str, Any]:
        data: dict[str, Any] = {"cache": self.cache, "took_us": self.took_us}
        if self.dropped is not None:
            data["dropped"] = self.dropped
        if self.emptied is not None:
            data["emptied"] = self.emptied
        if self.tries is not None:
            data["tries"] = self.tries
        return data

    @classmethod
    def values_of(cls, data: Mapping[str, Any]) -> list[Any]:
        found = orjson.dumps(data["documents"]) if "documents" in data else None
        dropped = tuple(data["dropped"]) if "dropped" in data else None
        return [
            found,
            data["cache"],
            data["took_us"],
            dropped,
            data.get("emptied"),
            data.get("tries"),
        ]


@dataclass(frozen=True, slots=True)
class RetrievalFailed(Record, kind="retrieval.failed"):
    """Search ``number`` has no answer."""

    number: int
    code: str
    cause: str
    detail: str


@dataclass(frozen=True, slots=True)
class RetrievalDeclined(Record, kind="retrieval.declined"):
    """A query that is answered `invalid query` and consumes no attempt."""

    number: int
    reason: str
    asked: Asked

    def to_data(self) -> dict[str, Any]:
        return {"reason": self.reason, **self.asked.to_data()}

    @classmethod
    def values_of(cls, data: Mapping[str, Any]) -> list[Any]:
        return [data["reason"], _asked_of(data)]


@dataclass(frozen=True, slots=True)
class DeliveryLost(Record, kind="delivery.lost"):
    """The client was gone before the answer to search ``number``, and ``others`` of its batch.
    ``awaits_repeat``: the run is not settled until ``delivery.repeated`` names this loss.
    """

    number: int | None
    stage: str
    others: tuple[int, ...] | None = None
    awaits_repeat: bool | None = None


@dataclass(frozen=True, slots=True)
class DeliveryRepeated(Record, kind="delivery.repeated"):
    """The client of the ``loss``-th ``delivery.lost`` asked again, and is handed the answer to
    search ``number`` now: that of the lost request, or of a search of its own where that had none.
    """

    number: int | None
    loss: int


@dataclass(frozen=True, slots=True)
class RewardRequested(Record, kind="reward.requested"):
    """Score ``number`` of a split is admitted.

    ``key`` is what must be the same for a score to be reused. The counts of result blocks are there
    where blocks are judged: ``broken_blocks`` are offsets into ``solution_str``, in characters.
    ``unjudged_searches`` are calls that a rollout without a judged block shows, and that this run
    answered; it is left out where there are none.
    """

    number: int
    split: str
    key: str
    solution_str: str
    judged_blocks: int | None = None
    policy_blocks: int | None = None
    broken_blocks: tuple[int, ...] | None = None
    unjudged_searches: int | None = None


@dataclass(frozen=True, slots=True)
class HelperRequested(Record, kind="helper.requested"):
    """Helper call ``number`` of a split is about to be sent for ``score``."""

    number: int
    split: str
    score: int
    prompt_sha256: str
    prompt_bytes: int
    seed: int


@dataclass(frozen=True, slots=True)
class HelperAnswered(Record, kind="helper.answered"):
    """What the helper wrote, with its measured tokens."""

    number: int
    split: str
    score: int
    text: str
    input_tokens: int
    output_tokens: int
    finish_reason: str
    model: str | None


@dataclass(frozen=True, slots=True)
class HelperFailed(Record, kind="helper.failed"):
    """No usable answer; ``usage``: input, output tokens if measured; ``sent``: whether it left."""

    number: int
    split: str
    score: int
    code: str
    detail: str
    usage: tuple[int, int] | None
    sent: bool


@dataclass(frozen=True, slots=True)
class RewardAnswered(Record, kind="reward.answered"):
    """The reward of score ``number``, and what the helper's texts were read as."""

    number: int
    split: str
    reward: float
    verdicts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RewardFailed(Record, kind="reward.failed"):
    """Score ``number`` never gets a reward."""

    number: int
    split: str
    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class RewardReused(Record, kind="reward.reused"):
    """The reward of score ``of`` was given again."""

    split: str
    of: int
    number: ClassVar[None] = None


@dataclass(frozen=True, slots=True)
class LatchClosed(Record, kind="latch.closed"):
    """The run has failed."""

    cause: Cause

    @property
    def number(self) -> int | None:
        """The attempt that failed, if the cause is one's."""
        return self.cause.number

    def to_data(self) -> dict[str, Any]:
        return self.cause.to_data()

    @classmethod
    def values_of(cls, data: Mapping[str, Any]) -> list[Any]:
        return [Cause.from_data(data)]


@dataclass(frozen=True, slots=True)
class CheckpointAccepted(Record, kind="checkpoint.accepted"):
    """The ``occurrence`` of this ``step``; ``nodes`` has each node's journal if there are many.

    ``read_back_bytes`` of the journal were read from the medium for it: all since the last one.
    ``gaps`` are those since the last one (``Gap.to_data``, of many nodes with ``node``).
    ``searches`` is how many searches all nodes were asked for so far, and ``idle`` is true where
    that is no more than at the last one. ``result_blocks`` counts the blocks of scored rollouts.
    """

    number: int
    step: int
    path: str | None
    manifest_sha256: str | None
    occurrence: int
    usage: Mapping[str, Any]
    nodes: Mapping[str, Any] | None = None
    read_back_bytes: int | None = None
    gaps: tuple[Mapping[str, Any], ...] | None = None
    searches: int | None = None
    idle: bool | None = None
    result_blocks: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class CheckpointRefused(Record, kind="checkpoint.refused"):
    """A checkpoint was asked for and not accepted: ``state`` is what the run was, or ``idle``."""

    number: int
    step: int
    path: str | None
    manifest_sha256: str | None
    state: str


KINDS: Final = frozenset(CLASSES)
MISREAD: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What reading a record of another shape may raise."""


def record_of(kind: str, number: int | None, data: Mapping[str, Any]) -> Record:
    """The record that a line holds. Raises ``LedgerCorrupt`` where it cannot be one."""
    shape = CLASSES.get(kind)
    if shape is None:
        raise errors.LEDGER_CORRUPT(
            f"a record of the unknown kind {kind!r:.80} was written by a newer version"
        )
    numbered = shape.__match_args__[:1] == ("number",)  # type: ignore[attr-defined]
    if numbered and number is None and shape not in (DeliveryLost, DeliveryRepeated):
        raise errors.LEDGER_CORRUPT(f"a {kind} record has no number")
    try:
        values = shape.values_of(data)
        return shape(number, *values) if numbered else shape(*values)  # type: ignore[call-arg]
    except MISREAD as exc:
        raise errors.LEDGER_CORRUPT(
            f"a {kind} record lacks what the fold reads ({type(exc).__name__}: {exc})"
        ) from None

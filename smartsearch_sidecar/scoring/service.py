"""The order of one reward request, and the only place that knows it.

slot -> latch -> rows (bounds, question, references, provenance) -> reuse -> admit all -> record
``reward.requested`` -> source's bytes -> dry pass -> helper calls, each reserved, recorded and
synced before it is sent -> second pass -> source's bytes -> record ``reward.answered``, synced ->
answer.

A batch is one request: it is refused whole before any helper call if one row is unusable, and it
fails whole if one row fails. Every failure closes the latch, because the pinned trainer swallows
the first exception and scores the batch again. Work admitted goes to its end in a task of its own:
a caller that has left is recorded, not latched, for the trainer's side raised.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from smartsearch_sidecar import errors
from smartsearch_sidecar.config.sections import RewardSection
from smartsearch_sidecar.contract.reward import RewardItem
from smartsearch_sidecar.daemon_threads import DaemonThreads
from smartsearch_sidecar.ledger.recorder import Run
from smartsearch_sidecar.reward.scorer import Scorer
from smartsearch_sidecar.run.record import RewardAnswered, RewardFailed, RewardReused
from smartsearch_sidecar.run.scores import Score
from smartsearch_sidecar.run.slots import Slots
from smartsearch_sidecar.scoring.helper_calls import MeteredCalls
from smartsearch_sidecar.scoring.rows import Preparation, Row, judged

CALLS_END_SECONDS: Final = 2.0  # after the deadline: for helper calls to be given up and settled

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Scored:
    """One reward, as it is answered."""

    score: Score
    reused: bool

    def as_json(self) -> dict[str, Any]:
        """The body of ``/reward``, and a row of ``/reward/batch``."""
        return {
            "reward": self.score.reward,
            "split": self.score.split,
            "number": self.score.number,
            "reused": self.reused,
        }


@dataclass(eq=False, kw_only=True, slots=True)
class Scoring:
    """Rewards of one run; the state of ``run`` must have been claimed: it has the splits."""

    run: Run
    slots: Slots
    scorer: Scorer
    preparation: Preparation
    calls: MeteredCalls
    section: RewardSection
    threads: DaemonThreads
    _under_way: dict[str, asyncio.Future[Score]] = field(default_factory=dict, init=False)
    _tasks: set[asyncio.Task[list[Scored]]] = field(default_factory=set, init=False)

    async def score(self, items: Sequence[RewardItem], *, began: float) -> list[Scored]:
        """The rewards of a batch, in order; ``began`` is the loop's clock at its first byte.

        Raises a ``SidecarError`` whose latch is closed and durable by then. It is not counted yet:
        what answers the request counts it.
        """
        task = asyncio.get_running_loop().create_task(
            self._score(items, began, began + self.section.deadline_seconds)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # The task goes on if the caller is cancelled; its failure closes the latch all the same.
        return await asyncio.shield(task)

    async def _score(
        self, items: Sequence[RewardItem], began: float, deadline: float
    ) -> list[Scored]:
        with self.run.stalls.request("reward", began, deadline, errors.REWARD_DEADLINE):
            return await self._in_turn(items, deadline)

    async def _in_turn(self, items: Sequence[RewardItem], deadline: float) -> list[Scored]:
        try:
            async with self.slots.hold(deadline):
                self.run.state.refuse_closed()
                rows = await judged(self.preparation, items, self.run.quota, deadline)
                answered = await self._answer(rows, deadline)
            self.run.state.refuse_closed()
            return answered
        except errors.SidecarError as exc:
            named = as_reward_failure(exc)
            await self.run.recorder.latch_for(named)
            if named is exc:
                raise
            raise named from exc

    # --- answering --------------------------------------------------------------------------------

    async def _answer(self, rows: list[Row], deadline: float) -> list[Scored]:
        """Reuses what was scored, shares what is being scored, scores the rest."""
        if self.run.quota is not None:
            await self.run.quota.room_to_score(lambda: self._wanted(rows), deadline)
        fresh: list[Row] = []
        waits: dict[str, asyncio.Future[Score]] = {}
        if self.section.reuse_identical:
            for row in rows:
                if row.key in self.run.state.scores.given or row.key in waits:
                    continue
                flight = self._under_way.get(row.key)
                if flight is None:
                    fresh.append(row)
                    flight = asyncio.get_running_loop().create_future()
                    flight.add_done_callback(_retrieved)
                waits[row.key] = flight
        else:
            fresh = rows
        new = set(map(id, fresh))
        self._admit(fresh)
        if self.section.reuse_identical:
            self._under_way.update({row.key: waits[row.key] for row in fresh})
        if fresh:
            await self._run(fresh, deadline)
        answered: list[Scored] = []
        for row in rows:
            if id(row) in new:
                answered.append(Scored(Score(row.split, row.number, row.reward), reused=False))
                continue
            given = self.run.state.scores.given.get(row.key)
            if given is None:
                given = await self._shared(waits[row.key], deadline)
            await self.run.recorder.post_for_receipt(RewardReused(given.split, given.number))
            answered.append(Scored(given, reused=True))
        return answered

    def _wanted(self, rows: list[Row]) -> Counter[str]:
        """How many of ``rows`` would have to be scored now, per split."""
        if not self.section.reuse_identical:
            return Counter(row.split for row in rows)
        known = self.run.state.scores.given.keys() | self._under_way.keys()
        return Counter({row.key: row.split for row in rows if row.key not in known}.values())

    async def _shared(self, flight: asyncio.Future[Score], deadline: float) -> Score:
        try:
            async with asyncio.timeout_at(deadline):
                return await asyncio.shield(flight)
        except TimeoutError:
            raise errors.REWARD_DEADLINE(
                "the deadline passed while the same rollout was being scored for another request"
            ) from None

    def _admit(self, rows: list[Row]) -> None:
        """All rows or none: the state is asked for every row before any is recorded."""
        self.run.state.refuse_closed()
        wanted = Counter(row.split for row in rows)
        splits = self.run.state.scores.splits
        numbers = {split: iter(splits[split].admit_scores(wanted[split])) for split in wanted}
        for row in rows:
            row.number = next(numbers[row.split])
        self.run.recorder.post_all([row.requested() for row in rows])

    async def _run(self, rows: list[Row], deadline: float) -> None:
        """Scores admitted rows; every one of them is settled when this returns or raises."""
        try:
            if self.section.side_by_side:
                await self._side_by_side(rows, deadline)
            else:
                await self._one_after_another(rows, deadline)
            await self._record_rewards(rows)
        except BaseException as exc:
            self._fail(rows, exc)
            raise

    async def _side_by_side(self, rows: list[Row], deadline: float) -> None:
        await self._in_thread(deadline, partial(self._collect_prompts, rows))
        owners = [row for row in rows for _ in row.prompts]
        prompts = [prompt for row in rows for prompt in row.prompts]
        texts = await self.calls.ask(owners, prompts, deadline)
        for row, text in zip(owners, texts, strict=True):
            row.texts.append(text)
        await self._in_thread(deadline, partial(self._compute, rows))

    async def _in_thread(self, deadline: float, work: Callable[[], T]) -> T:
        """What ``work`` returns: the scorer's code, or its file. Left behind at the deadline."""
        with self.run.stalls.call("scorer", "score", deadline, errors.REWARD_DEADLINE):
            bound = asyncio.timeout_at(deadline)
            try:
                async with bound:
                    return await self.threads.run(work)
            except TimeoutError:
                if not bound.expired():
                    raise
                raise errors.REWARD_DEADLINE(
                    "the scorer was still running at the deadline (reward.deadline_seconds)"
                ) from None

    def _collect_prompts(self, rows: list[Row]) -> None:
        """The source's bytes and the dry pass, in a thread."""
        self.scorer.source.recheck()
        for row in rows:
            item = row.item
            row.prompts = self.scorer.collect_prompts(item.solution_str, item.ground_truth)

    def _compute(self, rows: list[Row]) -> None:
        """The second pass and the source's bytes, in a thread."""
        for row in rows:
            item, answers = row.item, list(zip(row.prompts, row.texts, strict=True))
            row.reward = self.scorer.score(item.solution_str, item.ground_truth, answers)
        self.scorer.source.recheck()
        for row in rows:
            row.verdicts = list(map(self.scorer.verdict, row.texts))

    async def _one_after_another(self, rows: list[Row], deadline: float) -> None:
        """Each prompt asked when the scorer asks it: the scorer's thread waits for the loop."""
        loop = asyncio.get_running_loop()
        await self._in_thread(deadline, self.scorer.source.recheck)
        for row in rows:

            def ask(prompt: str, row: Row = row) -> str:
                asking = asyncio.run_coroutine_threadsafe(
                    self.calls.ask([row], [prompt], deadline), loop
                )
                (text,) = asking.result()
                row.texts.append(text)
                return text

            item = row.item
            score = partial(self.scorer.score_serial, item.solution_str, item.ground_truth, ask)
            # Helper calls under way at the deadline are settled first: they say why.
            row.reward = await self._in_thread(deadline + CALLS_END_SECONDS, score)
        await self._in_thread(deadline, self.scorer.source.recheck)
        for row in rows:
            row.verdicts = list(map(self.scorer.verdict, row.texts))

    async def _record_rewards(self, rows: list[Row]) -> None:
        await self.run.recorder.post_all_for_receipt(
            [RewardAnswered(row.number, row.split, row.reward, tuple(row.verdicts)) for row in rows]
        )
        for row in rows:
            flight = self._under_way.pop(row.key, None)
            if flight is not None and not flight.done():
                flight.set_result(Score(row.split, row.number, row.reward))
        share = self.run.state.scores.unparsed_share
        if share > self.section.unparsed_share_max:
            raise errors.VERDICTS_UNPARSED(
                f"{share:.0%} of the last verdicts were neither 0 nor 1, above "
                f"reward.unparsed_share_max ({self.section.unparsed_share_max:g}): the pinned "
                "scorer counts each of them as correct; look at what the helper writes"
            )

    # --- failing ----------------------------------------------------------------------------------

    def _fail(self, rows: list[Row], exc: BaseException) -> None:
        """Settles every row that is still open, and closes the latch under the failure's name."""
        failure = as_reward_failure(exc)
        for row in rows:
            flight = self._under_way.pop(row.key, None)
            if flight is not None and not flight.done():
                flight.set_exception(failure)
            if row.number not in self.run.state.scores.splits[row.split].scoring:
                continue
            try:
                self.run.recorder.post(
                    RewardFailed(row.number, row.split, failure.code, failure.message)
                )
            except errors.LedgerFailed:
                return  # the ledger failed first, and that is the cause
        if failure.cause is not None:
            self.run.recorder.close_latch(failure.cause, consumed=True, detail=failure.message)

    async def close(self) -> None:
        """Waits for scores under way, each until its deadline at most, and ends the threads."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.threads.stop()


def as_reward_failure(exc: BaseException) -> errors.SidecarError:
    """The failure under the name it has on this route.

    Edge and overload failures have a row of their own here, so that the latch says whose request it
    was; an exception without a row is a broken promise of ours.
    """
    if isinstance(exc, errors.SidecarError):
        row = exc.failure.as_reward
        return exc if row is None else row(exc.message)
    if isinstance(exc, asyncio.CancelledError):
        return errors.REWARD_CANCELLED("the daemon stopped before the score was finished")
    return errors.INTERNAL_ERROR(f"a score ended in {type(exc).__name__}")


def _retrieved(flight: asyncio.Future[Score]) -> None:
    """A failure that no other request shares must not warn at collection; its owner raises it."""
    if not flight.cancelled():
        flight.exception()

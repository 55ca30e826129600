"""The rows of a reward request: each usable, or the request refused before anything is spent."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from smartsearch_sidecar import errors
from smartsearch_sidecar.config.sections import RewardSection
from smartsearch_sidecar.contract.reward import RewardItem
from smartsearch_sidecar.ledger.recorder import SharedQuota
from smartsearch_sidecar.reward.provenance import AnswerDigests, Judgement
from smartsearch_sidecar.reward.references import References
from smartsearch_sidecar.reward.tool_answers import judge_tool_answers, why_broken
from smartsearch_sidecar.run.record import RewardRequested


@dataclass(slots=True, eq=False)
class Row:
    """One rollout on its way: what is known of it, and what it has been answered so far."""

    item: RewardItem
    split: str
    key: str
    judgement: Judgement | None
    number: int = 0
    prompts: tuple[str, ...] = ()
    texts: list[str] = field(default_factory=list)
    reward: float = 0.0
    verdicts: list[str] = field(default_factory=list)

    def requested(self) -> RewardRequested:
        """The record of its admission, under its ``number``."""
        blocks = self.judgement
        return RewardRequested(
            number=self.number,
            split=self.split,
            key=self.key,
            solution_str=self.item.solution_str,
            judged_blocks=None if blocks is None else blocks.judged,
            policy_blocks=None if blocks is None else blocks.policy_own,
            broken_blocks=None if blocks is None else blocks.broken,
            unjudged_searches=(blocks.unjudged or None) if blocks else None,
        )


@dataclass(frozen=True, slots=True)
class Preparation:
    """What is asked of a row before it is admitted. Blocking and pure: called in a thread.

    ``answers`` holds what this run handed to rollouts; ``binding_sha256`` names scorer, references
    and helper, so that a score is reused only under the same ones.
    """

    references: References
    answers: AnswerDigests
    binding_sha256: str
    section: RewardSection

    def rows(self, items: Sequence[RewardItem]) -> list[Row]:
        """Every row usable, or the first error of the first of these steps that has one."""
        for item in items:
            size = len(item.solution_str.encode())
            if size > self.section.max_input_bytes:
                raise errors.SOLUTION_TOO_LONG(
                    f"a rollout of {size} bytes is over reward.max_input_bytes "
                    f"({self.section.max_input_bytes})"
                )
        lookup = self.references.lookup
        located = [lookup(item.solution_str, item.ground_truth) for item in items]
        judgements: list[Judgement | None] = [None] * len(items)
        if self.section.provenance != "off":
            # Of verl's tool loop: there `</search>` stops no generation, and a result behind it is
            # the policy's own text.
            judgements = [
                self.answers.judge(item.solution_str)
                if item.tool_answers is None
                else judge_tool_answers(self.answers, item.solution_str, item.tool_answers)
                for item in items
            ]
        for item, judgement in zip(items, judgements, strict=True):
            if judgement and judgement.broken and self.section.provenance == "enforce":
                if item.tool_answers is not None:
                    raise errors.PROVENANCE_BROKEN(why_broken(judgement))
                raise errors.PROVENANCE_BROKEN(
                    f"{len(judgement.broken)} of {judgement.judged} result blocks of a rollout are "
                    "no answer of this run to the query before them: the rollout met an error that "
                    "never reached us (a proxy, a timeout, a refused connection)"
                )
        return [
            Row(item, found.split, self._key(found.split, item), judgement)
            for item, found, judgement in zip(items, located, judgements, strict=True)
        ]

    def _key(self, split: str, item: RewardItem) -> str:
        """What must be the same for a score to be reused, as 32 hex digits."""
        digest = hashlib.blake2b(digest_size=16)
        answers = item.ground_truth
        parts = [self.binding_sha256, split, item.solution_str]
        parts += ["one", answers] if isinstance(answers, str) else ["many", *answers]
        for part in parts:
            encoded = part.encode()
            digest.update(len(encoded).to_bytes(8, "big") + encoded)
        return digest.hexdigest()


async def judged(
    preparation: Preparation,
    items: Sequence[RewardItem],
    quota: SharedQuota | None,
    deadline: float,
) -> list[Row]:
    """Every row usable, or the first error. Where a block is not known here and the run has other
    nodes, all of it is judged again once what they had answered is known.
    """
    try:
        rows = await asyncio.to_thread(preparation.rows, items)
        if quota is None or not any(row.judgement and row.judgement.broken for row in rows):
            return rows
    except errors.ProvenanceBroken:
        if quota is None:
            raise
        # perhaps an answer of another node that is still on its way here
    await quota.answers_known(deadline)
    return await asyncio.to_thread(preparation.rows, items)

"""Asks all nodes live: how each is, and to publish the digests of what it has answered.

The state that a node published last is as old as a heartbeat. A checkpoint is accepted on states
that were given for it, each after that node's own work had settled.

Apart from ``node.py``, whose tasks run by themselves: here each call is a request of this node's
gate or scoring, and ``LivePoll.answer`` is the other side of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any, Final

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.canonical import canonical, read_canonical
from smartsearch_sidecar.cluster.membership import NodeRow, RunVerdict
from smartsearch_sidecar.cluster.node import Node, retry_forever
from smartsearch_sidecar.cluster.node_state import NodeState, RunStatus

ANSWER_SECONDS: Final = 3.0  # beyond the settling: a question, an identity, an answer
ASK_AGAIN_SECONDS: Final = 0.05
PATIENCE_SECONDS: Final = 5.0
"""How long publishing and reading the digests may take; they take milliseconds as a rule."""

Rows = Mapping[str, NodeRow]


class LivePoll:
    """Asks for one node, and answers for it. Called on the loop."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def verdict(self, settle_seconds: float) -> tuple[RunVerdict, Rows]:
        """What the run is, asked of every node now; waits up to ``settle_seconds`` for healthy.

        What it returns holds in the very step of the loop in which it returns.
        """
        node = self._node
        end = node.now() + settle_seconds
        while True:
            if node.local.state.closed:
                return self.present()  # no node's answer would change it
            left = max(0.0, end - node.now())
            _, answered = await asyncio.gather(node.local.settle(left), self._ask_states(left))
            answered.add(node.name)
            node.note_own_state()
            verdict = node.membership.verdict(node.now(), answered=answered)
            if verdict.status is not RunStatus.PENDING or node.now() >= end:
                node.close_by(verdict)
                return verdict, node.membership.rows(node.now(), answered=answered)
            await asyncio.sleep(min(ASK_AGAIN_SECONDS, max(0.0, end - node.now())))

    def present(self) -> tuple[RunVerdict, Rows]:
        """What the run is by the states received so far, without asking."""
        node = self._node
        node.note_own_state()
        return node.membership.verdict(node.now()), node.membership.rows(node.now())

    async def answers_known(self, deadline: float) -> None:
        """Returns once every answer that any node had handed over by now is known here.

        Called after a block was found unknown; its digest is looked up again afterwards.
        ``deadline`` is loop time. The first row that matches decides:

        | all nodes published | stream read up | messages missing | it raises, and the block is |
        |---|---|---|---|
        | no  | -           | -    | ``ClusterUnreachable``: nothing is proven |
        | yes | not in time | -    | ``ClusterUnreachable``: nothing is proven |
        | yes | yes         | some | ``ClusterUnreadable``: nothing is proven |
        | yes | yes         | none | nothing: an answer of the run exactly where it is known now |
        """
        node, stream = self._node, self._node.answers
        if stream is None:
            raise errors.INTERNAL_ERROR("answers are looked up, and their stream is not read")
        # One of three servers may die meanwhile: the others need seconds for a new leader, and a
        # reward must not fail for that.
        patience = max(PATIENCE_SECONDS, node.cluster.lost_seconds)
        until = min(deadline, node.now() + patience)
        live = self._live()
        question = {"by": node.instance, "answers": True}
        answers = await self._ask(question, len(live), until - node.now())
        published = {read_canonical(answer, "an answer")["instance"] for answer in answers}
        silent = sorted(name for name, instance in live.items() if instance not in published)
        if silent:
            raise errors.CLUSTER_UNREACHABLE(
                f"node {', '.join(silent)} did not publish what it answered: whether a block is an "
                "answer of this run cannot be said"
            )
        try:
            async with asyncio.timeout_at(until):
                await retry_forever(stream.read_up)
        except TimeoutError:
            raise errors.CLUSTER_UNREACHABLE(
                "the answers of the other nodes could not be read up to date in time"
            ) from None

    # --- questions --------------------------------------------------------------------------------

    def _live(self) -> dict[str, str]:
        """Nodes that have joined and not ended, and their instances."""
        rows = self._node.membership.rows(self._node.now())
        return {
            name: row.state.instance
            for name, row in rows.items()
            if row.state and not row.state.ended
        }

    async def _ask_states(self, settle_seconds: float) -> set[str]:
        """Asks every node how it is; the names of those that answered."""
        node = self._node
        live = self._live()
        names = {instance: name for name, instance in live.items()}
        question = {"by": node.instance, "settle_ms": round(settle_seconds * 1000)}
        found: set[str] = set()
        for answer in await self._ask(question, len(live), settle_seconds + ANSWER_SECONDS):
            state = NodeState.decode(answer)
            name = names.get(state.instance)
            if name is not None:
                found.add(name)
                node.membership.on_state(name, state, node.now())
        return found

    async def _ask(
        self, question: Mapping[str, Any], answers: int, seconds: float
    ) -> Collection[bytes]:
        bus = self._node.bus
        if not bus.connected:
            return ()
        try:
            found = await bus.ask(canonical(dict(question)), answers=answers, seconds=seconds)
        except errors.ClusterUnreachable:
            return ()
        return [answer for answer in found if answer]

    async def answer(self, question: bytes) -> bytes:
        """What this node answers to a question of any node."""
        node = self._node
        value = read_canonical(question, "a question")
        if value.get("answers"):
            if node.answers is not None:
                await node.answers.published()
            return canonical({"instance": node.instance})
        # The node that asks settles its own work itself, at the same time.
        if value["by"] != node.instance:
            await node.local.settle(value["settle_ms"] / 1000)
        return node.state().encode()

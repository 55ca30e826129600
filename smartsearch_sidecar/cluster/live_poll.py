"""What all nodes are asked live: how each is, and to publish what it has answered.

The last words that were heard are as old as a beat. A checkpoint is accepted on words that were
given for it, each after that node's own work had settled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any, Final

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.canonical import canonical, read_canonical
from smartsearch_sidecar.cluster.digests import PATIENCE_SECONDS
from smartsearch_sidecar.cluster.membership import NodeRow, Verdict
from smartsearch_sidecar.cluster.node import Node, retry_forever
from smartsearch_sidecar.cluster.nodestate import NodeState, RunStatus

ANSWER_SECONDS: Final = 3.0  # beyond the settling: a question, an identity, an answer
ASK_AGAIN_SECONDS: Final = 0.05

Rows = Mapping[str, NodeRow]


class Gate:
    """Asks for one node, and answers for it. Called on the loop."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def verdict(self, settle_seconds: float) -> tuple[Verdict, Rows]:
        """What the run is, asked of every node now; waits up to ``settle_seconds`` for healthy.

        What it returns holds in the very step in which it returns.
        """
        node = self._node
        end = node.now() + settle_seconds
        while True:
            if node.own.state.closed:
                return self.present()  # nobody's answer would change it
            left = max(0.0, end - node.now())
            _, answered = await asyncio.gather(node.own.settle(left), self._ask_states(left))
            answered.add(node.name)
            node.say_to_self()
            verdict = node.company.verdict(node.now(), answered=answered)
            if verdict.state is not RunStatus.PENDING or node.now() >= end:
                node.judge(verdict)
                return verdict, node.company.rows(node.now(), answered=answered)
            await asyncio.sleep(min(ASK_AGAIN_SECONDS, max(0.0, end - node.now())))

    def present(self) -> tuple[Verdict, Rows]:
        """What the run is by what was heard so far, asking nobody."""
        node = self._node
        node.say_to_self()
        return node.company.verdict(node.now()), node.company.rows(node.now())

    async def answers_known(self, deadline: float) -> None:
        """See ``allowance.Allowance``."""
        node, stream = self._node, self._node.answers
        if stream is None:
            raise errors.INTERNAL_ERROR("answers are looked for, and nobody reads them")
        # Three servers of which one dies need a while for a new leader, and nobody is to notice.
        patience = max(PATIENCE_SECONDS, node.cluster.lost_seconds)
        until = min(deadline, node.now() + patience)
        live = self._live()
        question = {"by": node.instance, "answers": True}
        heard = await self._ask(question, len(live), until - node.now())
        told = {read_canonical(answer, "an answer")["instance"] for answer in heard}
        silent = sorted(name for name, instance in live.items() if instance not in told)
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
        rows = self._node.company.rows(self._node.now())
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
                node.company.heard(name, state, node.now())
        return found

    async def _ask(
        self, question: Mapping[str, Any], answers: int, seconds: float
    ) -> Collection[bytes]:
        bus = self._node.bus
        if not bus.connected:
            return ()
        try:
            heard = await bus.ask(canonical(dict(question)), answers=answers, seconds=seconds)
        except errors.ClusterUnreachable:
            return ()
        return [answer for answer in heard if answer]

    async def answer(self, question: bytes) -> bytes:
        """What this node answers to a question of any node."""
        node = self._node
        value = read_canonical(question, "a question")
        if value.get("answers"):
            if node.answers is not None:
                await node.answers.published()
            return canonical({"instance": node.instance})
        if value["by"] != node.instance:
            await node.own.settle(value["settle_ms"] / 1000)
        return node.state().encode()

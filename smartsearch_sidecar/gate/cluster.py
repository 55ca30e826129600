"""A run of many nodes, as the parts of one of them use it.

``cluster/`` has the rules and speaks to the other nodes; here it meets this node's service,
scoring, ledger and provenance. Loaded only where ``[cluster]`` is set.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.joining import identities
from smartsearch_sidecar.cluster.live_poll import Gate, Rows
from smartsearch_sidecar.cluster.local_run import Connect, LocalRun
from smartsearch_sidecar.cluster.membership import Verdict
from smartsearch_sidecar.cluster.node import Node
from smartsearch_sidecar.cluster.quota_leaser import totals_of
from smartsearch_sidecar.config import Config
from smartsearch_sidecar.gate.health import check, counts, pending, status_report
from smartsearch_sidecar.ledger.claim import versions
from smartsearch_sidecar.reward.provenance import AnswerDigests, block_digest, block_of
from smartsearch_sidecar.run.line import claim_digest
from smartsearch_sidecar.run.record import SplitQuotas
from smartsearch_sidecar.search.service import Service

REMEMBERED_AT_ONCE: Final = 1024  # digests read from an old journal between two turns of the loop


class ClusterRun:
    """This node among the run's; the ``SharedQuota`` of its service and scoring."""

    def __init__(self, config: Config, node: Node) -> None:
        self._config = config
        self.node = node
        self._gate = Gate(node)
        self._answers: AnswerDigests | None = None
        self._fresh = False
        self.room_to_search = node.leasing.room_to_search
        self.room_to_score = node.leasing.room_to_score
        self.room_to_call = node.leasing.room_to_call
        self.woken = node.leasing.woken
        self.answers_known = self._gate.answers_known

    # --- before the run is claimed ----------------------------------------------------------------

    @classmethod
    async def reach(cls, config: Config, connect: Connect | None = None) -> ClusterRun:
        """Reaches the servers between the nodes.

        Raises ``ClusterRefused`` where they are not reached, ``ConfigError`` without a capability
        that all nodes can have.
        """
        if config.cluster is None:
            raise errors.INTERNAL_ERROR("a run without [cluster] has no other nodes")
        if config.server.execute_capability is None:
            raise errors.CONFIG_INVALID(
                "server.execute_capability is missing: with [cluster] every node has the same one, "
                "so that one sandbox_url serves all; set it, or execute_capability_file"
            )
        if connect is None:
            try:
                from smartsearch_sidecar.cluster.nats.bus import connect as connect_nats
            except ImportError:
                raise errors.NOT_AVAILABLE(
                    "[cluster] needs nats-py: install the extra, smartsearch-sidecar[cluster]"
                ) from None
            connect = connect_nats
        splits = {}
        if config.reward.enabled:
            splits = {
                "train": SplitQuotas.of(config.reward).to_data(),
                "validation": SplitQuotas.of(config.reward.validation).to_data(),
            }
        node = Node(config.cluster, config.run.nodes)
        try:
            await node.connect(connect, totals_of(config.execute.max_calls, splits))
        except errors.ClusterUnreachable as exc:
            raise _unreachable(exc) from None
        return cls(config, node)

    async def learn(self, answers: AnswerDigests, own: Iterator[str]) -> None:
        """Learns what rollouts were told on any node; ``own`` are the results in this node's
        journal (blocking to read), of which the others may lack the last.
        """
        self._answers = answers
        try:
            stream = await self.node.follow_answers(answers.add_digest)
        except (errors.ClusterUnreachable, TimeoutError) as exc:
            raise _unreachable(exc) from None
        except errors.ClusterUnreadable as exc:
            raise errors.CLUSTER_REFUSED(exc.message) from None
        while texts := await asyncio.to_thread(_some, own):
            for text in texts:
                block = block_of(text)
                if block not in answers:
                    digest = block_digest(block)
                    answers.add_digest(digest)
                    stream.add(digest)

    async def join(self, facts: Mapping[str, Any], claim: bytes, fresh: bool) -> None:
        """Takes this node's place, before its run is claimed. ``facts`` are the identities.

        Raises ``ClusterRefused``, with nothing of the run written.
        """
        self._fresh = fresh
        totals = self.node.leasing.totals
        ours = identities(self._config, _shared(facts), versions(), totals)
        try:
            await self.node.join(ours, orjson.loads(claim)["run_id"], claim_digest(claim))
        except errors.ClusterUnreachable as exc:
            raise _unreachable(exc) from None
        except errors.ClusterUnreadable as exc:
            raise errors.CLUSTER_REFUSED(exc.message) from None

    # --- while it is served -----------------------------------------------------------------------

    async def begin(self, service: Service) -> None:
        """Speaks and hears from now on. Returns once a latch closed elsewhere is closed here."""
        recorder, writer = service.run.recorder, service.run.writer

        def close(cause: str, detail: str) -> None:
            recorder.close_latch(cause, detail=detail)

        own = LocalRun(
            state=service.run.state,
            busy=lambda: pending(service),
            journal=lambda: (writer.seq, writer.head),
            settle=lambda seconds: check(service, seconds),
            close=close,
            latched=recorder.latched,
            latch_durable=recorder.latch_durable,
        )
        await self.node.begin(own, self._gate.answer)

    @property
    def on_answer(self) -> Callable[[str], None] | None:
        """Called with each text before it is handed over; ``None`` where no blocks are judged."""
        answers, stream = self._answers, self.node.answers
        if answers is None or stream is None:
            return None

        def on_answer(text: str) -> None:
            digest = block_digest(block_of(text))
            known = len(answers)
            answers.add_digest(digest)
            if len(answers) > known:  # otherwise the stream has it, or this node is about to add it
                stream.add(digest)

        return on_answer

    async def health(self, service: Service, settle_seconds: float) -> dict[str, Any]:
        """The body of ``/health``: the run's state, this node's counts, a row for every node."""
        word, cluster, _ = await self.verdict(service, settle_seconds)
        return {"state": word, **counts(service), "cluster": cluster}

    def status(self, service: Service) -> dict[str, Any]:
        """The body of ``/status``: the same by what was heard last, asking nobody."""
        verdict, rows = self._gate.present()
        report = status_report(service)
        word = "failed" if service.run.state.closed else verdict.state.value
        return {**report, "state": word, "cluster": self._view(verdict, rows)}

    def used(self) -> dict[str, int]:
        """What all nodes have used of each resource, as far as it was heard."""
        return _used(self._gate.present()[1])

    async def verdict(
        self, service: Service, settle_seconds: float
    ) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """The run's state, asked of every node; a row for each; and what a receipt names of each.

        Where it is healthy it is so in the step in which this returns.
        """
        verdict, rows = await self._gate.verdict(settle_seconds)
        if service.run.state.closed:
            with contextlib.suppress(errors.LedgerFailed):  # that is a failure as well, and known
                await service.run.recorder.latch_durable()
            word = "failed"
        else:
            word = verdict.state.value
        heads: dict[str, Any] = {
            name: {
                "claim_sha256": self.node.claims.get(name),
                "seq": row.state.seq,
                "head": row.state.head,
            }
            for name, row in rows.items()
            if row.state is not None
        }
        if word == "healthy" and any(head["claim_sha256"] is None for head in heads.values()):
            word = "pending"  # its claim is still on its way here: a receipt could not name it
        return word, self._view(verdict, rows), heads

    def _view(self, verdict: Verdict, rows: Rows) -> dict[str, Any]:
        nodes: dict[str, dict[str, Any]] = {}
        for name, row in rows.items():
            state = row.state
            nodes[name] = {
                "hearing": row.hearing.value,
                "silent_seconds": round(row.silent_seconds, 3),
                "claim_sha256": self.node.claims.get(name),
            }
            if state is None:
                continue
            nodes[name] |= {
                "state": "ended" if state.ended else state.word.value,
                "cause": state.cause,
                "restarts": state.restarts,
                "seq": state.seq,
                "head": state.head,
                "counts": dict(state.counts),
            }
        return {
            "node": self.node.name,
            "expected": self._config.run.nodes,
            "connected": self.node.bus.connected,
            "state": verdict.state.value,
            "reason": None if verdict.reason is None else verdict.reason.value,
            "detail": verdict.detail,
            "counts": _used(rows),
            "nodes": nodes,
        }

    # --- at its end -------------------------------------------------------------------------------

    def ending(self) -> None:
        """Before the last record: what is heard from now on is for the next start."""
        self.node.ending()

    async def leave(self) -> None:
        """After the last record: gives back what was leased, and says that this node has ended."""
        await self.node.leave()

    async def withdraw(self) -> None:
        """The run was not begun after all."""
        if self._fresh:
            await self.node.withdraw()
        else:
            await self.node.close()


def _used(rows: Rows) -> dict[str, int]:
    used: Counter[str] = Counter()
    for row in rows.values():
        used.update({} if row.state is None else row.state.counts)
    return dict(used)


def _some(texts: Iterator[str]) -> list[str]:
    return list(itertools.islice(texts, REMEMBERED_AT_ONCE))


def _shared(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Identities without the places where this node has what they name."""
    found = dict(facts)
    if "reward" in found:
        source = dict(found["reward"]["source"])
        for place in ("root", "path"):
            source.pop(place, None)
        found["reward"] = {**found["reward"], "source": source}
    return found


def _unreachable(exc: Exception) -> errors.ClusterRefused:
    reason = exc.message if isinstance(exc, errors.SidecarError) else "they did not answer in time"
    return errors.CLUSTER_REFUSED(
        f"the servers named by cluster.nats_url cannot be used ({reason}): start them first"
    )

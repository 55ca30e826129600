"""A run of many nodes, as the parts of one of its nodes use it.

``cluster/`` has the rules and exchanges values with the other nodes; here it meets this node's
service, scoring, ledger and provenance. Imported only where ``[cluster]`` is set.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, Final

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.answer_digests import AnswerStream
from smartsearch_sidecar.cluster.bus import Connect
from smartsearch_sidecar.cluster.join import identities
from smartsearch_sidecar.cluster.membership import RunVerdict
from smartsearch_sidecar.cluster.node import LocalRun, Node, Rows
from smartsearch_sidecar.cluster.quota_leases import totals_of
from smartsearch_sidecar.config import Config
from smartsearch_sidecar.gate.health import Covered, check, counts, pending, status_report
from smartsearch_sidecar.ledger.start import versions
from smartsearch_sidecar.reward.provenance import AnswerDigests, answer_digest
from smartsearch_sidecar.run.coverage import Gap
from smartsearch_sidecar.run.line import claim_digest
from smartsearch_sidecar.search.service import Service

REMEMBERED_AT_ONCE: Final = 1024  # digests read from an old journal between two turns of the loop


class ClusterRun:
    """This node's part in the run; the ``SharedQuota`` of its service and scoring."""

    def __init__(self, config: Config, node: Node) -> None:
        self._config = config
        self.node = node
        # Takes query and result before it is handed over; ``None`` where no reward checks blocks.
        self.on_answer: Callable[[str, str], None] | None = None
        self.room_to_search = node.leaser.room_to_search
        self.room_to_score = node.leaser.room_to_score
        self.room_to_call = node.leaser.room_to_call
        self.woken = node.leaser.woken
        self.answers_known = node.answers_known
        self.ending, self.leave, self.withdraw = node.ending, node.leave, node.withdraw

    @classmethod
    async def reach(cls, config: Config, connect: Connect | None = None) -> ClusterRun:
        """Reaches the servers between the nodes. Raises ``ClusterRefused`` where they are not
        reached, ``ConfigError`` without a capability that all nodes can have.
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
        node = Node(config.cluster, config.run.nodes)
        with _refusing():
            await node.connect(connect, totals_of(config))
        return cls(config, node)

    async def learn(self, answers: AnswerDigests, own: Iterator[tuple[str, str]]) -> None:
        """Reads the digests of what all nodes answered into ``answers``. ``own`` are query and
        result of each answer in this node's journal (blocking to read). Those that the stream
        lacks, because this node died before it published them, are published now, each once.
        """
        with _refusing():
            stream = await self.node.follow_answers(answers.add_digest)
        self.on_answer = publish = partial(_publish, answers, stream)
        while given := await asyncio.to_thread(lambda: list(islice(own, REMEMBERED_AT_ONCE))):
            for query, text in given:
                publish(query, text)

    async def join(self, facts: Mapping[str, Any], claim: bytes, fresh: bool) -> None:
        """Takes this node's place, before its run is claimed. ``facts`` are the identities. Raises
        ``ClusterRefused``, with nothing of the run written.
        """
        totals = self.node.leaser.totals
        ours = identities(self._config, facts, versions(), totals)
        run_id = orjson.loads(claim)["run_id"]
        with _refusing():
            await self.node.join(ours, run_id, claim_digest(claim), fresh=fresh)

    async def begin(self, service: Service) -> None:
        """Publishes this node's state and follows the others' from now on. Returns once a latch
        that was closed on another node before is closed here too.
        """
        recorder, writer = service.run.recorder, service.run.writer
        local = LocalRun(
            state=service.run.state,
            busy=lambda: pending(service),
            journal=lambda: (writer.seq, writer.head),
            settle=lambda seconds: check(service, seconds),
            close=recorder.close_latch,
            latched=recorder.latched,
            latch_durable=recorder.latch_durable,
        )
        await self.node.begin(local)

    async def health(self, service: Service, settle_seconds: float) -> dict[str, Any]:
        """The body of ``/health``: the run's state, this node's counts, a row for every node."""
        state, cluster, _ = await self.verdict(service, settle_seconds)
        return {"state": state, **counts(service), "cluster": cluster}

    def status(self, service: Service) -> dict[str, Any]:
        """The body of ``/status``: the same by the states received so far, without asking."""
        verdict, rows = self.node.present()
        state = "failed" if service.run.state.closed else verdict.status.value
        state = self._unless_deaf(state, rows)
        view = self._view(service, verdict, rows)
        return {**status_report(service), "state": state, "cluster": view}

    def used(self) -> dict[str, int]:
        """What all nodes have used of each resource, by the states received so far."""
        return _used(self.node.present()[1])

    async def verdict(
        self, service: Service, settle_seconds: float
    ) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """The run's state, asked of every node; a row for each; and what a receipt names of each. A
        run that is returned as healthy is so in the very step of the loop in which this returns.
        """
        verdict, rows = await self.node.verdict(settle_seconds)
        state = verdict.status.value
        if service.run.state.closed:
            with contextlib.suppress(errors.LedgerFailed):  # that is a failure as well, and known
                await service.run.recorder.latch_durable()
            state = "failed"
        claims = self.node.claims
        heads: dict[str, Any] = {
            name: {
                "claim_sha256": claims.get(name),
                "seq": row.state.seq,
                "head": row.state.head,
                "restarts": row.state.restarts,
            }
            for name, row in rows.items()
            if row.state is not None
        }
        if state == "healthy" and not heads.keys() <= claims.keys():
            state = "pending"  # a claim is still on its way here: a receipt could not name it
        return self._unless_deaf(state, rows), self._view(service, verdict, rows), heads

    def _unless_deaf(self, state: str, rows: Rows) -> str:
        return "pending" if state == "healthy" and self._deaf(rows) else state

    def _deaf(self, rows: Rows) -> str:
        """Which nodes were asked before and have ended, where no provenance is enforced: whether
        their rollouts go on asking is not known until they are resumed.
        """
        ended = [name for name, row in rows.items() if row.state and row.state.deaf_from]
        if self._config.judged or not ended:
            return ""
        return (
            f"node {', '.join(ended)} has ended, and what its rollouts ask now is refused: resume "
            "it, with --trainer-stopped where they stood still"
        )

    def covered(self, service: Service) -> Covered:
        """What a receipt says of all nodes, by the states received so far: those that were given
        for a verdict, where one was asked for in this step of the loop.
        """
        return _covered(service, self.node.present()[1])

    def _view(self, service: Service, verdict: RunVerdict, rows: Rows) -> dict[str, Any]:
        found = _covered(service, rows)
        nodes: dict[str, dict[str, Any]] = {}
        for name, row in rows.items():
            nodes[name] = {
                "hearing": row.liveness.value,
                "silent_seconds": round(row.silent_seconds, 3),
                "claim_sha256": self.node.claims.get(name),
            }
            if (state := row.state) is not None:
                shown = "ended" if state.ended else state.status.value
                nodes[name] |= {"state": shown, "cause": state.cause, "restarts": state.restarts}
                nodes[name] |= {"seq": state.seq, "head": state.head, "counts": dict(state.counts)}
        return {
            "node": self.node.name,
            "expected": self._config.run.nodes,
            "connected": self.node.bus.connected,
            "state": self._unless_deaf(verdict.status.value, rows),
            "reason": None if verdict.reason is None else verdict.reason.value,
            "detail": verdict.detail or self._deaf(rows),
            "counts": _used(rows),
            "searches_unaccepted": found.unaccepted,
            "gaps": list(found.gaps),
            "result_blocks": found.result_blocks,
            "nodes": nodes,
        }


def _publish(answers: AnswerDigests, stream: AnswerStream, query: str, text: str) -> None:
    digest = answer_digest(query, text)
    # A digest that was known is in the stream, or in this node's backlog for it.
    if answers.add_digest(digest):
        stream.add(digest)


def _covered(service: Service, rows: Rows) -> Covered:
    named, used = service.run.state.coverage.restarts_named, _used(rows)
    gaps: list[dict[str, Any]] = []
    accepted = 0
    for name, row in rows.items():
        if row.state is not None:
            fresh = row.state.restarts - named.get(name, 0)
            gaps += [{"node": name, **gap} for gap in row.state.gaps[-fresh:] if fresh > 0]
            accepted = max(accepted, row.state.accepted_searches)
            if (began := row.state.deaf_from) is not None:
                gaps.append({"node": name, **Gap(began, None, True, None, 0).to_data(0)})
    blocks = {kind: used.get(f"blocks.{kind}", 0) for kind in ("judged", "policy", "broken")}
    searches = used.get("searches", 0) + used.get("declined", 0)
    return Covered(tuple(gaps), searches, accepted, blocks)


def _used(rows: Rows) -> dict[str, int]:
    used: Counter[str] = Counter()
    for row in rows.values():
        used.update({} if row.state is None else row.state.counts)
    return dict(used)


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Before the run is claimed, servers that cannot be used refuse its start."""
    try:
        yield
    except (errors.ClusterUnreachable, TimeoutError) as exc:
        timed_out = "they did not answer in time"
        reason = exc.message if isinstance(exc, errors.SidecarError) else timed_out
        raise errors.CLUSTER_REFUSED(
            f"the servers named by cluster.nats_url cannot be used ({reason}): start them first"
        ) from None
    except errors.ClusterUnreadable as exc:
        raise errors.CLUSTER_REFUSED(exc.message) from None

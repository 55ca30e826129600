"""What a run keeps on NATS: the bucket of its keys and the stream of its answers' digests."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.nats.connection import NatsConnection

REQUEST_SECONDS: Final = 1.0
"""What one try may take. The servers answer in milliseconds, unless they have no leader."""

DUPLICATE_SECONDS: Final = 120
"""How long the servers know a write's id; longer than any call tries."""

NANOSECONDS: Final = 1_000_000_000
REPLICAS: Final = 3

# JetStream's numbers of errors that are expected here.
NOT_FOUND: Final = 10037
OTHER_CONFIGURATION: Final = 10058
NOT_CLUSTERED: Final = 10074
NO_PEERS: Final = 10005


async def api(
    connection: NatsConnection,
    subject: str,
    body: bytes | dict[str, Any],
    *,
    headers: dict[str, str] | None = None,
    expected: Sequence[int] = (),
) -> dict[str, Any]:
    """One request of JetStream's; an error other than those expected is ``ClusterUnreachable``."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode("ascii")
    answer = await connection.request(subject, data, seconds=REQUEST_SECONDS, headers=headers)
    error = answer.get("error")
    if error and error.get("err_code") not in expected:
        raise errors.CLUSTER_UNREACHABLE(
            f"JetStream answers: {error.get('description', 'an error')}"
        )
    return answer


async def last_message(
    connection: NatsConnection, stream: str, subject: str
) -> dict[str, Any] | None:
    """The last message of a subject, which may have wildcards; asked of the stream's leader."""
    answer = await api(
        connection,
        f"$JS.API.STREAM.MSG.GET.{stream}",
        {"last_by_subj": subject},
        expected=(NOT_FOUND,),
    )
    return answer.get("message")


def decoded(message: dict[str, Any], field: str) -> bytes:
    """A message's ``data`` or ``hdrs``, its headers, as JetStream's JSON has them."""
    return base64.b64decode(message.get(field, ""))


class Stream(NamedTuple):
    """One stream by its names.

    Attributes:
        subjects: what is written to it.
        sent_on_subjects: where the servers send each message on once it is kept.
    """

    name: str
    subjects: str
    sent_on_subjects: str
    config: dict[str, Any]

    def below(self, subject: str) -> str:
        """A subject of either kind without its prefix; a key of the bucket, for the bucket."""
        for subjects in (self.subjects, self.sent_on_subjects):
            if subject.startswith(prefix := subjects.removesuffix(">")):
                return subject.removeprefix(prefix)
        return subject


class Streams:
    """The two streams of one run, by the names that ``nats kv`` and ``nats stream`` show."""

    def __init__(self, run_id: str) -> None:
        bucket = f"smartsearch-{run_id}"
        self.keys = _stream(
            f"KV_{bucket}",
            f"$KV.{bucket}.>",
            f"smartsearch.{run_id}.sent.keys.>",
            {"max_msgs_per_subject": 1},
        )
        self.answers = _stream(
            f"{bucket}-answers",
            f"smartsearch.{run_id}.answers",
            f"smartsearch.{run_id}.sent.answers",
            {},
        )
        self._made: dict[str, str] = {}

    async def make(self, connection: NatsConnection, replicas: int | None, servers: int) -> None:
        """Makes both, or finds them as another node has made them.

        Raises:
            ClusterUnreachable: the servers cannot now; they may still be coming up.
            ClusterRefused: a stream of that name is not one of ours.
        """
        for stream in (self.keys, self.answers):
            self._made[stream.name] = await _make(connection, stream, replicas, servers)

    async def prove(self, connection: NatsConnection) -> None:
        """Checks that both are the streams this node began with, and that they can be written.

        Raises:
            ClusterUnreachable: no proof. Only a write proves it: a server without a quorum still
                answers reads.
            ClusterRefused: they were made anew, so what the nodes had agreed on is gone.
        """
        for name, made in self._made.items():
            info = await api(connection, f"$JS.API.STREAM.INFO.{name}", b"")
            if info.get("created") != made:
                raise errors.CLUSTER_REFUSED(
                    f"the NATS stream {name} was made anew while the run went on: what the nodes "
                    "had agreed on is gone, and the run cannot go on"
                )
        headers = {"Nats-Msg-Id": secrets.token_hex(16)}
        await api(connection, self.key("link"), b"", headers=headers)

    def key(self, key: str) -> str:
        """The subject of a key."""
        return self.keys.subjects.removesuffix(">") + key


def _stream(name: str, subjects: str, sent_on_subjects: str, more: dict[str, Any]) -> Stream:
    config = {
        **more,
        "name": name,
        "subjects": [subjects],
        "republish": {"src": subjects, "dest": sent_on_subjects},
        "storage": "file",
        "retention": "limits",
        "discard": "new",
        "duplicate_window": DUPLICATE_SECONDS * NANOSECONDS,
        "deny_delete": True,
        "deny_purge": True,
        # For reading many at once; a single value is always asked of the leader.
        "allow_direct": True,
    }
    return Stream(name, subjects, sent_on_subjects, config)


async def _make(
    connection: NatsConnection, stream: Stream, replicas: int | None, servers: int
) -> str:
    """Makes one stream where there is none; returns when it was made."""
    subject = f"$JS.API.STREAM.CREATE.{stream.name}"
    expected = (OTHER_CONFIGURATION, NOT_CLUSTERED, NO_PEERS)
    answer: dict[str, Any] = {}
    error: dict[str, Any] = {}
    # Three, unless fewer servers are known. Where one of three is only down for now, this waits for
    # it: a run kept by two would stop with the first of them that dies.
    for count in (replicas or REPLICAS, min(servers, 2), 1):
        body = {**stream.config, "num_replicas": count}
        answer = await api(connection, subject, body, expected=expected)
        error = answer.get("error", {})
        alone = error.get("err_code") == NOT_CLUSTERED
        few = error.get("err_code") == NO_PEERS and servers < REPLICAS
        if replicas or not (alone or few):
            break
    if error and error["err_code"] != OTHER_CONFIGURATION:
        raise errors.CLUSTER_UNREACHABLE(f"JetStream cannot keep the run: {error['description']}")
    if error:
        answer = await api(connection, f"$JS.API.STREAM.INFO.{stream.name}", b"")
        if any(answer["config"].get(key) != value for key, value in stream.config.items()):
            raise errors.CLUSTER_REFUSED(
                f"the NATS servers hold a stream {stream.name} that this version has not made: "
                "give the run another cluster.run_id, or delete the stream"
            )
    return str(answer["created"])

"""Small runs on the disk, written line by line without a daemon, and ways to look at them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from smartsearch_sidecar.ledger.file import CLAIM, JOURNAL, segment_name
from smartsearch_sidecar.ledger.reader import History
from smartsearch_sidecar.run.json_values import encode_json
from smartsearch_sidecar.run.line import Draft, claim_digest, encode_line
from smartsearch_sidecar.run.record import record_of
from smartsearch_sidecar.run.state import RunState
from tests.fakes.provider import CORPUS_SHA256, INDEX_SHA256, documents_for

AT = "2026-12-02T04:13:00.000000Z"
ENVIRONMENT = "agentinputlab:smartsearch-fixed-wikipedia-v1"
Event = tuple[str, int | None, dict[str, Any]]


def claim_bytes(**values: Any) -> bytes:
    """A claim with everything that readers of a run ask for."""
    value = {
        "format": 1,
        "run_id": "ab" * 16,
        "retrieval": {"corpus_sha256": CORPUS_SHA256, "index_sha256": INDEX_SHA256},
        "max_retrieval_calls": 1000,
        "environment": ENVIRONMENT,
        "accepted_environment_sha256": [],
        "arbitrary_code_execution": False,
        **values,
    }
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)


def requested(number: int, query: str) -> Event:
    """A search that was admitted."""
    call = f"wikipedia_search(query={query!r}, top_n=5)"
    return "retrieval.requested", number, {"env": ENVIRONMENT, "call": call}


def answered(number: int, query: str, documents: Sequence[Any] | None = None) -> Event:
    """Its answer; without ``documents``, those the fake provider gives."""
    found = documents_for(query) if documents is None else list(documents)
    return "retrieval.answered", number, {"documents": found, "cache": "miss", "took_us": 7}


def failed(number: int, cause: str = "retrieval_failed") -> Event:
    """Its failure."""
    data = {"code": "retrieval_failed", "cause": cause, "detail": "the provider failed"}
    return "retrieval.failed", number, data


def latched(cause: str, number: int | None = None, *, consumed: bool = False) -> Event:
    """The latch's record."""
    data = {"cause": cause, "number": number, "attempt_consumed": consumed, "detail": "for a test"}
    return "latch.closed", number, data


def searches(count: int, first: int = 1) -> list[Event]:
    """So many searches, each answered at once."""
    events: list[Event] = []
    for number in range(first, first + count):
        events += [requested(number, f"query {number}"), answered(number, f"query {number}")]
    return events


def resumed() -> Event:
    """A restart after an orderly end."""
    data = {"clean": True, "ending": "clean", "torn_bytes": 0, "set_aside": None, "unsettled": []}
    return "run.resumed", None, data


def closed(count: int, *, latch: bool = False) -> Event:
    """An orderly end after ``count`` answered searches."""
    data = {"latched": latch, "retrieval_attempts": count, "retrieval_responses": count}
    return "run.closed", None, data


@dataclass
class Written:
    """A run on the disk: its lines, their heads, and the state they fold to."""

    directory: Path
    claim: bytes
    lines: list[bytes] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # lines a segment

    @property
    def segment(self) -> Path:
        """The first segment, the only one of a small run."""
        return self.directory / JOURNAL / segment_name(1)

    def state(self, seq: int | None = None) -> RunState:
        """The fold of the first ``seq`` records."""
        history = History(self.claim)
        for line in self.lines[:seq]:
            history.read(line.rstrip(b"\n"))
        return history.state

    def write(self) -> None:
        """Writes the segments anew, as they were built."""
        at = 0
        for index, size in enumerate(self.sizes, 1):
            path = self.directory / JOURNAL / segment_name(index)
            path.write_bytes(b"".join(self.lines[at : at + size]))
            at += size


def encode(events: Iterable[Event], claim: bytes) -> tuple[list[bytes], list[str]]:
    """Events as chained lines, ``run.claimed`` first; lines and heads, the claim's digest first."""
    head = claim_digest(claim)
    data = {"max_calls": 1000, "claim_sha256": head}
    lines, heads = [], [head]
    for seq, (kind, number, values) in enumerate([("run.claimed", None, data), *events], 1):
        first = {"documents": values["documents"]} if "documents" in values else {}
        encoded = encode_json({**first, **values})
        line, head = encode_line(kind, number, encoded, seq=seq, at=AT, prev=head)
        lines.append(line)
        heads.append(head)
    return lines, heads


def write_run(
    directory: Path, events: Sequence[Event], *, per_segment: int = 10**6, **claim: Any
) -> Written:
    """Writes a run of ``run.claimed`` and ``events``, ``per_segment`` lines a segment."""
    run = Written(directory, claim_bytes(**claim))
    run.lines, run.heads = encode(events, run.claim)
    whole, rest = divmod(len(run.lines), per_segment)
    run.sizes = [per_segment] * whole + ([rest] if rest else [])
    (directory / JOURNAL).mkdir(mode=0o700, parents=True)
    directory.chmod(0o700)
    (directory / CLAIM).write_bytes(run.claim)
    (directory / "lock").touch()
    run.write()
    return run


def write_latch(run: Written, at: int, /, **changes: Any) -> None:
    """``latch.json`` as the writer leaves it for record number ``at`` of the journal."""
    line = json.loads(run.lines[at - 1])
    value = {"seq": at, "at": line["at"], "sum": line["sum"], **line["data"], **changes}
    (run.directory / "latch.json").write_bytes(orjson.dumps(value) + b"\n")


def contents(directory: Path) -> dict[str, bytes]:
    """Every file under a directory, for comparison."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def drafted(kind: str, number: int | None, data: dict[str, Any]) -> Draft:
    """A decision in the words of the journal, as it is handed to the writer."""
    return Draft(record_of(kind, number, data), encode_json(data))

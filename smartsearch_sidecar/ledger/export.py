"""The retrieval part of a run in the reference implementation's own files.

``claim.json``, ``request-%06d.json``, ``response-%06d.json``, ``failed-%06d.json`` and
``transport-rejected.json``, with its names and JSON values, computed from our records: what we keep
once, it writes out (the joined passages, a trajectory of one search, an evidence row per document,
digests of canonical JSON). Its own sentences (``error``, ``error_type``) are ours.

Three things it has no file for. A query that was declined left no trace there, and leaves none
here. A search by another route than ``/execute`` has no request to write: such a run is refused.
A latch that closed without failing an attempt is a ``transport-rejected.json`` with our cause, so
that a failed run never looks like a healthy one; there, quota and identity lived in memory only.

Apart from the command, its one user: it knows no terminal.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from smartsearch_sidecar import errors
from smartsearch_sidecar.contract.execute import TOP_N
from smartsearch_sidecar.ledger.disk import FILE_MODE
from smartsearch_sidecar.ledger.file import DIRECTORY_MODE
from smartsearch_sidecar.ledger.reader import Progress
from smartsearch_sidecar.ledger.recorded_queries import RecordedRun
from smartsearch_sidecar.ledger.recovery import read_object
from smartsearch_sidecar.run import record as kinds
from smartsearch_sidecar.run.json_values import canonical_digest
from smartsearch_sidecar.run.line import Line

SOURCE: Final = "smartsearch.wikipedia_search"
_CLAIM_KEYS: Final = ("retrieval", "max_retrieval_calls", "environment", "arbitrary_code_execution")


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote; ``declined`` queries have no file. ``torn``: without the last line."""

    requests: int
    responses: int
    failed: int
    rejected: bool
    declined: int
    torn: bool


def export_reference(directory: Path, out: Path, *, progress: Progress | None = None) -> Exported:
    """Writes a run's retrieval files to ``out``, which must not exist and appears whole or not.

    Raises ``UsageError`` where ``out`` exists or cannot be written, ``LedgerCorrupt`` where the run
    is damaged; a torn last line is left out.
    """
    run = RecordedRun(directory, progress)
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    try:
        out.mkdir(mode=DIRECTORY_MODE)
    except FileExistsError:
        raise errors.USAGE(f"{out} exists already: name a directory that does not") from None
    except OSError as exc:
        raise errors.USAGE(f"{out} cannot be made: {exc.strerror}") from None
    try:
        partial.mkdir(mode=DIRECTORY_MODE)
        exported = _Layout(partial, run).write()
        partial.rename(out)  # onto the empty directory that holds the name
    except BaseException as exc:
        shutil.rmtree(partial, ignore_errors=True)
        out.rmdir()
        if isinstance(exc, OSError):
            raise errors.USAGE(f"{out} cannot be written: {exc.strerror or exc}") from None
        raise
    return exported


class _Layout:
    """One export under way."""

    def __init__(self, folder: Path, run: RecordedRun) -> None:
        self._folder = folder
        self._run = run
        identity = run.claim.get("retrieval")
        if not isinstance(identity, dict):
            raise errors.LEDGER_CORRUPT("claim.json: it names no retrieval identity")
        self._identity: Mapping[str, Any] = identity
        self._queries: dict[int, str] = {}  # of searches not settled yet: as many as slots
        self._failed: set[int] = set()
        self._rejection: Mapping[str, Any] | None = None

    def write(self) -> Exported:
        scan, latch = self._run.scan, self._run.latch
        self._save("claim.json", {key: self._run.claim.get(key) for key in _CLAIM_KEYS})
        for line in scan:
            try:
                self._line(line)
            except (errors.LedgerCorrupt, AttributeError, LookupError, TypeError) as exc:
                reason = f"the {line.record.kind} record cannot be exported ({exc!r:.80})"
                raise errors.LEDGER_CORRUPT(f"{scan.place}: {reason}") from None
        scan.require_whole()
        if latch is not None and scan.history.latch is None:
            self._rejection = read_object(latch)
        self._reject()
        state = scan.history.state
        rejected, torn = self._rejection is not None, scan.torn_bytes > 0
        searches = (state.attempts, state.responses, state.failed)
        return Exported(*searches, rejected, state.declined, torn)

    def _line(self, line: Line) -> None:
        match line.record:
            case kinds.LatchClosed(cause):
                self._rejection = cause.to_data()
            case kinds.RetrievalRequested(number, kinds.ClientQuery(route)):
                raise errors.USAGE(
                    f"search {number} came by /{route:.20}, for which the reference has no "
                    "files: only a run whose every search came by /execute can be exported to it"
                )
            case kinds.RetrievalRequested(number, kinds.NativeCall() as asked):
                self._queries[number] = self._run.query(asked)
                self._save(f"request-{number:06d}.json", {"env": asked.env, "call": asked.call})
            case kinds.RetrievalAnswered(number) as answered:
                query = self._queries.pop(number)
                value = _response(query, answered.documents(), self._identity)
                self._save(f"response-{number:06d}.json", value)
            case kinds.RetrievalFailed(number) as failed:
                self._queries.pop(number)
                self._failed.add(number)
                value = {"error_type": failed.cause, "error": failed.detail}
                value |= {"attempt_consumed": True, "no_automatic_retry": True}
                self._save(f"failed-{number:06d}.json", value)

    def _reject(self) -> None:
        """The first failure, unless it is a failed attempt's, which has its own file."""
        latch = self._rejection
        if latch is None or latch.get("number") in self._failed:
            self._rejection = None
            return
        cause = latch.get("cause", "ledger_failed")
        # A provider that failed before its attempt began: named there by the answer's code.
        value = {"code": "http_retrieval_failed" if cause == "retrieval_failed" else cause}
        value["retrieval_attempt_consumed"] = bool(latch.get("attempt_consumed"))
        value |= {"no_automatic_retry": True, "accept_checkpoint": False}
        self._save("transport-rejected.json", value)

    def _save(self, name: str, value: Any) -> None:
        data = json.dumps(value, ensure_ascii=False, sort_keys=True, allow_nan=False).encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(self._folder / name, flags, FILE_MODE), "wb") as stream:
            stream.write(data)


def _response(
    query: str, documents: Sequence[Mapping[str, Any]], identity: Mapping[str, Any]
) -> dict[str, Any]:
    """``response-%06d.json`` of one answered search; ``documents`` as recorded, best first."""
    clean = [{key: item[key] for key in ("id", "contents", "score")} for item in documents]
    result = "\n\n".join(item["contents"] for item in clean)
    return {
        "native_response": {"result": result, "output": "", "error": ""},
        "trajectory": [
            {
                "index": 0,
                "query": query,
                "raw_search_text": query,
                "raw_search_hash": hashlib.sha256(query.encode()).hexdigest(),
                "tag_parse_status": "ok",
                "document_ids": [item["id"] for item in clean],
                "retrieval_request_sha256": canonical_digest(
                    {"query": query, "top_n": TOP_N, "return_score": False}
                ),
                "retrieval_response_sha256": canonical_digest(clean),
            }
        ],
        "evidence": [_evidence(item, identity) for item in clean],
    }


def _evidence(item: Mapping[str, Any], identity: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "document_id": item["id"],
        "text": item["contents"],
        "source": SOURCE,
        "score": item["score"],
        "first_seen_step": 0,
        "corpus_sha256": identity["corpus_sha256"],
        "index_sha256": identity["index_sha256"],
        "document_sha256": canonical_digest({"document_id": item["id"], "text": item["contents"]}),
        "metadata": {},
    }

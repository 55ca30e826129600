"""A run read for its searches: from what was recorded of each back to the words that were searched.

Records of today name the query beside the call. Only an older journal's call is parsed again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.contract.execute import TOP_N, ExecuteRules, parse_execute
from smartsearch_sidecar.ledger.file import CLAIM
from smartsearch_sidecar.ledger.reader import History, Progress, RunReader, Scan
from smartsearch_sidecar.run.record import Asked, ClientQuery


class RecordedRun:
    """A run's claim, ``latch.json`` and journal, its passages included. Blocking.

    Raises ``LedgerCorrupt`` where the claim is missing or does not say how to read calls.
    """

    def __init__(self, directory: Path, progress: Progress | None) -> None:
        reader = RunReader(directory)
        claim = reader.read(CLAIM)
        if claim is None:
            raise errors.LEDGER_CORRUPT(f"{directory} has no claim.json")
        self.latch = reader.latch()
        self.scan = Scan(reader, History(claim, documents=True), progress=progress)
        try:
            self.claim: dict[str, Any] = orjson.loads(claim)
            accepted = frozenset(self.claim["accepted_environment_sha256"])
            self._rules = ExecuteRules(self.claim["environment"], accepted)
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise errors.LEDGER_CORRUPT(
                "claim.json: it names no environment to read calls by"
            ) from None

    def query(self, asked: Asked) -> str:
        """The query of a search as it was searched: stripped, else verbatim. Raises
        ``LedgerCorrupt`` where the run's own contract refuses an old journal's call.
        """
        if asked.query is not None:
            return asked.query.strip()
        body = orjson.dumps({"env": asked.env, "call": asked.call})
        try:
            return parse_execute(body, self._rules).query.strip()
        except errors.InvalidRequest as exc:
            raise errors.LEDGER_CORRUPT(
                f"the run's own contract refuses a recorded request: {exc.message}"
            ) from None


def recorded_top_n(asked: Asked) -> int:
    """How many passages a search asks for. Raises ``LedgerCorrupt``."""
    top_n = asked.top_n if isinstance(asked, ClientQuery) else TOP_N
    if top_n < 1:
        raise errors.LEDGER_CORRUPT("a recorded request does not say how many passages it asks for")
    return top_n

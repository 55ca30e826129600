"""From what was recorded of a request back to the words that were searched.

Records name the query since it is recorded beside the call. Where a journal is older, the call is
parsed again: here, and nowhere else.
"""

from __future__ import annotations

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.contract.execute import TOP_N, ExecuteRules, parse_call, parse_execute
from smartsearch_sidecar.run.record import Asked, ClientQuery


def rules_of(claim: bytes) -> ExecuteRules:
    """The environments a run accepts, from its ``claim.json``. Raises ``LedgerCorrupt``."""
    try:
        value = orjson.loads(claim)
        return ExecuteRules(value["environment"], frozenset(value["accepted_environment_sha256"]))
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise errors.LEDGER_CORRUPT(
            "claim.json: it names no environment to read calls by"
        ) from None


def recorded_query(asked: Asked, rules: ExecuteRules) -> str:
    """The query of a search as it was searched: stripped, else verbatim.

    Raises ``LedgerCorrupt`` where an old journal's call is none that the run's own contract takes.
    """
    if asked.query is not None:
        return asked.query.strip()
    body = orjson.dumps({"env": asked.env, "call": asked.call})
    try:
        return parse_execute(body, rules).query.strip()
    except errors.InvalidRequest as exc:
        raise errors.LEDGER_CORRUPT(
            f"a recorded request is none that this run takes: {exc.message}"
        ) from None


def recorded_top_n(asked: Asked) -> int:
    """How many passages a search asks for. Raises ``LedgerCorrupt``."""
    top_n = asked.top_n if isinstance(asked, ClientQuery) else TOP_N
    if top_n < 1:
        raise errors.LEDGER_CORRUPT("a recorded request does not say how many passages it asks for")
    return top_n

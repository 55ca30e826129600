"""From a recorded request back to the words that were searched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.contract.call_syntax import TOP_N, parse_call
from smartsearch_sidecar.contract.execute import ExecuteRules, parse_execute


def rules_of(claim: bytes) -> ExecuteRules:
    """The environments a run accepts, from its ``claim.json``. Raises ``LedgerCorrupt``."""
    try:
        value = orjson.loads(claim)
        return ExecuteRules(value["environment"], frozenset(value["accepted_environment_sha256"]))
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise errors.LEDGER_CORRUPT(
            "claim.json: it names no environment to read calls by"
        ) from None


def recorded_query(data: Mapping[str, Any], rules: ExecuteRules) -> str:
    """The query of a ``retrieval.requested`` record as it was searched: stripped, else verbatim.

    The routes of other trainers record ``route``, ``query`` and ``top_n``; ``/execute`` records
    ``env`` and ``call``. Raises ``LedgerCorrupt`` where the recorded call is none that the run's
    own contract takes.
    """
    if "query" in data:
        return str(data["query"]).strip()
    body = orjson.dumps({"env": data.get("env"), "call": data.get("call")})
    try:
        return parse_execute(body, rules).query.strip()
    except errors.InvalidRequest as exc:
        raise errors.LEDGER_CORRUPT(
            f"a recorded request is none that this run takes: {exc.message}"
        ) from None


def recorded_top_n(data: Mapping[str, Any]) -> int:
    """How many passages a ``retrieval.requested`` record asks for. Raises ``LedgerCorrupt``."""
    top_n = data.get("top_n", TOP_N)  # a request of `/execute` does not record it
    if type(top_n) is not int or top_n < 1:
        raise errors.LEDGER_CORRUPT("a recorded request does not say how many passages it asks for")
    return top_n


def readable_query(data: Mapping[str, Any]) -> str:
    """The query of a request for a person: of any call that can be read, else the call itself."""
    if "query" in data:
        return str(data["query"])
    call = str(data.get("call", ""))
    try:
        return parse_call(call)[0]
    except errors.InvalidRequest:
        return call

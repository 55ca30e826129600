"""``claim.json``: who this run is and what it may do, written once before anything is answered."""

from __future__ import annotations

import platform
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import orjson

from smartsearch_sidecar import __version__
from smartsearch_sidecar.config import Config
from smartsearch_sidecar.run.line import FORMAT

_PACKAGES = ("aiohttp", "orjson", "tantivy", "uvloop")


def build_claim(
    config: Config, facts: Mapping[str, Any], previous: Mapping[str, Any] | None = None
) -> bytes:
    """The bytes of ``claim.json``; no capability, no reference answer.

    ``facts`` are the identities of what answers (``retrieval`` and, with rewards, ``reward``);
    ``previous`` describes the run this one goes on from.
    """
    execute = config.execute
    value = {
        "format": FORMAT,
        "run_id": secrets.token_hex(16),
        "created_at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        **facts,
        "max_retrieval_calls": execute.max_calls,
        "environment": execute.environment,
        "accepted_environment_sha256": sorted(execute.accepted_environment_sha256),
        "arbitrary_code_execution": False,
        "profile": config.profile,
        "nodes": config.run.nodes,
        "config_sha256": config.digest(),
        "config": config.public(),
        "versions": versions(),
    }
    if previous is not None:
        value["previous"] = dict(previous)
    return orjson.dumps(
        value, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE
    )


def versions() -> dict[str, str]:
    """What this process runs on, to explain a difference later."""
    found = {"smartsearch_sidecar": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found

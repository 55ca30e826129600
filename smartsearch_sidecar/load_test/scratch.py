"""A copy of a configuration that can be rehearsed beside the run it is meant for.

Same provider, slots, deadline and ledger; another directory, port and capabilities; rewards off,
because they cost GPU time; an allowance no rehearsal uses up; one node, because coordination would
make it part of the real run.
"""

from __future__ import annotations

import json
from typing import Any

from smartsearch_sidecar.config import Config

MAX_CALLS = 1_000_000_000
_LEFT_OUT = ("reward", "cluster", "run")


def scratch_text(config: Config) -> str:
    """TOML of dotted keys; ``run.directory`` is given to ``serve`` beside it."""
    value = {name: part for name, part in config.public().items() if name not in _LEFT_OUT}
    value["execute"]["max_calls"] = MAX_CALLS
    server = value["server"]
    server["port"] = 0
    server["probe_host"] = server["probe_port"] = None
    return "".join(f"{key} = {_spelled(item)}\n" for key, item in _flat("", value))


def _flat(prefix: str, value: dict[str, Any]) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, item in value.items():
        key = f"{prefix}{name}"
        if isinstance(item, dict):
            pairs += _flat(f"{key}.", item)
        elif item is not None:
            pairs.append((key, item))
    return pairs


def _spelled(item: Any) -> str:
    # JSON spells strings, numbers, booleans and lists of them as TOML does; DEL alone differs.
    return json.dumps(item, ensure_ascii=False).replace("\x7f", "\\u007f")

"""``Config``: the sections together, the rules between keys, and the flat table of all keys.

``loading.load`` is the way to make one: it also reads files, environment and profiles, and explains
each problem.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import types
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final, Literal, Self, Union, get_args, get_origin

from pydantic import Field, SecretStr, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from smartsearch_sidecar.config.sections import (
    Allowed,
    ClusterSection,
    ExecuteSection,
    LedgerSection,
    Preset,
    RetrievalSection,
    RewardSection,
    RunSection,
    Section,
    ServerSection,
)


class Config(Section):
    profile: Literal["training", "reference"] = "training"
    """Presets the keys that show two defaults; `reference` equals the reference implementation."""
    run: RunSection = Field(default_factory=RunSection)
    server: ServerSection = Field(default_factory=ServerSection)
    execute: ExecuteSection = Field(default_factory=ExecuteSection)
    retrieval: RetrievalSection = Field(default_factory=RetrievalSection)
    reward: RewardSection = Field(default_factory=RewardSection)
    ledger: LedgerSection = Field(default_factory=LedgerSection)
    cluster: ClusterSection | None = None

    @model_validator(mode="after")
    def _rules(self) -> Self:
        if sentences := [sentence for rule in RULES for sentence in rule(self)]:
            raise PydanticCustomError("rules", "{sentences}", {"sentences": sentences})
        return self

    @property
    def judged(self) -> bool:
        """Whether a rollout that met an outage is found before it is trained on: each block of it
        is judged with its reward, and no answer goes to rollouts that are not rewarded here.
        """
        reward, routes = self.reward, self.execute.routes
        return reward.enabled and reward.provenance == "enforce" and "retrieve" not in routes

    def public(self) -> dict[str, Any]:
        """JSON values of every key but the secrets; for claim, status and page."""
        return self.model_dump(mode="json")

    def digest(self) -> str:
        """sha256 of the keys that decide how a run behaves: not its directory, port or secrets."""
        value = self.public()
        del value["run"]["directory"], value["server"]["port"]
        canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode("ascii")).hexdigest()


# --- rules between keys ---------------------------------------------------------------------------
#
# The docstring of each rule is its line in config/README.md. A rule yields one sentence for
# each way in which it is broken.


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``. Of names, only ``localhost`` counts."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _unclean_restart(config: Config) -> Iterator[str]:
    """`run.on_unclean_restart = "report"` needs rewards with `reward.provenance = "enforce"`, and
    no `retrieve` among `execute.routes`.
    """
    if config.run.on_unclean_restart == "report" and not config.judged:
        yield (
            'run.on_unclean_restart = "report" needs reward.enabled = true and reward.provenance = '
            '"enforce", and no "retrieve" in execute.routes: nothing else finds the rollouts that '
            "met the outage."
        )


def _provenance_of_nodes(config: Config) -> Iterator[str]:
    """`run.nodes` above 1 presets `reward.provenance` to `record`; `enforce` needs `[cluster]`."""
    if config.cluster is None and config.run.nodes > 1 and config.reward.provenance == "enforce":
        yield (
            'reward.provenance = "enforce" with run.nodes above 1 needs [cluster]: a sidecar alone '
            'does not know what the others answered; use "record".'
        )


def _cluster_of_one(config: Config) -> Iterator[str]:
    """`[cluster]` needs `run.nodes` of 2 or more."""
    if config.cluster is not None and config.run.nodes == 1:
        yield (
            "[cluster] needs run.nodes of 2 or more: with 1, this node's verdict would pass for "
            "the run's."
        )


def _loopback(config: Config) -> Iterator[str]:
    """`server.host` must be loopback unless `server.allow_remote` is true."""
    server = config.server
    if not is_loopback(server.host) and not server.allow_remote:
        yield (
            f'server.host = "{server.host}" is not loopback: capabilities would cross a network in '
            "clear; use 127.0.0.1, or allow it with server.allow_remote = true."
        )


def _probe(config: Config) -> Iterator[str]:
    """`server.probe_host` and `server.probe_port` go together; the port is one of its own."""
    server = config.server
    if (server.probe_host is None) != (server.probe_port is None):
        absent = "server.probe_host" if server.probe_host is None else "server.probe_port"
        yield f"{absent} is missing: server.probe_host and server.probe_port go together."
    elif server.probe_port and (server.probe_host, server.probe_port) == (server.host, server.port):
        yield "server.probe_port is server.port: the second listener needs a port of its own."


def _capabilities(config: Config) -> Iterator[str]:
    """The two capabilities of `[server]` differ; each comes from its key or its file, not both."""
    execute, internal = config.server.execute_capability, config.server.internal_capability
    if execute is not None and execute == internal:
        yield (
            "server.execute_capability and server.internal_capability are the same: rollout code "
            "would reach references and rewards; use two."
        )


def _provider(config: Config) -> Iterator[str]:
    """`retrieval.provider = "bm25"` needs `retrieval.bm25.index`; `"flashrag"` needs `url`,
    `corpus_sha256` and `index_sha256` of `[retrieval.flashrag]`.
    """
    retrieval = config.retrieval
    if retrieval.provider == "bm25" and retrieval.bm25.index is None:
        yield (
            'retrieval.bm25.index is missing: retrieval.provider = "bm25" needs the folder that '
            "`smartsearch-sidecar index build` wrote."
        )
    if retrieval.provider == "flashrag":
        for name in ("url", "corpus_sha256", "index_sha256"):
            if getattr(retrieval.flashrag, name) is None:
                yield (
                    f"retrieval.flashrag.{name} is missing: retrieval.provider = "
                    '"flashrag" needs it.'
                )


def _reward(config: Config) -> Iterator[str]:
    """`reward.enabled` needs `reward.checkout`, or `reward.source` with `reward.source_sha256`; the
    references of at least one split; and the helper's `url`, `model` and `model_sha256`.
    """
    reward = config.reward
    if not reward.enabled:
        return
    if reward.checkout is not None and reward.source is not None:
        yield "reward.checkout and reward.source exclude each other: name one place of the scorer."
    if reward.checkout is None and reward.source is None:
        yield (
            "reward.checkout is missing: reward.enabled needs the pinned trainer's checkout, or "
            "reward.source with reward.source_sha256."
        )
    if reward.source is not None and reward.source_sha256 is None:
        yield "reward.source_sha256 is missing: reward.source is trusted by its digest alone."
    if reward.references.train is None and reward.references.validation is None:
        yield (
            "reward.references.train is missing: reward.enabled needs the answers of at least one "
            "split."
        )
    for name in ("url", "model", "model_sha256"):
        if getattr(reward.helper, name) is None:
            yield f"reward.helper.{name} is missing: reward.enabled needs it."


RULES: Final[tuple[Callable[[Config], Iterator[str]], ...]] = (
    _unclean_restart,
    _provenance_of_nodes,
    _cluster_of_one,
    _loopback,
    _probe,
    _capabilities,
    _provider,
    _reward,
)


# --- the flat table of keys -----------------------------------------------------------------------

FIELDS: Final[dict[str, FieldInfo]] = {}
"""Every key by its dotted name."""
KINDS: Final[dict[str, Any]] = {}
"""Its plain type: ``int``, ``Path``, ``SecretStr``, ``tuple``, or ``Literal`` itself."""
SECTIONS: Final[dict[str, type[Section]]] = {}


def _parts(annotation: Any) -> Iterator[Any]:
    """An annotation and what it is made of: unions and ``Annotated`` opened, ``None`` left out."""
    if get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            if part is not types.NoneType:
                yield from _parts(part)
    elif get_origin(annotation) is Annotated:
        yield from annotation.__metadata__
        yield from _parts(get_args(annotation)[0])
    else:
        yield annotation


def _kind(field: FieldInfo) -> Any:
    origins = (get_origin(part) or part for part in _parts(field.annotation))
    return next(kind for kind in origins if isinstance(kind, type) or kind is Literal)


def _read(model: type[Section], prefix: str = "") -> None:
    for name, field in model.model_fields.items():
        key, kind = prefix + name, _kind(field)
        if isinstance(kind, type) and issubclass(kind, Section):
            SECTIONS[key] = kind
            _read(kind, f"{key}.")
        else:
            FIELDS[key], KINDS[key] = field, kind


_read(Config)


def _extra(field: FieldInfo, name: str) -> Any:
    extra = field.json_schema_extra
    return extra.get(name) if isinstance(extra, dict) else None


PRESETS: Final[dict[str, Preset]] = {
    key: preset for key, field in FIELDS.items() if (preset := _extra(field, "preset"))
}
"""The keys that a profile presets. After loading each of them has a value."""

SECRETS_WITH_FILES: Final = [
    key for key in FIELDS if KINDS[key] is SecretStr and f"{key}_file" in FIELDS
]
"""The secrets that may also be read from a file, named by the key with ``_file`` behind it."""


def allowed(key: str) -> str:
    """The values a key may hold, in words that complete "use …"."""
    field = FIELDS[key]
    if words := _extra(field, "allowed"):
        return str(words)
    for part in (*field.metadata, *_parts(field.annotation)):
        if isinstance(part, Allowed):
            return part.words
        if get_origin(part) is Literal:
            *rest, last = (f'"{word}"' for word in get_args(part))
            return f"{', '.join(rest)} or {last}"
    return "true or false"

"""What must hold between keys: one sentence for each rule that does not."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smartsearch_sidecar.config.model import Config


def broken(config: Config) -> list[str]:
    """The sentences of every rule that ``config`` breaks, in the order of the key table."""
    return [
        *_run(config),
        *_server(config),
        *_retrieval(config),
        *_reward(config),
    ]


def is_loopback(host: str) -> bool:
    """Whether nothing but this machine reaches ``host``; a name is not, except ``localhost``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _run(config: Config) -> Iterator[str]:
    run, reward = config.run, config.reward
    enforced = reward.enabled and reward.provenance == "enforce"
    if run.on_unclean_restart == "report" and not enforced:
        yield (
            'run.on_unclean_restart = "report" needs reward.enabled = true and reward.provenance = '
            '"enforce": nothing else finds the rollouts that met the outage.'
        )
    if config.cluster is None and run.nodes > 1 and reward.provenance == "enforce":
        yield (
            'reward.provenance = "enforce" with run.nodes above 1 needs [cluster]: a sidecar alone '
            'does not know what the others answered; use "record".'
        )
    if config.cluster is not None and run.nodes == 1:
        yield (
            "[cluster] needs run.nodes of 2 or more: with 1, this node's verdict would pass for "
            "the run's."
        )


def _server(config: Config) -> Iterator[str]:
    server = config.server
    if not is_loopback(server.host) and not server.allow_remote:
        yield (
            f'server.host = "{server.host}" is not loopback: capabilities would cross a network in '
            "clear; use 127.0.0.1, or allow it with server.allow_remote = true."
        )
    if (server.probe_host is None) != (server.probe_port is None):
        absent = "server.probe_host" if server.probe_host is None else "server.probe_port"
        yield f"{absent} is missing: server.probe_host and server.probe_port go together."
    elif server.probe_port and (server.probe_host, server.probe_port) == (server.host, server.port):
        yield "server.probe_port is server.port: the second listener needs a port of its own."
    capabilities = server.execute_capability, server.internal_capability
    if capabilities[0] is not None and capabilities[0] == capabilities[1]:
        yield (
            "server.execute_capability and server.internal_capability are the same: rollout code "
            "would reach references and rewards; use two."
        )


def _retrieval(config: Config) -> Iterator[str]:
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

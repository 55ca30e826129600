"""Everything in order: what is cheap and local first, then what must be opened or asked."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from smartsearch_sidecar import errors
from smartsearch_sidecar.config import Config
from smartsearch_sidecar.doctor import loopback, machine, retriever, scoring
from smartsearch_sidecar.doctor.findings import Finding, error, ok
from smartsearch_sidecar.retrieval.registry import Progress


@dataclass(frozen=True, slots=True)
class Asked:
    """What the operator says: ranks of this node, a question and the text its passage must hold,
    whether the helper may be called once (it costs tokens), and whose uid the trainer has.
    """

    ranks: int | None = None
    question: str | None = None
    passage: str | None = None
    trial_call: bool = False
    trainer_uid: int | None = None


def examine(
    config: Config,
    asked: Asked,
    *,
    environ: Mapping[str, str],
    mounts: str,
    progress: Progress | None = None,
) -> list[Finding]:
    """Looks at everything a run of ``config`` needs; blocks, for as long as verifying the index
    takes. ``environ`` is that of whoever starts the trainer, ``mounts`` the text of
    ``/proc/self/mounts``.
    """
    server = config.server
    findings = [
        ok("configuration", f"profile {config.profile}, provider {config.retrieval.provider}"),
        *machine.check_ports(config),
        *machine.check_room(config, asked.ranks),
        loopback.check_proxies(environ, server.host, server.port or 80),
        machine.check_descriptors(config, asked.ranks),
        machine.check_user(os.geteuid(), asked.trainer_uid),
        machine.check_directory(config.run.directory),
    ]
    searched, helped = asyncio.run(_ask(config, asked, progress))
    place = machine.existing(config.run.directory or Path.cwd())
    findings += [
        machine.check_filesystem(place, mounts),
        machine.check_space(config, place, searched.search_bytes),
        *searched.findings,
    ]
    if not config.reward.enabled:
        return [*findings, ok("rewards", "off (reward.enabled)")]
    return [*findings, *scoring.check_files(config), *helped]


async def _ask(
    config: Config, asked: Asked, progress: Progress | None
) -> tuple[retriever.Searched, list[Finding]]:
    searched = await retriever.check_retriever(
        config, question=asked.question, passage=asked.passage, progress=progress
    )
    if not config.reward.enabled:
        return searched, []
    return searched, await scoring.check_helper(config, trial_call=asked.trial_call)


def broken_configuration(exc: errors.SidecarError) -> Finding:
    """The one finding there is where the configuration cannot be loaded."""
    return error("configuration", exc.message)

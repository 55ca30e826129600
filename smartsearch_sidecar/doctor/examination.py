"""All checks in order: first the cheap and local ones, then those that open or ask something.

Apart from the command so that it knows no terminal.
"""

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
from smartsearch_sidecar.retrieval.provider import Progress


@dataclass(frozen=True, slots=True)
class Options:
    """The operator's options.

    Attributes:
        ranks: rollout ranks of this node; ``None`` where not known.
        question: one that must find a passage.
        passage: text that one of its passages must hold.
        trial_call: whether the helper is called once, which costs tokens.
        trainer_uid: the user the trainer runs as.
    """

    ranks: int | None = None
    question: str | None = None
    passage: str | None = None
    trial_call: bool = False
    trainer_uid: int | None = None


def examine(
    config: Config,
    options: Options,
    *,
    environ: Mapping[str, str],
    mounts: str,
    progress: Progress | None = None,
) -> list[Finding]:
    """Checks everything a run of ``config`` needs. Blocks for as long as verifying the index takes.

    Args:
        config: the configuration that ``serve`` will get.
        options: the operator's options.
        environ: the environment in which the trainer is started.
        mounts: the text of ``/proc/self/mounts``.
        progress: called with bytes verified and bytes in all.
    """
    server = config.server
    findings = [
        ok("configuration", f"profile {config.profile}, provider {config.retrieval.provider}"),
        *machine.check_ports(config),
        *machine.check_room(config, options.ranks),
        loopback.check_proxies(environ, server.host, server.port or 80),
        machine.check_descriptors(config, options.ranks),
        machine.check_user(os.geteuid(), options.trainer_uid),
        machine.check_directory(config.run.directory),
    ]
    searched, helped = asyncio.run(_ask(config, options, progress))
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
    config: Config, options: Options, progress: Progress | None
) -> tuple[retriever.Searched, list[Finding]]:
    searched = await retriever.check_retriever(
        config, question=options.question, passage=options.passage, progress=progress
    )
    if not config.reward.enabled:
        return searched, []
    return searched, await scoring.check_helper(config, trial_call=options.trial_call)


def broken_configuration(exc: errors.SidecarError) -> Finding:
    """The only finding where the configuration cannot be loaded."""
    return error("configuration", exc.message)

"""Rewards: the pinned source, the references, the helper and, if asked for, one call to it.

Apart from ``retriever``, as reward and retrieval are apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from smartsearch_sidecar import errors
from smartsearch_sidecar.config import Config
from smartsearch_sidecar.doctor.findings import Finding, error, ok
from smartsearch_sidecar.reward.helper import HelperClient
from smartsearch_sidecar.reward.references import References
from smartsearch_sidecar.reward.scorer import Scorer
from smartsearch_sidecar.reward.source import verify_checkout, verify_file

TRIAL_PROMPT = "Is Paris the capital of France? Answer with <answer> 1 </answer> for yes.\n"


def check_files(config: Config) -> Iterator[Finding]:
    """Source and references; blocking."""
    reward = config.reward
    try:
        if reward.checkout is not None:
            source = verify_checkout(reward.checkout)
        elif reward.source is not None and reward.source_sha256 is not None:
            source = verify_file(reward.source, reward.source_sha256)
        else:  # loading refuses this; here for the type checker
            raise errors.CONFIG_INVALID("neither reward.checkout nor reward.source is set")
        Scorer(source)
        if config.run.directory is not None:
            source.refuse_overlap(config.run.directory)
        yield ok("scorer", f"{source.path} is the pinned one (sha256 {source.sha256[:12]}…)")
    except errors.SidecarError as exc:
        yield error("scorer", exc.message)
    try:
        references = References.load(reward.references.train, reward.references.validation)
        counted = ", ".join(f"{count:,} {split}" for split, count in references.counts.items())
        yield ok("references", f"questions: {counted}")
    except errors.SidecarError as exc:
        yield error("references", exc.message)


async def check_helper(config: Config, *, trial_call: bool) -> list[Finding]:
    """Whether the helper is the declared one; ``trial_call`` asks it once, which costs tokens."""
    section = config.reward.helper
    if section.url is None or section.model is None or section.model_sha256 is None:
        return [error("helper", "reward.helper.url, model and model_sha256 are needed")]
    helper = HelperClient(
        kind=section.kind,
        url=section.url,
        model=section.model,
        model_sha256=section.model_sha256,
        timeout_seconds=section.timeout_seconds,
    )
    findings = []
    try:
        identity = await helper.identity()
        shown = "" if identity["shown"] else "; the server shows nothing to check it by"
        findings.append(ok("helper", f"{section.kind} serves {section.model}{shown}"))
        if trial_call:
            findings.append(await _trial(helper, config.reward.seed))
    except errors.HelperFault as exc:
        findings.append(error("trial call" if findings else "helper", exc.message))
    finally:
        await helper.close()
    return findings


async def _trial(helper: HelperClient, seed: int) -> Finding:
    loop = asyncio.get_running_loop()
    began = loop.time()
    answer = await helper.ask(TRIAL_PROMPT, seed=seed)
    usage = answer.usage
    return ok(
        "trial call",
        f"answered in {loop.time() - began:.1f} s, {usage.input_tokens} tokens in, "
        f"{usage.output_tokens} out",
    )

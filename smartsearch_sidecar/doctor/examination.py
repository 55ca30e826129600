"""All checks in order: first the cheap and local ones, then those that open or ask something.

The retriever opens, identifies itself and finds a known passage; scorer and references are the
declared ones; the helper is asked, and called once if that is asked for. Apart from the command so
that it knows no terminal.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from smartsearch_sidecar import errors
from smartsearch_sidecar.config import Config
from smartsearch_sidecar.contract.execute import TOP_N
from smartsearch_sidecar.doctor import machine
from smartsearch_sidecar.doctor.machine import Finding, error, ok, warning
from smartsearch_sidecar.load_test.client_worker import STOCK_QUESTIONS
from smartsearch_sidecar.retrieval.guard import Guard
from smartsearch_sidecar.retrieval.passages import Found
from smartsearch_sidecar.retrieval.provider import Progress, open_configured
from smartsearch_sidecar.reward.helper import HelperClient
from smartsearch_sidecar.reward.references import References
from smartsearch_sidecar.reward.scorer import Scorer
from smartsearch_sidecar.reward.source import verify_checkout, verify_file
from smartsearch_sidecar.run.line import draft, encode_line
from smartsearch_sidecar.run.record import NativeCall, RetrievalAnswered, RetrievalRequested

SEARCH_BYTES: Final = 6 * 1024
"""Records of one search where none could be measured: five passages of 100 words, escaped."""
FOREIGN_ENVIRONMENT_BYTES: Final = 4 * 1024
"""An unmodified dataset's ``env`` text, kept with each search; only its digest is known here."""
MEASURED: Final = STOCK_QUESTIONS[:4]
"""Asked to find a passage, and to measure the records of a search."""
TRIAL_PROMPT = "Is Paris the capital of France? Answer with <answer> 1 </answer> for yes.\n"
_WORDS_KEPT = 12  # of a passage, to ask for it
_KNOWN = "known question"


class Options(NamedTuple):
    """The operator's options: ``question`` must find a passage, and one that holds ``passage``;
    ``trial_call`` calls the helper once, which costs tokens.
    """

    ranks: int | None = None
    question: str | None = None
    passage: str | None = None
    trial_call: bool = False
    trainer_uid: int | None = None


def examine(
    config: Config, options: Options, *, environ: Mapping[str, str], mounts: str, progress: Progress
) -> list[Finding]:
    """Checks everything a run of ``config`` needs. Blocks for as long as verifying the index takes;
    ``progress`` is told bytes verified, and in all.

    ``environ`` is the environment in which the trainer is started, ``mounts`` the text of
    ``/proc/self/mounts``.
    """
    server = config.server
    findings = [
        ok("configuration", f"profile {config.profile}, provider {config.retrieval.provider}"),
        *machine.check_ports(config),
        *machine.check_room(config, options.ranks),
        machine.check_proxies(environ, server.host, server.port or 80),
        machine.check_descriptors(config, options.ranks),
        machine.check_user(os.geteuid(), options.trainer_uid),
        machine.check_directory(config.run.directory),
    ]
    searched, search_bytes = asyncio.run(_check_retriever(config, options, progress))
    place = machine.existing(config.run.directory or Path.cwd())
    findings += [
        machine.check_filesystem(place, mounts),
        machine.check_space(config, place, search_bytes),
        *searched,
    ]
    if not config.reward.enabled:
        return [*findings, ok("rewards", "off (reward.enabled)")]
    helped = asyncio.run(_check_helper(config, trial_call=options.trial_call))
    return [*findings, *_check_files(config), *helped]


# --- the retriever --------------------------------------------------------------------------------


async def _check_retriever(
    config: Config, options: Options, progress: Progress
) -> tuple[list[Finding], int]:
    """Opens the configured retriever, as ``serve`` does, and asks it. Returns the findings, and the
    bytes that the records of one search take.
    """
    try:
        provider = await open_configured(config, progress)
    except errors.SidecarError as exc:
        return [error("retriever", exc.message)], SEARCH_BYTES
    findings: list[Finding] = []
    try:
        guard = Guard(
            provider,
            top_n=TOP_N,
            retries=config.retrieval.retries,
            drop_tagged=config.retrieval.on_protocol_tag == "drop",
            watch_drift=False,
        )
        identity = await guard.claim_identity()
        corpus, index = identity["corpus_sha256"][:12], identity["index_sha256"][:12]
        count = identity.get("passages")
        text = f"{provider.name}, corpus {corpus}…, index {index}…"
        if isinstance(count, int):
            text += f", {count:,} passages, every file as in its manifest"
        findings.append(ok("retriever", text))
        if config.retrieval.provider == "flashrag":
            findings.append(_canaries(config))
        findings.append(await _known(guard, config, options))
        left_out: Counter[str] = Counter()
        search_bytes = await _measured(guard, config, left_out)
        if left_out:
            findings.append(_left_out(left_out))
        return findings, search_bytes
    except errors.SidecarError as exc:
        return [*findings, error("search", exc.message)], SEARCH_BYTES
    finally:
        await provider.close()


def _canaries(config: Config) -> Finding:
    if config.retrieval.flashrag.canaries is None:
        return warning(
            "canaries",
            "none: nothing checks that the retriever serves the declared corpus and index",
            "`smartsearch-sidecar canaries record QUESTIONS OUT --config F`, then "
            "retrieval.flashrag.canaries",
        )
    return ok("canaries", "the retriever gives every recorded answer")  # opening asked them all


async def _search(guard: Guard, config: Config, question: str) -> Found:
    seconds = config.execute.deadline_seconds
    deadline = asyncio.get_running_loop().time() + seconds
    try:
        async with asyncio.timeout_at(deadline):
            return await guard.search(question, deadline)
    except TimeoutError:
        raise errors.PROVIDER_TRANSPORT(
            f"a search did not end within {seconds:g} s (execute.deadline_seconds)"
        ) from None


async def _known(guard: Guard, config: Config, options: Options) -> Finding:
    """Whether ``options.question`` finds something, and a passage that holds ``options.passage`` if
    that is given. Without a question, one is made of a passage's own words.
    """
    if options.question is not None:
        answer = (await _search(guard, config, options.question)).documents()
        return _answered(options.question, answer, options.passage)
    for stock in MEASURED:
        for document in (await _search(guard, config, stock)).documents():
            words = " ".join(document["contents"].split()[:_WORDS_KEPT])
            found = [other["id"] for other in (await _search(guard, config, words)).documents()]
            if document["id"] in found:
                rank = found.index(document["id"]) + 1
                return ok(_KNOWN, f"the first words of a passage find it at rank {rank}")
            return error(
                _KNOWN,
                f"passage {document['id'][:40]!r} is not found by its own first words",
                "the index is not of this corpus, or the retriever does not search by text: pass a "
                "question with --question",
            )
    return error(
        _KNOWN,
        "plain questions find no passage at all: the corpus is empty, or of another language",
        "pass a question that it must answer with --question",
    )


def _answered(question: str, documents: list[dict[str, str]], passage: str | None) -> Finding:
    asked = repr(question[:60])
    if not documents:
        remedy = "is this the corpus the run is to search?"
        return error(_KNOWN, f"{asked} finds no passage", remedy)
    if passage is None:
        return ok(_KNOWN, f"{asked} finds, at rank 1: {documents[0]['contents'][:60]!r}")
    for rank, document in enumerate(documents, 1):
        if passage.casefold() in document["contents"].casefold():
            return ok(_KNOWN, f"{asked} finds its passage at rank {rank}")
    return error(
        _KNOWN,
        f"{asked} finds {len(documents)} passages, none with {passage[:60]!r}",
        "is this the corpus the run is to search, and the index of it?",
    )


def _left_out(reasons: Counter[str]) -> Finding:
    told = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    return warning(
        "passages",
        f"the run would leave passages out of the answers to plain questions: {told}",
        "repair the corpus and build the index again: a passage left out is no answer",
    )


async def _measured(guard: Guard, config: Config, left_out: Counter[str]) -> int:
    """The mean bytes of the records of one search, as the ledger would write them; ``left_out``
    is told of each dropped passage by its reason.
    """
    environment = config.execute.environment
    if config.execute.accepted_environment_sha256:
        environment = " " * max(FOREIGN_ENVIRONMENT_BYTES, len(environment))
    number, at, prev = 1_000_000, "2026-01-01T00:00:00.000000Z", "0" * 64
    size = 0
    for question in MEASURED:
        found = await _search(guard, config, question)
        left_out.update(item["reason"] for item in found.dropped)
        call = f"wikipedia_search(query={question!r}, top_n={TOP_N})"
        for record in (
            RetrievalRequested(number, NativeCall(environment, call, question)),
            RetrievalAnswered(number, found.documents_json, "shared", 1_000_000),
        ):
            data = draft(record).data_json
            line, _ = encode_line(record.kind, number, data, seq=2 * number, at=at, prev=prev)
            size += len(line)
    return size // len(MEASURED)


# --- rewards --------------------------------------------------------------------------------------


def _check_files(config: Config) -> Iterator[Finding]:
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


async def _check_helper(config: Config, *, trial_call: bool) -> list[Finding]:
    section = config.reward.helper
    if section.url is None or section.model is None or section.model_sha256 is None:
        return [error("helper", "reward.helper.url, model and model_sha256 are needed")]
    helper = HelperClient(section)
    findings = []
    try:
        identity = await helper.identity()
        shown = "" if identity["shown"] else "; the server shows nothing to check it by"
        findings.append(ok("helper", f"{section.kind} serves {section.model}{shown}"))
        if trial_call:
            loop = asyncio.get_running_loop()
            began = loop.time()
            usage = (await helper.ask(TRIAL_PROMPT, seed=config.reward.seed)).usage
            tokens = f"{usage.input_tokens} tokens in, {usage.output_tokens} out"
            told = f"answered in {loop.time() - began:.1f} s, {tokens}"
            findings.append(ok("trial call", told))
    except errors.HelperFault as exc:
        findings.append(error("trial call" if findings else "helper", exc.message))
    finally:
        await helper.close()
    return findings

"""``canaries record``: questions and the retriever's answers, to compare its later answers with."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from smartsearch_sidecar import errors
from smartsearch_sidecar.config import load
from smartsearch_sidecar.contract.execute import TOP_N
from smartsearch_sidecar.retrieval.canaries import Canary, dump, record

app = typer.Typer(
    name="canaries",
    no_args_is_help=True,
    help="Pinned questions that defend a retriever's identity.",
)

QUESTIONS_MAX = 1000  # asked one by one on a timer: more would load the retriever


@app.command("record")
def record_command(
    questions: Annotated[
        Path, Argument(help="One question a line; a handful from your dataset is enough.")
    ],
    out: Annotated[Path, Argument(help="The canary file to write; it must not exist.")],
    config: Annotated[Path, Option(help="The configuration with [retrieval.flashrag].")],
) -> None:
    """Ask each question twice and write the answers: name the file in retrieval.flashrag.canaries.

    Record them while the retriever serves the right index. Exit codes: 0 written, 2 not.
    """
    asked = read_questions(questions)
    if out.exists():
        raise errors.USAGE(f"{out} exists already: name a new file")
    canaries = asyncio.run(_record(config, asked))
    with out.open("xb") as file:
        file.write(dump(canaries))
    typer.echo(f"{len(canaries)} canaries written to {out}")


def read_questions(path: Path) -> list[str]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise errors.USAGE(
            f"{path} cannot be read as lines of UTF-8 text ({type(exc).__name__})"
        ) from None
    asked = [line.strip() for line in lines if line.strip()]
    if not 1 <= len(asked) <= QUESTIONS_MAX:
        raise errors.USAGE(f"{path} holds {len(asked)} questions: 1 to {QUESTIONS_MAX} are allowed")
    return asked


async def _record(config: Path, questions: list[str]) -> list[Canary]:
    from smartsearch_sidecar.retrieval.flashrag.provider import FlashragProvider

    settings = load(config).retrieval.flashrag
    if settings.url is None or settings.corpus_sha256 is None or settings.index_sha256 is None:
        raise errors.CONFIG_INVALID(
            f"{config} has no complete [retrieval.flashrag]: set url, corpus_sha256, index_sha256"
        )
    # The configured file may be the one this command is to write.
    provider = FlashragProvider(settings.model_copy(update={"canaries": None}))
    try:
        await provider.start()
        return await record(provider, questions, top_n=TOP_N)
    finally:
        await provider.close()

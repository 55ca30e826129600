"""``index build``: from a corpus to the folder that ``retrieval.bm25.index`` names."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from typer import Argument, Option

from smartsearch_sidecar import errors
from smartsearch_sidecar.commands.progress import MIB, plain_lines
from smartsearch_sidecar.retrieval.bm25.corpus import Format

if TYPE_CHECKING:
    from smartsearch_sidecar.retrieval.bm25.build import BuildProgress
    from smartsearch_sidecar.retrieval.bm25.manifest import Manifest

app = typer.Typer(name="index", help="Make the index that is searched.", no_args_is_help=True)

STAGES = {
    "reading": "reading the corpus",
    "indexing": "indexing",
    "merging": "merging into one segment",
    "hashing": "hashing the index",
}


@app.command("build")
def build(
    corpus: Annotated[
        Path,
        Argument(
            metavar="CORPUS",
            help="FlashRAG/Search-R1 JSONL (id, contents), BEIR JSONL (_id, title, text), DPR TSV "
            "(id, text, title) or the vital-articles summaries; plain or gzip.",
        ),
    ],
    out: Annotated[
        Path, Argument(metavar="OUT", help="The index: a folder that does not exist yet.")
    ],
    form: Annotated[
        Format | None, Option("--format", help="Of the corpus; without it, the content tells.")
    ] = None,
) -> None:
    """Build the BM25 index of a corpus: the same corpus gives the same answers on every machine.

    Needs free disk of about twice the corpus while it builds; memory does not grow with the corpus.
    Passages with protocol tags (`<search>`, `</result>`, `<|im_end|>`, ...) are left out, and
    counted.
    """
    manifest = _build(corpus, out, form)
    size = sum(file.bytes for file in manifest.files.values())
    typer.echo(
        f"built {out}: {manifest.passages} passages ({manifest.dropped} left out for protocol "
        f"tags), {size / MIB:.1f} MiB, {manifest.built['seconds']:.1f} s"
    )
    typer.echo(f"corpus_sha256 {manifest.corpus_sha256} ({manifest.corpus_format})")
    typer.echo(f"index_sha256  {manifest.index_sha256}")


def build_if_missing(corpus: Path, out: Path) -> None:
    """Builds the index of ``corpus`` for the demo, unless ``out`` exists."""
    if out.exists():
        return
    if not corpus.exists():
        raise errors.USAGE(f"there is no corpus at {corpus}; fetch it with `make setup`")
    _build(corpus, out, None)


def _build(corpus: Path, out: Path, form: Format | None) -> Manifest:
    """SIGTERM stops like Ctrl-C. Signals after the first do not disturb the cleanup."""
    from smartsearch_sidecar.retrieval.bm25.build import build as build_index

    received: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with _progress() as progress:
            return build_index(corpus, out, form=form, progress=progress)
    except KeyboardInterrupt:
        # The process ends now, whatever comes behind the first signal, and however late.
        before = dict.fromkeys(before, signal.SIG_IGN)
        left = "is complete" if out.exists() else "was not made, and nothing was left behind"
        print(f"stopped: {out} {left}", file=sys.stderr)
        raise typer.Exit(128 + (received[0] if received else signal.SIGINT)) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress() -> Iterator[BuildProgress]:
    """A bar for each stage on a terminal, a plain line every few seconds elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield stage_lines()
        return
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}")
    times = TimeElapsedColumn(), TimeRemainingColumn()
    with Bars(*columns, *times, console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                for earlier in tasks.values():
                    bars.update(earlier, visible=False)
                tasks[stage] = bars.add_task(STAGES[stage], total=total or None, amount="")
            bars.update(tasks[stage], completed=done, amount=_amount(stage, done, total))

        yield update


def stage_lines(clock: Callable[[], float] = time.monotonic) -> BuildProgress:
    """The progress of each stage as lines of text on standard error."""
    show = plain_lines(clock)

    def update(stage: str, done: int, total: int) -> None:
        show(lambda: f"{STAGES[stage]} {_amount(stage, done, total)}".rstrip())

    return update


def _amount(stage: str, done: int, total: int) -> str:
    if not total:
        return ""
    if stage == "indexing":
        return f"{done:,} of {total:,} passages"
    return f"{done // MIB} of {total // MIB} MiB"

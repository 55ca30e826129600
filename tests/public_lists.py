"""What `docs/public.md` lists, read from the package; ``python -m tests.public_lists`` writes it.

Codes, causes with their remedies, kinds of records and commands each stand between two markers.
Routes are written by hand, because each says what it answers; a test holds them to the package.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import typer

from smartsearch_sidecar import errors
from smartsearch_sidecar.commands import app as command_line
from smartsearch_sidecar.metrics import Observer
from smartsearch_sidecar.run.record import CLASSES
from smartsearch_sidecar.web.app import PROBES, SEGMENTS, App
from smartsearch_sidecar.web.capabilities import Capabilities

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "public.md"
WIDTH: Final = 118
PAGES_OWN: Final = frozenset({("GET", "/<internal>/events"), ("GET", "/<internal>/recent")})
"""Routes that only the operator's page asks; they are named as not public."""


def codes() -> str:
    """Every error code with its HTTP status."""
    answers = [row.answer for row in errors.TABLE.values() if row.answer.status is not None]
    return _table("code", "status", {answer.code: str(answer.status) for answer in answers})


def causes() -> str:
    """Every cause of a closed latch, with what to look at."""
    found = {row.cause: errors.remedy(row.cause) for row in errors.TABLE.values() if row.cause}
    return _table("cause", "what to look at", found)


def kinds() -> str:
    """Every kind of record."""
    return _words(iter(CLASSES))


def commands() -> str:
    """Every command, its group before it."""
    return _words(_commands(typer.main.get_command(command_line)))


LISTS: Final[Mapping[str, Callable[[], str]]] = {
    "codes": codes,
    "causes": causes,
    "kinds": kinds,
    "commands": commands,
}


def routes() -> set[tuple[str, str]]:
    """Every method and target that is served, the page's own included."""
    app = App(
        Capabilities("e" * 43, "i" * 43),
        body_bytes_max=1,
        body_seconds=1.0,
        deadline_seconds=1.0,
        routes=("execute", *SEGMENTS),
        observer=Observer(),
        about={},
    )
    found = {("GET", probe) for probe in PROBES} | {("POST", "/<execute>/execute")}
    found |= {("POST", f"/<execute>/{segment}") for segment in app._segments}
    for segments, (method, _) in app._internal_routes.items():
        found.add((method, "/".join(("/<internal>", *segments))))
    for segments in app.operator.pages:  # `()` and `("",)` are one route: the page, and its slash
        found.add(("GET", "/".join(("/<internal>", *(segments or ("",))))))
    return found


def marked(page: str, name: str) -> tuple[str, str, str]:
    """The page before a list, the list, and the page after it."""
    begin, end = f"<!-- {name}:begin -->\n", f"\n<!-- {name}:end -->"
    before, _, rest = page.partition(begin)
    listed, _, after = rest.partition(end)
    return before + begin, listed, end + after


def with_lists(page: str) -> str:
    """The page with every list as the package has it."""
    for name, listed in LISTS.items():
        before, _, after = marked(page, name)
        page = before + listed() + after
    return page


def _commands(group: Any, before: str = "") -> Iterator[str]:
    if not hasattr(group, "list_commands"):
        yield before
        return
    for name in group.list_commands(None):
        yield from _commands(group.get_command(None, name), f"{before} {name}".strip())


def _table(name: str, meaning: str, rows: Mapping[str, str]) -> str:
    lines = [f"| {name} | {meaning} |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{key}` | {rows[key]} |" for key in sorted(rows))])


def _words(words: Iterator[str]) -> str:
    # A line may break between two words and never within one: `ledger verify` is one word here.
    glued = " ".join(f"`{word}`".replace(" ", "\0") for word in words)
    lines = textwrap.wrap(glued, WIDTH, break_on_hyphens=False, break_long_words=False)
    return "\n".join(lines).replace("\0", " ")


if __name__ == "__main__":
    PAGE.write_text(with_lists(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

"""The documents: every link leads somewhere, what is public is what is served, the example runs."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from smartsearch_sidecar.run.record import KINDS
from tests.fakes.each import each
from tests.fakes.provider import FakeProvider
from tests.fakes.served import served
from tests.public_lists import LISTS, PAGE, PAGES_OWN, marked, routes, with_lists

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
README_LINES_MAX = 135  # one page: what is more belongs into docs/
PICTURE_BYTES_MAX = 200_000
LANGUAGES = {"", "sh", "python", "toml", "yaml", "json", "mermaid"}


@cache
def tracked() -> frozenset[str]:
    """Every file git tracks, and the folders they are in, from the repository's root."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    files = {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}
    folders = {str(parent) for name in files for parent in Path(name).parents}
    return frozenset(files | folders)


def pages() -> list[Path]:
    """Every tracked Markdown file."""
    return sorted(ROOT / name for name in tracked() if name.endswith(".md"))


def named(path: Path) -> str:
    """A path as it is written in a message."""
    return path.relative_to(ROOT).as_posix()


# --- reading Markdown -----------------------------------------------------------------------------


class Fence(NamedTuple):
    """A fenced block: its language, its lines, and the number of its first line."""

    language: str
    lines: tuple[str, ...]
    at: int


def split(path: Path) -> tuple[list[str], list[Fence], list[int]]:
    """A page's lines outside of fences, its fences, and where a fence begins that never ends."""
    prose: list[str] = []
    fences: list[Fence] = []
    inside: list[str] | None = None
    language, at = "", 0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        mark = re.fullmatch(r"\s*```(.*)", line)
        if mark and inside is None:
            inside, language, at = [], mark[1].strip(), number
        elif mark and not mark[1].strip() and inside is not None:
            fences.append(Fence(language, tuple(inside), at))
            inside = None
        elif inside is not None:
            inside.append(line)
        else:
            prose.append(line)
    return prose, fences, [] if inside is None else [at]


def links(path: Path) -> Iterator[str]:
    """Every target of a link or picture, in order; code is left out."""
    prose, _, _ = split(path)
    text = re.sub(r"`[^`\n]*`", "", "\n".join(prose))
    yield from re.findall(r"\[[^\]\n]*\]\(([^)\s]+)\)", text)


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    prose, _, _ = split(path)
    seen: Counter[str] = Counter()
    found = set()
    for line in prose:
        heading = re.fullmatch(r"#{1,6}\s+(.*?)\s*", line)
        if heading is None:
            continue
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])
        kept = (c for c in text.lower() if c in "-_ " or unicodedata.category(c)[0] in "LN")
        slug = "".join(kept).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return frozenset(found)


# --- links ----------------------------------------------------------------------------------------


def broken(path: Path, target: str) -> str | None:
    """Why a link of a page leads nowhere, or ``None`` where it leads somewhere."""
    if re.match(r"[a-z]+:", target):
        return None
    place, _, anchor = target.partition("#")
    linked = path if not place else Path(os.path.normpath(path.parent / place))
    if not linked.is_relative_to(ROOT) or named(linked) not in tracked():
        return "is no tracked file"
    if anchor and (linked.suffix != ".md" or anchor not in anchors(linked)):
        return "has no such heading"
    return None


def test_every_relative_link_leads_somewhere() -> None:
    """Each relative link of each tracked page names a tracked file, and a heading that it has."""
    found = [
        f"{named(path)}: {target} {why}"
        for path in pages()
        for target in links(path)
        if (why := broken(path, target)) is not None
    ]
    assert not found


def test_links_are_looked_at() -> None:
    """A link to a missing file, a missing heading or out of the repository is found."""
    assert sum(1 for path in pages() for _ in links(path)) > 50
    assert broken(README, "docs/formats.md#versions") is None
    assert broken(README, "docs/absent.md") == "is no tracked file"
    assert broken(README, "docs/formats.md#absent") == "has no such heading"
    assert broken(README, "../outside.md") == "is no tracked file"
    assert broken(PAGE, "#codes") is None


def test_every_page_is_reached_from_the_readme() -> None:
    """A reader who follows links from the README meets every page of docs/ and of the top."""
    met: set[Path] = set()
    ahead = [README]
    while ahead:
        path = ahead.pop()
        met.add(path)
        targets = {target.partition("#")[0] for target in links(path)} - {""}
        linked = {Path(os.path.normpath(path.parent / target)) for target in targets}
        ahead += [one for one in linked if one.suffix == ".md" and one not in met and one.exists()]
    reachable = {named(path) for path in met}
    numbered = {path for path in pages() if path.parent.name == "adr" and path.stem[0].isdigit()}
    wanted = {named(path) for path in pages() if path.parent in (ROOT, ROOT / "docs")}
    assert wanted - reachable == set()
    # A decision may be listed before its file is linked; it must stand in the list.
    listed = (ROOT / "docs" / "adr" / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in numbered if path.name not in listed] == []


def test_the_readme_stays_one_page() -> None:
    """The README is short, and its picture small."""
    assert len(README.read_text(encoding="utf-8").splitlines()) <= README_LINES_MAX
    assert (ROOT / "docs" / "page.png").stat().st_size <= PICTURE_BYTES_MAX


def test_every_path_of_the_package_that_a_page_names_is_there() -> None:
    """A module or folder that a page names in code is tracked: in the package or from the root."""
    elsewhere = {"retriever_serving.py", "runs/"}  # the pinned trainer's; what `make run` makes
    path_like = re.compile(r"`([a-z_0-9.]+(?:/[a-z_0-9.]+)*(?:\.py|/))`")
    bases = ["", "smartsearch_sidecar/", "smartsearch_sidecar/integrations/"]
    absent = [
        f"{named(page)}: {name}"
        for page in pages()
        if page.parent in (ROOT, ROOT / "docs", ROOT / "docs" / "adr")
        for name in path_like.findall("\n".join(split(page)[0]))
        if name not in elsewhere
        if not any(os.path.normpath(base + name) in tracked() for base in bases)
    ]
    assert not absent


# --- fences and pictures --------------------------------------------------------------------------


def test_every_fence_ends_and_names_its_language() -> None:
    """A fenced block ends, and its language is one that GitHub shows."""
    for path in pages():
        _, fences, open_at = split(path)
        assert not open_at, f"{named(path)}:{open_at} never ends"
        for fence in fences:
            assert fence.language in LANGUAGES, f"{named(path)}:{fence.at}: {fence.language}"


def test_every_mermaid_block_is_whole() -> None:
    """A Mermaid block names its kind, closes what it opens, and declares whom it shows."""
    kinds: Counter[str] = Counter()
    for path in pages():
        for fence in split(path)[1]:
            if fence.language == "mermaid":
                kinds[fence.lines[0].split()[0]] += 1
                assert mermaid_faults(fence.lines) == [], f"{named(path)}:{fence.at}"
    assert kinds["sequenceDiagram"] >= 2
    assert kinds["flowchart"] >= 2


@each(
    ("block", "fault"),
    [
        ("pie\n  a", "unknown kind"),
        ("flowchart LR\n  subgraph a\n  b", "end"),
        ('flowchart LR\n  a["b] --> c', "quote"),
        ("flowchart LR\n  a[b --> c", "bracket"),
        ("sequenceDiagram\n  participant A\n  A->>B: hello", "B"),
        ("sequenceDiagram\n  participant A\n  A->>A: one; two", "semicolon"),
        ("sequenceDiagram\n  participant A\n  loop x\n  A->>A: y", "end"),
    ],
)
def test_a_broken_mermaid_block_is_found(block: str, fault: str) -> None:
    """Each slip that Mermaid draws nothing for is found by its word."""
    assert any(fault in found for found in mermaid_faults(tuple(block.splitlines())))


def mermaid_faults(lines: tuple[str, ...]) -> list[str]:
    """What keeps Mermaid from drawing a block, as far as it is looked at here."""
    kind = lines[0].split()[0]
    body = [line.strip() for line in lines[1:] if line.strip()]
    words = [line.split()[0] for line in body]
    if kind == "flowchart":
        opened = words.count("subgraph")
        text = "\n".join(body)
        faults = ["a quote is open" for line in body if line.count('"') % 2]
        bare = re.sub(r'"[^"]*"', "", text)
        faults += [f"a bracket is open: {a}{b}" for a, b in ("[]", "()") if _uneven(bare, a, b)]
    elif kind == "sequenceDiagram":
        opened = sum(words.count(word) for word in ("alt", "opt", "loop", "par", "critical"))
        declared = {line.split()[1] for line in body if line.startswith(("participant", "actor"))}
        arrows = [re.match(r"(\w+)\s*-{1,2}>{1,2}\s*(\w+)\s*:", line) for line in body]
        asked = {name for arrow in arrows if arrow for name in arrow.groups()}
        faults = [f"{name} is not declared" for name in sorted(asked - declared)]
        faults += ["a semicolon ends a message" for line in body if ";" in line or "#" in line]
    else:
        return [f"unknown kind {kind}"]
    if opened != words.count("end"):
        faults.append("an end is missing, or one too many")
    return faults


def _uneven(text: str, opening: str, closing: str) -> bool:
    return text.count(opening) != text.count(closing)


# --- what is public -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(LISTS))
def test_the_public_lists_are_the_packages(name: str) -> None:
    """Codes, causes, kinds and commands stand on the page as the package has them, both ways."""
    page = PAGE.read_text(encoding="utf-8")
    assert page.count(f"<!-- {name}:begin -->") == page.count(f"<!-- {name}:end -->") == 1
    assert marked(page, name)[1] == LISTS[name](), "python -m tests.public_lists"
    assert with_lists(page) == page


def test_the_public_routes_are_those_that_are_served() -> None:
    """Each route of the table is served, and each that is served is in the table or the page's."""
    prose, _, _ = split(PAGE)
    rows = [row for line in prose if (row := re.match(r"\| `([A-Z]+) (/[^`]*)` \|", line))]
    shown = [(row[1], row[2]) for row in rows]
    assert len(shown) == len(set(shown))
    assert set(shown) | PAGES_OWN == routes()
    assert not set(shown) & PAGES_OWN
    text = "\n".join(prose)
    assert all(f"`{method} {target}`" in text for method, target in PAGES_OWN)


def test_every_kind_of_record_has_its_fields() -> None:
    """The table of record fields has one row for each kind, and no other."""
    prose, _, _ = split(ROOT / "docs" / "formats.md")
    rows = [row[1] for line in prose if (row := re.match(r"\| `([a-z]+\.[a-z]+)` \|", line))]
    rows = [row for row in rows if not row.endswith(".json")]
    assert Counter(rows) == Counter(KINDS)


# --- the example ----------------------------------------------------------------------------------


async def test_the_readmes_example_runs(tmp_path: Path) -> None:
    """The Python example of the README searches, asks the gate and takes a checkpoint."""
    (example,) = (fence for fence in split(README)[1] if fence.language == "python")
    script = await asyncio.to_thread(_written, tmp_path / "example.py", example.lines)
    async with served(tmp_path / "run", provider=FakeProvider()) as run:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(script),
            env={"SMARTSEARCH_SIDECAR_ENDPOINTS": str(run.directory / "endpoints.json")},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, said = await process.communicate()
        assert process.returncode == 0, said.decode()
        lines = out.decode().splitlines()
        assert "healthy 1 searches answered" in lines
        accepted = next(one for one in run.records() if one["kind"] == "checkpoint.accepted")
        head = accepted["sum"]
        assert lines[-1] == f"record {accepted['seq']} of the journal, head {head}"


def _written(path: Path, lines: tuple[str, ...]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path

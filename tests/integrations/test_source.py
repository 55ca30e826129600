"""What the trainer-side files share is written once, and the committed files are what it makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from smartsearch_sidecar.integrations.source import write

FILES = sorted(write.FOLDER.glob("*.py"))
SHARING = {
    "ray_sidecars.py": ["requests"],
    "smartsearch_reward.py": ["requests", "failures", "rewards"],
    "verl_reward.py": ["requests", "failures", "rewards"],
    "verl_search_tool.py": ["requests", "failures"],
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_committed_file_is_what_the_source_makes(path: Path) -> None:
    """Each file is as `make integrations` leaves it."""
    text = path.read_text(encoding="utf-8")
    made = write.written(text, write.regions())
    assert text == made, f"{path.name} is not what source/shared.py makes: make integrations"


def test_every_file_has_its_regions() -> None:
    """A region that is removed from a file, or a marker that is lost, is noticed."""
    found = {
        path.name: [region["name"] for region in write.REGION.finditer(path.read_text())]
        for path in FILES
    }
    assert found == SHARING
    assert set(write.regions()) == {"requests", "failures", "rewards"}


def test_an_edit_in_a_region_is_replaced() -> None:
    """A line changed or lost within a region, or the header, comes back from the source; a line
    outside of every region stays.
    """
    text = (write.FOLDER / "verl_reward.py").read_text(encoding="utf-8")
    shared = write.regions()
    spoilt = text.replace("follows no redirect", "follows redirects").removeprefix(write.HEADER)
    spoilt = spoilt.replace('    """The reward of one answered row."""\n', "")
    assert spoilt.count("\n") == text.count("\n") - 2
    assert write.written(spoilt, shared) == text
    outside = text.replace("_SENDER = _Sender()\n", "_SENDER = _Sender()  # here\n")
    assert outside != text
    assert write.written(outside, shared) == outside


def test_a_file_without_regions_stays() -> None:
    """A file that shares nothing gets no header."""
    assert write.written('"""Alone."""\n', write.regions()) == '"""Alone."""\n'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("# --- shared: absent ---\n# --- end of shared ---\n", "no region called absent"),
        ("# --- shared: requests ---\n", "no line `# --- end of shared ---`"),
        (
            "# --- shared: requests ---\n# --- shared: failures ---\n# --- end of shared ---\n",
            "no line `# --- end of shared ---`",
        ),
    ],
)
def test_a_region_that_cannot_be_written_is_refused(text: str, sentence: str) -> None:
    """Nothing is written over a file whose markers are wrong."""
    with pytest.raises(ValueError, match=sentence):
        write.written(text, write.regions())

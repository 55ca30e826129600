"""What the trainer-side files share is written once, and the committed files are what it makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from smartsearch_sidecar.integrations import share

FILES = sorted(share.FOLDER.glob("*.py"))
SHARING = {
    "share.py": [],
    "ray_sidecars.py": ["requests"],
    "smartsearch_reward.py": ["requests", "failures", "rewards"],
    "verl_reward.py": ["requests", "failures", "rewards"],
    "verl_search_tool.py": ["requests", "failures"],
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_committed_file_is_what_the_source_makes(path: Path) -> None:
    """Each file is as `make integrations` leaves it."""
    text = path.read_text(encoding="utf-8")
    made = share.written(text, share.regions())
    assert text == made, f"{path.name} is not what `make integrations` makes of it"


def test_every_file_has_its_regions() -> None:
    """A region that is removed from a file, or a marker that is lost, is noticed."""
    found = {
        path.name: [region["name"] for region in share.REGION.finditer(path.read_text())]
        for path in FILES
    }
    assert found == SHARING
    assert set(share.regions()) == {"requests", "failures", "rewards"}


def test_an_edit_in_a_region_is_replaced() -> None:
    """A line changed or lost within a region, its first one too, comes back from the source; a line
    outside of every region stays.
    """
    text = (share.FOLDER / "verl_reward.py").read_text(encoding="utf-8")
    shared = share.regions()
    spoilt = text.replace("no redirect", "redirects").replace(
        "# --- shared: rewards (", "# --- shared: rewards ["
    )
    spoilt = spoilt.replace('    """The reward of one answered row."""\n', "")
    assert spoilt.count("\n") == text.count("\n") - 1
    assert len(set(spoilt.split("\n")) - set(text.split("\n"))) == 2
    assert share.written(spoilt, shared) == text
    outside = text.replace("_SENDER = _Sender()\n", "_SENDER = _Sender()  # here\n")
    assert outside != text
    assert share.written(outside, shared) == outside


def test_a_file_without_regions_stays() -> None:
    """A file that shares nothing is left alone."""
    assert share.written('"""Alone."""\n', share.regions()) == '"""Alone."""\n'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("# --- shared: absent ---\n# --- end of shared ---\n", "no region called absent"),
        ("# --- shared: requests ---\n", "no line `# --- end of shared ---`"),
        (
            "# --- shared: requests ---\n# --- end of shared ---\n# --- shared: failures ---\n",
            "no line `# --- end of shared ---`",
        ),
    ],
)
def test_a_region_that_cannot_be_written_is_refused(text: str, sentence: str) -> None:
    """Nothing is written over a file whose markers are wrong."""
    with pytest.raises(ValueError, match=sentence):
        share.written(text, share.regions())

"""The table of differences: every row has its test, the page shows exactly these rows."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from smartsearch_sidecar.config.model import PRESETS
from tests.parity.differences import BEGIN, DIFFERENCES, END, PAGE, markdown_table, with_table
from tests.parity.messages import ODD
from tests.parity.play import EXPLANATIONS

IDS = [row.id for row in DIFFERENCES]


def test_every_row_has_its_test_and_every_test_its_row() -> None:
    """Every row of the table has one test, and every test of a difference has one row."""
    tests = [
        node.name
        for path in Path(__file__).parent.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.name.startswith("test_differs_")
    ]
    assert Counter(tests) == Counter(row.test for row in DIFFERENCES)


def test_the_page_shows_exactly_these_rows() -> None:
    """The page's table is the one made of the rows (``python -m tests.parity.differences``)."""
    text = PAGE.read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1
    shown = text.partition(BEGIN)[2].partition(END)[0].strip()
    assert shown == markdown_table()
    assert with_table(text) == text


def test_the_table_is_made_and_renewed() -> None:
    """A page without the section gets it at its end; one with an old table gets the new one."""
    made = with_table("# A title\n")
    assert made.startswith("# A title\n\n## Where we differ")
    assert with_table(made.replace("| `methods` |", "| `old` |")) == made
    assert with_table(made + "\n## After\n") == made + "\n## After\n"


def test_the_training_rows_are_the_keys_that_differ() -> None:
    """Each key that the profiles preset apart is a row, and no other row is of training alone."""
    apart = {key for key, preset in PRESETS.items() if preset.training != preset.reference}
    assert {row.id for row in DIFFERENCES if row.profile == "training"} == apart


def test_what_excuses_a_difference_is_a_row() -> None:
    """The explanations of the sequences, and every odd message, belong to rows of the table."""
    assert len(IDS) == len(set(IDS))
    assert set(EXPLANATIONS) | {odd.row for odd in ODD.values()} <= set(IDS)


def test_a_row_is_one_line_of_a_table() -> None:
    """No cell breaks the table it stands in."""
    for row in DIFFERENCES:
        for cell in (row.reference, row.ours, row.why):
            assert "\n" not in cell
            assert "|" not in cell.replace("\\|", "")
            assert cell == cell.strip() != ""

"""``each``: a table in one test hides no case."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tests.fakes.each import each


def test_every_case_is_tried_and_those_that_fail_are_named() -> None:
    """A case that fails, by an assertion or in the way pytest fails, hides no other case."""
    tried: list[tuple[int, str, Path]] = []

    @each("number, word", [(1, "one"), (2, "two"), (3, "three"), (4, "four")])
    def played(number: int, tmp_path: Path, word: str) -> None:
        tried.append((number, word, tmp_path))
        assert number != 2
        if number == 3:
            pytest.fail("three")

    here = Path()
    with pytest.raises(BaseExceptionGroup, match="2 of 4 cases") as caught:
        played(tmp_path=here)
    words = [(1, "one"), (2, "two"), (3, "three"), (4, "four")]
    assert tried == [(*row, here) for row in words]
    notes = [exc.__notes__ for exc in caught.value.exceptions]
    assert notes == [["case (2, 'two')"], ["case (3, 'three')"]]
    assert list(inspect.signature(played).parameters) == ["tmp_path"]


def test_tables_over_tables_and_single_names() -> None:
    """Two tables are every pair; a row of one name is the value itself, though it be a tuple."""
    tried: list[tuple[object, int]] = []

    @each("value", [(1, 2), "x"], ids=["a pair", "a word"])
    @each("other", [3, 4])
    def played(value: object, other: int) -> None:
        tried.append((value, other))
        assert value != "x"

    with pytest.raises(BaseExceptionGroup) as caught:
        played()
    assert tried == [((1, 2), 3), ((1, 2), 4), ("x", 3), ("x", 4)]
    (failed,) = caught.value.exceptions
    assert failed.__notes__ == ["case a word"]
    assert isinstance(failed, BaseExceptionGroup)
    assert [exc.__notes__ for exc in failed.exceptions] == [["case 3"], ["case 4"]]


def test_a_table_without_cases_is_refused() -> None:
    """A test that would try nothing is no test."""
    with pytest.raises(AssertionError, match="without cases"):
        each("value", [])

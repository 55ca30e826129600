"""Faults in every order that a seed can draw, and one oracle (``hunter.py`` says which).

A failing seed prints its steps and what came of each. To try it alone:
``python -m tests.verdict.hunter 17``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.helper import FakeHelper
from tests.verdict import files, wire
from tests.verdict.hunter import ACTS, hunt_seeds
from tests.verdict.plan import (
    FATES,
    FAULTS,
    FILE_ACTS,
    FORMS,
    HISTORY_ACTS,
    HOWS,
    OFF,
    STOPPED_ACTS,
    plan,
)

QUICK_SEEDS = range(20)
SEEDS = range(1000, 1500)
PARTS = {"gap", "moved directory", "history cut", "latch removed", "read-only report"}
"""What is switched off of a class of faults, and not all of it."""


@pytest.fixture
async def helper() -> AsyncIterator[FakeHelper]:
    """One helper for all hunts of a test."""
    async with FakeHelper() as fake:
        yield fake


@pytest.mark.process
@pytest.mark.parametrize("first", QUICK_SEEDS[::5])
async def test_hunt(first: int, helper: FakeHelper, tmp_path: Path) -> None:
    """No receipt covers what is no answer, no latch is forgotten, and no stranger closes a run."""
    found = await hunt_seeds(range(first, first + 5), tmp_path, helper.url)
    assert not found, "\n\n".join(found)


@pytest.mark.process
@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_hunt_for_long(helper: FakeHelper, tmp_path: Path) -> None:
    """The same for 500 seeds."""
    found = await hunt_seeds(SEEDS, tmp_path, helper.url)
    assert not found, "\n\n".join(found)


def test_same_seed_same_steps() -> None:
    """A hunt can be repeated by its seed, and another seed is another hunt."""
    texts = [str(plan(seed)) for seed in QUICK_SEEDS]
    assert texts == [str(plan(seed)) for seed in QUICK_SEEDS]
    assert len(set(texts)) == len(QUICK_SEEDS)


def test_every_kind_of_fault_is_hunted() -> None:
    """The seeds of `make soak` have each kind of fault that is not switched off, and no other."""
    steps = [step for seed in SEEDS for step in plan(seed).steps]
    names = {step.name for step in steps}
    for step in steps:
        if "beside" in step.values:
            names.add(step.values["beside"][0])
        names |= {
            name
            for asks in step.values.get("asks", ())
            for ask in asks
            for name in (ask.get("how"), ask.get("fate"))
            if name is not None
        }
        if "form" in step.values:
            names.add(step.values["form"])
    kinds = {**FAULTS, **HOWS, **FATES, **FORMS}
    wanted = {name for name, fault in kinds.items() if fault.of not in OFF}
    assert names & set(kinds) == wanted
    assert names - set(kinds) == {"play", "reward", "checkpoint", "health"}


def test_whatever_a_plan_names_can_be_done() -> None:
    """Each name that may be drawn, also of a class that is switched off, is one of the hunter's."""
    assert set(FAULTS) <= set(ACTS)
    assert {*FILE_ACTS, *STOPPED_ACTS, *HISTORY_ACTS} == set(files.ACTS)
    spelled = {how for how in HOWS if how.startswith("/")} | {"repeats", "GET"}
    assert set(HOWS) - spelled <= set(wire.HOWS)
    assert OFF.keys() <= {fault.of for fault in (FAULTS | HOWS | FATES | FORMS).values()} | PARTS

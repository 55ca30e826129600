"""The reference and the sidecar, side by side over real HTTP, one caller at a time.

Every sequence gets a new pair of services in the reference profile, as does each case after one
that has ended a run. After each step both are asked how they stand; at the end the exported
directory is held against the reference's own. What differs is a row of ``differences.py`` or a
failure. A failing run prints its seed (set ``PARITY_SEED`` to it) and the shortest sequence that
fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.fakes.served import native_body
from tests.parity.bodies import DEEP_CALL, EDITS, QUERIES
from tests.parity.messages import ODD
from tests.parity.play import Sequence, Step, play, play_each
from tests.parity.retriever import FINGERPRINTS, SEARCHES, Plan
from tests.parity.sequences import EDGES, posted, queried, sequences
from tests.parity.sides import LIMIT, needs_reference
from tests.parity.wire import asking, message

pytestmark = [
    needs_reference,
    # The reference parses calls such as '\d' with the interpreter's warnings on.
    pytest.mark.filterwarnings("ignore::SyntaxWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

VECTORS = Path(__file__).parent.parent / "data" / "execute_bodies.jsonl"
SOAK_BODIES = 100_000
NEXT = Step(asking("next"))
TAG = re.compile(r"</?(?:search|result|answer|think)>", re.IGNORECASE)


def new_runner() -> asyncio.Runner:
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def play_generated(
    strategy: st.SearchStrategy[Sequence], examples: int, folder: Path, number: int
) -> int:
    """Plays that many generated sequences; returns how many steps they had."""
    played = 0

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def hold(sequence: Sequence) -> None:
        nonlocal played
        with tempfile.TemporaryDirectory(dir=folder) as place:
            played += runner.run(play(Path(place), sequence))

    try:
        with new_runner() as runner:
            hold()
    except BaseException as error:
        error.add_note(f"PARITY_SEED={number}")
        raise
    return played


def first_seed() -> int:
    """The seed that was asked for, or a new one."""
    return int(os.environ.get("PARITY_SEED") or random.SystemRandom().randrange(2**32))


@pytest.mark.timeout(400)  # a failure takes minutes to shrink
def test_generated_sequences_are_alike(tmp_path: Path) -> None:
    """Whatever one caller sends, both answer, count, latch and write down the same."""
    # What a sequence is made of is swept below, a test for each: these few are for its order.
    # How long each is, its seed decides: only that one step of each was played is sure.
    assert play_generated(sequences, 12, tmp_path, first_seed()) >= 12


async def test_every_answer_of_a_retriever(tmp_path: Path) -> None:
    """Each thing a retriever may bring is taken or refused alike, and so is the next query."""
    first, again = asking(" Ada\n"), Step(asking("again"))
    await play_each(
        tmp_path,
        {name: (Step(first, Plan(search=name)), again, again) for name in sorted(SEARCHES)},
    )


@pytest.mark.parametrize("when", ["before", "after"])
async def test_every_identity(tmp_path: Path, when: str) -> None:
    """An identity that changed, or cannot be told, before or after a search fails both alike."""
    a, c = Step(asking("a")), Step(asking("c"))
    cases = {name: (a, Step(asking("b"), Plan(**{when: name})), c) for name in sorted(FINGERPRINTS)}
    await play_each(tmp_path, cases)


async def test_every_message_at_the_edge(tmp_path: Path) -> None:
    """Each target, method, media type, header, size and framing is refused or served alike."""
    await play_each(tmp_path, {name: (EDGES[name], NEXT) for name in sorted(EDGES)})


async def test_every_kind_of_query(tmp_path: Path) -> None:
    """Each kind of query, at its bounds, is searched, refused or failed alike."""
    await play_each(
        tmp_path, {name: (Step(asking(QUERIES[name])), NEXT) for name in sorted(QUERIES)}
    )


async def test_every_slip_in_a_body(tmp_path: Path) -> None:
    """Each slip that a writer of JSON can make is read or refused alike."""
    cases = {}
    for old, new in EDITS:
        body = json.dumps(native_body("Ada Lovelace")).replace(old, new, 1).encode()
        cases[f"{old} to {new:.24}"] = (Step(message(body), body=body), NEXT)
    assert len(cases) == len(EDITS)
    await play_each(tmp_path, cases)


@pytest.mark.parametrize("limit", [1, 2, 5])
async def test_the_quota_ends_alike(tmp_path: Path, limit: int) -> None:
    """The call after the last one is refused and latches, also where it repeats a query."""
    steps = [Step(asking("the same")) for _ in range(limit + 2)]
    bad = Step(asking(""))
    await play(tmp_path, Sequence((*steps, bad, steps[0]), limit=limit))


async def test_a_latched_run_still_tells_bad_requests_apart(tmp_path: Path) -> None:
    """After the latch closed, every odd message and bad body is answered as before it."""
    steps = [Step(asking(""))]
    steps += [Step(odd.request, odd=name) for name, odd in ODD.items()]
    steps += [Step(asking(query)) for query in ("good", " ", "x" * 5000, "\ud800", "<think>")]
    deep = json.dumps({**native_body("x"), "call": DEEP_CALL}).encode()
    steps.append(Step(message(deep), body=deep))
    await play(tmp_path, Sequence(tuple(steps)))


def recorded() -> list[tuple[Step, dict[str, Any]]]:
    """The recorded bodies, and what is recorded of each."""
    found = []
    for line in VECTORS.read_text().splitlines():
        row = json.loads(line)
        body = json.dumps(row["body"]).encode()
        found.append((Step(message(body), body=body), row))
    return found


def answered(row: dict[str, Any]) -> bool:
    """Whether the reference takes the body, and its query has no tag to fail for."""
    return bool(row["accept"] and not TAG.search(row["query"]))


def some_of_each_kind(bodies: list[tuple[Step, dict[str, Any]]]) -> list[Step]:
    """Three bodies of each kind that is recorded, with a tag and without."""
    counted: Counter[tuple[str, bool]] = Counter()
    steps = []
    for step, row in bodies:
        kind = (row["why"], answered(row))
        counted[kind] += 1
        if counted[kind] <= 3:
            steps.append(step)
    return steps


# All 900 are read as recorded in tests/contract/test_execute.py, and played in the soak below.


async def test_recorded_bodies_that_are_taken(tmp_path: Path) -> None:
    """Bodies of each kind that the reference takes are answered alike, one run for them all."""
    steps = some_of_each_kind([(step, row) for step, row in recorded() if answered(row)])
    assert len(steps) > 40
    await play(tmp_path, Sequence(tuple(steps)))


async def test_recorded_bodies_that_are_refused(tmp_path: Path) -> None:
    """The bodies that the reference refuses, or fails for their tag, are told apart alike."""
    steps = some_of_each_kind([(step, row) for step, row in recorded() if not answered(row)])
    assert len(steps) > 120
    await play(tmp_path, Sequence(tuple(steps)))


@pytest.mark.soak
def test_soak_recorded_bodies_each_in_a_run_of_its_own(tmp_path: Path) -> None:
    """Each recorded body closes or leaves the latch of a new run for the same cause."""
    with new_runner() as runner:
        for step, _ in recorded():
            with tempfile.TemporaryDirectory(dir=tmp_path) as place:
                runner.run(play(Path(place), Sequence((step,))))


@pytest.mark.soak
def test_soak_generated_bodies(tmp_path: Path) -> None:
    """A hundred thousand generated bodies, and hostile sequences between them, are alike."""
    several = st.lists(st.one_of(posted(), posted(), queried()), min_size=1, max_size=9).map(tuple)
    bodies = st.builds(Sequence, several, st.just(LIMIT))
    number, played = first_seed(), 0
    while played < SOAK_BODIES:
        played += play_generated(bodies, 500, tmp_path, number)
        play_generated(sequences, 50, tmp_path, number)
        number += 1

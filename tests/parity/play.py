"""Plays a sequence to both services and holds each step of one against the other's.

A difference is either a row of ``differences.py`` whose explanation fits it exactly, or a failure.
Where an explained difference leaves the two runs in different states, the sequence ends there.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from tests.parity.messages import ODD, Odd, Outcome
from tests.parity.retriever import BAD_SEARCHES, GOOD, OTHER_SEARCHES, VALUE_ERRORS, Plan
from tests.parity.sides import LIMIT, Pair, State, pair
from tests.parity.wire import CAPABILITY, Said, exchange

HEADERS = ("content-type", "cache-control", "x-content-type-options")
IN_MEMORY = {"quota_exhausted", "identity_changed"}
METHOD_CAUSES = {"http_method_not_allowed", "http_unauthorized"}
DEPTH, WORDS = 64, 138  # beyond these nesting is ours to bound


@dataclass(frozen=True)
class Step:
    """One request. ``odd`` names an entry of ``messages.ODD`` that it is; ``body`` is what of it is
    to be read by the explanations.
    """

    request: bytes
    plan: Plan = GOOD
    body: bytes = b""
    odd: str | None = None

    def __repr__(self) -> str:
        what = f"odd={self.odd!r}" if self.odd else f"request={self.request!r}"
        return f"Step({what}, {self.plan})"


@dataclass(frozen=True)
class Sequence:
    """Steps for a new pair of services with this quota."""

    steps: tuple[Step, ...]
    limit: int = LIMIT


@dataclass(frozen=True)
class Moment:
    """What both said to one step, and how both runs stood after it."""

    step: Step
    was_open: bool
    searched: bool
    theirs: Said
    ours: Said
    their_state: State
    our_state: State
    our_cause: str | None

    @property
    def alike(self) -> bool:
        return (
            self.their_state == self.our_state
            and (self.theirs.status, self.theirs.code) == (self.ours.status, self.ours.code)
            and (self.theirs.status != 200 or self.theirs.value == self.ours.value)
            and (self.theirs.value is None or _head(self.theirs) == _head(self.ours))
        )

    def told(self) -> str:
        lines = [repr(self.step), "open before" if self.was_open else "latched before"]
        for name, said, state in [
            ("reference", self.theirs, self.their_state),
            ("ours", self.ours, self.our_state),
        ]:
            lines.append(f"{name}: {said.status} {said.code} {said.value!r:.300} {state}")
        return "\n  ".join([*lines, f"our latch: {self.our_cause}"])


def _head(said: Said) -> list[str | None]:
    return [said.headers.get(name) for name in HEADERS]


async def play(directory: Path, sequence: Sequence) -> int:
    """Plays a sequence; returns how many steps were played. Raises ``AssertionError``."""
    async with pair(directory, limit=sequence.limit) as both:
        moments = await _play(both, sequence.steps)
        await _hold_what_is_left(both, moments[-1])
        return len(moments)


async def play_each(directory: Path, cases: Mapping[str, tuple[Step, ...]]) -> None:
    """Plays cases one after another. A run that one has ended, or left in two states, is held
    against the reference's and followed by a new pair. A failure is noted with its cases.
    """
    left = list(cases.items())
    while left:
        place = directory / str(len(left))
        place.mkdir()
        played: list[str] = []
        try:
            async with pair(place) as both:
                await _hold_what_is_left(both, await _play_while_open(both, left, played))
        except BaseException as error:
            error.add_note(f"the last of these cases in one run: {played}")
            raise


async def _play_while_open(
    both: Pair, left: list[tuple[str, tuple[Step, ...]]], played: list[str]
) -> Moment:
    """The last moment of the case that ended the run, or of the last case."""
    while True:
        name, steps = left.pop(0)
        played.append(name)
        last = (await _play(both, steps))[-1]
        if not left or last.their_state.latched or last.their_state != last.our_state:
            return last


async def _play(both: Pair, steps: tuple[Step, ...]) -> list[Moment]:
    """The moments of the steps, up to one that leaves the two runs in different states."""
    moments = []
    for number, step in enumerate(steps, 1):
        moment = await _step(both, step)
        row = None if moment.alike else explained(moment)
        assert moment.alike or row, f"step {number} differs:\n  {moment.told()}"
        _hold_cause(moment)
        moments.append(moment)
        if moment.their_state != moment.our_state:
            break
    return moments


async def _hold_what_is_left(both: Pair, last: Moment) -> None:
    """Searches and files, unless the runs have ended in different states."""
    if last.their_state == last.our_state:
        _hold_searches(both)
        _hold_files(both.reference.files(), await both.ours.files())


async def differs(directory: Path, step: Step, row: str) -> Moment:
    """One step to a new pair: it must not be alike, and be explained by exactly this row."""
    async with pair(directory) as both:
        moment = await _step(both, step)
    assert not moment.alike, f"no difference:\n  {moment.told()}"
    assert explained(moment) == row, moment.told()
    return moment


async def _step(both: Pair, step: Step) -> Moment:
    before = both.reference.state()
    both.play(step.plan)
    half_close = step.odd is not None and ODD[step.odd].half_close
    theirs = await exchange(both.reference.port, step.request, half_close=half_close)
    their_state = both.reference.state()
    ours = await exchange(both.ours.port, step.request, half_close=half_close)
    both.rest()
    our_state = await both.ours.state()
    cause = both.ours.cause
    return Moment(
        step,
        not before.latched,
        their_state.searches > before.searches,
        theirs,
        ours,
        their_state,
        our_state,
        None if cause is None else str(cause["cause"]),
    )


def _hold_cause(moment: Moment) -> None:
    """An attempt that failed has, with us, the cause that its plan calls for; without a search it
    was a tag in the query.
    """
    if not moment.was_open or moment.our_state.cause != "attempt failed":
        return
    expected = expected_cause(moment.step.plan) if moment.searched else "retrieval_failed"
    assert moment.our_cause == expected, moment.told()


def expected_cause(plan: Plan) -> str:
    """What our latch names for a search that failed under ``plan``."""
    if plan.after != "same":
        return "retrieval_failed" if plan.after.startswith("raises") else "identity_changed"
    if isinstance(plan.search, tuple):
        return "document_invalid"
    if plan.search in BAD_SEARCHES:
        return BAD_SEARCHES[plan.search][0]
    row, _ = OTHER_SEARCHES[plan.search]
    return "retrieval_failed" if row == "provider_exit" else "document_invalid"


def _hold_searches(both: Pair) -> None:
    assert both.reference.retriever.searches == both.ours.retriever.searches


def _hold_files(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """The exported files are the reference's own, but for the one of row ``failures_on_disk``."""
    rejected = ours.get("transport-rejected.json")
    if rejected is not None and "transport-rejected.json" not in theirs:
        assert rejected["code"] in IN_MEMORY, rejected
        assert not rejected["retrieval_attempt_consumed"]
        del ours["transport-rejected.json"]
    assert list(theirs) == list(ours)
    for name, value in theirs.items():
        assert value == ours[name], f"{name} differs"


# --- explanations ---------------------------------------------------------------------------------


def explained(moment: Moment) -> str | None:
    """The row of the table that says exactly this, if there is one."""
    if moment.step.odd is not None:
        odd = ODD[moment.step.odd]
        return odd.row if _as_the_table_says(moment, odd) else None
    return next((row for row, fits in EXPLANATIONS.items() if fits(moment)), None)


def _as_the_table_says(moment: Moment, odd: Odd) -> bool:
    return _fits(
        odd.theirs, moment, moment.theirs, moment.their_state, moment.their_state.cause
    ) and (_fits(odd.ours, moment, moment.ours, moment.our_state, moment.our_cause))


def _fits(outcome: Outcome, moment: Moment, said: Said, state: State, cause: str | None) -> bool:
    if outcome.status == 200 and not moment.was_open:
        return _said(said, 502, "retrieval_failed")
    if outcome.status == 200 and said.code == "quota_exhausted":
        return said.status == 429 and state.latched
    if moment.was_open:
        latched = outcome.cause is not None
        if latched != state.latched or (latched and cause != outcome.cause):
            return False
    if outcome.unheard and said.status is None:
        return True
    return (said.status, said.code) == (outcome.status, outcome.code)


def _methods(moment: Moment) -> bool:
    return (
        (moment.theirs.status, moment.theirs.code) == (501, None)
        and moment.ours.status in (401, 405)
        and (moment.their_state == moment.our_state or moment.our_cause in METHOD_CAUSES)
    )


def _utf8_only(moment: Moment) -> bool:
    return (
        _said(moment.ours, 400, "invalid_request")
        and not _plain_utf8(moment.step.body)
        and (not moment.was_open or moment.our_cause == "http_invalid_request")
    )


def _plain_utf8(body: bytes) -> bool:
    if json.detect_encoding(body) != "utf-8":
        return False
    try:
        body.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _nesting(moment: Moment) -> bool:
    if not _said(moment.ours, 400, "invalid_request"):
        return False
    body = moment.step.body
    deep = body.count(b"[") + body.count(b"{") > DEPTH
    if deep and moment.theirs.status == 400:  # only the cause differs: both refuse
        return moment.our_cause == "http_invalid_request"
    words = re.findall(r"\w+|[^\w\s]", _call(body))
    return len(words) > WORDS and moment.theirs.status in (200, 502)


def _call(body: bytes) -> str:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    return str(value.get("call", "")) if isinstance(value, dict) else ""


def _provider_value_error(moment: Moment) -> bool:
    plan = moment.step.plan
    raised = "raises ValueError" in (plan.before, plan.after)
    return (
        _said(moment.theirs, 400, "invalid_request")
        and _said(moment.ours, 502, "retrieval_failed")
        and (raised or _no_json(plan.search))
    )


def _no_json(search: str | tuple[Mapping[str, Any], ...]) -> bool:
    """Whether documents have no form in JSON and UTF-8."""
    if isinstance(search, str):
        return search in VALUE_ERRORS
    scores = [document.get("score") for document in search]
    texts = "".join(str(document.get(key, "")) for document in search for key in ("id", "contents"))
    return any(isinstance(score, float) and not math.isfinite(score) for score in scores) or any(
        "\ud800" <= character <= "\udfff" for character in texts
    )


def _other_search(row: str) -> Callable[[Moment], bool]:
    names = {name for name, (own, _) in OTHER_SEARCHES.items() if own == row}
    status = None if row == "provider_exit" else 200
    return lambda moment: (
        moment.step.plan.search in names
        and moment.theirs.status == status
        and _said(moment.ours, 502, "retrieval_failed")
    )


def _said(said: Said, status: int, code: str) -> bool:
    return (said.status, said.code) == (status, code)


def _capability_elsewhere(moment: Moment) -> bool:
    told = _said(moment.theirs, 401, "unauthorized") and _said(moment.ours, 401, "unauthorized")
    spelled = unquote(unquote(moment.step.request.decode("latin-1"))).lower()
    latched = not moment.was_open or moment.our_cause == "http_unauthorized"
    return told and CAPABILITY.lower() in spelled and latched


EXPLANATIONS: dict[str, Callable[[Moment], bool]] = {
    "capability_elsewhere": _capability_elsewhere,
    "methods": _methods,
    "utf8_only": _utf8_only,
    "nesting": _nesting,
    "provider_value_error": _provider_value_error,
    **{row: _other_search(row) for row in {row for row, _ in OTHER_SEARCHES.values()}},
}

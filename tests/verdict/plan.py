"""What the hunter will do, drawn from a seed: the same seed gives the same steps.

A hunt has one of three flavours. ``harmless``: nothing in it may close the run, and at its end the
run is healthy. ``judged``: rewards judge the blocks of every rollout, so a failure may lie where
the daemon cannot see it. ``unjudged``: no rewards, so that everything that fails is what the daemon
itself can know.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.verdict.wire import CROWDS, STRANGERS

FLAVOURS = ("harmless", "judged", "judged", "unjudged", "unjudged")

OFF: dict[str, str] = {
    "moved directory": "a run whose directory is gone before its first receipt is begun anew by "
    "--resume, which is documented",
    "read-only report": "docs/formats.md: a disk that takes no write keeps no latch, and with "
    "on_unclean_restart = report the next start goes on",
}
"""Classes of faults that are known and not mended, each with its reason: no hunt has them."""


@dataclass(frozen=True)
class Step:
    """One thing the hunter does, with JSON values: so that a list of them can be printed."""

    name: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name} {json.dumps(self.values)}" if self.values else self.name


Draw = Callable[[Random], dict[str, Any]]


@dataclass(frozen=True)
class Fault:
    """How one kind of fault is drawn.

    ``harmless``: it must not close the run. ``unseen``: the daemon cannot know of it, so only a
    judged rollout shows it. ``beside``: it may strike while rollouts play; else between them only.
    """

    of: str
    draw: Draw = lambda rng: {}
    harmless: bool = False
    unseen: bool = False
    beside: bool = True


FILE_ACTS = (
    *("directory removed", "directory renamed", "journal removed", "segment unlinked"),
    *("segment replaced", "segment truncated", "segment appended to", "segment overwritten"),
    *("claim removed", "claim changed", "claim replaced", "lock removed", "lock replaced"),
    *("room removed", "room replaced", "latch written by another"),
)
STOPPED_ACTS = (
    *("journal removed", "segment unlinked", "segment overwritten", "segment cut short"),
    *("claim removed", "claim changed", "latch removed", "room removed", "lock removed"),
)
HISTORY_ACTS = ("history cut", "put back")
MOVED = ("directory removed", "directory renamed")


def _file_act(rng: Random) -> dict[str, Any]:
    acts = [act for act in FILE_ACTS if "moved directory" not in OFF or act not in MOVED]
    return {"act": rng.choice(acts), "place": rng.randint(1, 60)}


def _full(rng: Random) -> dict[str, Any]:
    left = rng.choice((0, 0, 60, 700, 3000))
    return {"disk": "full", "left": left, "names": rng.random() < 0.5}


def _restart(rng: Random) -> dict[str, Any]:
    """How long it is down, and what is done to its files meanwhile."""
    values: dict[str, Any] = {"down": round(rng.uniform(0, 0.1), 3)}
    if rng.random() < 0.3:
        values["clock"] = rng.choice((-86_400, -60, 3600))
    return values


def _restart_changed(rng: Random) -> dict[str, Any]:
    acts = [act for act in STOPPED_ACTS if act not in OFF]
    values = {**_restart(rng), "act": rng.choice(acts), "place": rng.randint(1, 60)}
    if "history cut" not in OFF and rng.random() < 0.3:
        values["act"] = rng.choice(HISTORY_ACTS)
    return values


FAULTS: dict[str, Fault] = {
    "file": Fault("files", _file_act),
    "endpoints removed": Fault("files", harmless=True),
    "disk full": Fault("disk", _full),
    "disk fails": Fault("disk", lambda rng: {"disk": "failing"}),
    "disk read-only": Fault("disk", lambda rng: {"disk": "read_only"}),
    "disk hangs": Fault("disk", lambda rng: {"seconds": rng.choice((0.3, 1.8))}),
    "disk slow": Fault(
        "disk", lambda rng: {"disk": "slow", "seconds": rng.choice((0.01, 0.05))}, harmless=True
    ),
    "clock steps": Fault(
        "clock", lambda rng: {"clock": rng.choice((-86_400, -600, 5, 3600))}, harmless=True
    ),
    "stands still": Fault(
        "clock", lambda rng: {"seconds": round(rng.uniform(0.02, 0.2), 3)}, harmless=True
    ),
    "stands still long": Fault("stall", lambda rng: {"seconds": round(rng.uniform(1.1, 2.0), 3)}),
    "stopped": Fault("signals", _restart, harmless=True, beside=False),
    "stopped under load": Fault("signals", _restart, unseen=True),
    "stopped twice": Fault("signals", _restart, unseen=True),
    "stopped and killed": Fault(
        "signals",
        lambda rng: {**_restart(rng), "after": round(rng.uniform(0, 0.05), 3)},
        unseen=True,
    ),
    "killed": Fault("signals", _restart),
    "killed while it stands still": Fault("signals", _restart),
    "changed while stopped": Fault("files", _restart_changed, beside=False),
    "changed after a kill": Fault("files", _restart_changed, beside=False),
    "second process": Fault("processes", harmless=True, beside=False),
    "closed by hand": Fault("operator"),
    "stranger": Fault(
        "strangers", lambda rng: {"kind": rng.choice(sorted(STRANGERS))}, harmless=True
    ),
    "crowd": Fault("crowd", lambda rng: {"kind": rng.choice(sorted(CROWDS))}, harmless=True),
    "reward cut": Fault(
        "clients",
        lambda rng: {"after": round(rng.uniform(0, 0.03), 3)},
        harmless=True,
        beside=False,
    ),
}
"""What strikes at a time of its own."""

HOWS: dict[str, Fault] = {
    "in pieces": Fault("clients", harmless=True),
    "slow reader": Fault("clients", harmless=True),
    "twice": Fault("clients", harmless=True),
    "shuts": Fault("clients"),
    "half": Fault("clients"),
    "stalled": Fault("clients"),
    "leaves at once": Fault("clients"),
    "leaves soon": Fault("clients"),
    "resets": Fault("clients"),
    "repeats": Fault("repeat", harmless=True),
    "GET": Fault("spelling"),
    "/execute/": Fault("spelling"),
    "//execute": Fault("spelling"),
    "/%65xecute": Fault("spelling"),
    "/search": Fault("clients"),
    "/execute?a=1": Fault("clients"),
}
"""How a rollout asks, where not plainly."""

FATES: dict[str, Fault] = {
    "delays": Fault("proxies", harmless=True),
    "asks twice": Fault("proxies", harmless=True),
    "cuts the request": Fault("proxies", unseen=True),
    "cuts the answer": Fault("proxies", unseen=True),
    "loses the answer": Fault("proxies", unseen=True),
    "gives up": Fault("proxies", unseen=True),
    "says 502": Fault("proxies", unseen=True),
    "refuses": Fault("proxies", unseen=True),
}
"""What becomes of a request in the proxy; without one it takes the direct way."""

SWAPPED = "answer of another query"
FORMS: dict[str, Fault] = {
    "glued by a space": Fault("form", unseen=True),
    "cut within a block": Fault("form", unseen=True),
    SWAPPED: Fault("form", unseen=True),
}
"""What the trainer's own code makes of a rollout's text, where not what it should."""


@dataclass(frozen=True)
class Plan:
    """A whole hunt: the keys of its daemon's configuration, and its steps."""

    seed: int
    flavour: str
    passage_bytes: int
    keys: Mapping[str, Any]
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        head = f"seed {self.seed}, {self.flavour}, {json.dumps(dict(self.keys))}"
        return "\n".join([head, *(f"{at:2}. {step}" for at, step in enumerate(self.steps, 1))])


def plan(seed: int) -> Plan:
    """The hunt of a seed."""
    return _Drawing(seed).plan()


class _Drawing:
    """One plan while it is drawn."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._rng = Random(f"hunt {seed}")
        self._flavour = self._rng.choice(FLAVOURS)
        self._asked = 0
        # How many faults that are not harmless are still to come. Often one: another one that is
        # found would hide that it was not.
        self._hard = 0 if self._flavour == "harmless" else self._rng.choice((1, 1, 1, 2, 3))

    def plan(self) -> Plan:
        rng = self._rng
        steps: list[Step] = []
        episodes = rng.randint(2, 4)
        for episode in range(episodes):
            steps += self._episode(episode)
        if rng.random() < 0.5:
            steps += [Step("stopped", _restart(rng)), Step("checkpoint", {"step": episodes})]
        fat = rng.random() < 0.1
        keys = self._keys()
        named = [name for step in steps for name in (step.name, *step.values.get("beside", ()))]
        if "read-only report" in OFF and "disk read-only" in named:
            keys.pop("run__on_unclean_restart", None)
        return Plan(self._seed, self._flavour, 60_000 if fat else 0, keys, tuple(steps))

    def _keys(self) -> dict[str, Any]:
        rng = self._rng
        # Under load of other work a harmless hunt must not meet a deadline; others meet theirs.
        keys: dict[str, Any] = {"ledger__segment_mib": 1, "server__connections_max": 64}
        if self._flavour != "harmless":
            keys |= {"execute__deadline_seconds": 1.0, "server__body_seconds": 1.0}
            keys |= {"ledger__stall_seconds": 1}
        elif "repeat" not in OFF:
            keys["execute__on_undelivered"] = "replay"
        if self._flavour == "judged":
            keys["execute__on_undelivered"] = rng.choice(("latch", "record"))
            keys["run__on_unclean_restart"] = rng.choice(("latch", "report"))
        return keys

    def _episode(self, episode: int) -> list[Step]:
        rng = self._rng
        steps = [self._play()]
        if rng.random() < 0.4:
            steps += self._between()
        if self._struck(steps) and rng.random() < 0.6:
            again = rng.choice(("stopped", "killed", "changed while stopped"))
            steps.append(Step(again, FAULTS[again].draw(rng)))
        if self._flavour != "unjudged":
            values: dict[str, Any] = {"together": rng.random() < 0.5, "again": rng.random() < 0.3}
            steps.append(Step("reward", values))
        if rng.random() < 0.2:
            steps += self._between()
        if rng.random() < 0.25:
            steps.append(Step("health"))
        if rng.random() < 0.8:
            steps.append(Step("checkpoint", {"step": episode}))
        return steps

    def _between(self) -> list[Step]:
        found = self._draw(FAULTS)
        return [] if found is None else [Step(found, FAULTS[found].draw(self._rng))]

    def _struck(self, steps: list[Step]) -> bool:
        """Whether disk or files were: a restart then has something to forget."""
        names = [*(step.name for step in steps), *steps[0].values.get("beside", ())[:1]]
        kinds = [FAULTS[name] for name in names if name in FAULTS]
        return any(kind.of in ("disk", "files") and not kind.harmless for kind in kinds)

    def _allowed(self, fault: Fault, *, hard: bool) -> bool:
        if fault.of in OFF or fault.harmless is hard:
            return False
        if self._flavour == "unjudged" and fault.unseen:
            return fault.of == "signals" and "gap" not in OFF
        return True

    def _draw(self, table: Mapping[str, Fault], *, beside: bool = False) -> str | None:
        """A kind of the table that this hunt may have, its class drawn first."""
        hard = self._hard > 0 and self._rng.random() < 0.6
        kinds: dict[str, list[str]] = {}
        for name, fault in table.items():
            if self._allowed(fault, hard=hard) and (fault.beside or not beside):
                kinds.setdefault(fault.of, []).append(name)
        if not kinds:
            return None
        self._hard -= hard
        return self._rng.choice(kinds[self._rng.choice(sorted(kinds))])

    def _play(self) -> Step:
        """Rollouts side by side, and perhaps a fault while they play."""
        rng = self._rng
        values: dict[str, Any] = {}
        if rng.random() < 0.5 and (found := self._draw(FAULTS, beside=True)) is not None:
            values["after"] = round(rng.uniform(0, 0.1), 3)
            values["beside"] = [found, FAULTS[found].draw(rng)]
        turns = rng.randint(1, 4)
        asks = [[self._ask() for _ in range(turns)] for _ in range(rng.randint(1, 4))]
        values["asks"] = asks
        if self._flavour == "judged" and (form := self._draw(FORMS)) is not None:
            values["form"] = form
            if form != SWAPPED:  # it hides a failure only where there is one
                unseen = sorted(fate for fate, fault in FATES.items() if fault.unseen)
                rng.choice(asks)[-1]["fate"] = rng.choice(unseen)
        return Step("play", values)

    def _ask(self) -> dict[str, Any]:
        rng = self._rng
        # Every third is asked by several rollouts, at once or later; some are the policy's slips.
        self._asked += rng.random() < 0.67
        milliseconds = rng.choice((0, 0, 0, 5, 40))
        slip = rng.random() < 0.04
        values: dict[str, Any] = {"query": "" if slip else f"q{self._asked} {milliseconds}"}
        if rng.random() < 0.12 and (how := self._draw(HOWS)) is not None:
            values["how"] = how
        elif rng.random() < 0.15 and (fate := self._draw(FATES)) is not None:
            values["fate"] = fate
        return values

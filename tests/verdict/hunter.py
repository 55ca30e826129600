"""One hunt: a real daemon, a trainer with its rollouts, faults, and one oracle.

The trainer keeps for each rollout what its client put into it, and whether all of that is what the
daemon answered to that very query. It trains on a rollout once it has a reward, or has played where
no rewards are asked for. What must hold:

- **Every receipt accepted covers only answers that reached their client or were judged.** At each
  201 all that was trained since the last one consists of answers.
- A run that has once said that it failed never says anything else, over all restarts.
- An error that the daemon told a rollout, or a file of the run that is not what it was, is a
  failure: no later word of the run is healthy.
- What is harmless closes no run.
- What a client was told is in the journal, and the journal is whole where no file was touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from smartsearch_sidecar.ledger.receipt import CheckpointReceipt
from smartsearch_sidecar.ledger.recovery import Ending
from smartsearch_sidecar.ledger.verify import verify
from tests.fakes import rollouts
from tests.fakes.forked import Forked
from tests.fakes.helper import FakeHelper
from tests.fakes.process import command
from tests.fakes.rewarded import QUESTION, TRUTH, reward_keys
from tests.fakes.until import until
from tests.verdict import files
from tests.verdict.hunted import passages
from tests.verdict.plan import OFF, SWAPPED, Plan, Step, plan
from tests.verdict.wire import HOST, Address, Came, Proxy, call, request, search, strangers
from tests.web.rawclient import RawClient

START_SECONDS = 30.0
END_SECONDS = 40.0
TRAINER_SECONDS = 20.0
SETTLE_SECONDS = 2
HUNTS_AT_ONCE = 4
HISTORY = {"history cut", "moved directory"}
"""Classes that a resume can only see by the last receipt of the trainer."""
NOBODY: Address = (HOST, 1)


class Violation(AssertionError):
    """The oracle does not hold."""


@dataclass
class Rollout:
    """What one rollout holds, and the queries whose blocks are no answers to them."""

    number: int
    turns: list[rollouts.Turn] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    form: str | None = None

    def text(self) -> str:
        """As the reward sees it."""
        # No two rollouts are the same text: else the first one's score would be given again.
        ending = rollouts.final("Paris").replace("clear", f"clear to {self.number}")
        text = rollouts.rollout(QUESTION, self.turns, ending)
        if self.form == "glued by a space":
            text = text.replace("</search><result>", "</search> <result>")
        elif self.form == "cut within a block":
            text = text[: text.rindex("<result>") + 30]
        return text


@dataclass
class Trainer:
    """What was trained, and what the run has said of itself."""

    judged: bool
    played: list[Rollout] = field(default_factory=list)
    trained: list[Rollout] = field(default_factory=list)
    told: Counter[tuple[str, str]] = field(default_factory=Counter)
    arrived: Counter[str] = field(default_factory=Counter)
    receipts: list[tuple[dict[str, Any], Counter[str]]] = field(default_factory=list)
    """Each with the queries whose answers had arrived by then."""
    failed: str | None = None
    """What said or showed that the run has failed: it has, for good."""
    broken: str | None = None
    """What was done to the files of a process that serves: it must find that before it is asked."""

    def said_healthy(self, where: str) -> None:
        """Raises where the run has failed before."""
        if self.failed is not None:
            raise Violation(f"{where}, although {self.failed}")

    def gate_opened(self, where: str) -> None:
        """The gate has looked: it may have overlooked nothing either."""
        self.said_healthy(where)
        if self.broken is not None:
            raise Violation(f"{where}, although {self.broken} while it was served")

    def must_have_failed(self, why: str) -> None:
        """Keeps the first reason."""
        self.failed = self.failed or why

    def accepted(self, receipt: dict[str, Any]) -> None:
        """Holds a 201 against all that was trained."""
        self.gate_opened(f"the checkpoint of step {receipt['step']} was accepted")
        wrong = [rollout for rollout in self.trained if rollout.wrong]
        if wrong:
            blocks = {one.number: [turn.text[:60] for turn in one.turns] for one in wrong}
            raise Violation(f"the receipt covers what is no answer: {blocks}")
        self.trained.clear()
        self.receipts.append((receipt, self.arrived.copy()))


class Hunt:
    """A plan, carried out. ``log`` says what came of each step."""

    def __init__(self, drawn: Plan, folder: Path, helper_url: str) -> None:
        self.plan = drawn
        self.directory = folder / "run"
        self.trainer = Trainer(judged=drawn.flavour != "unjudged")
        self.harmless = drawn.flavour == "harmless"
        self.patience = 30.0 if self.harmless else 1.5
        self.log: list[str] = []
        self.untouched = True
        """No file of the run was changed, so its history must be whole."""
        self._folder = folder
        self._control = folder / "control"
        self._says: dict[str, Any] = {"disk": "ok", "clock": 0}
        self._began = time.monotonic()
        self._ways = (
            f"/hunt-{drawn.seed}-execute-{'x' * 32}",
            f"/hunt-{drawn.seed}-internal-{'i' * 32}",
        )
        self._helper_url = helper_url
        self._process: Forked | None = None
        self._output = folder / "run.log"
        self._address: Address = NOBODY
        self._rollouts = 0
        self._open: list[RawClient] = []
        self._proxy = Proxy(lambda: self._address)
        self._lives = 0

    async def run(self) -> None:
        """Carries all steps out. Raises ``Violation`` with the steps and the log."""
        try:
            async with self._proxy.serving():
                await self._begin()
                for step in self.plan.steps:
                    await self.act(step)
                await self._end()
        except Exception as exc:
            said = self._output.read_text(errors="replace")[-2000:]
            story = "\n".join([f"{exc}", "", str(self.plan), "", *self.log, "", said])
            raise Violation(story) from exc
        finally:
            for client in self._open:
                client.close()
            if self._process is not None:
                self._process.kill()

    async def act(self, step: Step) -> None:
        """One step."""
        self.note(f"- {step.name}")
        await ACTS[step.name](self, **step.values)

    def note(self, what: str) -> None:
        """A line of the log, with the seconds since the beginning."""
        self.log.append(f"{time.monotonic() - self._began:6.2f} {what}")

    # --- the daemon -------------------------------------------------------------------------------

    def _keys(self) -> dict[str, Any]:
        execute, internal = self._ways
        keys = {
            **self.plan.keys,
            "server__execute_capability": execute[1:],
            "server__internal_capability": internal[1:],
            "retrieval__bm25__index": "never-opened",
        }
        if self.trainer.judged:
            keys |= reward_keys(self._folder, self._helper_url)
        return keys

    async def _begin(self) -> None:
        self.control()
        if not await self._start():
            raise Violation("the run did not begin")

    def control(self, **says: Any) -> None:
        """What disk and clock do from now on."""
        self._says |= says
        beside = self._control.with_suffix(".new")
        beside.write_text(json.dumps(self._says))
        beside.rename(self._control)

    def _spawn(self, *, at_rest: bool = False) -> Forked:
        """A new process on the run's directory; ``at_rest``: the trainer stood still meanwhile."""
        more: dict[str, Any] = {}
        if self._lives and at_rest and "gap" not in OFF:
            more["trainer_stopped"] = True
        if self._lives and self.trainer.receipts and not OFF.keys() >= HISTORY:
            more["receipt"] = json.dumps(self.trainer.receipts[-1][0])
        order = {
            "more": more,
            "directory": str(self.directory),
            "keys": self._keys(),
            "control": str(self._control),
            "passage_bytes": self.plan.passage_bytes,
            "resume": self._lives > 0,
        }
        return command(
            "tests.verdict.hunted", json.dumps(order), folder=self._folder, out=self._output
        )

    async def _start(self, *, at_rest: bool = False) -> bool:
        """Starts or resumes; whether it serves."""
        process = self._process = self._spawn(at_rest=at_rest)
        self._lives += 1
        path = self.directory / "endpoints.json"

        def ready() -> bool:
            with contextlib.suppress(FileNotFoundError):
                return bool(json.loads(path.read_bytes())["pid"] == process.pid)
            return False

        await until(
            lambda: ready() or process.poll() is not None, seconds=START_SECONDS, pause=0.01
        )
        if process.poll() is not None:
            self.note(f"refused to serve, exit {process.poll()}")
            return False
        url = urlsplit(json.loads(path.read_bytes())["sandbox_url"])
        self._address = (HOST, int(url.port or 0))
        return True

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the daemon, where it still runs."""
        if self._process is not None:
            self._process.send_signal(number)

    async def ended(self) -> None:
        """Waits for its end, and holds the exit code against what it has said."""
        process = self._process
        if process is None:
            return
        await until(lambda: process.poll() is not None, seconds=END_SECONDS, pause=0.01)
        code, self._process, self._address = process.poll(), None, NOBODY
        self.trainer.broken = None
        self.note(f"ended, exit {code}")
        if code == 4:
            self.trainer.must_have_failed("the process ended with exit code 4")
        elif code == 0:
            self.trainer.said_healthy("the process ended with exit code 0")
        elif code != -signal.SIGKILL:
            raise Violation(f"the process ended with {code}")
        self._must_be_good(code == 0, "the process of a good run ended with", code)

    async def resume(self, *, at_rest: bool, down: float = 0.0, clock: float | None = None) -> None:
        """Serves the run again, as a supervisor does; once more where the disk kept it from it."""
        await asyncio.sleep(down)
        if clock is not None:
            self.control(clock=clock)
        if await self._start(at_rest=at_rest):
            return
        self._process = None
        if self._says["disk"] != "ok":
            self.control(disk="ok")
            if await self._start(at_rest=at_rest):
                return
            self._process = None
        self._must_be_good(False, "a good run was not resumed", self.log[-1])

    # --- rollouts and trainer ---------------------------------------------------------------------

    async def play(
        self,
        asks: list[list[dict[str, Any]]],
        after: float = 0.0,
        beside: tuple[str, dict[str, Any]] | None = None,
        form: str | None = None,
    ) -> None:
        """Rollouts side by side, and what strikes meanwhile."""

        async def strike() -> None:
            if beside is not None:
                await asyncio.sleep(after)
                await self.act(Step(*beside))

        begun = []
        for turns in asks:
            self._rollouts += 1
            begun.append(self._play(Rollout(self._rollouts, form=form), turns))
        await asyncio.gather(strike(), *begun)

    async def _play(self, rollout: Rollout, asks: list[dict[str, Any]]) -> None:
        for asked in asks:
            await self._turn(rollout, **asked)
        if rollout.form == SWAPPED and len(rollout.turns) > 1:
            first, second = rollout.turns[0], rollout.turns[1]
            if first.text != second.text:
                rollout.turns[1] = rollouts.Turn(second.query, first.text)
                rollout.wrong.append(second.query)
        played = self.trainer.played if self.trainer.judged else self.trainer.trained
        played.append(rollout)

    async def _turn(
        self, rollout: Rollout, query: str, how: str = "plain", fate: str | None = None
    ) -> None:
        path = self._ways[0]

        async def connect() -> RawClient:
            if fate is not None:
                return await self._proxy.connect(fate)
            return await RawClient.connect(self._address)

        came = await search(path, query, how, connect, self.patience)
        rollout.turns.append(rollouts.Turn(query, came.text))
        if came.status == 200:
            self._answered(query, came)
            self.trainer.arrived[query] += 2 if "twice" in f"{how} {fate}" else 1
            return
        self._must_be_good(False, "a rollout of a good run got no answer", came.text)
        rollout.wrong.append(query)
        self.note(f"rollout {rollout.number}, {query!r}: {came.text[:60]}")
        if came.status is not None and fate is None:
            self.trainer.must_have_failed(f"a rollout was told {came.text!r}")

    def _answered(self, query: str, came: Came) -> None:
        expected = "invalid query"
        if query:
            found = passages(query, self.plan.passage_bytes)
            expected = "\n\n".join(one["contents"] for one in found)
            self.trainer.told[query, expected] += 1
        if came.value != {"result": expected, "output": "", "error": ""}:
            raise Violation(f"{query!r} was answered with {came.value!r}")

    async def reward(self, together: bool, again: bool) -> None:
        """All that was played is scored; ``again`` is the pinned trainer's second pass."""
        played, self.trainer.played = self.trainer.played, []
        if not played:
            return
        items = [{"solution_str": one.text(), "ground_truth": TRUTH} for one in played]
        parts: list[tuple[list[Rollout], str, Any]] = [(played, "/reward/batch", {"items": items})]
        if not together:
            each = zip(played, items, strict=True)
            parts = [([rollout], "/reward", item) for rollout, item in each]
        for some, path, value in parts:
            first = await self._rewarded(path, value)
            if first is None:
                continue
            if again and await self._rewarded(path, value) not in (first, None):
                raise Violation("the same rollouts were given another reward")
            self.trainer.trained += some

    async def _rewarded(self, path: str, value: Any) -> Any:
        came = await self.internal(path, value)
        if came.status == 200:
            given = came.value.get("rewards", [came.value])
            return [(one["split"], one["number"], one["reward"]) for one in given]
        self._must_be_good(False, "a good run gave no reward", came.value)
        if came.status is not None:
            self.trainer.must_have_failed(f"a reward was refused with {came.text!r}")
        return None

    async def reward_cut(self, after: float) -> None:
        """The trainer leaves while its rollouts are scored, and then asks for them again."""
        if not self.trainer.played or not self.trainer.judged:
            return
        items = [{"solution_str": one.text(), "ground_truth": TRUTH} for one in self.trainer.played]
        data = request(f"{self._ways[1]}/reward/batch", {"items": items})
        with contextlib.suppress(OSError):
            client = await RawClient.connect(self._address)
            await client.send(data)
            await asyncio.sleep(after)
            client.close()

    async def internal(self, path: str, value: Any = None) -> Came:
        """One request of the trainer's."""
        method = "GET" if value is None else "POST"
        data = request(self._ways[1] + path, value, method=method)
        came = await call(self._address, data, TRAINER_SECONDS)
        self.note(f"{path.partition('?')[0]}: {came.status} {_brief(came.value)}")
        return came

    async def checkpoint(self, step: int) -> None:
        """Asks the gate."""
        wanted: dict[str, Any] = {"step": step}
        if "gap" not in OFF:
            wanted["allow_idle"] = True
        came = await self.internal(f"/checkpoints?settle={SETTLE_SECONDS}", wanted)
        if came.status == 201:
            self.trainer.accepted(came.value)
        elif came.status is not None:
            self._said(came)
        self._must_be_good(came.status == 201, "a checkpoint of a good run was refused", came.value)

    async def health(self) -> None:
        """Asks how the run is."""
        came = await self.internal(f"/health?settle={SETTLE_SECONDS}")
        if came.status == 200 and self.trainer.broken in files.SEEN_BY_READING:
            self.trainer.said_healthy("/health says healthy")
        elif came.status == 200:
            self.trainer.gate_opened("/health says healthy")
        elif came.status is not None:
            self._said(came)
        self._must_be_good(came.status == 200, "a good run is not healthy", came.value)

    def _must_be_good(self, good: bool, otherwise: str, found: object) -> None:
        """Raises where a run that met nothing but what is harmless is not as it should be."""
        if self.harmless and not good:
            raise Violation(f"{otherwise}: {found}")

    def _said(self, came: Came) -> None:
        value = came.value if isinstance(came.value, dict) else {}
        if value.get("state") == "failed" or "error" in value:
            cause = value.get("cause") or value.get("error")
            self.trainer.must_have_failed(f"it said that it has failed: {cause}")

    # --- faults -----------------------------------------------------------------------------------

    async def strange(self, kind: str) -> None:
        """A stranger's connections; those of the stranger before are closed."""
        for client in self._open:
            client.close()
        self._open = await strangers(self._address, kind)

    async def file(self, act: str, place: int = 0) -> None:
        """Something is done to a file of the run while it is served."""
        self.untouched = False
        done = await asyncio.to_thread(files.do, self.directory, act, place)
        if done and self._process is not None:
            self.trainer.broken = self.trainer.broken or act

    async def disk(self, seconds: float = 0.0, disk: str = "hung", **more: Any) -> None:
        """The disk behaves so from now on; a hung one for some seconds."""
        self.control(disk=disk, seconds=seconds, **more)
        if disk == "hung":
            await asyncio.sleep(seconds)
            self.control(disk="ok")

    async def clock(self, clock: float) -> None:
        """The wall clock is set."""
        self.control(clock=clock)

    async def stand_still(self, seconds: float) -> None:
        """The process is stopped for some seconds, as a machine that is short of memory does it."""
        self.send(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        self.send(signal.SIGCONT)

    async def restart(
        self,
        signals: tuple[signal.Signals, ...],
        at_rest: bool,
        after: float = 0.0,
        act: str | None = None,
        place: int = 0,
        **resume: Any,
    ) -> None:
        """Ends the process by these signals, changes a file where told to, and resumes it."""
        for number, sent in enumerate(signals):
            if number:
                await asyncio.sleep(after)
            self.send(sent)
        await self.ended()
        if act is not None:
            self.untouched = False
            await asyncio.to_thread(self._change, act, place)
        if "history cut" not in OFF and self.directory.exists():
            await asyncio.to_thread(files.keep_backup, self.directory)
        await self.resume(at_rest=at_rest, **resume)

    def _change(self, act: str, place: int) -> None:
        """Something is done to the files of a run that is not served."""
        if not files.do(self.directory, act, place):
            return
        lost = any(
            receipt["seq"] > files.last_seq(self.directory) for receipt, _ in self.trainer.receipts
        )
        if act in files.MUST_BE_SEEN or lost:
            self.trainer.must_have_failed(f"{act} while it was down")

    async def second_process(self) -> None:
        """Another process would serve the same directory: it is refused, and the first goes on."""
        if self._process is None:
            return
        second = self._spawn()
        try:
            await until(lambda: second.poll() is not None, seconds=END_SECONDS, pause=0.01)
        finally:
            second.kill()
        if second.poll() != 2:
            raise Violation(f"a second process on the directory ended with {second.poll()}")

    async def closed_by_hand(self) -> None:
        """The operator closes the latch."""
        came = await self.internal("/latch", {"reason": "by hand"})
        if came.status == 200:
            self.trainer.must_have_failed("the operator closed its latch")

    async def endpoints_removed(self) -> None:
        """The file that says where it listens is removed: those who know it go on."""
        with contextlib.suppress(OSError):
            os.unlink(self.directory / "endpoints.json")

    # --- the end ----------------------------------------------------------------------------------

    async def _end(self) -> None:
        await self.checkpoint(99)
        await self.health()
        self.send(signal.SIGTERM)
        await self.ended()
        if self.untouched and self.directory.exists():
            await asyncio.to_thread(self._check_history)

    def _check_history(self) -> None:
        """The journal is whole, has every receipt, and no more answers than those that arrived."""
        found = verify(self.directory)
        if found.problem is not None and found.ending is not Ending.TORN:
            raise Violation(f"the history is not whole: {found.problem}")
        answers = files.answers(self.directory)
        missing = self.trainer.told - Counter(told for _, told in answers)
        if missing:
            raise Violation(f"told and not in the journal: {sorted(missing)}")
        for receipt, arrived in self.trainer.receipts:
            parsed = CheckpointReceipt.parse(json.dumps(receipt).encode())
            held = verify(self.directory, receipt=parsed)
            if held.receipt_problem is not None:
                raise Violation(f"a receipt does not hold: {held.receipt_problem}")
            covered = Counter(query for seq, (query, _) in answers if seq < receipt["seq"])
            if not self.trainer.judged and covered - arrived:
                raise Violation(f"a receipt covers answers that never arrived: {covered - arrived}")


def _brief(value: Any) -> str:
    """What an answer of the daemon says, in short."""
    if not isinstance(value, dict):
        return repr(value)[:80]
    kept = ("state", "cause", "accepted", "error", "reward", "number", "seq")
    return json.dumps({key: value[key] for key in kept if value.get(key) is not None})[:200]


Act = Callable[..., Awaitable[None]]

TERM, KILL, STOP = signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP


def _restarting(*signals: signal.Signals, at_rest: bool = False) -> Act:
    async def act(hunt: Hunt, **values: Any) -> None:
        await hunt.restart(signals, at_rest, **values)

    return act


ACTS: dict[str, Act] = {
    "play": Hunt.play,
    "reward": Hunt.reward,
    "reward cut": Hunt.reward_cut,
    "checkpoint": Hunt.checkpoint,
    "health": Hunt.health,
    "file": Hunt.file,
    "endpoints removed": Hunt.endpoints_removed,
    "second process": Hunt.second_process,
    "closed by hand": Hunt.closed_by_hand,
    **dict.fromkeys(
        ("disk full", "disk fails", "disk read-only", "disk hangs", "disk slow"), Hunt.disk
    ),
    "clock steps": Hunt.clock,
    **dict.fromkeys(("stands still", "stands still long"), Hunt.stand_still),
    "stopped": _restarting(TERM, at_rest=True),
    "stopped under load": _restarting(TERM),
    "changed while stopped": _restarting(TERM, at_rest=True),
    "stopped twice": _restarting(TERM, TERM),
    "stopped and killed": _restarting(TERM, KILL),
    "killed": _restarting(KILL),
    "changed after a kill": _restarting(KILL),
    "killed while it stands still": _restarting(STOP, KILL),
    "stranger": Hunt.strange,
    "crowd": Hunt.strange,
}
"""What is done for each name that a plan may have."""


async def hunt_seeds(seeds: Iterable[int], folder: Path, helper_url: str) -> list[str]:
    """Hunts some seeds, a few at once; the stories of those that found something."""
    room = asyncio.Semaphore(HUNTS_AT_ONCE)

    async def one(seed: int) -> str | None:
        async with room:
            place = folder / str(seed)
            place.mkdir()
            try:
                await Hunt(plan(seed), place, helper_url).run()
            except Violation as found:
                return str(found)
            shutil.rmtree(place)
            return None

    return [story for story in await asyncio.gather(*map(one, seeds)) if story is not None]


async def main(words: list[str]) -> int:
    """Hunts the seeds that are named, ``17`` or ``1000-1500``; prints what each found."""
    seeds: list[int] = []
    for word in words:
        first, _, last = word.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    with tempfile.TemporaryDirectory() as folder:
        async with FakeHelper() as helper:
            found = await hunt_seeds(seeds, Path(folder), helper.url)
    print("\n\n".join(found))
    print(f"{len(found)} of {len(seeds)} seeds found something")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))

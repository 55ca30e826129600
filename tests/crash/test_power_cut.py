"""The machine loses its power: what was not synced is thrown away, in part, or turned to NUL bytes.

A daemon in this process serves on a disk that remembers what was synced. At points of its ledger
the disk lays down what a machine would find, beside the run; each of these images is then held to
what a killed daemon is (invariants 1, 4, 6 and 12). The seed is in the test's name.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.crash.dying import padded
from tests.crash.harness import Told, check_history, expected_cause
from tests.fakes.disk import ForgetfulDisk
from tests.fakes.provider import FakeProvider
from tests.fakes.served import Served, served
from tests.fakes.soaked import soaked

KEYS: dict[str, Any] = {"retrieval__bm25__index": "never-opened", "ledger__segment_mib": 1}


@dataclass(frozen=True)
class Image:
    """What a machine finds after a power cut, and what clients had been told by then."""

    point: str
    directory: Path
    told: list[Told]


class ImagingDisk(ForgetfulDisk):
    """Lays down images at the points that ``wanted`` chooses by name.

    ``told`` is what clients know; ``rng`` decides how much of what was unsynced survives, ``None``
    that nothing does.
    """

    def __init__(
        self, base: Path, wanted: Callable[[str], bool], told: list[Told], rng: random.Random | None
    ) -> None:
        super().__init__(base)
        self.images: list[Image] = []
        self._wanted = wanted
        self._told = told
        self._rng = rng

    def point(self, name: str) -> None:
        if self._wanted(name):
            image = self.base.with_name(f"{self.base.name}-{len(self.images)}")
            self._lay_down(image)
            # Read behind the image, by another thread than the one that tells: if anything, more.
            self.images.append(Image(name, image / "run", list(self._told)))

    def _lay_down(self, image: Path) -> None:
        image.mkdir()
        for path in sorted(self.base.rglob("*")):
            place = image / path.relative_to(self.base)
            if path not in self._names or not place.parent.exists():
                continue
            if path.is_dir():
                place.mkdir(mode=0o700)
            else:
                place.write_bytes(self._remains(path, self._rng))
                place.chmod(0o600)


async def ask(run: Served, told: list[Told], clients: int, each: int) -> None:
    """Clients that remember what they were told; every second query is a repeat."""

    async def one(name: int) -> None:
        for count in range(each):
            query = f"q{name} {count // 2}"
            status, value = await run.execute(query)
            if status == 200:
                told.append((query, value["result"]))

    await asyncio.gather(*(one(name) for name in range(clients)))


async def check_image(image: Image, **keys: Any) -> str | None:
    """As ``harness.check_restart``, in this process; returns the resumed run's cause."""
    directory = image.directory
    before = await asyncio.to_thread(check_history, directory, image.told)
    expected = await asyncio.to_thread(expected_cause, directory)
    async with served(directory, resume=True, trainer_stopped=True, **KEYS, **keys) as run:
        _, health = await run.health()
        cause = health["cause"] and health["cause"]["cause"]
        assert (health["state"], cause) == ("failed" if expected else "healthy", expected)
        assert (await run.execute("afterwards"))[0] == (502 if expected else 200)
        assert await run.stop() == (4 if expected else 0)
    after = await asyncio.to_thread(check_history, directory, image.told)
    assert after.problem is None, (image.point, after.problem)
    assert after.seq > before.seq
    return expected


def distinct(images: list[Image]) -> list[Image]:
    """Without those that are as the one before: a sync often changes nothing that was there."""
    found: list[Image] = []
    before: object = None
    for image in images:
        files = {
            path.relative_to(image.directory): path.read_bytes() if path.is_file() else None
            for path in image.directory.rglob("*")
        }
        if (files, image.told) != before:
            found.append(image)
        before = files, image.told
    return found


def seeded(seed: int) -> random.Random | None:
    """No survivor among the unsynced bytes for an even seed, chance for an odd one."""
    return random.Random(seed) if seed % 2 else None


@pytest.mark.parametrize("seed", [0, 3, *soaked([1, 2, *range(4, 20)])])
async def test_power_cut_under_load(tmp_path: Path, seed: int) -> None:
    """Whatever a client was told before the cut is in the journal after it."""
    chance = random.Random(-seed)
    told: list[Told] = []

    def wanted(name: str) -> bool:
        return name.startswith(("write", "sync")) and chance.random() < 0.15

    disk = ImagingDisk(tmp_path / "machine", wanted, told, seeded(seed))
    disk.base.mkdir()
    async with served(disk.base / "run", disk=disk, **KEYS) as run:
        await ask(run, told, clients=6, each=12)
        await run.stop()
    assert len(told) == 72
    assert max(len(image.told) for image in disk.images) > 6
    for image in distinct(disk.images):
        cause = await check_image(image)
        assert cause is not None or not image.told or image is disk.images[-1]


@pytest.mark.parametrize("seed", [0, 1, *soaked(range(2, 20))])
async def test_power_cut_in_rotation_and_latch(tmp_path: Path, seed: int) -> None:
    """A new segment begins behind a durable one, and the latch's file behind its record."""
    told: list[Told] = []
    counted: Counter[str] = Counter()

    def wanted(name: str) -> bool:
        counted[name] += 1
        return name.startswith("latch.json") or (name.startswith("rotate") and counted[name] == 2)

    disk = ImagingDisk(tmp_path / "machine", wanted, told, seeded(seed))
    disk.base.mkdir()
    provider = FakeProvider()
    provider.answer = lambda query: padded(query, 12_000)
    async with served(disk.base / "run", disk=disk, provider=provider, **KEYS) as run:
        await ask(run, told, clients=6, each=8)
        await run.internal("POST", "/latch", {"reason": "by hand"})
        await run.stop()
    points = [image.point for image in disk.images]
    assert points[:2] == ["rotate:before", "rotate:after"]
    assert points[-3:] == ["latch.json:before", "latch.json:written", "latch.json:after"]
    for image in disk.images:
        cause = await check_image(image)
        assert (cause == "operator") == image.point.startswith("latch")
        assert cause is not None


@pytest.mark.parametrize("seed", [0, 1, *soaked(range(2, 20))])
async def test_power_cut_while_resuming_from_one(tmp_path: Path, seed: int) -> None:
    """A cut during the resume that follows a cut leaves a run that a third start reads."""
    told: list[Told] = []
    counted: Counter[str] = Counter()

    def third_sync(name: str) -> bool:
        counted[name] += 1
        return name == "write:after" and counted[name] == 5

    first = ImagingDisk(tmp_path / "machine", third_sync, told, seeded(seed))
    first.base.mkdir()
    async with served(first.base / "run", disk=first, **KEYS) as run:
        await ask(run, told, clients=6, each=4)
        await run.stop()
    (cut,) = first.images
    with (cut.directory / "journal" / "000001.jsonl").open("ab") as stream:
        stream.write(b'{"seq":99,"at"' + bytes(seed % 2 * 7))
    second = ImagingDisk(cut.directory.parent, lambda name: True, cut.told, seeded(seed))
    async with served(cut.directory, disk=second, resume=True, **KEYS) as run:
        cause = (await run.health())[1]["cause"]["cause"]
        await run.stop()
    before_end = [image for image in second.images if not image.point.startswith("endpoints")]
    assert {"trim:before", "trim:after", "latch.json:written"} <= {i.point for i in before_end}
    for image in distinct(second.images):
        assert await check_image(image) == cause

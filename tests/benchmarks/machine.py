"""The machine a benchmark ran on, and what a process on it has used."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import statistics
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")
SYNCS = 200
PACKAGES = ("smartsearch-sidecar", "aiohttp", "uvloop", "tantivy", "orjson", "agentinputlab")


def cpu_seconds(pid: int) -> tuple[float, float]:
    """User and system time of a process, all its threads, ended ones included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / TICKS, int(fields[12]) / TICKS


def resident_bytes(pid: int, key: str = "VmRSS") -> int:
    """Resident memory; ``VmHWM`` for its peak."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024 if found else 0


def sync_microseconds(folder: Path) -> float:
    """The median of appending 4 KiB to a file in ``folder`` and syncing it."""
    path, took = folder / "sync-probe", []
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        for _ in range(SYNCS):
            began = time.perf_counter()
            os.write(fd, b"x" * 4096)
            os.fdatasync(fd)
            took.append(time.perf_counter() - began)
    finally:
        os.close(fd)
        path.unlink()
    return statistics.median(took) * 1e6


def facts(folder: Path) -> dict[str, Any]:
    """What a reader of the figures needs to know; ``folder`` is where the ledgers lie."""
    about = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*:\s*(.+)", about)
    memory = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    wrk = subprocess.run(["wrk", "-v"], capture_output=True, text=True, check=False).stdout
    kind = subprocess.run(
        ["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True, check=False
    ).stdout
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": model[1] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory[1]) / 2**20, 1) if memory else None,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "wrk": wrk.split("\n")[0].split(" [")[0],
        "filesystem": kind.strip(),
        "sync_microseconds": round(sync_microseconds(folder)),
        "load_average": os.getloadavg()[0],
    }


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None

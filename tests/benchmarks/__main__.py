"""``make bench``: /execute beside its peers in one run, alternating, medians and ratios.

Load by ``wrk``, every query another one, the ledger synced always. Prints a table and writes
``.cache/bench.json``. ``python -m tests.benchmarks --rounds 5 --seconds 4`` for steadier figures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.fakes.process import ROOT, environment
from tests.fakes.served import ENVIRONMENT, EXECUTE_CAPABILITY

SCRIPT = """
local n, who = 0, tostring({}):sub(8)
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
request = function()
  n = n + 1
  return wrk.format(nil, nil, nil, '{"env": "%s", "call": "wikipedia_search(query=\\'question '
    .. who .. n .. '\\', top_n=5)"}')
end
"""


@dataclass(frozen=True)
class Scenario:
    """One row: a server under so many clients, set against a peer under its own number."""

    server: str
    clients: int
    peer: str
    peer_clients: int
    target: float


SCENARIOS = [
    Scenario("ours", 8, "reference", 4, 6.0),
    Scenario("ours", 8, "bare", 8, 0.3),
    Scenario("ours", 64, "bare", 64, 0.3),
    Scenario("ours-50ms", 8, "reference-50ms", 4, 7.5),
]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def measured(server: str, clients: int, seconds: int, script: Path) -> float:
    """Answers a second of one server under one load; other statuses than 200 are an error."""
    port = free_port()
    words = [sys.executable, "-m", "tests.benchmarks.servers", server, str(port)]
    # The reference prints a traceback for every connection the load leaves.
    quiet = subprocess.DEVNULL if server.startswith("reference") else None
    process = subprocess.Popen(
        words, env=environment(), cwd=script.parent, stdout=subprocess.DEVNULL, stderr=quiet
    )
    try:
        wait_for(port)
        load = ["wrk", "-t1", f"-c{clients}", f"-d{seconds}", "-s", str(script)]
        said = subprocess.run(
            [*load, f"http://127.0.0.1:{port}/{EXECUTE_CAPABILITY}/execute"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    finally:
        process.terminate()
        process.wait(30)
    if "Non-2xx" in said:
        raise SystemExit(f"{server} under {clients} clients refused requests:\n{said}")
    found = re.search(r"Requests/sec:\s+([0-9.]+)", said)
    if found is None:
        raise SystemExit(f"wrk said nothing of {server}:\n{said}")
    return float(found.group(1))


def wait_for(port: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                time.sleep(0.5)  # listening comes before serving
                return
        time.sleep(0.05)
    raise SystemExit(f"nothing listens on port {port}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=3)
    chosen = parser.parse_args()
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is not installed (Debian: apt-get install wrk)")
    rows = []
    table = Table("server", "clients", "answers/s", "peer", "clients", "answers/s", "ratio", "goal")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "load.lua"
        script.write_text(SCRIPT % ENVIRONMENT)
        for scenario in SCENARIOS:
            pairs = [
                (
                    measured(scenario.server, scenario.clients, chosen.seconds, script),
                    measured(scenario.peer, scenario.peer_clients, chosen.seconds, script),
                )
                for _ in range(chosen.rounds)
            ]
            own = statistics.median(pair[0] for pair in pairs)
            peer = statistics.median(pair[1] for pair in pairs)
            ratios = sorted(one / other for one, other in pairs)
            middle = statistics.median(ratios)
            table.add_row(
                *(scenario.server, str(scenario.clients), f"{own:,.0f}"),
                *(scenario.peer, str(scenario.peer_clients), f"{peer:,.0f}"),
                f"{middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
                f"{scenario.target:g}",
            )
            rows.append({**vars(scenario), "pairs": pairs, "ratio": middle})
    Console(width=110).print(table)
    out = ROOT / ".cache" / "bench.json"
    out.parent.mkdir(exist_ok=True)
    facts = {"python": platform.python_version(), "cores": os.cpu_count()}
    out.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1))
    print(f"written to {out.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

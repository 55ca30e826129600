"""``serve`` with a provider that costs nothing: what is measured is everything else.

Takes the words of ``serve`` (``serve --config F --run-dir D``) and ``--milliseconds N``, how long a
search takes. The provider is given to the daemon as who embeds it would.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from tests.fakes.provider import FakeProvider

DOCUMENTS: Sequence[Mapping[str, Any]] = [
    {"id": str(rank), "contents": f'"Article {rank}"\n' + "words of it " * 50, "score": 5.0 - rank}
    for rank in range(5)
]


class Instant(FakeProvider):
    """Five passages at once, or after ``seconds``."""

    async def search(self, query: str, top_n: int) -> Sequence[Mapping[str, Any]]:
        if self.seconds:
            await asyncio.sleep(self.seconds)
        return DOCUMENTS


async def serve(config: Path, directory: Path, seconds: float) -> int:
    """Serves until SIGTERM."""
    from smartsearch_sidecar.config import load
    from smartsearch_sidecar.process.daemon import Daemon
    from smartsearch_sidecar.process.logs import configure_logs

    loaded = load(config, overrides={"run.directory": str(directory)})
    daemon = Daemon(loaded, provider=Instant(seconds=seconds))
    configure_logs(daemon.secrets, pretty=False)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, daemon.stop)
    return await daemon.run()


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.benchmarks.instant")
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--milliseconds", type=int, default=0)
    asked = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(serve(asked.config, asked.run_dir, asked.milliseconds / 1000)))


if __name__ == "__main__":
    main()

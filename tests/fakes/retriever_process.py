"""The fake retriever in a process of its own, so that it can be killed, frozen and started again.

Run as ``python -m tests.fakes.retriever_process KNOBS`` (JSON): prints its port, then takes one
JSON object of knobs a line and says when they are turned.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from typing import Any, Self

from tests.fakes.process import ROOT, environment
from tests.fakes.retriever import FakeRetriever


class RetrieverProcess:
    """A retriever service; once killed it may be started again, on the port it had."""

    def __init__(self, **knobs: Any) -> None:
        """``knobs`` are attributes of ``FakeRetriever``."""
        self._knobs = knobs
        self.port = 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self, **knobs: Any) -> None:
        """Returns once it listens; ``knobs`` are added to those it had."""
        self._knobs.update(knobs)
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.fakes.retriever_process"),
                json.dumps({**self._knobs, "port": self.port}),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
            cwd=ROOT,
        )
        self.port = self._said()["port"]

    def turn(self, **knobs: Any) -> None:
        """Turns knobs while it serves."""
        process = self._running
        if process.stdin is None:
            raise RuntimeError("a retriever without a standard input")
        process.stdin.write(json.dumps(knobs) + "\n")
        process.stdin.flush()
        self._said()

    def freeze(self) -> None:
        """Takes connections, since the kernel does, and answers none of them."""
        self._running.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """``kill -9``."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate(timeout=10)

    @property
    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise RuntimeError("the retriever does not run")
        return self._process

    def _said(self) -> Any:
        process = self._running
        line = process.stdout.readline() if process.stdout is not None else ""
        if not line:
            raise RuntimeError(f"the retriever ended with {process.wait(10)}")
        return json.loads(line)


def _turned(retriever: FakeRetriever, line: str) -> None:
    for name, value in json.loads(line).items():
        if not hasattr(retriever, name):
            raise AttributeError(f"a retriever has no knob {name}")
        setattr(retriever, name, value)


async def _serve(knobs: str) -> None:
    retriever = FakeRetriever()
    _turned(retriever, knobs)
    await retriever.start()
    print(json.dumps({"port": retriever.port}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        _turned(retriever, line)
        print("{}", flush=True)
    await retriever.stop()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))

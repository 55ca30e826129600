"""The fake retriever in a process of its own, so that it can be killed, frozen and started again.

Run as ``python -m tests.fakes.retriever_process KNOBS`` (JSON): prints its port, then takes one
JSON object of knobs a line and says when they are turned.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any, Self, TextIO

from tests.fakes.forked import Forked
from tests.fakes.process import ROOT, environment
from tests.fakes.retriever import FakeRetriever


class RetrieverProcess:
    """A retriever service; once killed it may be started again, on the port it had."""

    def __init__(self, **knobs: Any) -> None:
        """``knobs`` are attributes of ``FakeRetriever``."""
        self._knobs = knobs
        self.port = 0
        self._process: Forked | None = None
        self._streams: tuple[TextIO, TextIO] | None = None  # to it, and from it

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
        its_input, to_it = os.pipe()
        from_it, its_output = os.pipe()
        try:
            self._process = Forked(
                "tests.fakes.retriever_process",
                [json.dumps({**self._knobs, "port": self.port})],
                environ=environment(),
                folder=ROOT,
                streams=(its_input, its_output, 2),
            )
        finally:
            os.close(its_input)
            os.close(its_output)
        self._streams = os.fdopen(to_it, "w"), os.fdopen(from_it)
        self.port = self._said()["port"]

    def turn(self, **knobs: Any) -> None:
        """Turns knobs while it serves."""
        _, (to_it, _) = self._running
        to_it.write(json.dumps(knobs) + "\n")
        to_it.flush()
        self._said()

    def freeze(self) -> None:
        """Takes connections, since the kernel does, and answers none of them."""
        self._running[0].send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """``kill -9``."""
        if self._process is None:
            return
        process, streams = self._running
        self._process = self._streams = None
        process.kill()
        process.wait(10)
        for stream in streams:
            stream.close()

    @property
    def _running(self) -> tuple[Forked, tuple[TextIO, TextIO]]:
        if self._process is None or self._streams is None:
            raise RuntimeError("the retriever does not run")
        return self._process, self._streams

    def _said(self) -> Any:
        process, (_, from_it) = self._running
        line = from_it.readline()
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

"""A sidecar's internal routes over real HTTP on 127.0.0.1, for what runs in a trainer's process.

It answers as the sidecar does: rewards in order or one error for the whole batch, a latch that the
first failure closes, receipts and refusals of checkpoints; and it can misbehave by the route.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

INTERNAL = "internal-capability-for-tests-0123456789abc"
EXECUTE = "execute-capability-for-tests-0123456789abcd"
HANG_UP = b"hang up"
GARBLED = b"no HTTP"
ROWS_MAX = 64  # reward.batch_max
MESSAGES = {"reward_latched": "the run has failed before", "helper_timeout": "the helper was late"}


def digest_reward(item: dict[str, Any]) -> float:
    """A reward that tells texts and answers apart, from 0 to 1."""
    text = json.dumps([item["solution_str"], item["ground_truth"]]).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big") / 2**32


class RewardServer:
    """Knobs may be turned while it runs.

    Attributes:
        reward: row to reward.
        seconds: how long a request for rewards takes, at any number of rows: they run side by side.
        answers: route to what it answers instead: ``(status, value)``, a body, ``HANG_UP``,
            ``GARBLED``, or a function that is handed the request's value and returns one of these.
        failing: answer the request for rewards of this number (from 1) with 502 and latch.
        cause: why the latch is closed, or None.
        state: what ``/health`` and a refusal say while the latch is open.
        seen: route and value of every request, in order.
    """

    def __init__(self, folder: Path) -> None:
        self.reward: Callable[[dict[str, Any]], Any] = digest_reward
        self.seconds = 0.0
        self.answers: dict[str, Any] = {}
        self.failing = 0
        self.cause: str | None = None
        self.state = "healthy"
        self.seen: list[tuple[str, Any]] = []
        self.rows: dict[str, dict[str, Any]] = {}
        self.busiest = 0
        self._busy = 0
        self._lock = threading.Lock()
        self.endpoints = folder / "endpoints.json"
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.sidecar = self
        self.port = self._server.server_address[1]
        base = f"http://127.0.0.1:{self.port}"
        self.sandbox_url = f"{base}/{EXECUTE}"
        self.internal_url = f"{base}/{INTERNAL}"
        value = {"sandbox_url": self.sandbox_url, "internal_url": self.internal_url, "pid": 1}
        self.endpoints.write_text(json.dumps(value))
        self.endpoints.chmod(0o600)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def asked(self, route: str) -> list[Any]:
        """The values posted to one route, in order."""
        return [value for seen, value in self.seen if seen == route]

    # --- what each route answers ------------------------------------------------------------------

    def answer(self, method: str, target: str, value: Any) -> Any:
        """The answer to one request under the internal capability."""
        route = target.partition("?")[0]
        with self._lock:
            self.seen.append((route, value))
        if route in self.answers:
            instead = self.answers[route]
            return instead(value) if callable(instead) else instead
        if route in ("/reward", "/reward/batch"):
            return self._rewards(route, [value] if route == "/reward" else value["items"])
        if route == "/latch":
            self.cause = self.cause or value["reason"]
            return 200, {"state": "failed"}
        if route == "/health":
            return (200 if self._word() == "healthy" else 503), {"state": self._word()}
        if route == "/checkpoints":
            return self._checkpoint(value)
        if route == "/checkpoints/verify":
            return 200, {"verdict": "known", "detail": "it is record 7"}
        return 404, error("no_such_page")

    def _word(self) -> str:
        return "failed" if self.cause else self.state

    def _rewards(self, route: str, items: list[dict[str, Any]]) -> Any:
        with self._lock:
            self._busy += 1
            self.busiest = max(self.busiest, self._busy)
            number = sum(seen.startswith("/reward") for seen, _ in self.seen)
        time.sleep(self.seconds)
        with self._lock:
            self._busy -= 1
        if self.cause:
            return 502, error("reward_latched")
        if not 1 <= len(items) <= ROWS_MAX:
            self.cause = "invalid_reward_request"
            return 400, error("invalid_request")
        if number == self.failing:
            self.cause = "helper_timeout"
            return 502, error("helper_timeout")
        scored = [self._scored(item) for item in items]
        return 200, (scored[0] if route == "/reward" else {"rewards": scored})

    def _scored(self, item: dict[str, Any]) -> dict[str, Any]:
        """The same row is given its first reward again, as the sidecar gives it."""
        key = json.dumps([item["solution_str"], item["ground_truth"]])
        with self._lock:
            if key in self.rows:
                return {**self.rows[key], "reused": True}
            number = len(self.rows) + 1
            scored = {"reward": self.reward(item), "split": "train", "number": number}
            self.rows[key] = scored
        return {**scored, "reused": False}

    def _checkpoint(self, wanted: dict[str, Any]) -> Any:
        if self._word() != "healthy":
            cause = {"cause": self.cause, "detail": "why it was"} if self.cause else None
            refusal = {"accepted": False, "step": wanted["step"], "state": self._word()}
            return 409, {**refusal, "cause": cause}
        receipt = {"format": 1, "accepted": True, "number": 1, **wanted, "occurrence": 1}
        return 201, {**receipt, "seq": 7, "head": "a" * 64, "claim_sha256": "b" * 64}


def error(code: str) -> dict[str, Any]:
    """An error answer's body."""
    message = MESSAGES.get(code, "no")
    return {"error": {"code": code, "message": message, "retryable": False}}


class _Server(ThreadingHTTPServer):
    sidecar: RewardServer
    daemon_threads = False  # joined at the end: no thread outlives its test


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _handle(self) -> None:
        sidecar = self.server.sidecar  # type: ignore[attr-defined]
        length = int(self.headers.get("Content-Length", "0"))
        value = json.loads(self.rfile.read(length)) if length else None
        prefix = f"/{INTERNAL}"
        if not self.path.startswith(prefix):
            self._send(401, json.dumps(error("unauthorized")).encode())
            return
        answer = sidecar.answer(self.command, self.path.removeprefix(prefix), value)
        self.close_connection = True
        if answer == GARBLED:
            self.wfile.write(b"nothing that is HTTP\r\n\r\n")
        if answer in (HANG_UP, GARBLED):
            return
        if isinstance(answer, bytes):
            self._send(200, answer)
        else:
            self._send(answer[0], json.dumps(answer[1]).encode())

    def do_GET(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it
        """Nothing on stderr."""


@contextmanager
def reward_server(folder: Path) -> Iterator[RewardServer]:
    """Serves until the block ends; ``endpoints`` names its file, mode 0600."""
    server = RewardServer(folder)
    try:
        yield server
    finally:
        server.stop()

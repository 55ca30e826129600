"""The sidecar from outside: what ``check``, ``latch``, ``url``, the demo and tests speak through.

Standard library only, one connection a call, no proxies, no redirects, no retries. Errors never
quote a URL, because every URL holds a capability.
"""

from __future__ import annotations

import http.client
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from smartsearch_sidecar import errors

ENDPOINTS_VARIABLE = "SMARTSEARCH_SIDECAR_ENDPOINTS"
TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Answered:
    """An HTTP answer: its status and its JSON value."""

    status: int
    value: Any


@dataclass(frozen=True, slots=True)
class Endpoints:
    """A served run's two URLs, as ``endpoints.json`` holds them."""

    sandbox_url: str
    internal_url: str


def read_endpoints(path: Path) -> Endpoints:
    """Reads ``endpoints.json``; raises ``Unreachable`` where no sidecar has written it."""
    try:
        value = json.loads(path.read_bytes())
        return Endpoints(str(value["sandbox_url"]), str(value["internal_url"]))
    except FileNotFoundError:
        raise errors.UNREACHABLE(
            f"{path} does not exist: no sidecar serves this run (it writes the file when ready)"
        ) from None
    except (OSError, ValueError, KeyError, TypeError):
        raise errors.UNREACHABLE(
            f"{path} cannot be read as a sidecar's endpoints: name the file `serve` wrote, as "
            "its user"
        ) from None


def find_endpoints(run_directory: Path | None, environ: dict[str, str] | None = None) -> Endpoints:
    """The endpoints of a run directory, or of the file the environment names."""
    if run_directory is not None:
        return read_endpoints(run_directory / "endpoints.json")
    named = (os.environ if environ is None else environ).get(ENDPOINTS_VARIABLE)
    if not named:
        raise errors.UNREACHABLE(
            f"which run? pass --run-dir, or set {ENDPOINTS_VARIABLE} to its endpoints.json"
        )
    return read_endpoints(Path(named))


class Client:
    """Speaks to one base URL (``sandbox_url`` or ``internal_url``)."""

    def __init__(self, base_url: str, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        parts = urlsplit(base_url)
        if parts.scheme != "http" or parts.hostname is None:
            raise errors.UNREACHABLE("the sidecar's address is not an http URL")
        self._host = parts.hostname
        self._port = parts.port or 80
        self._prefix = parts.path.rstrip("/")
        self._timeout = timeout_seconds

    def call(
        self, method: str, path: str, value: Any = None, *, timeout_seconds: float | None = None
    ) -> Answered:
        """One request; raises ``Unreachable`` where nothing of ours answers in time."""
        body = None if value is None else json.dumps(value).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        connection = http.client.HTTPConnection(
            self._host, self._port, timeout=timeout_seconds or self._timeout
        )
        try:
            connection.request(method, self._prefix + path, body=body, headers=headers)
            answer = connection.getresponse()
            return Answered(answer.status, json.loads(answer.read()))
        except (OSError, http.client.HTTPException) as exc:
            raise errors.UNREACHABLE(
                f"no sidecar answers on {self._host} port {self._port} ({type(exc).__name__}): it "
                "stopped, hangs or was killed; its log says why"
            ) from None
        except ValueError:
            raise errors.UNREACHABLE(
                f"what answers on {self._host} port {self._port} is not a sidecar: the run's "
                "has ended, and another program took its port"
            ) from None
        finally:
            connection.close()

    def health(self, settle_seconds: float = 0.0) -> Answered:
        """``GET /health``, waiting up to ``settle_seconds`` for work in flight."""
        return self.call(
            "GET",
            f"/health?settle={settle_seconds:g}",
            timeout_seconds=self._timeout + settle_seconds,
        )

    def execute(self, query: str, environment: str) -> Answered:
        """``POST /execute`` as a rollout sends it."""
        call = f"wikipedia_search(query={query!r}, top_n=5)"
        return self.call("POST", "/execute", {"env": environment, "call": call})

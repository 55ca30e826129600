"""A client of the sidecar: ``check``, ``latch``, ``url``, the load test, the demo and tests use it.

Standard library only. Each call opens a connection of its own; there are no proxies, no redirects
and no retries. No error quotes a URL, because each URL holds a capability.
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
"""The environment variable that names a run's ``endpoints.json``."""
TIMEOUT_SECONDS = 10.0
"""The default of ``Client``: seconds of one call, connecting included."""


@dataclass(frozen=True, slots=True)
class Answered:
    """An HTTP answer of any status code, with its body's JSON value."""

    status: int
    value: Any


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The two URLs of a served run. Both hold a capability: never log them."""

    sandbox_url: str  # for rollouts: searches
    internal_url: str  # for the trainer and the operator: rewards, health, checkpoints, the latch


def read_endpoints(path: Path) -> Endpoints:
    """Reads a run's ``endpoints.json``.

    Raises:
        errors.Unreachable: the file does not exist, cannot be read, or is not a sidecar's.
    """
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


def find_endpoints(run_directory: Path | None) -> Endpoints:
    """The endpoints of a run directory, or else of the file that the environment names.

    Raises:
        errors.Unreachable: neither names a run, or ``endpoints.json`` cannot be read.
    """
    if run_directory is not None:
        return read_endpoints(run_directory / "endpoints.json")
    named = os.environ.get(ENDPOINTS_VARIABLE)
    if not named:
        raise errors.UNREACHABLE(
            f"which run? pass --run-dir, or set {ENDPOINTS_VARIABLE} to its endpoints.json"
        )
    return read_endpoints(Path(named))


class Client:
    """Calls one sidecar. It holds no connection and may be used from several threads.

    ``base_url`` is ``sandbox_url`` for searches and ``internal_url`` for everything else; one that
    is no http URL raises ``errors.Unreachable``.

    Example::

        client = Client(find_endpoints(Path("runs/001")).internal_url)
        healthy = client.health(settle_seconds=30).status == 200
    """

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
        """Sends one request and reads its JSON answer.

        ``path`` is below the base URL, with a query where there is one: ``/health?settle=30``;
        ``value`` is the body, as a JSON value; ``None`` sends no body.

        Raises:
            errors.Unreachable: no connection, no answer in time, or an answer that is not JSON.
        """
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
                "has ended, hangs or was killed; its log says why"
            ) from None
        except ValueError:
            raise errors.UNREACHABLE(
                f"got a non-JSON answer on {self._host} port {self._port}: is another program on "
                "this port, because the run's sidecar has ended?"
            ) from None
        finally:
            connection.close()

    def health(self, settle_seconds: float = 0.0) -> Answered:
        """``GET /health``: status 200 where the run is healthy, else 503 with the cause.

        The sidecar waits ``settle_seconds`` at most for work in flight. Raises as ``call``.
        """
        timeout = self._timeout + settle_seconds
        return self.call("GET", f"/health?settle={settle_seconds:g}", timeout_seconds=timeout)

    def execute(self, query: str, environment: str) -> Answered:
        """``POST /execute`` as a rollout sends it: one search for five passages.

        ``environment`` is the ``env`` text of ``execute.environment``. Raises as ``call``.
        """
        call = f"wikipedia_search(query={query!r}, top_n=5)"
        return self.call("POST", "/execute", {"env": environment, "call": call})

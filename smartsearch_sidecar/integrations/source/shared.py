"""What the files of ``integrations/`` have in common, written here once.

A trainer loads one file by its path, so that file can import nothing of this package. Therefore
``make integrations`` (``write.py``) copies the regions below into the files that have a region of
the same name. Nothing imports this file. It is Python 3.10 and the standard library, as they are.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

# --- shared: requests -----------------------------------------------------------------------------

ENDPOINTS_VARIABLE = "SMARTSEARCH_SIDECAR_ENDPOINTS"
ENDPOINTS_BYTES_MAX = 65536
ANSWER_BYTES_MAX = 4 * 1024 * 1024


class _Trouble(Exception):
    """A failure as a sentence. It never leaves this file as an exception: Ray cannot carry a class
    that only this file defines, and would drop the sentence.
    """

    def __init__(self, sentence: str, *, latch: bool = True) -> None:
        super().__init__(sentence)
        self.latch = latch


def _url(name: str, endpoints: str | None = None) -> str:
    """The URL called ``name`` in the file ``endpoints``, or else in the file that the environment
    variable names. It is read at every call, since a sidecar that is resumed has another port.
    """
    path = endpoints or os.environ.get(ENDPOINTS_VARIABLE)
    if not path:
        raise _Trouble(f"{ENDPOINTS_VARIABLE} must name the run's endpoints.json where Ray starts")
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(ENDPOINTS_BYTES_MAX)
    except OSError as exc:
        raise _Trouble(f"{path} cannot be read ({exc.strerror}): is the sidecar up?") from None
    if mode & 0o077:
        raise _Trouble(f"{path} can be read by others: it holds capabilities, so chmod it to 600")
    try:
        url = str(json.loads(raw)[name]).rstrip("/")
        parts = urlsplit(url)
        if parts.scheme != "http" or not (parts.hostname and parts.port and parts.path.strip("/")):
            raise ValueError
    except (ValueError, LookupError, TypeError, RecursionError):
        raise _Trouble(f"{path} is not the endpoints.json of a sidecar") from None
    return url


def _ask(
    method: str,
    path: str,
    value: Any,
    seconds: float,
    *,
    url: str = "internal_url",
    endpoints: str | None = None,
    bytes_max: int = ANSWER_BYTES_MAX,
) -> tuple[int, Any]:
    """Status and JSON of one request. It uses no proxy, follows no redirect and never retries."""
    parts = urlsplit(_url(url, endpoints))
    try:
        body = None if value is None else json.dumps(value, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError):
        raise _Trouble("the request cannot be written as UTF-8 JSON") from None
    headers = {} if body is None else {"Content-Type": "application/json"}
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=seconds)
    try:
        connection.request(method, parts.path + path, body, headers)
        answer = connection.getresponse()
        raw = answer.read(bytes_max + 1)
    except (OSError, http.client.HTTPException) as exc:
        raise _Trouble(f"the sidecar gave no answer ({type(exc).__name__})") from None
    finally:
        connection.close()
    if len(raw) > bytes_max:
        raise _Trouble(f"got an answer of more than {bytes_max} bytes: is another program there?")
    try:
        # A sidecar never quotes its capability, but a proxy's error page may.
        return answer.status, json.loads(raw.replace(parts.path.strip("/").encode(), b"***"))
    except (ValueError, RecursionError):
        raise _Trouble("got an answer that is not JSON: is another program on this port?") from None


# --- end of shared --------------------------------------------------------------------------------

# --- shared: failures -----------------------------------------------------------------------------

LATCH_SECONDS = 5.0


class _Failed:
    """The first failure of this process. Every request after it is refused."""

    def __init__(self, caller: str) -> None:
        self._caller = caller
        self._lock = threading.Lock()
        self._told = False
        self.first: str | None = None

    def __reduce__(self) -> tuple[type[_Failed], tuple[str]]:
        """A worker that receives a pickle of this starts without a failure, with its own lock."""
        return _Failed, (self._caller,)

    def refuse(self) -> None:
        """Raises ``RuntimeError`` once this process has failed."""
        if self.first is not None:
            raise RuntimeError(f"refused, since this process has failed before: {self.first}")

    @contextlib.contextmanager
    def guarding(self, what: str, endpoints: str | None = None) -> Iterator[None]:
        """Refuses after a failure. Any exception of the block becomes the first failure, asks the
        sidecar to close its latch, and is raised as a ``RuntimeError`` with a sentence.
        """
        self.refuse()
        latch = True
        try:
            yield
            return
        except _Trouble as exc:
            sentence, latch = f"{what}: {exc}", exc.latch
        except Exception as exc:  # noqa: BLE001 - its text may hold a rollout; it is raised below
            sentence = f"{what}: {type(exc).__name__}"
        with self._lock:
            self.first = self.first or sentence
            tell, self._told = latch and not self._told, self._told or latch
        if tell:
            # Best effort: this process refuses even if the sidecar does not get the request.
            reason = {"reason": f"{self._caller}: {sentence}"}
            with contextlib.suppress(_Trouble):
                _ask("POST", "/latch", reason, LATCH_SECONDS, endpoints=endpoints)
        # `from None`: a traceback must not show the first exception, whose text may hold a rollout.
        raise RuntimeError(sentence) from None


def _why(status: int, value: Any) -> str:
    """An error answer as words, all of them constants of the sidecar."""
    error = value.get("error") if isinstance(value, dict) else None
    if not isinstance(error, dict):
        return f"the sidecar answered with status {status}"
    return f"the sidecar answered {error.get('code')}: {error.get('message')}"[:500]


# --- end of shared --------------------------------------------------------------------------------

# --- shared: rewards ------------------------------------------------------------------------------

BATCH_MAX = int(os.environ.get("SMARTSEARCH_SIDECAR_BATCH_MAX", "64"))
"""Rows of one request; at most the sidecar's ``reward.batch_max``, whose default this is."""
REWARD_SECONDS = float(os.environ.get("SMARTSEARCH_SIDECAR_REWARD_SECONDS", "660"))
"""Above the sidecar's ``reward.deadline_seconds`` (600), so that the sidecar gives up first."""


def _finite(row: Any) -> float:
    """The reward of one answered row."""
    reward = row.get("reward") if isinstance(row, dict) else None
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise _Trouble("the sidecar answered with something other than a finite number")
    return float(reward)


def _ask_batch(items: list[dict[str, Any]]) -> list[float]:
    """The rewards of at most ``BATCH_MAX`` rows, in order."""
    status, value = _ask("POST", "/reward/batch", {"items": items}, REWARD_SECONDS)
    if status != 200:
        raise _Trouble(_why(status, value))
    rows = value.get("rewards") if isinstance(value, dict) else None
    if not isinstance(rows, list) or len(rows) != len(items):
        raise _Trouble("the sidecar answered with another number of rewards than of rows")
    return [_finite(row) for row in rows]


def _answers(ground_truth: Any) -> Any:
    """The reference answers as JSON has them. An array is numpy's, which is not imported here."""
    return ground_truth.tolist() if hasattr(ground_truth, "tolist") else ground_truth


# --- end of shared --------------------------------------------------------------------------------

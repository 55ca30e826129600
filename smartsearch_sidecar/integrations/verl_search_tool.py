"""The search tool of current verl, through the sidecar beside it.

One file for the trainer's own Python (3.10, standard library only; verl is imported once a tool is
made). Put its folder on ``PYTHONPATH``, name the run's ``endpoints.json`` in
``SMARTSEARCH_SIDECAR_ENDPOINTS`` where Ray is started, and give verl a tool configuration::

    tools:
      - class_name: verl_search_tool.SidecarSearch
        config: {type: native}

with ``actor_rollout_ref.rollout.multi_turn.tool_config_path=.../tools.yaml``,
``agent.default_agent_loop=tool_agent`` and ``multi_turn.max_tool_response_length`` above the length
of five passages: verl's default cuts every answer to 256 characters.

verl's agent loop makes a tool message of whatever ``execute`` raises, and trains on it. What
``release`` raises it lets through, and the trajectory fails. So a failure is raised from both,
which is why this is a tool with a life cycle: verl's function tools have none. What is raised is a
plain ``RuntimeError``: Ray can carry it to the driver.

What a failed trajectory does to the run is verl's to say. Its older trainer ends the step. Its
current one (``trainer.use_v1``, the default) leaves it out, trains on what else the step has, and
ends only where a step has nothing; by itself it would go on with rollouts that never search. So
after the first failure of a process every call is refused, the sidecar is asked to close its latch,
which fails the searches of all other processes, and no further trajectory begins: ``tool_schema``
raises, which verl reads before each. Leave ``trainer.v1.sampler.sync_refill_failed_groups`` off
(the asynchronous modes ask for other prompts in any case, and stand still), and ask the gate before
a checkpoint is accepted.

What the policy gets wrong is no failure. An empty query, or arguments that hold none, goes to the
sidecar like any other and comes back as ``invalid query``, recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

ENDPOINTS_VARIABLE = "SMARTSEARCH_SIDECAR_ENDPOINTS"
ENVIRONMENT = "agentinputlab:smartsearch-fixed-wikipedia-v1"
TIMEOUT_SECONDS = 30.0
"""Above the sidecar's ``execute.deadline_seconds`` (9), so that the sidecar gives up first."""
SEARCHES_AT_ONCE = 8
"""Of one process, as many as the sidecar has slots; verl runs eight such processes on a node."""
LATCH_SECONDS = 5.0
ENDPOINTS_BYTES_MAX = 65536
ANSWER_BYTES_MAX = 64 * 1024 * 1024

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "wikipedia_search",
        "description": "Search Wikipedia for a given query.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "Query to search for."}},
            "required": ["query"],
        },
    },
}
"""What the policy is shown, unless the tool configuration has a ``tool_schema`` of its own. It may
rename the tool; the argument is called ``query``."""


class _Trouble(Exception):
    """What is wrong, as a sentence; it never leaves this file."""


class _Process:
    """The first failure of this process, which is its last, and the threads that search."""

    def __init__(self) -> None:
        self.failure: str | None = None
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    def __reduce__(self) -> tuple[type[_Process], tuple[()]]:
        """Neither lock nor threads can travel; a worker that is sent a tool begins afresh."""
        return _Process, ()

    def threads(self) -> ThreadPoolExecutor:
        """Made when first needed: a dataset makes tools too, and never searches."""
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(SEARCHES_AT_ONCE, "sidecar-search")
            return self._threads

    def refuse(self) -> None:
        """Raises once this process has failed."""
        if self.failure is not None:
            raise RuntimeError(f"refused, since this process has failed before: {self.failure}")

    def fail(self, sentence: str, endpoints: str | None) -> None:
        """Remembers the first failure, and asks the sidecar to close its latch."""
        with self._lock:
            first, self.failure = self.failure is None, self.failure or sentence
        if first:
            # Best effort: this process refuses whether or not the sidecar hears of it.
            with contextlib.suppress(_Trouble):
                reason = {"reason": f"the search tool: {sentence}"}
                _post(endpoints, "internal_url", "/latch", reason, LATCH_SECONDS)


_PROCESS = _Process()


class SidecarSearch:
    """A verl tool: ``BaseTool`` in all but name, so that this file needs no verl to be read.

    ``config`` may hold ``endpoints`` (a path, instead of the environment variable),
    ``timeout_seconds`` and ``environment`` (the sidecar's ``execute.environment``).
    """

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        schemas = importlib.import_module("verl.tools.schemas")
        self.config = config
        self._schema = tool_schema or schemas.OpenAIFunctionToolSchema.model_validate(SCHEMA)
        self.name: str = self._schema.function.name
        self._response = schemas.ToolResponse
        self._endpoints = config.get("endpoints")
        self._timeout = float(config.get("timeout_seconds", TIMEOUT_SECONDS))
        self._environment = str(config.get("environment", ENVIRONMENT))

    @property
    def tool_schema(self) -> Any:
        """What the policy is shown. verl reads it where a trajectory begins: once this process has
        failed none does, the one that would never have searched included.
        """
        _PROCESS.refuse()
        return self._schema

    def get_openai_tool_schema(self) -> Any:
        """What the policy is shown."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **_given: Any) -> tuple[str, Any]:
        """A call begins. Never raises: verl would make a message of it, and release nothing."""
        return instance_id or str(uuid4()), self._response()

    async def execute(
        self, instance_id: str, parameters: Any, **_given: Any
    ) -> tuple[Any, float, dict[str, Any]]:
        """The passages of a query. Raises ``RuntimeError`` where the sidecar gave none."""
        query = parameters.get("query") if isinstance(parameters, dict) else None
        loop = asyncio.get_running_loop()
        text = await loop.run_in_executor(_PROCESS.threads(), self._search, query)
        return self._response(text=text), 0.0, {}

    async def calc_reward(self, instance_id: str, **_given: Any) -> float:
        """A search is no merit by itself."""
        return 0.0

    async def release(self, instance_id: str, **_given: Any) -> None:
        """A call ends. Raises what ``execute`` raised before: here verl lets it through."""
        _PROCESS.refuse()

    def _search(self, query: Any) -> str:
        """In a thread: the result of one search. Whatever goes wrong, the process has failed."""
        _PROCESS.refuse()
        call = f"wikipedia_search(query={query if isinstance(query, str) else ''!r}, top_n=5)"
        try:
            status, value = _post(
                self._endpoints,
                "sandbox_url",
                "/execute",
                {"env": self._environment, "call": call},
                self._timeout,
            )
            if status != 200:
                raise _Trouble(_why(status, value))
            result = value.get("result") if isinstance(value, dict) else None
            if not isinstance(result, str):
                raise _Trouble("what answered in the sidecar's place is none")
            return result
        except _Trouble as exc:
            sentence = f"no search: {exc}"
        except Exception as exc:  # noqa: BLE001 - its text may hold a query; it is raised below
            sentence = f"no search: {type(exc).__name__}"
        _PROCESS.fail(sentence, self._endpoints)
        raise RuntimeError(sentence)


# --- the link to the sidecar ----------------------------------------------------------------------


def _url(endpoints: str | None, name: str) -> str:
    """One of the run's two URLs, read at every call: a sidecar that was resumed has moved."""
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
        if parts.scheme != "http" or not (parts.hostname and parts.port and parts.path):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise _Trouble(f"{path} is not the endpoints.json of a sidecar") from None
    return url


def _post(
    endpoints: str | None, name: str, path: str, value: Any, seconds: float
) -> tuple[int, Any]:
    """One try, no proxy, no redirect: status and JSON."""
    url = urlsplit(_url(endpoints, name))
    connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=seconds)
    try:
        connection.request(
            "POST",
            url.path + path,
            json.dumps(value).encode(),
            {"Content-Type": "application/json"},
        )
        answer = connection.getresponse()
        raw = answer.read(ANSWER_BYTES_MAX + 1)
    except (OSError, http.client.HTTPException) as exc:
        raise _Trouble(f"the sidecar gave no answer ({type(exc).__name__})") from None
    finally:
        connection.close()
    try:
        if len(raw) > ANSWER_BYTES_MAX:
            raise ValueError
        # No sidecar quotes its own address; if something else does, it goes no further.
        return answer.status, json.loads(raw.replace(url.path.strip("/").encode(), b"***"))
    except (ValueError, RecursionError):
        raise _Trouble("what answered in the sidecar's place is none") from None


def _why(status: int, value: Any) -> str:
    """An error answer as words, all of them the sidecar's own constants."""
    error = value.get("error") if isinstance(value, dict) else None
    if not isinstance(error, dict):
        return f"the sidecar answered with status {status}"
    return f"the sidecar answered {error.get('code')}: {error.get('message')}"[:500]

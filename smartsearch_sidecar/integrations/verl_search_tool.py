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

verl's agent loop makes a tool message of an exception of ``execute``, and trains on it. An
exception of ``release`` passes through it and fails the trajectory. So a failure is raised from
both. This needs a tool with a life cycle: verl's function tools have no ``release``. Every failure
is raised as a plain ``RuntimeError``, which Ray can carry to the driver.

verl decides what a failed trajectory does to the run. Its older trainer ends the step. Its current
one (``trainer.use_v1``, the default) leaves the trajectory out and trains on the rest of the step;
it ends only if a step is empty. Left alone it would go on with rollouts that never search. So,
after the first failure of a process:

- every call is refused, and the sidecar is asked to close its latch, which fails the searches of
  all other processes;
- no further trajectory begins, since ``tool_schema``, which verl reads before each, raises.

Leave ``trainer.v1.sampler.sync_refill_failed_groups`` off (the asynchronous modes ask for other
prompts in any case, and stand still). Ask the gate before a checkpoint is accepted.

What was answered goes to the reward beside the rollout's text: in ``extra_fields["extras"]`` of
verl's agent loop, which the reward managers ``naive`` and ``remote`` hand on in ``extra_info``.
With ``verl_reward.py`` as the reward, the sidecar judges the text's tool responses by it. The
manager ``dapo`` drops it, and nothing is judged. ``extras`` is the one free key that every row of
verl has: a key of our own, in some rows alone, breaks verl's joining of batches.

An error of the policy is not a failure. An empty or missing query goes to the sidecar like any
other and comes back as ``invalid query``, recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

ENVIRONMENT = "agentinputlab:smartsearch-fixed-wikipedia-v1"
TIMEOUT_SECONDS = 30.0
"""Above the sidecar's ``execute.deadline_seconds`` (9), so that the sidecar gives up first."""
SEARCHES_AT_ONCE = 8
"""In one process: as many as the sidecar has slots. verl runs eight such processes on a node."""
SEARCH_BYTES_MAX = 64 * 1024 * 1024
"""Of one answer: five passages of any corpus, far above what a context window holds."""

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
"""The policy sees this unless the tool configuration has a ``tool_schema`` of its own. That one may
rename the tool, but not the argument ``query``."""


# --- shared: requests (of smartsearch_reward.py, copied by `make integrations`) -------------------

ENDPOINTS_VARIABLE = "SMARTSEARCH_SIDECAR_ENDPOINTS"
ANSWER_BYTES_MAX = 4 * 1024 * 1024


class _Trouble(Exception):
    """A failure as a sentence. It stays in this file: Ray drops the text of a class it lacks."""

    latch = True


def _url(name: str, endpoints: str | None = None) -> str:
    """The URL called ``name``, read at every call: a sidecar that is resumed has another port."""
    path = endpoints or os.environ.get(ENDPOINTS_VARIABLE)
    if not path:
        raise _Trouble(f"{ENDPOINTS_VARIABLE} must name the run's endpoints.json where Ray starts")
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(65536)
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
    url: str, path: str, value: Any, seconds: float, bytes_max: int = ANSWER_BYTES_MAX
) -> tuple[int, Any]:
    """Status and JSON of one POST, or GET without ``value``: no proxy, no redirect, no retry."""
    parts = urlsplit(url)
    try:
        body = None if value is None else json.dumps(value, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError):
        raise _Trouble("the request cannot be written as UTF-8 JSON") from None
    method, headers = ("POST", {"Content-Type": "application/json"}) if body else ("GET", {})
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


# --- shared: failures (of smartsearch_reward.py, copied by `make integrations`) -------------------

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
        try:
            yield
            return
        except _Trouble as exc:
            sentence, latch = f"{what}: {exc}", exc.latch
        except Exception as exc:  # noqa: BLE001 - its text may hold a rollout; it is raised below
            sentence, latch = f"{what}: {type(exc).__name__}", True
        with self._lock:
            self.first = self.first or sentence
            tell, self._told = latch and not self._told, self._told or latch
        if tell:
            # Best effort: this process refuses even if the sidecar does not get the request.
            reason = {"reason": f"{self._caller}: {sentence}", "by": "trainer"}
            with contextlib.suppress(_Trouble):
                _ask(_url("internal_url", endpoints), "/latch", reason, LATCH_SECONDS)
        # `from None`: a traceback must not show the first exception, whose text may hold a rollout.
        raise RuntimeError(sentence) from None


def _why(status: int, value: Any) -> str:
    """An error answer as words, all of them constants of the sidecar."""
    error = value.get("error") if isinstance(value, dict) else None
    said = f"{error.get('code')}: {error.get('message')}" if isinstance(error, dict) else None
    return f"the sidecar answered {said or f'with status {status}'}"[:500]


# --- end of shared --------------------------------------------------------------------------------

_FAILED = _Failed("the search tool")

HANDED = "smartsearch_answers"
"""The key within ``extras``; ``verl_reward.py`` reads it."""


class _Threads(ThreadPoolExecutor):
    """The threads that search. They start at the first search: a dataset's tools never search."""

    def __init__(self) -> None:
        super().__init__(SEARCHES_AT_ONCE, "sidecar-search")

    def __reduce__(self) -> tuple[type[_Threads], tuple[()]]:
        """Threads cannot be pickled; a worker that receives a tool starts its own."""
        return _Threads, ()


_THREADS = _Threads()


class SidecarSearch:
    """A verl tool. It has the methods of ``BaseTool`` but does not inherit: no verl to import.

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
        self._unanswered: set[str] = set()

    @property
    def tool_schema(self) -> Any:
        """The schema for the policy. verl reads it at the start of a trajectory. It raises once
        this process has failed, so no trajectory starts, not even one that would never search.
        """
        _FAILED.refuse()
        return self._schema

    def get_openai_tool_schema(self) -> Any:
        """The schema for the policy, under the name that ``BaseTool`` has for it."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **_given: Any) -> tuple[str, Any]:
        """A call begins. Never raises: verl would make a message of it and not call ``release``."""
        instance_id = instance_id or str(uuid4())
        self._unanswered.add(instance_id)
        return instance_id, self._response()

    async def execute(
        self, instance_id: str, parameters: Any, *, agent_data: Any = None, **_given: Any
    ) -> tuple[Any, float, dict[str, Any]]:
        """The passages of a query. Raises ``RuntimeError`` if the sidecar gives no result."""
        asked = parameters.get("query") if isinstance(parameters, dict) else None
        query = asked if isinstance(asked, str) else ""
        # Before the first await: verl begins the calls of a turn in their order, side by side.
        handed = _place(agent_data, query)
        loop = asyncio.get_running_loop()
        try:
            text = await loop.run_in_executor(_THREADS, self._search, query)
        except asyncio.CancelledError:
            self._unanswered.discard(instance_id)  # verl gave the trajectory up
            raise
        handed["result"] = text
        self._unanswered.discard(instance_id)
        return self._response(text=text), 0.0, {}

    async def calc_reward(self, instance_id: str, **_given: Any) -> float:
        """Always 0.0: a search by itself earns no reward."""
        return 0.0

    async def release(self, instance_id: str, **_given: Any) -> None:
        """A call ends. Raises after a failure, as ``execute`` does: verl lets this one pass."""
        _FAILED.refuse()
        if instance_id in self._unanswered:
            # What kept `execute` from running is a tool message by now.
            self._unanswered.discard(instance_id)
            await asyncio.get_running_loop().run_in_executor(_THREADS, self._never_asked)

    def _never_asked(self) -> None:
        with _FAILED.guarding("no search", self._endpoints):
            raise _Trouble("verl ended a call without an answer: is this the verl it was made for?")

    def _search(self, query: str) -> str:
        """The result of one search, in a thread. Any exception is this process's failure."""
        call = f"wikipedia_search(query={query!r}, top_n=5)"
        with _FAILED.guarding("no search", self._endpoints):
            url = _url("sandbox_url", self._endpoints)
            body = {"env": self._environment, "call": call}
            status, value = _ask(url, "/execute", body, self._timeout, SEARCH_BYTES_MAX)
            if status != 200:
                raise _Trouble(_why(status, value))
            result = value.get("result") if isinstance(value, dict) else None
            if not isinstance(result, str):
                raise _Trouble("got an answer without passages: is another program on this port?")
        return result


def _place(agent_data: Any, query: str) -> dict[str, Any]:
    """Where the answer of one call goes, among those of its trajectory in verl's agent loop.

    ``turns`` are the assistant's and the environment's at this moment: they tell the reward whether
    verl had room for the last answers. An agent loop without ``extra_fields`` hands on nothing.
    """
    turns = [int(getattr(agent_data, f"{whose}_turns", 0)) for whose in ("assistant", "user")]
    handed = {"query": query, "turns": turns, "result": None}
    fields = getattr(agent_data, "extra_fields", None)
    if isinstance(fields, dict):
        extras = fields.setdefault("extras", {})
        extras.setdefault(HANDED, []).append(handed)
    return handed

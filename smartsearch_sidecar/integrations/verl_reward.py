"""Rewards of current verl, through the sidecar beside it.

One file for the trainer's own Python (3.10, standard library only). Give it to verl with

    reward.custom_reward_function.path=.../verl_reward.py
    reward.custom_reward_function.name=compute_score_async  (compute_score for ``remote``)
    reward.reward_manager.name=naive                        (or dapo, or remote)

and name the run's ``endpoints.json`` in ``SMARTSEARCH_SIDECAR_ENDPOINTS`` where Ray is started.
``compute_score_batch`` is for the ``batch`` manager of earlier verl.

verl's managers hand over the response alone, decoded without special tokens. The sidecar's scorer
reads prompt and response in the pinned trainer's form. So this file puts the prompt back, from
``extra_info["question"]``, or from ``extra_info["prompt"]`` (messages, or the rendered template).
``reward_kwargs.think_prefilled`` says whether the generation prompt ends in ``<think>``, as the
pinned one does. Without it, this file assumes so unless the response begins with the tag.

Rows that arrive together are sent together: verl scores a step's rollouts all at once and in
several processes, and one request for each row would fill the sidecar's waiting room.

The managers ``rate_limited`` and ``prime`` catch an exception and score 0.0 instead. Both are
refused when this file is loaded, and again at each call. After the first failure of a process
every later call is refused, and the sidecar is asked to close its latch. Every failure is raised as
a plain ``RuntimeError``, which Ray can carry to the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import inspect
import json
import logging
import math
import os
import re
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

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
            reason = {"reason": f"{self._caller}: {sentence}"}
            with contextlib.suppress(_Trouble):
                _ask(_url("internal_url", endpoints), "/latch", reason, LATCH_SECONDS)
        # `from None`: a traceback must not show the first exception, whose text may hold a rollout.
        raise RuntimeError(sentence) from None


def _why(status: int, value: Any) -> str:
    """An error answer as words, all of them constants of the sidecar."""
    error = value.get("error") if isinstance(value, dict) else None
    said = f"{error.get('code')}: {error.get('message')}" if isinstance(error, dict) else None
    return f"the sidecar answered {said or f'with status {status}'}"[:500]


# --- shared: rewards (of smartsearch_reward.py, copied by `make integrations`) --------------------

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
    url = _url("internal_url")
    status, value = _ask(url, "/reward/batch", {"items": items}, REWARD_SECONDS)
    if status != 200:
        raise _Trouble(_why(status, value))
    rows = value.get("rewards") if isinstance(value, dict) else None
    if not isinstance(rows, list) or len(rows) != len(items):
        raise _Trouble("the sidecar answered with another number of rewards than of rows")
    return [_finite(row) for row in rows]


def _item(solution: Any, ground_truth: Any, data_source: Any) -> dict[str, Any]:
    """A row of a request. Answers may be a numpy array, which JSON does not know."""
    answers = ground_truth.tolist() if hasattr(ground_truth, "tolist") else ground_truth
    return {"solution_str": solution, "ground_truth": answers, "data_source": data_source}


# --- end of shared --------------------------------------------------------------------------------

_FAILED = _Failed("the trainer")

END = "<|im_end|>"
THINK = "<think>"
THINKS_OF_THE_SYSTEM_PROMPT = 3
"""The scorer takes the response from the fourth ``<think>`` on; the pinned prompt shows three."""
UNSEEN_SYSTEM_PROMPT = (
    "(The system prompt is not part of this record. The pinned one shows these: "
    "<think> <think> <think>)"
)
_RENDERED = re.compile(
    r"(?:<\|im_start\|>system\n(?P<system>.*?)<\|im_end\|>\n)?"
    r"<\|im_start\|>user\n(?P<question>.*?)<\|im_end\|>\n"
    r"<\|im_start\|>assistant\n(?P<response>.*)",
    re.DOTALL,
)
_LOST_TOKENS = re.compile(r"(?:system|user)(?:\n.*)?\nassistant\n", re.DOTALL)
"""How a rendered prompt begins that was decoded without its special tokens."""
_LOST_PROMPT = re.compile(r"system\n.*?\nuser\n(?P<question>.*?)\nassistant\n", re.DOTALL)
"""The same where it is all there, with its question."""
SWALLOWING = {"rate_limited", "prime"}
"""Managers that turn an exception into a reward of 0.0."""
_CLASSES = ("RateLimitedReward", "PrimeReward")
_MODULES = ("reward_manager.limited", "reward_manager.prime", "concurrent.futures.process")
_SWALLOWED = (
    "this reward manager turns every failure into a reward of 0.0: choose naive, dapo or remote"
)


def compute_score(
    data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None, **given: Any
) -> float:
    """The reward of one rollout, for managers that call from a thread or a process of their own.

    The pinned scorer scores every row, for any ``data_source``, if its question is declared. Of
    ``given``, only ``think_prefilled`` counts. Raises ``RuntimeError`` if the sidecar gives no
    finite number.
    """
    swallowed = _is_swallowed()
    row = functools.partial(_row, solution_str, ground_truth, extra_info, given, swallowed)
    try:
        return _SENDER.submit(row).result()
    except RuntimeError as exc:
        raise _not_an_answer(exc) if swallowed else exc from None


async def compute_score_async(
    data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None, **given: Any
) -> float:
    """The same reward for managers that await it, without a thread for each row."""
    swallowed = _is_swallowed()
    row = functools.partial(_row, solution_str, ground_truth, extra_info, given, swallowed)
    try:
        return await asyncio.wrap_future(_SENDER.submit(row))
    except RuntimeError as exc:
        raise _not_an_answer(exc) if swallowed else exc from None
    except asyncio.CancelledError:
        _SENDER.submit(_given_up)
        raise


def compute_score_batch(
    data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any = None, **given: Any
) -> list[float]:
    """The rewards of many rollouts, in order, for a manager that hands over a whole batch."""
    infos = [None] * len(solution_strs) if extra_infos is None else extra_infos
    rows = zip(solution_strs, ground_truths, infos, strict=True)
    waiting = [_SENDER.submit(functools.partial(_row, *row, given, False)) for row in rows]
    return [reward.result() for reward in waiting]


# --- rows that are sent together ------------------------------------------------------------------


class _Sender:
    """One thread. It posts the rows that have gathered during its previous request."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._gathered: deque[tuple[Future[float], Callable[[], dict[str, Any]]]] = deque()
        self._process: int | None = None

    def __reduce__(self) -> tuple[type[_Sender], tuple[()]]:
        """A thread cannot be pickled; a worker that receives this starts its own."""
        return _Sender, ()

    def submit(self, make: Callable[[], dict[str, Any]]) -> Future[float]:
        """The future reward of a row; the thread calls ``make`` for the row."""
        reward: Future[float] = Future()
        with self._change:
            if self._process != os.getpid():  # the first call, or a fork, which copies no thread
                self._process = os.getpid()
                self._gathered.clear()
                threading.Thread(target=self._run, name="sidecar-rewards", daemon=True).start()
            self._gathered.append((reward, make))
            self._change.notify()
        return reward

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._gathered)
                count = min(BATCH_MAX, len(self._gathered))
                rows = [self._gathered.popleft() for _ in range(count)]
            if rows := [row for row in rows if row[0].set_running_or_notify_cancel()]:
                self._post(rows)

    def _post(self, rows: list[tuple[Future[float], Callable[[], dict[str, Any]]]]) -> None:
        try:
            with _FAILED.guarding("no reward"):
                rewards = _ask_batch([make() for _, make in rows])
        except RuntimeError as exc:
            for waiting, _ in rows:
                waiting.set_exception(RuntimeError(str(exc)))
        else:
            for (waiting, _), reward in zip(rows, rewards, strict=True):
                waiting.set_result(reward)


_SENDER = _Sender()


def _given_up() -> dict[str, Any]:
    """A manager that stops waiting for a reward may use another number: a failure too."""
    raise _Trouble("the reward manager stopped waiting for a reward")


# --- the text the scorer reads --------------------------------------------------------------------


def _row(
    solution: Any, ground_truth: Any, extra_info: Any, given: dict[str, Any], swallowed: bool
) -> dict[str, Any]:
    """One row of a request. Raises ``_Trouble`` if its text cannot be put together."""
    if swallowed:
        raise _Trouble(_SWALLOWED)
    if not isinstance(solution, str):
        raise _Trouble("a rollout is not text")
    text = _text(solution, dict(extra_info or {}), given.get("think_prefilled"))
    return _item(text, ground_truth, "re_call")


def _text(solution: str, extra_info: dict[str, Any], prefilled: bool | None) -> str:
    """Prompt and response, in the form of the pinned trainer's template.

    What the policy writes is never judged for its form: special tokens in a response are its own.
    Only where a text begins with this row's prompt, its question in it, is it prompt and response.
    """
    prompt, question = extra_info.get("prompt"), extra_info.get("question")
    system, asked, opening = None, None, None
    if isinstance(prompt, str) and "<|im_start|>" in prompt:
        system, asked, opening = _rendered(prompt)
    elif isinstance(prompt, str):
        asked = prompt
    elif prompt is not None:
        system, asked = _turns(prompt)
    question = question or asked
    lost = _LOST_PROMPT.match(solution)
    lost_here = lost is not None and question in (None, lost["question"].strip(), lost["question"])
    if lost_here or (isinstance(question, str) and _LOST_TOKENS.match(question)):
        raise _Trouble(
            "special tokens are gone: a prompt was decoded without its <|im_start|>, and its turns "
            "cannot be told apart; keep them, or hand over the response alone"
        )
    if question is None and solution.startswith("<|im_start|>"):
        system, question, response = _rendered(solution)
    elif _begins_with_its_prompt(solution, question):
        system, _, response = _rendered(solution)
    elif opening is not None:
        response = opening + solution
    elif prefilled or (prefilled is None and not solution.startswith(THINK)):
        response = THINK + solution
    else:
        response = solution
    if not isinstance(question, str) or not question.strip():
        raise _Trouble(
            "verl hands over the response alone and extra_info has neither question nor prompt, so "
            "the user turn cannot be put together: add one of them to the dataset"
        )
    if END in question or "<|im_start|>" in question:
        raise _Trouble("a question holds special tokens of the template")
    if system is None or system.count(THINK) != THINKS_OF_THE_SYSTEM_PROMPT:
        system = UNSEEN_SYSTEM_PROMPT
    return (
        f"<|im_start|>system\n{system}{END}\n<|im_start|>user\n{question}{END}\n"
        f"<|im_start|>assistant\n{response}"
    )


def _begins_with_its_prompt(solution: str, question: Any) -> bool:
    """Whether a manager has handed over the row's own prompt with the response."""
    turns = _RENDERED.match(solution)
    if turns is None or turns["system"] is None or not isinstance(question, str):
        return False
    return turns["question"].strip() == question.strip() and THINK in turns["response"]


def _rendered(text: str) -> tuple[str | None, str, str]:
    """System prompt, question and the rest of a rendered template."""
    turns = _RENDERED.match(text)
    if turns is None:
        raise _Trouble(
            "a prompt is not in the form of the pinned template (system, user, assistant)"
        )
    return turns["system"], turns["question"], turns["response"]


def _turns(messages: Any) -> tuple[str | None, Any]:
    """The system prompt and the one question of a list of messages."""
    try:
        turns = [(message["role"], message["content"]) for message in messages]
    except (TypeError, KeyError, IndexError):
        raise _Trouble("extra_info's prompt is neither text nor a list of messages") from None
    roles = [role for role, _ in turns]
    if roles not in (["user"], ["system", "user"]):
        raise _Trouble(
            "extra_info's prompt must be one user message, with at most a system message"
        )
    system = turns[0][1] if len(turns) > 1 else None
    return (system if isinstance(system, str) else None), turns[-1][1]


# --- managers that swallow ------------------------------------------------------------------------


def _is_swallowed() -> bool:
    """Whether such a manager, or its process pool, is among the callers."""
    return any(
        type(frame.f_locals.get("self")).__name__.startswith(_CLASSES)
        or str(frame.f_globals.get("__name__")).endswith(_MODULES)
        for frame, _ in traceback.walk_stack(inspect.currentframe())
    )


def _not_an_answer(exc: RuntimeError) -> asyncio.CancelledError:
    """The one exception that these managers do not turn into 0.0 and Ray does not return."""
    logging.getLogger("smartsearch_sidecar").error("%s", exc)  # Ray drops the sentence
    return asyncio.CancelledError(str(exc))


def _refuse_to_be_loaded() -> None:
    """Looks for the manager's name in the configuration of the calling frames, verl's loader."""
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        config = frame.f_locals.get("config")
        for section in ("reward", "reward_model"):  # its place now, and before
            manager = getattr(getattr(config, section, None), "reward_manager", None)
            if str(getattr(manager, "name", manager)) in SWALLOWING:
                raise RuntimeError(_SWALLOWED)


_refuse_to_be_loaded()

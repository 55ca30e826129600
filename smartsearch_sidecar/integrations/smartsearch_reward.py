"""Rewards and checkpoints of the pinned SmartSearch trainer, through the sidecar beside it.

One file for the trainer's own Python (3.10, standard library only). Give it to the trainer with

    custom_reward_function.path=.../smartsearch_reward.py  custom_reward_function.name=compute_score
    reward_model.reward_manager=re_call  actor_rollout_ref.rollout.sandbox_url=sidecar

and name the run's ``endpoints.json`` in ``SMARTSEARCH_SIDECAR_ENDPOINTS`` where Ray is started.

``main_ppo.py`` executes this file in its task runner after it has imported the manager and the
trainer and before it builds either. So this file replaces methods of the two classes:

- The manager's ``__call__`` runs twice. The first run only notes texts and answers. Then all rows
  are scored in batches, and the second run reads those rewards. Each row is decoded once, by the
  trainer's own code. ``reward_extra_info`` is added: without it the trainer scores again.
- ``_save_checkpoint`` takes a receipt first and writes it beside the checkpoint afterwards.
  ``_load_checkpoint`` refuses a checkpoint without a receipt, and one whose receipt is not of the
  sidecar's ledger or of a run that it follows.
- ``init_workers`` hands the real ``sandbox_url`` to the rollouts only. What the trainer prints at
  its start and sends to its trackers holds the word ``sidecar``.

The trainer swallows the first exception of a scored batch and scores it again. Therefore, after the
first failure of a process, every later call is refused, and the sidecar is asked to close its
latch. Every failure is raised as a plain ``RuntimeError``, which Ray can carry to the driver.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import http.client
import importlib
import json
import math
import os
import re
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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

SANDBOX_WORD = "sidecar"
"""The placeholder for the real address in ``actor_rollout_ref.rollout.sandbox_url``."""
BATCHES_AT_ONCE = 2
"""With two, the helper has work while the last helper calls of a batch are awaited."""
SETTLE_SECONDS = 60.0
RECEIPT = "sidecar_receipt.json"
ALLOW_IDLE = os.environ.get("SMARTSEARCH_SIDECAR_ALLOW_IDLE") == "1"
"""Whether a checkpoint is meant to be accepted where no search came since the last one. Without it
the sidecar refuses that, because rollouts that ask a wrong address look just so.
"""
UNCOMPARED_VARIABLE = "SMARTSEARCH_SIDECAR_LOAD_UNCOMPARED"
"""The ``head`` of the one receipt that may be loaded though no ledger is there to compare it."""
LEDGER_SECONDS = 600.0
"""The sidecar reads whole journals to compare a receipt: 90 GB in this time."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MARK = "_smartsearch_sidecar"


class _Refusal(_Trouble):
    """A failure that is not the served run's: its latch stays as it is."""

    latch = False


def compute_score(data_source: Any, tokenizer: Any, solution_str: Any, ground_truth: Any) -> float:
    """The reward of one rollout; the wrapped manager asks for whole batches instead.

    ``solution_str`` is prompt and response decoded together, special tokens kept; ``ground_truth``
    one answer or several. Raises ``RuntimeError`` if the sidecar gives no finite number.
    """
    _install()
    with _FAILED.guarding("no reward"):
        item = _item(solution_str, ground_truth, data_source)
        status, value = _ask(_url("internal_url"), "/reward", item, REWARD_SECONDS)
        if status != 200:
            raise _Trouble(_why(status, value))
        return _finite(value)


# --- the manager ----------------------------------------------------------------------------------


class _Noting:
    """The tokenizer of the first run: it decodes, and keeps the decoded texts."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.texts: deque[str] = deque()

    def decode(self, *args: Any, **kwargs: Any) -> str:
        self.texts.append(self._tokenizer.decode(*args, **kwargs))
        return self.texts[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class _Reading(_Noting):
    """The tokenizer of the second run, where the manager reads the same rows in order."""

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return self.texts.popleft()


def _score_in_batches(native: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, data: Any, return_dict: bool = False, curr_save_path: Any = None) -> Any:
        items: list[dict[str, Any]] = []
        rewards: dict[Any, deque[float]] = defaultdict(deque)
        failed = threading.Event()

        def note(data_source: Any, tokenizer: Any, solution_str: Any, ground_truth: Any) -> float:
            items.append(_item(solution_str, ground_truth, data_source))
            return 0.0

        def read(data_source: Any, tokenizer: Any, solution_str: Any, ground_truth: Any) -> float:
            waiting = rewards.get(_key(_item(solution_str, ground_truth, data_source)))
            if not waiting:
                raise RuntimeError("the manager asked for a rollout that it had not shown before")
            return waiting.popleft()

        def ask(batch: list[dict[str, Any]]) -> list[float]:
            if failed.is_set():  # the rewards of a further batch would not be read
                return []
            try:
                return _ask_batch(batch)
            except BaseException:
                failed.set()
                raise

        first, second = copy.copy(self), copy.copy(self)
        first.tokenizer, first.compute_score = _Noting(self.tokenizer), note
        first.num_examine, first.save_path = 0, None  # nothing is printed or saved twice
        native(first, data)
        with _FAILED.guarding("no rewards for a batch"):
            batches = [items[at : at + BATCH_MAX] for at in range(0, len(items), BATCH_MAX)]
            with ThreadPoolExecutor(BATCHES_AT_ONCE) as pool:
                scored = [reward for batch in pool.map(ask, batches) for reward in batch]
            for item, reward in zip(items, scored, strict=True):
                rewards[_key(item)].append(reward)
        second.tokenizer, second.compute_score = _Reading(self.tokenizer), read
        second.tokenizer.texts = first.tokenizer.texts
        result = native(second, data, return_dict=return_dict, curr_save_path=curr_save_path)
        if isinstance(result, dict):
            result.setdefault("reward_extra_info", {})
        return result

    return call


def _key(item: dict[str, Any]) -> tuple[str, str]:
    """Exact text and answers. Identical rollouts of a group share a key and queue under it."""
    return item["solution_str"], json.dumps(item["ground_truth"])


# --- the trainer ----------------------------------------------------------------------------------


def _take_receipt_first(native: Callable[..., Any]) -> Callable[..., Any]:
    def save(self: Any) -> Any:
        step = int(self.global_steps)
        parent = self.config.trainer.default_local_dir
        folder = os.path.abspath(os.path.join(parent, f"global_step_{step}"))
        path = os.path.join(folder, RECEIPT)
        with _FAILED.guarding(f"no checkpoint of step {step}"):
            receipt = _take_receipt(step, folder)
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)  # of an earlier run: it must not vouch for a checkpoint half saved
        result = native(self)
        with _FAILED.guarding(f"the receipt of step {step} is not written"):
            with open(path + ".new", "w", encoding="utf-8") as file:
                json.dump(receipt, file, indent=2)
                file.flush()
                os.fsync(file.fileno())
            os.replace(path + ".new", path)
        return result

    return save


def _take_receipt(step: int, folder: str, allow_idle: bool = ALLOW_IDLE) -> Any:
    """The sidecar settles, checks and records. Raises its first cause in words if it refuses."""
    wanted: dict[str, Any] = {"step": step, "path": folder}
    if allow_idle:
        wanted["allow_idle"] = True
    path = f"/checkpoints?settle={SETTLE_SECONDS:g}"
    status, value = _ask(_url("internal_url"), path, wanted, 2 * SETTLE_SECONDS)
    if status == 409 and isinstance(value, dict):
        # The sidecar has recorded its refusal, and work in flight is no failure.
        cause, cluster = value.get("cause"), value.get("cluster") or {}
        why = value.get("reason") or cluster.get("detail") or "work in flight: nothing has failed"
        if cause:
            why = f"{cause.get('cause')}: {cause.get('detail')}"
        raise _Refusal(f"the run is {value.get('state')}, {why}")
    if status != 201 or not _is_receipt(value, step):
        raise _Trouble(_why(status, value))
    return value


def _is_receipt(value: Any, step: int) -> bool:
    return (
        isinstance(value, dict)
        and value.get("accepted") is True
        and value.get("step") == step
        and all(_SHA256.fullmatch(str(value.get(name))) for name in ("head", "claim_sha256"))
    )


def _compare(receipt: dict[str, Any], folder: str) -> None:
    """The sidecar holds the receipt against its ledger. Raises ``_Refusal`` unless it is of it.

    Where no ledger of the receipt's run can be read (the old run is not named by ``run.previous``,
    or its directory is gone), it is refused as well, unless ``UNCOMPARED_VARIABLE`` names its head;
    then a warning says that it was not compared.
    """
    url = _url("internal_url")
    status, value = _ask(url, "/checkpoints/verify", receipt, LEDGER_SECONDS)
    answer = value if status == 200 and isinstance(value, dict) else {}
    verdict, detail = answer.get("verdict"), answer.get("detail")
    if verdict == "known":
        return
    if verdict == "refused":
        raise _Refusal(f"its {RECEIPT} is not of the sidecar's ledger: {detail}")
    if verdict != "unknown":
        raise _Refusal(f"its {RECEIPT} was not compared with a ledger: {_why(status, value)}")
    if os.environ.get(UNCOMPARED_VARIABLE) != receipt["head"]:
        raise _Refusal(
            f"its {RECEIPT} can be compared with no ledger: {detail}. To load it all the same, set "
            f"{UNCOMPARED_VARIABLE} to the receipt's head"
        )
    sys.stderr.write(
        f"WARNING: {folder} is loaded, and its {RECEIPT} was compared with no ledger: {detail}\n"
    )


class _Gate:
    """Stands for the actor's workers during a load: it checks the receipt before they load."""

    def __init__(self, workers: Any) -> None:
        self._workers = workers
        self.asked = False

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> Any:
        folder = os.path.dirname(os.path.abspath(local_path))
        with _FAILED.guarding(f"{folder} is not loaded"):
            step = os.path.basename(folder).rpartition("_")[2]
            try:
                with open(os.path.join(folder, RECEIPT), encoding="utf-8") as file:
                    value = json.load(file)
            except (OSError, ValueError):
                value = None
            if not step.isdigit() or not _is_receipt(value, int(step)):
                raise _Refusal(
                    f"it has no {RECEIPT} of a sidecar for this step, so it is not known whether "
                    "its training data was healthy; resume from an earlier checkpoint"
                )
            _compare(value, folder)
        self.asked = True
        return self._workers.load_checkpoint(local_path, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workers, name)


def _load_only_with_receipt(native: Callable[..., Any]) -> Callable[..., Any]:
    def load(self: Any) -> Any:
        workers, before = getattr(self, "actor_rollout_wg", None), self.global_steps
        self.actor_rollout_wg = gate = _Gate(workers)
        try:
            result = native(self)
        finally:
            self.actor_rollout_wg = workers
        if self.global_steps != before and not gate.asked:
            raise RuntimeError("a checkpoint was loaded past the gate: is this the pinned trainer?")
        return result

    return load


def _hide_the_address(native: Callable[..., Any]) -> Callable[..., Any]:
    def init_workers(self: Any) -> Any:
        rollout = self.config.actor_rollout_ref.rollout
        with _FAILED.guarding("training does not begin"):
            path = f"/health?settle={SETTLE_SECONDS:g}"
            status, value = _ask(_url("internal_url"), path, None, 2 * SETTLE_SECONDS)
            if status != 200:
                state = value.get("state") if isinstance(value, dict) else None
                raise _Refusal(f"the sidecar is {state or 'not ready'}")
            real = _url("sandbox_url")
        given = rollout.sandbox_url
        try:
            if given == SANDBOX_WORD:
                rollout.sandbox_url = real
            return native(self)
        finally:
            # The trainer printed a full address before it loaded this file; trackers start later.
            rollout.sandbox_url = given and re.sub(r"(//[^/]*/).+", r"\1***", given)

    return init_workers


# --- putting it in place --------------------------------------------------------------------------

_MANAGER = ("verl.workers.reward_manager.re_call", "ReCallRewardManagerWithSave")
_TRAINER = ("verl.trainer.ppo.ray_trainer", "RayPPOTrainer")
_WRAPS = (
    (_MANAGER, "__call__", _score_in_batches),
    (_TRAINER, "init_workers", _hide_the_address),
    (_TRAINER, "_save_checkpoint", _take_receipt_first),
    (_TRAINER, "_load_checkpoint", _load_only_with_receipt),
)


def _install() -> None:
    """Replaces the four methods, once. In a process without the trainer it does nothing."""
    if "verl" not in sys.modules:
        return
    for (module, owner), name, wrap in _WRAPS:
        try:
            holder = getattr(importlib.import_module(module), owner)
            native = vars(holder)[name]
        except (ImportError, AttributeError, KeyError) as exc:
            raise RuntimeError(
                f"this verl has no {module}.{owner}.{name}, so it is not the pinned trainer; "
                "verl_reward.py serves current verl"
            ) from exc
        if not hasattr(native, _MARK):
            wrapped = functools.wraps(native)(wrap(native))
            setattr(wrapped, _MARK, True)
            setattr(holder, name, wrapped)


_install()

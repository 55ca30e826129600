"""Stand-ins for the two trainers: our own writing, driving the hooks as they do.

Standard library only and loadable by path in Python 3.10, so that one process can hold these and a
trainer-side file, and nothing else of this repository.

As the pinned trainer has it: the manager decodes prompt and response of one row together, calls
with keywords, writes a line for each row and returns no ``reward_extra_info``; the trainer reads
that key all the same, scores the batch once more after any exception, and hands its
configuration to the code that prints or tracks it. As current verl has it: ``run_single`` of a
row, the response alone, decoded without special tokens, a plain function in a thread, a coroutine
function awaited; ``rate_limited`` gives 0.0 for any exception; and the batch manager of
earlier verl.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import types
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# --- rows and tokens ------------------------------------------------------------------------------


class Tokenizer:
    """A token is a character, a special token ``<|...|>`` is one token; padding is 0."""

    SPECIAL = re.compile(r"<\|[a-z_]+\|>")

    def __init__(self) -> None:
        self.special: list[str] = []
        self.decoded = 0

    def encode(self, text: str) -> list[int]:
        tokens, at = [], 0
        for found in [*self.SPECIAL.finditer(text), None]:
            end = found.start() if found else len(text)
            tokens += [ord(char) for char in text[at:end]]
            if found:
                if found[0] not in self.special:
                    self.special.append(found[0])
                tokens.append(-1 - self.special.index(found[0]))
                at = found.end()
        return tokens

    def decode(self, tokens: Any, skip_special_tokens: bool = False) -> str:
        self.decoded += 1
        words = [chr(one) if one > 0 else self.special[-1 - one] for one in tokens if one]
        keep = [word for word in words if len(word) == 1 or not skip_special_tokens]
        return "".join(keep)


TOOL_LOOP = ("tool_extra_fields", "__num_turns__")
"""What verl's agent loops say of a rollout beside its ids."""


class Batch:
    """Rows as a trainer holds them: padded ids beside columns of objects."""

    def __init__(self, tokenizer: Tokenizer, rows: list[dict[str, Any]]) -> None:
        self.items = []
        for row in rows:
            prompt, response = tokenizer.encode(row["prompt"]), tokenizer.encode(row["response"])
            ids = {"prompts": [0, 0, *prompt], "responses": [*response, 0, 0, 0]}
            ids["attention_mask"] = [0, 0, *[1] * (len(prompt) + len(response)), 0, 0, 0]
            objects = {
                "data_source": row.get("data_source", "re_call"),
                "reward_model": {"ground_truth": row["ground_truth"]},
                "extra_info": row.get("extra_info", {}),
                **{name: row[name] for name in TOOL_LOOP if name in row},
            }
            self.items.append(SimpleNamespace(batch=ids, non_tensor_batch=objects))
        self.batch: dict[str, Any] = {"responses": [item.batch["responses"] for item in self.items]}
        self.non_tensor_batch: dict[str, Any] = {
            name: [item.non_tensor_batch[name] for item in self.items]
            for name in ("data_source", "extra_info")
        }

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Any:
        return self.items[number]


def valid(item: Any) -> tuple[list[int], list[int]]:
    """The ids of prompt and response without their padding."""
    prompts, mask = item.batch["prompts"], item.batch["attention_mask"]
    kept = sum(mask[: len(prompts)])
    return prompts[-kept:], item.batch["responses"][: sum(mask[len(prompts) :])]


# --- the pinned trainer ---------------------------------------------------------------------------


class ReCallRewardManagerWithSave:
    """Scores row after row in the driver."""

    def __init__(
        self, tokenizer: Any, num_examine: int, compute_score: Any = None, save_path: Any = None
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score
        self.save_path = save_path

    def __call__(self, data: Any, return_dict: bool = False, curr_save_path: Any = None) -> Any:
        if "rm_scores" in data.batch.keys():  # noqa: SIM118 - as it is asked there
            return data.batch["rm_scores"]
        path = curr_save_path or self.save_path
        tensor = [[0.0] * len(row) for row in data.batch["responses"]]
        shown: dict[str, int] = {}
        saved = []
        for number in range(len(data)):
            item = data[number]
            prompt, response = valid(item)
            text = self.tokenizer.decode([*prompt, *response])
            source = item.non_tensor_batch["data_source"]
            truth = item.non_tensor_batch["reward_model"]["ground_truth"]
            score = self.compute_score(
                data_source=source,
                tokenizer=self.tokenizer,
                solution_str=text,
                ground_truth=truth,
            )
            tensor[number][len(response) - 1] = score
            saved.append({"sequences_str": text, "ground_truth": truth, "score": score})
            if shown.setdefault(source, 0) < self.num_examine:
                shown[source] += 1
                print("shown:", score)
        if path is not None:
            with open(path, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in saved)
        return {"reward_tensor": tensor} if return_dict else tensor


class Workers:
    """The actor's worker group: keeps the address it was built with, saves and loads folders."""

    def __init__(self, sandbox_url: Any) -> None:
        self.sandbox_url = sandbox_url
        self.loaded: list[str] = []

    def save_checkpoint(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)
        with open(os.path.join(path, "weights"), "w", encoding="utf-8") as file:
            file.write("weights")

    def load_checkpoint(self, path: str, del_local_after_load: bool = False) -> None:
        self.loaded.append(path)


class RayPPOTrainer:
    """Trains by scoring; ``tracked`` is what its trackers were given."""

    def __init__(self, config: Any, reward_fn: Any, val_reward_fn: Any) -> None:
        self.config = config
        self.reward_fn = reward_fn
        self.val_reward_fn = val_reward_fn
        self.actor_rollout_wg: Any = None
        self.global_steps = 0
        self.trained: list[list[float]] = []
        self.tracked: Any = None

    def init_workers(self) -> None:
        self.actor_rollout_wg = Workers(self.config.actor_rollout_ref.rollout.sandbox_url)

    def _folder(self) -> str:
        return os.path.join(
            self.config.trainer.default_local_dir, f"global_step_{self.global_steps}"
        )

    def _save_checkpoint(self) -> None:
        self.actor_rollout_wg.save_checkpoint(os.path.join(self._folder(), "actor"))
        path = os.path.join(self.config.trainer.default_local_dir, "latest")
        with open(path, "w", encoding="utf-8") as file:
            file.write(str(self.global_steps))

    def _load_checkpoint(self) -> int | None:
        path = os.path.join(self.config.trainer.default_local_dir, "latest")
        if self.config.trainer.resume_mode == "disable" or not os.path.exists(path):
            return 0
        with open(path, encoding="utf-8") as file:
            self.global_steps = int(file.read())
        actor = os.path.join(self._folder(), "actor")
        self.actor_rollout_wg.load_checkpoint(actor, del_local_after_load=False)
        return None

    def fit(self, batches: list[Any], save_every: int = 1) -> None:
        """One step a batch; a batch whose scoring raises is scored once more."""
        self.tracked = repr(self.config)
        self.global_steps = 0
        self._load_checkpoint()
        for batch in batches:
            self.global_steps += 1
            path = os.path.join(
                self.config.trainer.rollout_save_path, f"train_{self.global_steps}.jsonl"
            )
            try:
                result = self.reward_fn(batch, return_dict=True, curr_save_path=path)
                tensor = result["reward_tensor"]
                result["reward_extra_info"]
            except Exception as exc:  # noqa: BLE001 - as it is caught there
                print(f"while scoring: {exc}")
                tensor = self.reward_fn(batch)
            self.trained.append([sum(row) for row in tensor])
            if self.global_steps % save_every == 0:
                self._save_checkpoint()


PINNED: dict[str, dict[str, type]] = {
    "verl": {},
    "verl.workers": {},
    "verl.workers.reward_manager": {},
    "verl.workers.reward_manager.re_call": {
        "ReCallRewardManagerWithSave": ReCallRewardManagerWithSave
    },
    "verl.trainer": {},
    "verl.trainer.ppo": {},
    "verl.trainer.ppo.ray_trainer": {"RayPPOTrainer": RayPPOTrainer},
}
"""Modules and what is in them, in a process of the pinned trainer."""


def modules(table: dict[str, dict[str, type]]) -> dict[str, Any]:
    """Modules for ``sys.modules``, each with fresh copies of its classes, not yet wrapped."""
    made = {}
    for name, classes in table.items():
        made[name] = module = types.ModuleType(name)
        for attribute, model in classes.items():
            copied = {key: value for key, value in vars(model).items() if key != "__dict__"}
            copied.pop("__weakref__", None)
            setattr(
                module, attribute, type(attribute, model.__bases__, {**copied, "__module__": name})
            )
    return made


def load_as_pinned(path: str, name: str = "compute_score") -> Any:
    """The function as the pinned task runner loads it: by path, registered, then executed."""
    spec = importlib.util.spec_from_file_location("custom_module", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["custom_module"] = module
    spec.loader.exec_module(module)
    function = getattr(module, name)
    return lambda *args, **kwargs: function(*args, **kwargs)


def pinned_run(path: str, folder: str, *, sandbox_url: Any, resume_mode: str = "auto") -> Any:
    """A trainer built in the order of the pinned task runner: print, load, build, workers."""
    trainer_config = SimpleNamespace(
        default_local_dir=folder, rollout_save_path=folder, resume_mode=resume_mode
    )
    rollout = SimpleNamespace(sandbox_url=sandbox_url)
    config = SimpleNamespace(
        trainer=trainer_config, actor_rollout_ref=SimpleNamespace(rollout=rollout)
    )
    print(config)
    manager = sys.modules["verl.workers.reward_manager.re_call"].ReCallRewardManagerWithSave
    trainer = sys.modules["verl.trainer.ppo.ray_trainer"].RayPPOTrainer
    function = load_as_pinned(path)
    tokenizer = Tokenizer()
    run = trainer(
        config=config,
        reward_fn=manager(tokenizer=tokenizer, num_examine=0, compute_score=function),
        val_reward_fn=manager(tokenizer=tokenizer, num_examine=1, compute_score=function),
    )
    run.init_workers()
    return run


# --- current verl ---------------------------------------------------------------------------------


class NaiveRewardManager:
    """One row at a time, many at once; failures are raised."""

    def __init__(self, tokenizer: Tokenizer, compute_score: Any) -> None:
        self.tokenizer = tokenizer
        self.compute_score = compute_score
        self.is_async = inspect.iscoroutinefunction(compute_score)

    async def run_single(self, item: Any) -> dict[str, Any]:
        score = await self._compute_reward(self._arguments(item))
        return {"reward_score": score, "reward_extra_info": {"acc": score}}

    def _arguments(self, item: Any) -> dict[str, Any]:
        extra_info = item.non_tensor_batch["extra_info"]
        extra_info.update(item.non_tensor_batch.get("tool_extra_fields", {}))
        num_turns = item.non_tensor_batch.get("__num_turns__")
        extra_info.update(num_turns=num_turns, rollout_reward_scores={})
        return self._plain_arguments(item)

    def _plain_arguments(self, item: Any) -> dict[str, Any]:
        extra_info = item.non_tensor_batch["extra_info"]
        return {
            "data_source": item.non_tensor_batch["data_source"],
            "solution_str": self.tokenizer.decode(valid(item)[1], skip_special_tokens=True),
            "ground_truth": item.non_tensor_batch["reward_model"]["ground_truth"],
            "extra_info": extra_info,
        }

    async def _compute_reward(self, arguments: dict[str, Any]) -> Any:
        if self.is_async:
            return await self.compute_score(**arguments)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, lambda: self.compute_score(**arguments))

    async def run_batch(self, batch: Batch) -> list[dict[str, Any]]:
        """All rows as tasks of their own, as a reward loop's worker does."""
        tasks = [asyncio.create_task(self.run_single(batch[at])) for at in range(len(batch))]
        return await asyncio.gather(*tasks)


class DAPORewardManager(NaiveRewardManager):
    """It hands on what the dataset says of a row, and nothing of the agent loop's."""

    def _arguments(self, item: Any) -> dict[str, Any]:
        return self._plain_arguments(item)


class RateLimitedRewardManager(NaiveRewardManager):
    """Any exception becomes a reward of 0.0."""

    async def run_single(self, item: Any) -> dict[str, Any]:
        try:
            return {
                "reward_score": await asyncio.wait_for(
                    self._compute_reward(self._arguments(item)), timeout=300
                )
            }
        except Exception as exc:  # noqa: BLE001 - as it is caught there
            return {"reward_score": 0.0, "reward_extra_info": {"error": str(exc)}}


class BatchRewardManager:
    """Hands over a whole batch, as verl did before."""

    def __init__(self, tokenizer: Tokenizer, compute_score: Any) -> None:
        self.tokenizer = tokenizer
        self.compute_score = compute_score

    def __call__(self, data: Batch) -> list[float]:
        texts = [
            self.tokenizer.decode(valid(item)[1], skip_special_tokens=True) for item in data.items
        ]
        scores: list[float] = self.compute_score(
            data_sources=data.non_tensor_batch["data_source"],
            solution_strs=texts,
            ground_truths=[
                item.non_tensor_batch["reward_model"]["ground_truth"] for item in data.items
            ],
            extra_infos=data.non_tensor_batch["extra_info"],
        )
        return scores


def load_as_current(config: Any, path: str, name: str, **reward_kwargs: Any) -> Any:
    """The function as current verl loads it: unregistered, under a name made of the path."""
    module_name = f"custom_module_{abs(hash(path))}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name)
    if not inspect.iscoroutinefunction(function):
        return partial(_call, function, reward_kwargs)
    return partial(_call_async, function, reward_kwargs)


def _call(function: Any, more: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **{**kwargs, **more})


async def _call_async(function: Any, more: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    return await function(*args, **{**kwargs, **more})


def current_config(manager: str, section: str = "reward") -> Any:
    """What verl's own loader holds under the name ``config``: its layout now, or before."""
    if section == "reward":
        return SimpleNamespace(reward=SimpleNamespace(reward_manager=SimpleNamespace(name=manager)))
    return SimpleNamespace(reward_model=SimpleNamespace(reward_manager=manager))


# --- a process of its own -------------------------------------------------------------------------

ALONE = """
import asyncio, importlib.util, json, sys
for name in list(sys.modules):
    assert not name.startswith(("smartsearch_sidecar", "tests"))
spec = importlib.util.spec_from_file_location("standins", sys.argv[1])
standins = importlib.util.module_from_spec(spec)
spec.loader.exec_module(standins)
"""


def old_python() -> str | None:
    """Python 3.10, on the path or as pyenv keeps it, if it really starts."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [*map(str, sorted(root.glob("versions/3.10*/bin/python"))), shutil.which("python3.10")]
    for candidate in filter(None, found):
        tried = subprocess.run([candidate, "-c", "import ssl"], capture_output=True, check=False)
        if tried.returncode == 0:
            return candidate
    return None


def run_alone(python: str, driver: str, words: list[str], endpoints: Path, folder: Path) -> Any:
    """The JSON a driver prints last, where it has this file and nothing else of the repository."""
    done = subprocess.run(
        [python, "-I", "-c", ALONE + driver, str(Path(__file__).resolve()), *words],
        env={"SMARTSEARCH_SIDECAR_ENDPOINTS": str(endpoints), "PATH": os.environ["PATH"]},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])

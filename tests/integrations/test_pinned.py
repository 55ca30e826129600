"""The file for the pinned trainer, driven as that trainer drives it.

Stand-ins of the trainer's classes and an HTTP server with the sidecar's internal routes; at the end
the same against a served run.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import rollouts, trainer
from tests.fakes.reward_server import (
    EXECUTE,
    GARBLED,
    HANG_UP,
    INTERNAL,
    RewardServer,
    digest_reward,
    error,
    reward_server,
)
from tests.fakes.rewarded import TRUTH, rewarded

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "smartsearch_sidecar" / "integrations" / "smartsearch_reward.py"
SECRET = "Charles Gounod's birthplace"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RewardServer]:
    """A sidecar's internal routes, and the variable that names its endpoints."""
    with reward_server(tmp_path) as running:
        monkeypatch.setenv("SMARTSEARCH_SIDECAR_ENDPOINTS", str(running.endpoints))
        yield running


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has imported the pinned trainer's modules, fresh for every test."""
    monkeypatch.delitem(sys.modules, "custom_module", raising=False)
    for name, module in trainer.modules(trainer.PINNED).items():
        monkeypatch.setitem(sys.modules, name, module)


def build(folder: Path, *, sandbox_url: str = "sidecar", **keys: Any) -> Any:
    """A trainer whose task runner has loaded the file, with its workers up."""
    return trainer.pinned_run(str(FILE), str(folder), sandbox_url=sandbox_url, **keys)


def rows(count: int, *, truth: Any = None) -> list[dict[str, Any]]:
    """Rows of a batch, all different, with special tokens in prompt and response."""
    return [
        {
            "prompt": rollouts.prompt(f"question {number}?"),
            "response": f" I know. </think><answer> \\boxed{{{number}}} </answer><|im_end|>",
            "ground_truth": [f"answer {number}"] if truth is None else truth,
        }
        for number in range(count)
    ]


def batch_of(run: Any, given: list[dict[str, Any]]) -> trainer.Batch:
    return trainer.Batch(run.reward_fn.tokenizer, given)


def scored(given: list[dict[str, Any]]) -> list[float]:
    """The rewards the server gives for these rows."""
    texts = [row["prompt"] + row["response"] for row in given]
    return [
        digest_reward({"solution_str": text, "ground_truth": row["ground_truth"]})
        for text, row in zip(texts, given, strict=True)
    ]


def module() -> Any:
    """The file as the trainer's process holds it."""
    return sys.modules["custom_module"]


def load_alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``compute_score`` in a process without a trainer."""
    for name in trainer.PINNED:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delitem(sys.modules, "custom_module", raising=False)
    return trainer.load_as_pinned(str(FILE))


def score_one(function: Any, truth: Any = None) -> float:
    """One rollout, as the manager calls for it."""
    return float(
        function(
            data_source="re_call",
            tokenizer=None,
            solution_str=rollouts.prompt("Which?") + " done",
            ground_truth=[SECRET] if truth is None else truth,
        )
    )


# --- batches --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("pinned")
def test_a_batch_is_scored_in_pieces_before_the_manager_reads(
    server: RewardServer, tmp_path: Path
) -> None:
    """Every row gets its own reward, in requests of 64 rows, and is decoded and scored once."""
    run = build(tmp_path)
    given = rows(150)
    run.fit([batch_of(run, given)])
    assert run.trained == [pytest.approx(scored(given))]
    assert sorted(len(asked["items"]) for asked in server.asked("/reward/batch")) == [22, 64, 64]
    assert server.asked("/reward") == []
    assert server.busiest <= 2
    assert run.reward_fn.tokenizer.decoded == 150
    lines = (tmp_path / "train_1.jsonl").read_text().splitlines()
    assert [json.loads(line)["score"] for line in lines] == pytest.approx(scored(given))


@pytest.mark.usefixtures("pinned")
def test_rewards_are_kept_apart_by_text_and_answers(server: RewardServer, tmp_path: Path) -> None:
    """The same text with other answers has another reward; identical rows stand in line."""
    run = build(tmp_path)
    row, other = rows(1)[0], rows(1, truth="one answer")[0]
    numbers = iter(range(100))
    server.answers["/reward/batch"] = lambda value: (
        200,
        {"rewards": [{"reward": next(numbers)} for _ in value["items"]]},
    )
    given = [row, other, row, {**row, "ground_truth": ["one answer"]}, row]
    run.fit([batch_of(run, given)])
    assert run.trained == [[0, 1, 2, 3, 4]]


@pytest.mark.usefixtures("pinned")
def test_a_reward_is_found_by_exact_text_and_answers(server: RewardServer, tmp_path: Path) -> None:
    """If a second pass over a batch has another order, a reward fits its row or the call fails."""

    class Turning(trainer.Batch):
        """Rows that are handed out backwards once all of them have been looked at."""

        looked = 0

        def __getitem__(self, number: int) -> Any:
            self.looked += 1
            return self.items[number if self.looked <= len(self) else -1 - number]

    run = build(tmp_path)
    with pytest.raises(RuntimeError, match="had not shown before"):
        run.reward_fn(Turning(run.reward_fn.tokenizer, rows(2)))
    given = [rows(1)[0], {**rows(1)[0], "ground_truth": ["other"]}]
    tensor = run.reward_fn(Turning(run.reward_fn.tokenizer, given))
    assert [sum(row) for row in tensor] == pytest.approx(scored(given)[::-1])


@pytest.mark.usefixtures("pinned")
def test_nothing_is_shown_or_saved_twice(
    server: RewardServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Validation shows one rollout with its real score, and its lines are saved once."""
    run = build(tmp_path)
    given = rows(3)
    path = tmp_path / "val_0.jsonl"
    result = run.val_reward_fn(batch_of(run, given), return_dict=True, curr_save_path=str(path))
    assert result["reward_extra_info"] == {}
    assert capsys.readouterr().out.count("shown:") == 1
    assert len(path.read_text().splitlines()) == 3
    tensor = run.val_reward_fn(batch_of(run, given))
    assert [sum(row) for row in tensor] == pytest.approx(scored(given))


@pytest.mark.usefixtures("pinned")
def test_scores_of_a_reward_model_are_left_alone(server: RewardServer, tmp_path: Path) -> None:
    """A batch that carries scores already is not sent anywhere."""
    run = build(tmp_path)
    batch = batch_of(run, rows(2))
    batch.batch["rm_scores"] = "theirs"
    assert run.reward_fn(batch, return_dict=True) == "theirs"
    assert server.asked("/reward/batch") == []


@pytest.mark.usefixtures("pinned")
def test_the_first_failure_is_the_last_word(
    server: RewardServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainer scores a failed batch again: that is refused without asking, and it stops."""
    run = build(tmp_path)
    server.failing = 2
    with pytest.raises(RuntimeError, match="refused, since this process has failed before") as seen:
        run.fit([batch_of(run, rows(3, truth=[SECRET])), batch_of(run, rows(4, truth=[SECRET]))])
    assert "helper_timeout" in str(seen.value)
    assert len(run.trained) == 1
    assert len(server.asked("/reward/batch")) == 2
    assert len(server.asked("/latch")) == 1
    said = capsys.readouterr().out + str(seen.value) + json.dumps(server.asked("/latch"))
    assert not [word for word in (INTERNAL, EXECUTE, SECRET) if word in said]
    assert not (tmp_path / "train_2.jsonl").exists()
    with pytest.raises(RuntimeError, match="refused"):
        run._save_checkpoint()
    assert len(server.asked("/checkpoints")) == 1


@pytest.mark.usefixtures("pinned")
def test_pieces_after_a_failed_one_are_not_sent(server: RewardServer, tmp_path: Path) -> None:
    """What is not under way when a piece fails stays unsent."""
    run = build(tmp_path)
    server.answers["/reward/batch"] = (502, error("helper_timeout"))
    with pytest.raises(RuntimeError, match="helper_timeout"):
        run.reward_fn(batch_of(run, rows(64 * 9)), return_dict=True)
    assert len(server.asked("/reward/batch")) <= 2  # as many as are asked at once


@pytest.mark.usefixtures("pinned")
def test_what_the_trainer_breaks_itself_is_its_own_affair(
    server: RewardServer, tmp_path: Path
) -> None:
    """A folder that cannot be written is the trainer's failure: it may score again, and does."""
    run = build(tmp_path)
    run.config.trainer.rollout_save_path = str(tmp_path / "absent")
    given = rows(2)
    run.fit([batch_of(run, given)])
    assert run.trained == [pytest.approx(scored(given))]
    assert server.asked("/latch") == []


# --- one rollout ----------------------------------------------------------------------------------


def test_one_rollout_is_scored_without_a_trainer(
    server: RewardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function works by itself; text and answers arrive as they were given."""
    function = load_alone(monkeypatch)

    class Array:
        """What numpy's arrays of answers can do."""

        def tolist(self) -> list[str]:
            return ["東京", "Tokyo"]

    text = rollouts.decoded(rollouts.prompt("cafe\u0301?"))
    reward = function("re_call", None, text, Array())
    (sent,) = server.asked("/reward")
    assert [sent.pop("data_source"), sent["solution_str"]] == ["re_call", text]
    assert sent["ground_truth"] == ["東京", "Tokyo"]
    assert reward == pytest.approx(digest_reward(sent))
    assert type(reward) is float
    function("another source", None, text, ("a", "b"))
    assert server.asked("/reward")[1]["ground_truth"] == ["a", "b"]
    assert server.asked("/reward")[1]["data_source"] == "another source"


DEEP = b"[" * 100_000  # json.loads answers this with a RecursionError

WRONG: dict[str, Any] = {
    "nan": (200, {"reward": float("nan")}),
    "infinite": (200, {"reward": float("inf")}),
    "too large": (200, {"reward": 10**400}),
    "true": (200, {"reward": True}),
    "text": (200, {"reward": "1.0"}),
    "none": (200, {"split": "train"}),
    "a list": (200, [1.0]),
    "not json": b"<html>",
    "empty": b"",
    "deep": DEEP,
    "huge": b'{"reward": 1.0}' + b" " * (5 * 1024 * 1024),
    "hang up": HANG_UP,
    "garbled": GARBLED,
    "redirect": (302, {"reward": 1.0}),
    "accepted": (202, {"reward": 1.0}),
    "busy": (429, error("busy")),
    "no words": (500, "what"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_anything_but_a_finite_number_is_refused(
    wrong: str, server: RewardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else comes back raises, once, and closes this process and the latch."""
    function = load_alone(monkeypatch)
    server.answers["/reward"] = WRONG[wrong]
    with pytest.raises(RuntimeError, match=r"^no reward: ") as seen:
        score_one(function)
    # Ray cannot carry a class of the file's own, and a cause could hold what came back.
    assert type(seen.value) is RuntimeError
    assert seen.value.__cause__ is None
    assert seen.value.__suppress_context__
    del server.answers["/reward"]
    with pytest.raises(RuntimeError, match="refused"):
        score_one(function)
    assert len(server.asked("/reward")) == 1
    assert [str(seen.value) in said["reason"] for said in server.asked("/latch")] == [True]


@pytest.mark.parametrize("answer", [HANG_UP, GARBLED, b"<html>", DEEP, (503, error("not_ready"))])
def test_a_latch_that_is_not_heard_changes_nothing(
    answer: Any, server: RewardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sidecar is asked once to close its latch; what is raised does not depend on it."""
    function = load_alone(monkeypatch)
    server.answers.update({"/reward": (502, error("helper_timeout")), "/latch": answer})
    with pytest.raises(RuntimeError, match="helper_timeout"):
        score_one(function)
    with pytest.raises(RuntimeError, match=r"refused.*helper_timeout"):
        score_one(function)
    assert len(server.asked("/latch")) == 1


@pytest.mark.parametrize("rewards", [[], [{"reward": 1}], [{"reward": 1}] * 3, "two", None])
@pytest.mark.usefixtures("pinned")
def test_a_batch_needs_a_reward_for_each_row(
    rewards: Any, server: RewardServer, tmp_path: Path
) -> None:
    """Too few or too many rewards are no rewards."""
    run = build(tmp_path)
    server.answers["/reward/batch"] = (200, {"rewards": rewards})
    with pytest.raises(RuntimeError, match="another number of rewards"):
        run.reward_fn(batch_of(run, rows(2)))


def test_no_secret_is_in_an_error(server: RewardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that quotes its address back does not get it into the message or the latch."""
    function = load_alone(monkeypatch)
    quoting = {"code": "odd", "message": f"at {server.internal_url}/reward"}
    server.answers["/reward"] = (500, {"error": quoting})
    with pytest.raises(RuntimeError) as seen:
        score_one(function)
    said = repr(seen.value) + json.dumps(server.asked("/latch"))
    assert "odd" in said
    assert not [word for word in (INTERNAL, EXECUTE, SECRET) if word in said]


@pytest.mark.parametrize("truth", [{"an object": 1, "set": {1}}, ["\ud800"], object()])
def test_what_is_no_text_is_not_sent(
    truth: Any, server: RewardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that no UTF-8 JSON can hold are refused before anything is sent."""
    function = load_alone(monkeypatch)
    with pytest.raises(RuntimeError, match="cannot be written as UTF-8 JSON"):
        score_one(function, truth)
    assert server.asked("/reward") == []


def test_proxies_are_not_used(server: RewardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables a cluster sets for the outside world do not reach the way to the sidecar."""
    function = load_alone(monkeypatch)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert 0 <= score_one(function) <= 1


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("pinned")
def test_a_receipt_is_taken_before_saving_and_lies_beside(
    server: RewardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is asked while nothing is saved yet; the receipt stands in the folder afterwards."""
    run = build(tmp_path)
    monkeypatch.chdir(tmp_path)
    run.config.trainer.default_local_dir = "."  # receipts name it in full all the same
    folder = tmp_path / "global_step_1"
    saved_already: list[bool] = []

    def checkpoint(value: dict[str, Any]) -> Any:
        saved_already.append((folder / "actor").exists())
        return server._checkpoint(value)

    server.answers["/checkpoints"] = checkpoint
    run.fit([batch_of(run, rows(2))])
    assert saved_already == [False]
    assert server.asked("/checkpoints") == [{"step": 1, "path": str(folder)}]
    receipt = json.loads((folder / "sidecar_receipt.json").read_text())
    assert receipt["step"] == 1
    assert receipt["head"] == "a" * 64
    assert sorted(path.name for path in folder.iterdir()) == ["actor", "sidecar_receipt.json"]


@pytest.mark.parametrize("state", ["failed", "pending"])
@pytest.mark.usefixtures("pinned")
def test_a_refused_checkpoint_stops_the_run(
    state: str, server: RewardServer, tmp_path: Path
) -> None:
    """Nothing is saved, the first cause is said, and the sidecar keeps its own verdict."""
    run = build(tmp_path)
    server.state = state
    if state == "failed":
        server.cause = "document_drift"
    with pytest.raises(RuntimeError) as seen:
        run._save_checkpoint()
    assert state in str(seen.value)
    assert ("document_drift" if state == "failed" else "in flight") in str(seen.value)
    assert type(seen.value) is RuntimeError
    assert not (tmp_path / "global_step_0").exists()
    assert server.asked("/latch") == []
    with pytest.raises(RuntimeError, match="refused"):
        run.reward_fn(batch_of(run, rows(1)))


@pytest.mark.parametrize(
    "answer",
    [
        (201, {"accepted": True, "step": 9, "head": "a" * 64, "claim_sha256": "b" * 64}),
        (201, {"accepted": True, "step": 0, "head": "a" * 64}),
        (201, ["receipt"]),
        (200, {"accepted": True, "step": 0, "head": "a" * 64, "claim_sha256": "b" * 64}),
        (503, error("ledger_failed")),
        HANG_UP,
    ],
)
@pytest.mark.usefixtures("pinned")
def test_no_checkpoint_without_a_whole_receipt(
    answer: Any, server: RewardServer, tmp_path: Path
) -> None:
    """Anything but a receipt for this step is a failure, and the latch is asked for."""
    run = build(tmp_path)
    server.answers["/checkpoints"] = answer
    with pytest.raises(RuntimeError, match="no checkpoint of step 0"):
        run._save_checkpoint()
    assert not (tmp_path / "global_step_0").exists()
    assert len(server.asked("/latch")) == 1


@pytest.mark.usefixtures("pinned")
def test_an_old_receipt_does_not_vouch_for_half_a_checkpoint(
    server: RewardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When saving fails, no receipt of an earlier run in the same folder is left."""
    run = build(tmp_path)
    run._save_checkpoint()
    receipt = tmp_path / "global_step_0" / "sidecar_receipt.json"
    assert receipt.exists()

    def fail(path: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run.actor_rollout_wg, "save_checkpoint", fail)
    with pytest.raises(OSError, match="No space"):
        run._save_checkpoint()
    assert not receipt.exists()


@pytest.mark.usefixtures("pinned")
def test_a_receipt_that_cannot_be_written_stops_the_run(
    server: RewardServer, tmp_path: Path
) -> None:
    """A checkpoint without its receipt cannot be loaded again, so the save raises."""
    run = build(tmp_path)
    (tmp_path / "global_step_0" / "sidecar_receipt.json.new").mkdir(parents=True)
    with pytest.raises(RuntimeError, match="the receipt of step 0 is not written"):
        run._save_checkpoint()


@pytest.mark.usefixtures("pinned")
def test_only_a_checkpoint_with_its_receipt_is_loaded(server: RewardServer, tmp_path: Path) -> None:
    """A run goes on from a checkpoint with a receipt, and starts from nothing without any."""
    first = build(tmp_path)
    first.fit([batch_of(first, rows(2)), batch_of(first, rows(2))])
    assert first.actor_rollout_wg.loaded == []
    second = build(tmp_path)
    second.fit([batch_of(second, rows(2))])
    assert second.global_steps == 3
    assert second.actor_rollout_wg.loaded == [str(tmp_path / "global_step_2" / "actor")]


@pytest.mark.parametrize("spoil", [{"step": 2}, {"accepted": False}, {"head": "?"}, "gone", "torn"])
@pytest.mark.usefixtures("pinned")
def test_a_checkpoint_without_a_receipt_is_not_loaded(
    spoil: Any, server: RewardServer, tmp_path: Path
) -> None:
    """The workers are never asked to load it, and the served run is not blamed."""
    first = build(tmp_path)
    first.fit([batch_of(first, rows(1))])
    receipt = tmp_path / "global_step_1" / "sidecar_receipt.json"
    text = receipt.read_text()
    if spoil == "gone":
        receipt.unlink()
    else:
        whole = text[:-20] if spoil == "torn" else json.dumps({**json.loads(text), **spoil})
        receipt.write_text(whole)
    second = build(tmp_path)
    workers = second.actor_rollout_wg
    with pytest.raises(RuntimeError, match=r"sidecar_receipt\.json"):
        second.fit([batch_of(second, rows(1))])
    assert workers.loaded == []
    assert second.actor_rollout_wg is workers
    assert server.asked("/latch") == []


@pytest.mark.usefixtures("pinned")
def test_loading_past_the_gate_is_noticed(server: RewardServer, tmp_path: Path) -> None:
    """A trainer that loads in a way this file does not see is not the pinned one."""
    original = sys.modules["verl.trainer.ppo.ray_trainer"].RayPPOTrainer

    def elsewhere(self: Any) -> None:
        self.global_steps = 7

    original._load_checkpoint = elsewhere
    run = build(tmp_path)
    with pytest.raises(RuntimeError, match="past the gate"):
        run.fit([])


# --- the address of the rollouts ------------------------------------------------------------------


@pytest.mark.usefixtures("pinned")
def test_only_rollouts_get_the_address(
    server: RewardServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The word in the configuration becomes the address for the workers alone."""
    run = build(tmp_path)
    run.fit([batch_of(run, rows(1))])
    assert run.actor_rollout_wg.sandbox_url == server.sandbox_url
    assert EXECUTE not in run.tracked
    assert EXECUTE not in capsys.readouterr().out
    assert "'sidecar'" in run.tracked


@pytest.mark.usefixtures("pinned")
def test_a_given_address_is_masked_once_the_workers_have_it(
    server: RewardServer, tmp_path: Path
) -> None:
    """What the trackers are given has no capability in it; other addresses stay recognisable."""
    run = build(tmp_path, sandbox_url=server.sandbox_url)
    run.fit([])
    assert run.actor_rollout_wg.sandbox_url == server.sandbox_url
    assert EXECUTE not in run.tracked
    assert f"http://127.0.0.1:{server.port}/***" in run.tracked


@pytest.mark.parametrize("given", [None, "", "your-sandbox-url"])
@pytest.mark.usefixtures("pinned")
def test_what_is_no_address_stays(given: Any, server: RewardServer, tmp_path: Path) -> None:
    """There is nothing to mask where no address is."""
    run = build(tmp_path, sandbox_url=given)
    assert run.config.actor_rollout_ref.rollout.sandbox_url == given


@pytest.mark.parametrize(
    ("answer", "word"),
    [((503, {"state": "failed"}), "failed"), ((503, error("not_ready")), "not ready")],
)
@pytest.mark.usefixtures("pinned")
def test_training_begins_only_beside_a_healthy_sidecar(
    answer: Any, word: str, server: RewardServer, tmp_path: Path
) -> None:
    """Before models are loaded the sidecar is asked; an early trainer does not close a latch."""
    server.answers["/health"] = answer
    with pytest.raises(RuntimeError, match=f"training does not begin: the sidecar is {word}"):
        build(tmp_path)
    assert server.asked("/latch") == []


# --- being put in place ---------------------------------------------------------------------------


@pytest.mark.usefixtures("pinned")
def test_loading_twice_wraps_once(server: RewardServer, tmp_path: Path) -> None:
    """A second load of the file leaves the wraps of the first in charge."""
    build(tmp_path)
    held = sys.modules["verl.workers.reward_manager.re_call"].ReCallRewardManagerWithSave.__call__
    run = build(tmp_path)
    assert type(run.reward_fn).__call__ is held
    run.fit([batch_of(run, rows(2))])
    assert len(server.asked("/reward/batch")) == 1
    assert len(server.asked("/checkpoints")) == 1


@pytest.mark.parametrize("missing", ["module", "class", "method"])
@pytest.mark.usefixtures("pinned")
def test_another_verl_is_refused(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the pinned trainer's classes are not found, loading fails and names the other file."""
    if missing == "module":
        monkeypatch.setitem(sys.modules, "verl.workers.reward_manager.re_call", None)
    elif missing == "class":
        monkeypatch.delattr(sys.modules["verl.trainer.ppo.ray_trainer"], "RayPPOTrainer")
    else:
        held = sys.modules["verl.trainer.ppo.ray_trainer"].RayPPOTrainer
        del held._save_checkpoint
    with pytest.raises(RuntimeError, match="not the pinned trainer"):
        trainer.load_as_pinned(str(FILE))


def test_a_trainer_that_comes_later_is_gated_at_the_first_reward(
    server: RewardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the file was loaded before the trainer, the first reward puts the gate in place."""
    function = load_alone(monkeypatch)
    for name, made in trainer.modules(trainer.PINNED).items():
        monkeypatch.setitem(sys.modules, name, made)
    native = sys.modules["verl.trainer.ppo.ray_trainer"].RayPPOTrainer._save_checkpoint
    score_one(function)
    assert sys.modules["verl.trainer.ppo.ray_trainer"].RayPPOTrainer._save_checkpoint is not native


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("SMARTSEARCH_SIDECAR_BATCH_MAX", "8", 8), ("SMARTSEARCH_SIDECAR_REWARD_SECONDS", "90", 90.0)],
)
def test_limits_follow_the_sidecars(
    name: str, value: str, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sidecar with other limits is followed by a variable of the same name."""
    monkeypatch.setenv(name, value)
    load_alone(monkeypatch)
    assert getattr(module(), name.removeprefix("SMARTSEARCH_SIDECAR_")) == expected


# --- the trainer's own Python ---------------------------------------------------------------------

DRIVER = """
sys.modules.update(standins.modules(standins.PINNED))
run = standins.pinned_run(sys.argv[2], sys.argv[3], sandbox_url="sidecar")
run.fit([standins.Batch(run.reward_fn.tokenizer, json.loads(sys.argv[4]))])
print(json.dumps({"python": sys.version_info[:2], "trained": run.trained}))
"""


def step_alone(python: str, folder: Path, given: list[dict[str, Any]], server: RewardServer) -> Any:
    """One step in another interpreter, started where nothing of this repository can be imported."""
    words = [str(FILE), str(folder), json.dumps(given)]
    return trainer.run_alone(python, DRIVER, words, server.endpoints, folder)


@pytest.mark.process
@pytest.mark.may_skip(reason="Python 3.10 is the trainer's; not every machine has one")
def test_it_runs_in_the_trainers_python(server: RewardServer, tmp_path: Path) -> None:
    """Loaded by path in Python 3.10, without this package, a step is scored and its gate passed."""
    python = trainer.old_python()
    if python is None:
        pytest.skip("no Python 3.10 on the path or under pyenv")
    given = rows(3)
    told = step_alone(python, tmp_path, given, server)
    assert told["python"] == [3, 10]
    assert told["trained"] == [pytest.approx(scored(given))]
    assert len(server.asked("/checkpoints")) == 1


@pytest.mark.process
def test_it_runs_alone_in_a_process(server: RewardServer, tmp_path: Path) -> None:
    """The same in this Python, so that a machine without 3.10 shows it too."""
    given = rows(3)
    told = step_alone(sys.executable, tmp_path, given, server)
    assert told["trained"] == [pytest.approx(scored(given))]


# --- a served run ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("pinned")
async def test_beside_a_served_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards and receipts of a real run: its ledger knows them, and a refusal stops training."""
    async with rewarded(tmp_path) as served:
        endpoints = served.run.directory / "endpoints.json"
        monkeypatch.setenv("SMARTSEARCH_SIDECAR_ENDPOINTS", str(endpoints))
        text = await served.rollout("one query", "another query")
        prompt, response = text.partition("assistant\n<think>")[::2]
        row = {"prompt": f"{prompt}assistant\n<think>", "response": response}
        run = await asyncio.to_thread(build, tmp_path)
        batch = batch_of(run, [{**row, "ground_truth": TRUTH}] * 2)
        await asyncio.to_thread(run.fit, [batch])
        ((reward, again),) = run.trained
        assert reward == again
        receipt = json.loads((tmp_path / "global_step_1" / "sidecar_receipt.json").read_text())
        records = {record["seq"]: record for record in served.run.records()}
        assert records[receipt["seq"]]["kind"] == "checkpoint.accepted"
        assert records[receipt["seq"]]["sum"] == receipt["head"]
        unknown = batch_of(run, [{**row, "ground_truth": ["London"]}])
        with pytest.raises(RuntimeError, match="reference_mismatch"):
            await asyncio.to_thread(run.fit, [unknown])
        status, health = await served.run.health()
        assert status == 503
        assert health["cause"]["cause"] == "reference_mismatch"
        assert health["checkpoints"] == {"accepted": 1, "refused": 0}

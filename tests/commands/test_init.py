"""``init``: what it writes loads, says how it was sized, and overwrites nothing."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from smartsearch_sidecar import errors
from smartsearch_sidecar.commands import app
from smartsearch_sidecar.commands.init import Plan, rounded, sized
from smartsearch_sidecar.config import load

FILES = ["execute.capability", "internal.capability", "sidecar.toml"]


def init(folder: Path, *words: str) -> Result:
    return CliRunner().invoke(
        app, ["init", str(folder), "--ranks", "8", "--tensor-parallel", "2", *words]
    )


def plan(**keys: Any) -> Plan:
    values: dict[str, Any] = {
        "ranks": 8,
        "tensor_parallel": 1,
        "steps": 10,
        "questions": 4,
        "rollouts": 2,
        "searches": 5,
        "validation_questions": 0,
        "test_every": 5,
        "nodes": 1,
    }
    return Plan(**{**values, **keys})


def test_what_is_written_loads(tmp_path: Path) -> None:
    """The file is a configuration, with two different capabilities read from beside it."""
    result = init(tmp_path / "new" / "run", "--index", str(tmp_path / "index"), "--port", "9001")
    assert result.exit_code == 0, result.output
    folder = tmp_path / "new" / "run"
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    config = load(folder / "sidecar.toml", environ={})
    execute, internal = config.server.execute_capability, config.server.internal_capability
    assert execute is not None
    assert internal is not None
    assert len(execute.get_secret_value()) == len(internal.get_secret_value()) == 43
    assert execute != internal
    assert config.server.port == 9001
    assert config.run.directory == folder / "runs" / "001"
    assert config.retrieval.bm25.index == tmp_path / "index"
    for secret in (execute, internal):
        assert secret.get_secret_value() not in result.output


def test_the_arithmetic_is_shown_and_written(tmp_path: Path) -> None:
    """The person sees how each quota came about, in the answer and in the file."""
    result = init(
        tmp_path / "x", "--steps", "100", "--questions", "256", "--validation-questions", "0"
    )
    line = "max_calls     (204,800 + 0) x 5 searches x 2 tensor-parallel x 1.25 = 2,600,000"
    text = (tmp_path / "x" / "sidecar.toml").read_text()
    assert line in result.stdout
    assert line in text
    assert load(tmp_path / "x" / "sidecar.toml", environ={}).execute.max_calls == 2_600_000


def test_the_trainer_is_told(tmp_path: Path) -> None:
    """The words for the trainer's command line are there, and the reward file they name exists."""
    out = init(tmp_path / "x", "--nodes", "2").stdout
    assert "actor_rollout_ref.rollout.sandbox_url=sidecar" in out
    path = out.split("custom_reward_function.path=")[1].split()[0]
    assert Path(path).is_file()
    assert f"SMARTSEARCH_SIDECAR_ENDPOINTS={tmp_path / 'x' / 'runs/001/endpoints.json'}" in out
    assert "export NO_PROXY=127.0.0.1,localhost" in out
    assert "On every other of the 2 nodes" in out
    assert load(tmp_path / "x" / "sidecar.toml", environ={}).run.nodes == 2


def test_any_path_is_spelled_as_toml(tmp_path: Path) -> None:
    """Quotes, backslashes and control characters of a path come back from the file as they were."""
    index = tmp_path / 'a "b" \\ \x7f \x1b é'
    assert init(tmp_path / "x", "--index", str(index)).exit_code == 0
    assert load(tmp_path / "x" / "sidecar.toml", environ={}).retrieval.bm25.index == index


NATS = "nats://user:pass-word@a:4222,nats://b:4222"


def test_nodes_are_one_run(tmp_path: Path) -> None:
    """With NATS one file serves every node: the run's quotas, enforced provenance, and a name that
    each node gets from its environment; the address stays in the file.
    """
    folder = tmp_path / "x"
    words = ("--nodes", "4", "--steps", "100", "--validation-questions", "0")
    result = init(folder, *words, "--nats", NATS, "--run-id", "run-7")
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert stat.S_IMODE((folder / "sidecar.toml").stat().st_mode) == 0o600
    for number in range(4):
        config = load(
            folder / "sidecar.toml",
            environ={"SMARTSEARCH_SIDECAR__CLUSTER__NODE": f"node-{number}"},
        )
        cluster = config.cluster
        assert cluster is not None
        assert (cluster.node, cluster.run_id) == (f"node-{number}", "run-7")
        assert cluster.nats_url.get_secret_value() == NATS
        assert (config.run.nodes, config.run.directory) == (4, None)
        assert config.execute.max_calls == 2_600_000
        assert config.reward.provenance == "enforce"
    assert "pass-word" not in result.output
    assert "SMARTSEARCH_SIDECAR__CLUSTER__NODE=node-0 smartsearch-sidecar serve" in result.stdout
    with pytest.raises(errors.ConfigError, match=r"cluster\.node"):
        load(folder / "sidecar.toml", environ={})


def test_the_address_need_not_be_on_a_command_line(tmp_path: Path) -> None:
    """The servers may come from the environment, and every run is named anew."""
    names = set()
    for folder in ("a", "b"):
        words = ["init", str(tmp_path / folder), "--ranks", "8", "--tensor-parallel", "1"]
        result = CliRunner().invoke(
            app, [*words, "--nodes", "2"], env={"SMARTSEARCH_SIDECAR__CLUSTER__NATS_URL": NATS}
        )
        assert result.exit_code == 0, result.output
        config = load(
            tmp_path / folder / "sidecar.toml", overrides={"cluster.node": "a"}, environ={}
        )
        assert config.cluster is not None
        names.add(config.cluster.run_id)
    assert len(names) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--nats", NATS), "--nodes"),
        (("--nodes", "2", "--run-id", "x"), "--nats"),
        (("--nodes", "2", "--nats", "http://a:4222"), "cluster.nats_url"),
        (("--nodes", "2", "--nats", NATS, "--run-id", "a.b"), "cluster.run_id"),
    ],
)
def test_what_makes_no_run_of_nodes_is_refused(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    """The sentence names what is missing or wrong, repeats no address, and nothing is written."""
    result = init(tmp_path / "x", *words)
    assert isinstance(result.exception, errors.UsageError | errors.ConfigError)
    assert said in result.exception.message
    assert "4222" not in result.exception.message
    assert not (tmp_path / "x").exists()


def test_blocks_are_small_beside_the_run() -> None:
    """The blocks of all nodes together are at most a twentieth of the run's searches."""
    assert sized(plan(nats_url="nats://n", nodes=2)).max_calls == sized(plan()).max_calls
    for nodes in (2, 7, 64):
        sizes = sized(plan(nats_url="nats://n", nodes=nodes, steps=1000))
        assert 1 <= sizes.lease_block <= 256
        assert sizes.lease_block * nodes * 20 <= sizes.max_calls
    assert sized(plan(nats_url="nats://n", nodes=2, steps=100_000)).lease_block == 256
    assert sized(plan(nats_url="nats://n", nodes=512)).lease_block == 1


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_overwritten(tmp_path: Path, name: str) -> None:
    """One of the files being there, even as a dangling link, keeps all from being written."""
    (tmp_path / name).symlink_to(tmp_path / "nowhere")
    result = init(tmp_path)
    assert isinstance(result.exception, errors.UsageError)
    assert name in result.exception.message
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_groups_must_fit_the_ranks(tmp_path: Path) -> None:
    """Eight ranks are no groups of three, and nothing is written."""
    result = CliRunner().invoke(
        app, ["init", str(tmp_path / "x"), "--ranks", "8", "--tensor-parallel", "3"]
    )
    assert isinstance(result.exception, errors.UsageError)
    assert not (tmp_path / "x").exists()


def test_a_folder_that_cannot_be_made_is_wrong_use(tmp_path: Path) -> None:
    """A file in the way is told in one sentence."""
    (tmp_path / "file").touch()
    assert isinstance(init(tmp_path / "file" / "x").exception, errors.UsageError)


def test_quotas_follow_the_plan() -> None:
    """Tensor parallelism multiplies searches but not scores; nodes share the searches."""
    one = sized(plan())
    assert (one.max_calls, one.rewards["max_scores"], one.rewards["max_helper_calls"]) == (
        500,
        100,
        500,
    )
    assert one.rewards["max_output_tokens"] == 500 * 2048
    four = sized(plan(tensor_parallel=4))
    assert (four.max_calls, four.rewards["max_scores"]) == (2000, 100)
    assert sized(plan(nodes=2)).max_calls == 250
    assert sized(plan(validation_questions=10)).max_calls == rounded((80 + 30) * 5 * 1.25)
    assert sized(plan(validation_questions=10)).validation["max_scores"] == 38
    assert sized(plan(ranks=80)).waiting_max == 632


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, 0), (1, 1), (9.2, 10), (101, 110), (1250, 1300), (2_600_000, 2600000)],
)
def test_quotas_are_rounded_up_to_two_digits(value: float, expected: int) -> None:
    """A quota is never below what was computed, and can be read at a glance."""
    assert rounded(value) == expected

"""What the Slurm script knows of its trainer, and what it says and does by that."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from tests.config.test_deployment import JOB_SECONDS, slurm
from tests.fakes.served import read_records


@pytest.mark.process
@pytest.mark.timeout(JOB_SECONDS)
def test_a_requeued_job_goes_on(tmp_path: Path) -> None:
    """Its trainer of the time before ended with the job: the sidecar is told so, and the run goes
    on, with the gap in its journal.
    """
    trainer = """
from smartsearch_sidecar.client import Client, find_endpoints
env = "agentinputlab:smartsearch-fixed-wikipedia-v1"
assert Client(find_endpoints(None).sandbox_url).execute("one more", env).status == 200
"""
    for times in (1, 2):
        ended = slurm(tmp_path, sys.executable, "-c", trainer)
        assert ended.returncode == 0, ended.stderr
        assert f"healthy: {times} of {times} searches answered" in ended.stdout
    records = read_records(tmp_path / "runs" / "17")
    (resumed,) = (record["data"] for record in records if record["kind"] == "run.resumed")
    assert (resumed["clean"], resumed["trainer_stopped"]) == (True, True)


@pytest.mark.process
@pytest.mark.timeout(JOB_SECONDS)
def test_a_trainer_that_outlived_its_sidecars(tmp_path: Path) -> None:
    """All of a job is signalled at once, and its trainer does not end: it asks, is refused, and the
    requeued job does not say that it stood still.
    """
    trainer = """
import os, signal, time
from smartsearch_sidecar import errors
from smartsearch_sidecar.client import Client, find_endpoints
env = "agentinputlab:smartsearch-fixed-wikipedia-v1"
client = Client(find_endpoints(None).sandbox_url)
assert client.execute("one", env).status == 200
sidecar = int(open(os.environ["SIDECAR_PID_FILE"]).read())
os.kill(sidecar, signal.SIGTERM)
while True:
    try:
        client.execute("in the gap", env)
    except errors.Unreachable:
        break
os.kill(os.getppid(), signal.SIGKILL)
"""
    runs = tmp_path / "runs"
    watched = {"SIDECAR_PID_FILE": str(tmp_path / "pid")}
    told = """
import json, pathlib, sys
found = json.loads((pathlib.Path(sys.argv[1]) / "17" / "endpoints.json").read_bytes())
pathlib.Path(sys.argv[2]).write_text(str(found["pid"]))
"""
    note = f"{shlex.join([sys.executable, '-c', told, str(runs), watched['SIDECAR_PID_FILE']])}"
    script = f"{note} && exec {shlex.join([sys.executable, '-c', trainer])}"
    slurm(tmp_path, "bash", "-c", script, given=watched)
    assert read_records(runs / "17")[-1]["kind"] == "run.closed"
    assert (runs / "17.training").exists()
    ended = slurm(tmp_path, "true")
    assert ended.returncode == 1
    assert "failed: unjudged_restart" in ended.stdout


@pytest.mark.process
@pytest.mark.timeout(JOB_SECONDS)
def test_a_job_ends_its_trainer_first(tmp_path: Path) -> None:
    """What a trainer asks while it ends is answered: its sidecar is stopped after it."""
    trainer = """
import os, pathlib, signal, sys, time
from smartsearch_sidecar.client import Client, find_endpoints
def end(*_):
    time.sleep(1)
    env = "agentinputlab:smartsearch-fixed-wikipedia-v1"
    answer = Client(find_endpoints(None).sandbox_url).execute("the last", env)
    pathlib.Path(sys.argv[1]).write_text(str(answer.status))
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)
"""
    said = tmp_path / "said"
    ended = slurm(tmp_path, sys.executable, "-c", trainer, str(said))
    assert ended.returncode == 143, ended.stderr
    assert said.read_text() == "200"
    assert read_records(tmp_path / "runs" / "17")[-1]["kind"] == "run.closed"

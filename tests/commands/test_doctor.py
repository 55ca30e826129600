"""``doctor``: each thing a run needs, broken one at a time, and the line that says so."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest
from requests.utils import get_environ_proxies, select_proxy
from typer.testing import CliRunner, Result

from smartsearch_sidecar import errors
from smartsearch_sidecar.commands import app
from smartsearch_sidecar.doctor import machine
from smartsearch_sidecar.doctor.machine import Finding, Level
from smartsearch_sidecar.process.sockets import OTHER_DESCRIPTORS
from smartsearch_sidecar.retrieval.bm25.build import build
from smartsearch_sidecar.retrieval.bm25.provider import verify_and_open
from tests.fakes.each import each
from tests.fakes.helper import FakeHelper
from tests.fakes.process import toml
from tests.fakes.retriever import FakeRetriever
from tests.fakes.rewarded import reward_keys
from tests.fakes.served import configured

CORPUS = Path(__file__).parents[1] / "data" / "corpora" / "flashrag.jsonl"
NO_PROXIES: dict[str, str | None] = {
    name: None  # removed, which is not the same as empty
    for base in ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
    for name in (base, base.upper())
}


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real index of seven passages."""
    out = tmp_path_factory.mktemp("doctor") / "index"
    build(CORPUS, out)
    return out


def written(tmp_path: Path, index: Path, **keys: Any) -> Path:
    """A configuration that is good but for ``keys``."""
    values: dict[str, Any] = {
        "server.port": 0,
        "run.directory": str(tmp_path / "run"),
        "retrieval.bm25.index": str(index),
        "execute.max_calls": 100,
    }
    values.update({key.replace("__", "."): value for key, value in keys.items()})
    path = tmp_path / "sidecar.toml"
    path.write_text(toml({key: value for key, value in values.items() if value is not None}))
    return path


def run(config: Path, *words: str, env: Mapping[str, str] | None = None) -> Result:
    """The command as typed, with no proxies but those of ``env``."""
    return CliRunner().invoke(
        app, ["doctor", "--config", str(config), *words], env={**NO_PROXIES, **(env or {})}
    )


def examined(config: Path, *words: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The findings by name, and the exit code under ``exit``."""
    result = run(config, "--json", *words, env=env)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    value = json.loads(result.stdout)
    assert value["ok"] == (result.exit_code == 0)
    found: dict[str, Any] = {item["name"]: item for item in value["findings"]}
    found["exit"] = result.exit_code
    return found


# --- the command ---------------------------------------------------------------------------------


def test_a_good_run_is_fine(tmp_path: Path, index: Path) -> None:
    """Where nothing is wrong the exit code is 0, and warnings have their remedies."""
    found = examined(written(tmp_path, index), "--ranks", "8")
    assert found.pop("exit") == 0
    levels = {item["level"] for item in found.values()}
    assert levels <= {"ok", "warning"}
    assert all(item["remedy"] for item in found.values() if item["level"] == "warning")
    assert "7 passages, every file as in its manifest" in found["retriever"]["text"]
    assert found["known question"]["level"] == "ok"
    assert not (tmp_path / "run").exists()


def test_lines_name_level_thing_and_remedy(tmp_path: Path, index: Path) -> None:
    """Without --json each thing has a line that begins with its level, and its remedy below."""
    result = run(written(tmp_path, index, execute__waiting_max=0), "--ranks", "8")
    assert result.exit_code == 1
    assert "error   waiting room" in result.stdout
    assert "-> execute.waiting_max = 56 or more" in result.stdout
    assert result.stdout.splitlines()[-1].endswith("1 errors")


def test_a_broken_configuration_is_a_finding(tmp_path: Path, index: Path) -> None:
    """The message of `load` is the only finding, and the exit code 1."""
    found = examined(written(tmp_path, index, execute__slot=3))
    assert (found["exit"], set(found)) == (1, {"exit", "configuration"})
    assert "execute.slots" in found["configuration"]["text"]


@pytest.mark.parametrize("words", [["--passage", "x"], ["--ranks", "0"]])
def test_wrong_use_is_no_finding(tmp_path: Path, index: Path, words: list[str]) -> None:
    """Options that make no sense end without findings."""
    result = run(written(tmp_path, index), *words)
    assert isinstance(result.exception, errors.UsageError) or result.exit_code == 2
    assert "findings" not in result.stdout


def test_a_missing_file_is_wrong_use(tmp_path: Path) -> None:
    """A configuration that is not there is the caller's mistake."""
    assert isinstance(run(tmp_path / "no.toml").exception, errors.UsageError)


# --- who searches --------------------------------------------------------------------------------


def test_a_damaged_index_is_an_error(tmp_path: Path, index: Path) -> None:
    """One flipped byte of the index is told with the file's name."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in index.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    victim = max(copy.glob("*.store"), key=lambda path: path.stat().st_size)
    victim.chmod(0o600)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    found = examined(written(tmp_path, copy))
    assert (found["exit"], found["retriever"]["level"]) == (1, "error")
    assert victim.name in found["retriever"]["text"]


@pytest.mark.parametrize(
    ("words", "level"),
    [
        (["--question", "{title}"], "ok"),
        (["--question", "{title}", "--passage", "{title}"], "ok"),
        (["--question", "{title}", "--passage", "nowhere to be found"], "error"),
        (["--question", "zzzzqqqq"], "error"),
    ],
)
def test_a_known_question_must_find_its_passage(
    tmp_path: Path, index: Path, words: list[str], level: str
) -> None:
    """The question must find a passage, and one with the given text."""
    first = json.loads(CORPUS.read_text("utf-8").splitlines()[0])
    title = first["contents"].splitlines()[0].strip('"')
    found = examined(written(tmp_path, index), *(word.format(title=title) for word in words))
    assert found["known question"]["level"] == level
    assert found["exit"] == (1 if level == "error" else 0)


def test_records_are_measured(tmp_path: Path, index: Path) -> None:
    """The bytes of a search are those of this corpus, and the quota is held against the disk."""
    found = examined(written(tmp_path, index, execute__max_calls=1_000_000_000))
    assert found["free space"]["level"] == "error"
    opened = verify_and_open(index)
    try:
        passages = sum(len(item["contents"]) for item in opened.search("history", 5))
    finally:
        opened.files.close()
    text = found["free space"]["text"]
    measured = int(text.rpartition("(")[2].split()[0].replace(",", ""))
    assert 600 < measured < 20_000 + passages


def test_a_retriever_that_is_not_there_is_an_error(tmp_path: Path, index: Path) -> None:
    """An unreachable retriever is an error that names it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: a connection is refused
        config = written(
            tmp_path,
            index,
            retrieval__provider="flashrag",
            retrieval__flashrag__url=f"http://127.0.0.1:{taken.getsockname()[1]}",
            retrieval__flashrag__corpus_sha256="a" * 64,
            retrieval__flashrag__index_sha256="b" * 64,
        )
        found = examined(config)
    assert found["retriever"]["level"] == "error"
    assert "127.0.0.1" in found["retriever"]["text"]
    assert "start it, or correct retrieval.flashrag.url" in found["retriever"]["text"]


class Server(Protocol):
    """A fake of another program, over HTTP."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...


@contextmanager
def beside(server: Server) -> Iterator[None]:
    """A real server on a loop of its own, as the command makes a loop itself."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)
        yield
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def remote(tmp_path: Path, index: Path, retriever: FakeRetriever, **keys: Any) -> Path:
    """A configuration that searches ``retriever``."""
    return written(
        tmp_path,
        index,
        retrieval__provider="flashrag",
        retrieval__flashrag__url=retriever.url,
        retrieval__flashrag__corpus_sha256="a" * 64,
        retrieval__flashrag__index_sha256="b" * 64,
        **keys,
    )


def test_a_retriever_without_canaries_is_a_warning(tmp_path: Path, index: Path) -> None:
    """Without canaries nothing checks the declared corpus: a warning names the command for them."""
    retriever = FakeRetriever()
    with beside(retriever):
        found = examined(remote(tmp_path, index, retriever), "--question", "who")
    assert (found["exit"], found["retriever"]["level"]) == (0, "ok")
    assert found["retriever"]["text"].startswith("flashrag, corpus aaaaaaaaaaaa…, index bbbb")
    assert found["canaries"]["level"] == "warning"
    assert "canaries record QUESTIONS OUT" in found["canaries"]["remedy"]
    assert found["known question"]["level"] == "ok"


class Blank(FakeRetriever):
    """The second passage of each answer is blank."""

    def documents(self, query: str, top_n: int = 5) -> list[dict[str, str]]:
        first, second, *rest = super().documents(query, top_n)
        return [first, {**second, "contents": " "}, *rest]


def test_passages_that_would_be_left_out_are_a_warning(tmp_path: Path, index: Path) -> None:
    """Before a run, and by reason; where they end a run they are the search's error."""
    retriever = Blank()
    with beside(retriever):
        found = examined(remote(tmp_path, index, retriever), "--question", "who")
        assert (found["exit"], found["passages"]["level"]) == (0, "warning")
        assert "plain questions: 4 blank" in found["passages"]["text"]
        strict = remote(tmp_path, index, retriever, retrieval__on_protocol_tag="latch")
        found = examined(strict, "--question", "who")
        assert (found["exit"], found["search"]["level"]) == (1, "error")
        assert "empty contents" in found["search"]["text"]


def test_canaries_are_asked_and_a_changed_answer_is_an_error(tmp_path: Path, index: Path) -> None:
    """Recorded answers that come again are a line of their own; others fail the retriever."""
    retriever, file = FakeRetriever(), tmp_path / "canaries.jsonl"
    questions = tmp_path / "questions.txt"
    questions.write_text("who wrote it\nwhere was it\n")
    with beside(retriever):
        bare = remote(tmp_path, index, retriever)
        recorded = CliRunner().invoke(
            app, ["canaries", "record", str(questions), str(file), "--config", str(bare)]
        )
        assert recorded.exit_code == 0, recorded.output
        config = remote(tmp_path, index, retriever, retrieval__flashrag__canaries=str(file))
        found = examined(config, "--question", "who")
        assert (found["exit"], found["canaries"]["level"]) == (0, "ok")
        assert {"who wrote it", "where was it"} <= set(retriever.asked)
        retriever.revision = 2
        found = examined(config, "--question", "who")
    assert (found["exit"], found["retriever"]["level"]) == (1, "error")
    assert "canaries" not in found
    assert "canar" in found["retriever"]["text"]


def test_a_canary_file_that_is_missing_is_named(tmp_path: Path, index: Path) -> None:
    """A path that leads nowhere is an error with the key to correct."""
    retriever = FakeRetriever()
    with beside(retriever):
        config = remote(tmp_path, index, retriever, retrieval__flashrag__canaries="no.jsonl")
        found = examined(config)
    assert (found["exit"], found["retriever"]["level"]) == (1, "error")
    assert "retrieval.flashrag.canaries" in found["retriever"]["text"]


# --- who scores ----------------------------------------------------------------------------------


@contextmanager
def helper_beside() -> Iterator[FakeHelper]:
    """A real helper server."""
    helper = FakeHelper()
    with beside(helper):
        yield helper


def rewards(tmp_path: Path, url: str, **keys: Any) -> dict[str, Any]:
    return reward_keys(tmp_path, url, **keys)


def test_the_helper_is_called_only_when_asked(tmp_path: Path, index: Path) -> None:
    """Its identity is always looked at; a completion costs tokens and needs --trial-call."""
    with helper_beside() as helper:
        config = written(tmp_path, index, **rewards(tmp_path, helper.url))
        found = examined(config)
        assert (found["exit"], helper.calls) == (0, [])
        assert {found[name]["level"] for name in ("scorer", "references", "helper")} == {"ok"}
        assert "1 train, 1 validation" in found["references"]["text"]
        assert "trial call" not in found
        tried = examined(config, "--trial-call")
        assert (tried["trial call"]["level"], len(helper.calls)) == ("ok", 1)
        helper.failure = "empty"
        assert examined(config, "--trial-call")["trial call"]["level"] == "error"


def test_what_scores_is_verified(tmp_path: Path, index: Path) -> None:
    """Another scorer, references that do not load and a helper that is not there are errors."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        keys = rewards(tmp_path, url, reward__source_sha256="0" * 64)
        (tmp_path / "train.jsonl").write_text('{"question": "no answers"}\n')
        found = examined(written(tmp_path, index, **keys))
    assert {found[name]["level"] for name in ("scorer", "references", "helper")} == {"error"}


# --- this machine --------------------------------------------------------------------------------


def test_a_taken_port_is_an_error(tmp_path: Path, index: Path) -> None:
    """Somebody listening on a port is told with its number, for both listeners."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        keys = {"server__probe_host": "127.0.0.1", "server__probe_port": port}
        found = examined(written(tmp_path, index, **keys))
        assert found["probe port"]["level"] == "error"
        found = examined(written(tmp_path, index, server__port=port))
    assert (found["exit"], found["port"]["level"]) == (1, "error")
    assert str(port) in found["port"]["text"]


def test_run_directories_are_told_apart(tmp_path: Path) -> None:
    """Absent is fine, a run goes on with --resume, a failed one and anything else is refused."""
    directory = tmp_path / "run"
    assert machine.check_directory(None).level is Level.WARNING
    assert machine.check_directory(directory).level is Level.OK
    assert machine.check_directory(tmp_path / "no" / "run").level is Level.OK
    directory.mkdir()
    assert machine.check_directory(directory).level is Level.ERROR
    (directory / "claim.json").touch()
    assert "--resume" in str(machine.check_directory(directory).remedy)
    (directory / "latch.json").touch()
    assert machine.check_directory(directory).level is Level.ERROR


MOUNTS = """\
overlay / overlay rw,relatime 0 0
tmpfs /dev/shm tmpfs rw,nosuid 0 0
/dev/sda1 /data ext4 rw 0 0
server:/x /data/my\\040nfs nfs4 rw 0 0
none /cheap overlay rw,volatile 0 0
"""


@pytest.mark.parametrize(
    ("place", "level", "words"),
    [
        ("/data/runs", Level.OK, "ext4"),
        ("/database", Level.OK, "overlay"),
        ("/dev/shm/runs", Level.WARNING, "a sync there does not reach a disk"),
        ("/cheap/runs", Level.WARNING, "a sync there does not reach a disk"),
        ("/data/my nfs/runs", Level.WARNING, "crosses a network"),
    ],
)
def test_a_filesystem_that_does_not_sync_is_a_warning(place: str, level: Level, words: str) -> None:
    """The nearest mount decides, by whole path segments, escapes read."""
    found = machine.check_filesystem(Path(place), MOUNTS)
    assert (found.level, words in found.text) == (level, True)


def test_an_unknown_filesystem_is_a_warning() -> None:
    """A system without that file is no reason to stop."""
    assert machine.check_filesystem(Path("/x"), "").level is Level.WARNING


def test_descriptors_are_counted_against_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too few for the ranks or for a run is an error, too few for every connection a warning."""
    limits = {"hard": 0}
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (16, limits["hard"]))
    config = configured(tmp_path, server__connections_max=1000)

    def level(hard: int, ranks: int | None) -> Level:
        limits["hard"] = hard
        return machine.check_descriptors(config, ranks).level

    assert level(OTHER_DESCRIPTORS + 127, 16) is Level.ERROR
    assert level(OTHER_DESCRIPTORS + 128, 16) is Level.WARNING
    assert level(OTHER_DESCRIPTORS + 63, None) is Level.ERROR
    assert level(OTHER_DESCRIPTORS + 64, None) is Level.WARNING
    assert level(OTHER_DESCRIPTORS + 1000, 8) is Level.OK
    assert level(resource.RLIM_INFINITY, 1024) is Level.OK


def test_the_trainer_should_be_another_user() -> None:
    """The same uid, an unknown one and root are warnings; another uid is fine."""
    assert machine.check_user(1000, 2000).level is Level.OK
    assert [machine.check_user(1000, uid).level for uid in (None, 1000, 0)] == [Level.WARNING] * 3


def test_a_deadline_beyond_the_clients_patience_is_a_warning(tmp_path: Path) -> None:
    """A deadline of ten seconds is a warning: the client has left by then."""
    findings = list(machine.check_room(configured(tmp_path, execute__deadline_seconds=10), 8))
    assert [(f.name, f.level) for f in findings] == [
        ("deadline", Level.WARNING),
        ("waiting room", Level.OK),
    ]


# --- proxies -------------------------------------------------------------------------------------

PROXIES: list[dict[str, str]] = [
    {},
    *({name: "http://proxy:1"} for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")),
    {"https_proxy": "http://proxy:1"},
    {"http_proxy": "", "HTTP_PROXY": "http://proxy:1"},
]
EXEMPT = [
    "",
    "127.0.0.1",
    "localhost",
    "*",
    "a,*",
    "127.0.0.0/8",
    "10.0.0.0/8",
    "nonsense/8",
    ".localhost",
    "10.0.0.1, 127.0.0.1",
    "0.0.1",
    "127.0.0.1:8765",
    "127.0.0.1:1",
    "LOCALHOST",
    "host",
]


@each("host", ["127.0.0.1", "localhost"])
@each("exempt", EXEMPT)
@each("spelling", ["NO_PROXY", "no_proxy"])
def test_proxies_capture_what_requests_says(
    host: str, exempt: str, spelling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each environment the verdict is that of the pinned client's own library."""
    for proxies in PROXIES:
        environ = {**proxies, **({spelling: exempt} if exempt else {})}
        for name in [name for name in os.environ if name.lower() in NO_PROXIES]:
            monkeypatch.delenv(name)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        url = f"http://{host}:8765/capability/execute"
        used = select_proxy(url, get_environ_proxies(url, no_proxy=None))
        assert (machine.capturing(environ, host, 8765) is not None) == bool(used), environ


def test_the_export_line_frees_the_calls(tmp_path: Path, index: Path) -> None:
    """The remedy keeps what was exempt, and with it nothing is captured."""
    environ = {"HTTP_PROXY": "http://proxy:1", "no_proxy": "10.0.0.1"}
    found = examined(written(tmp_path, index), env=environ)
    assert (found["exit"], found["proxy variables"]["level"]) == (1, "error")
    line = found["proxy variables"]["remedy"].partition("export ")[2]
    exported = dict(word.split("=", 1) for word in line.split())
    assert exported["no_proxy"].startswith("10.0.0.1,")
    after = {**environ, **exported}
    assert machine.check_proxies(after, "127.0.0.1", 8765) == Finding(
        "proxy variables", Level.OK, "a client with this environment reaches 127.0.0.1 directly"
    )

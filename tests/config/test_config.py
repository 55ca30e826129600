"""The configuration: what loads, what is refused and in which words, and what is never shown."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from smartsearch_sidecar import errors
from smartsearch_sidecar.config import Config, load, loading, model
from smartsearch_sidecar.config.model import PRESETS
from tests.fakes.each import each
from tests.fakes.key_table import document, meaning

ROOT = Path(__file__).resolve().parents[2]
SHA = "0123456789abcdef" * 4
CAPABILITY = "C" * 43
MINIMAL = {"retrieval.bm25.index": "/data/index"}
REWARD = {
    "reward.enabled": True,
    "reward.checkout": "/opt/trainer",
    "reward.references.train": "/data/train.parquet",
    "reward.helper.url": "http://127.0.0.1:30000",
    "reward.helper.model": "judge",
    "reward.helper.model_sha256": SHA,
}

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a configuration and gives its path."""

    def write(text: str) -> Path:
        path = tmp_path / "sidecar.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def loaded(**overrides: Any) -> Config:
    """A minimal configuration with overrides, their dots written as double underscores."""
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return load(None, overrides=MINIMAL | dotted, environ={})


def refused(
    path: Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> str:
    """The message with which a configuration is refused."""
    with pytest.raises(errors.ConfigError) as failure:
        load(path, overrides=MINIMAL | dict(overrides or {}), environ=environ or {})
    return failure.value.message


# --- what loads ----------------------------------------------------------------------------------


def test_defaults_are_the_design_table() -> None:
    """With nothing set, every key has the default of the design's table."""
    config = loaded()
    assert config.profile == "training"
    assert (config.run.directory, config.run.nodes, config.run.previous) == (None, 1, None)
    server = config.server
    assert (server.host, server.port, server.allow_remote) == ("127.0.0.1", 8765, False)
    assert (server.body_seconds, server.idle_seconds, server.connections_max) == (10, 75, 4096)
    assert server.execute_capability is None
    assert server.internal_capability is None
    assert (server.probe_host, server.probe_port) == (None, None)
    execute = config.execute
    assert execute.environment == "agentinputlab:smartsearch-fixed-wikipedia-v1"
    assert execute.accepted_environment_sha256 == ()
    assert (execute.max_calls, execute.slots, execute.deadline_seconds) == (10_000, 8, 9)
    assert (execute.routes, execute.retrieve_topk) == (("execute",), 3)
    assert config.retrieval.provider == "bm25"
    assert config.retrieval.flashrag.batch_max == 32
    reward = config.reward
    assert (reward.enabled, reward.slots, reward.waiting_max) == (False, 8, 64)
    assert (reward.deadline_seconds, reward.batch_max, reward.seed) == (600, 64, 17)
    assert reward.max_input_bytes == 16 * 1024 * 1024
    for quotas in (reward, reward.validation):
        found = (quotas.max_scores, quotas.max_helper_calls, quotas.max_output_tokens)
        assert found == (10_000, 100_000, 10_000_000)
    assert (reward.helper.timeout_seconds, reward.helper.concurrency) == (120, 64)
    assert (config.ledger.segment_mib, config.ledger.sync) == (256, True)
    assert config.cluster is None


@pytest.mark.parametrize("profile", ["training", "reference"])
def test_profile_presets_every_key_of_its_table(profile: str) -> None:
    """A profile presets exactly its column, and leaves no key of the table open."""
    public = loaded(profile=profile).public()
    column = {key: getattr(preset, profile) for key, preset in PRESETS.items()}
    assert {key: _get(public, key) for key in PRESETS} == column
    assert None not in column.values()


@each("key", sorted(PRESETS))
def test_profile_only_presets(key: str) -> None:
    """Each key a profile presets can be set by itself in the other profile's way."""
    preset = PRESETS[key]
    config = loaded(profile="reference", **{key: preset.training})
    assert _get(config.public(), key) == preset.training
    config = loaded(**{key: preset.reference})
    assert _get(config.public(), key) == preset.reference


def test_provenance_is_recorded_where_a_sidecar_knows_a_part() -> None:
    """Provenance is enforced for one node, recorded for more, off in the reference profile."""
    assert loaded().reward.provenance == "enforce"
    assert loaded(run__nodes=2).reward.provenance == "record"
    assert loaded(run__nodes=2, profile="reference").reward.provenance == "off"


def test_values_are_frozen() -> None:
    """A loaded configuration cannot be changed."""
    with pytest.raises(ValidationError, match="frozen"):
        loaded().execute.slots = 9  # type: ignore[misc]


def test_later_layers_win(write: Write) -> None:
    """The file beats the profile, the environment the file, a flag the environment."""
    path = write("[execute]\nslots = 1\nmax_calls = 1\nwaiting_max = 1\n")
    environ = {
        "SMARTSEARCH_SIDECAR__EXECUTE__MAX_CALLS": "2",
        "SMARTSEARCH_SIDECAR__EXECUTE__WAITING_MAX": "2",
    }
    config = load(path, environ=environ, overrides=MINIMAL | {"execute.waiting_max": 3})
    execute = config.execute
    assert (execute.slots, execute.max_calls, execute.waiting_max) == (1, 2, 3)


def test_flag_that_was_not_given_changes_nothing(write: Write) -> None:
    """An override of None is a flag that was not given."""
    path = write("[server]\nport = 7\n")
    assert load(path, environ={}, overrides=MINIMAL | {"server.port": None}).server.port == 7


@each(
    ("name", "words", "value"),
    [
        ("PROFILE", "reference", "reference"),
        ("SERVER__PORT", "0", 0),
        ("EXECUTE__DEADLINE_SECONDS", "0.5", 0.5),
        ("LEDGER__SYNC", "False", False),
        ("EXECUTE__ROUTES", '["execute", "search"]', ["execute", "search"]),
        ("EXECUTE__ROUTES", "execute, retrieve", ["execute", "retrieve"]),
        ("EXECUTE__ACCEPTED_ENVIRONMENT_SHA256", "", []),
        ("EXECUTE__ENVIRONMENT", "12", "12"),
        ("RETRIEVAL__BM25__INDEX", "/other", "/other"),
        ("REWARD__VALIDATION__MAX_SCORES", "5", 5),
    ],
)
def test_environment_reads_each_kind_of_value(name: str, words: str, value: Any) -> None:
    """A variable is read as the kind of value its key holds."""
    config = load(None, overrides={}, environ=_environ(MINIMAL) | {_variable(name): words})
    assert _get(config.public(), name.lower().replace("__", ".")) == value


def test_other_variables_are_not_ours(write: Write) -> None:
    """Variables with another prefix, the integrations' among them, are left alone."""
    environ = {"SMARTSEARCH_SIDECAR_ENDPOINTS": "/x", "SMARTSEARCH_SIDECAR_SERVICE_PORT": "1"}
    assert load(None, overrides=MINIMAL, environ=environ) == loaded()


def test_relative_paths_start_where_they_were_written(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths of the file start at its folder, those of environment and flags at the working one."""
    work = tmp_path / "work"
    work.mkdir()
    path = write('[retrieval.bm25]\nindex = "../index"\n')
    monkeypatch.chdir(work)
    config = load(
        path,
        environ={"SMARTSEARCH_SIDECAR__RUN__PREVIOUS": "old"},
        overrides={"run.directory": Path("new")},
    )
    assert config.retrieval.bm25.index == tmp_path.parent / "index"
    assert config.run.previous == work / "old"
    assert config.run.directory == config.run.needed_directory() == work / "new"


def test_home_is_spelled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tilde is the home directory, as a shell would have it."""
    monkeypatch.setenv("HOME", "/home/somebody")
    assert loaded(run__directory="~/runs/1").run.directory == Path("/home/somebody/runs/1")


def test_run_directory_is_asked_for_when_it_is_needed() -> None:
    """Only what writes a run needs run.directory, and then says how to name it."""
    with pytest.raises(errors.ConfigError, match=r"run\.directory is not set.*--run-dir"):
        loaded().run.needed_directory()


@pytest.mark.parametrize("path", sorted((ROOT / "config").glob("*.toml")), ids=lambda p: p.name)
def test_shipped_files_load(path: Path) -> None:
    """Every configuration in config/ loads as it is."""
    assert load(path, environ={}).profile in ("training", "reference")


def test_shipped_training_file_loads_with_its_rewards(write: Write) -> None:
    """The part of training.toml that is to be filled in is right once it is."""
    text = (ROOT / "config" / "training.toml").read_text(encoding="utf-8")
    before, mark, rewards = text.partition("# [reward]\n")
    filled = re.sub(r"(?m)^# ?", "", mark + rewards).replace("…", SHA)
    assert load(write(before + filled), environ={}).reward.enabled


def test_key_table_is_up_to_date() -> None:
    """config/README.md is what `make readme` writes from the models."""
    assert (ROOT / "config" / "README.md").read_text(encoding="utf-8") == document()


def test_every_key_says_what_it_is_for() -> None:
    """Each key has a meaning and words for what it takes, and each number a unit or a name."""
    for key in model.FIELDS:
        assert meaning(key), key
        assert model.allowed(key), key
        if model.KINDS[key] in (int, float) and not key.endswith(("port", "seed")):
            assert model.allowed(key).endswith(")"), key


# --- what is refused, and in which words ---------------------------------------------------------


BAD_VALUES: list[tuple[str, Any, str]] = [
    ("execute.slots", 0, ("execute.slots = 0 (command line) is not allowed: use a whole number "
     "from 1 to 1024 (searches).")),
    ("execute.slots", True, "execute.slots = true (command line) is not allowed"),
    ("execute.slots", 8.0, "execute.slots = 8.0 (command line) is not allowed"),
    ("server.port", "8765", ('server.port = "8765" (command line) is not allowed: use a whole '
     "number from 0 to 65535.")),
    ("server.port", 65536, "server.port = 65536 (command line) is not allowed"),
    ("execute.deadline_seconds", 0, "use a number above 0 and up to 3600 (seconds)"),
    ("execute.deadline_seconds", float("nan"), "use a number above 0"),
    ("execute.deadline_seconds", float("inf"), "use a number above 0"),
    ("reward.unparsed_share_max", 1.5, "use a number from 0 to 1 (share)"),
    ("ledger.sync", 1, "ledger.sync = 1 (command line) is not allowed: use true or false."),
    ("profile", "trainning", ('profile = "trainning" (command line) is not allowed: use "training" '
     'or "reference".')),
    ("reward.provenance", "on", 'use "enforce", "record" or "off".'),
    ("execute.routes", [], "use a list of at least one of execute, search and retrieve, each once"),
    ("execute.routes", ["execute", "execute"], "each once"),
    ("execute.routes", ["reward"], 'execute.routes = "reward" (command line) is not allowed'),
    ("execute.routes", "execute", "use a list of at least one"),
    ("execute.environment", "", "use 1 to 1024 characters"),
    ("execute.environment", "x" * 1025, "xxx… (command line) is not allowed"),
    ("execute.accepted_environment_sha256", [SHA, SHA], "a list of different sha256 digests"),
    ("execute.accepted_environment_sha256", [SHA.upper()], "a list of different sha256 digests"),
    ("retrieval.provider", "bm26", "use bm25, flashrag or package.module:factory."),
    ("retrieval.provider", "a.b:c:d", "use bm25, flashrag or package.module:factory."),
    ("retrieval.bm25.index", "", ('retrieval.bm25.index = "" (command line) is not allowed: use a '
     "path.")),
    ("retrieval.bm25.index", "a\0b", "use a path"),
    ("retrieval.bm25.index", 3, "use a path"),
    ("retrieval.bm25.index", "~nobody-of-this-name/x", "use a path"),
    ("server.host", "a host", "use an IP address or a host name"),
    ("cluster.node", "a b", "use 1 to 64 characters of A-Z, a-z, 0-9, _ and -."),
    ("execute.slots", {"a": 1}, "execute.slots = a table (command line) is not allowed"),
]  # fmt: skip


@each(("key", "value", "words"), BAD_VALUES)
def test_bad_value(key: str, value: Any, words: str) -> None:
    """A value that is not allowed is named with its key, its place and what is allowed."""
    message = refused(overrides={key: value})
    assert words in message
    assert key in message


@each("key", ["retrieval.flashrag.url", "reward.helper.url"])
@each(
    "url",
    [
        "",
        "127.0.0.1:9000",
        "ftp://host:21",
        "http://",
        "http:///x",
        "http://host:x",
        "http://host:0",
        "http://host:99999",
        "http://[::1",
        "http://host/a b",
        "http://host:9000/?q=1",
        "http://host:9000/#top",
        "http://user:hunter2@host:9000",
    ],
)
def test_bad_address(key: str, url: str) -> None:
    """An address that cannot be meant is named with its key and what is allowed, and the message
    repeats no password of it.
    """
    message = refused(overrides={key: url})
    assert message == (
        f'{key} = "{url.replace("user:hunter2@", "***@")}" (command line) is not allowed: use an '
        "http:// or https:// address without user, password, query or fragment."
    )


UNKNOWN: list[tuple[str, str]] = [
    ("slots = 8", "slots (FILE) is not a known key: the nearest is execute.slots."),
    ("profil = 1", "profil (FILE) is not a known key: the nearest is profile."),
    ("[execute]\nslot = 8", ("execute.slot (FILE) is not a known key: the nearest is "
     "execute.slots.")),
    ("[execute]\nport = 8", "execute.port (FILE) is not a known key: the nearest is server.port."),
    ("[exeute]\nslots = 8", ("exeute (FILE) is not a known key: the nearest is the section "
     "[execute].")),
    ("[retrieval.bm52]\nindex = 8", ("retrieval.bm52 (FILE) is not a known key: the nearest is the "
     "section [retrieval.bm25].")),
    ("[reward.validation]\nseed = 8", ("reward.validation.seed (FILE) is not a known key: the "
     "nearest is reward.seed.")),
    ('[a]\n"b.c" = 1', "a (FILE) is not a known key"),
    ("server = 1", "server (FILE) is a section, not a key: set its keys, as server.host."),
    ("[[server]]\nport = 1", "server (FILE) is a section, not a key"),
    ("[profile]\nx = 1", 'profile (FILE) is a key, not a section: use "training" or "reference".'),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), UNKNOWN)
def test_unknown_key_in_a_file(write: Write, text: str, words: str) -> None:
    """An unknown key or section is refused with the nearest known one."""
    path = write(text)
    assert words.replace("FILE", str(path)) in refused(path)


def test_unknown_variable() -> None:
    """A variable of our prefix that sets no key is refused with the nearest one that does."""
    message = refused(environ={"SMARTSEARCH_SIDECAR__EXECUTE__SLOT": "3"})
    assert message == (
        "SMARTSEARCH_SIDECAR__EXECUTE__SLOT is not a known key: the nearest is "
        "SMARTSEARCH_SIDECAR__EXECUTE__SLOTS."
    )
    assert "is a section" in refused(environ={"SMARTSEARCH_SIDECAR__EXECUTE": "3"})


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("EXECUTE__SLOTS", "eight"),
        ("EXECUTE__DEADLINE_SECONDS", "soon"),
        ("LEDGER__SYNC", "yes"),
        ("EXECUTE__ROUTES", "[execute]"),
        ("EXECUTE__ROUTES", "[" * 100_000),
        ("EXECUTE__SLOTS", "9" * 5000),
    ],
)
def test_variable_that_is_not_its_kind(variable: str, words: str) -> None:
    """A variable that cannot be read as its key's kind is refused by its name."""
    message = refused(environ={_variable(variable): words})
    assert _variable(variable) in message
    assert len(message) < 500


def test_unknown_flag() -> None:
    """An override of an unknown key is refused."""
    assert "server.prt (command line) is not a known key" in refused(overrides={"server.prt": 1})
    assert "server (command line) is a section" in refused(overrides={"server": 1})


def test_undecodable_text_is_named() -> None:
    """Bytes of a variable that are not UTF-8 are refused before anything encodes them."""
    message = refused(
        environ={_variable("EXECUTE__ENVIRONMENT"): b"\xff".decode("utf-8", "surrogateescape")}
    )
    assert "is not valid text: use UTF-8." in message


def test_all_problems_are_listed_once(write: Write) -> None:
    """Unknown keys, bad values and missing keys are all told at once, each on its own line."""
    path = write(
        "profil = 1\n[execute]\nslots = 0\nroutes = [1, 2]\n[server]\nport = -1\n"
        "[cluster]\nnode = 'n'\n"
    )
    message = refused(path, environ={_variable("RUN__NODE"): "1"}, overrides={"run.nodes": 0})
    head, *lines = message.splitlines()
    assert head == f"The configuration has {len(lines)} problems:"
    subjects = [line.split()[0] for line in lines]
    assert subjects == [
        "profil", _variable("RUN__NODE"), "run.nodes", "server.port", "execute.slots",
        "execute.routes", "execute.routes", "cluster.nats_url", "cluster.run_id",
    ]  # fmt: skip


def test_empty_cluster_section_is_not_forgotten(write: Write) -> None:
    """A [cluster] without keys is asked for its keys instead of being ignored."""
    assert "cluster.nats_url is missing" in refused(write("[cluster]\n"))


FILES: list[tuple[bytes, str]] = [
    (b"[execute]\nslots = \n", ", line 2: this is not TOML: Invalid value."),
    (b"a = 1\nb = [1,\n", ", line 2: this is not TOML: "),
    (b"a = 1\n\xff = 2\n", ", line 2: this is not UTF-8 text."),
    (b"a = " + b"[" * 100_000, " is nested too deeply to be a configuration."),
    (b"#" * (1024 * 1024 + 1), " is over 1048576 bytes: that is not a configuration."),
]


@pytest.mark.parametrize(("data", "words"), FILES, ids=["value", "end", "utf-8", "deep", "large"])
def test_file_that_is_no_configuration(tmp_path: Path, data: bytes, words: str) -> None:
    """A file that is not TOML is named, with the line where there is one."""
    path = tmp_path / "x.toml"
    path.write_bytes(data)
    message = refused(path)
    assert message.startswith(f"{path}{words}"), message
    assert "\n" not in message


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file, or a directory, is named with the system's reason."""
    missing = tmp_path / "missing.toml"
    assert f"{missing} cannot be read as a configuration (No such file" in refused(missing)
    assert f"{tmp_path} cannot be read as a configuration (Is a directory)" in refused(tmp_path)


RULES: list[tuple[dict[str, Any], str]] = [
    ({"run.nodes": 2, "reward.provenance": "enforce"}, "with run.nodes above 1 needs [cluster]"),
    ({"run.on_unclean_restart": "report"}, "needs reward.enabled = true and reward.provenance"),
    (REWARD | {"run.on_unclean_restart": "report", "reward.provenance": "record"},
     'run.on_unclean_restart = "report" needs reward.enabled'),
    ({"cluster.nats_url": "nats://h", "cluster.run_id": "r", "cluster.node": "n"},
     "[cluster] needs run.nodes of 2 or more"),
    ({"server.host": "0.0.0.0"}, 'server.host = "0.0.0.0" is not loopback'),
    ({"server.host": "::"}, 'server.host = "::" is not loopback'),
    ({"server.host": "localhost.example"}, "is not loopback"),
    ({"server.probe_port": 8080}, "server.probe_host is missing"),
    ({"server.probe_host": "0.0.0.0"}, "server.probe_port is missing"),
    ({"server.probe_host": "127.0.0.1", "server.probe_port": 8765}, "needs a port of its own"),
    ({"server.execute_capability": CAPABILITY, "server.internal_capability": CAPABILITY},
     "server.execute_capability and server.internal_capability are the same"),
    ({"retrieval.bm25.index": None}, "retrieval.bm25.index is missing"),
    ({"retrieval.provider": "flashrag"}, "retrieval.flashrag.url is missing"),
    ({"retrieval.provider": "flashrag"}, "retrieval.flashrag.corpus_sha256 is missing"),
    ({"retrieval.provider": "flashrag"}, "retrieval.flashrag.index_sha256 is missing"),
    ({"reward.enabled": True}, "reward.checkout is missing"),
    ({"reward.enabled": True}, "reward.references.train is missing"),
    ({"reward.enabled": True}, "reward.helper.url is missing"),
    ({"reward.enabled": True}, "reward.helper.model is missing"),
    ({"reward.enabled": True}, "reward.helper.model_sha256 is missing"),
    (REWARD | {"reward.source": "/s.py"}, "reward.checkout and reward.source exclude each other"),
    (REWARD | {"reward.checkout": None, "reward.source": "/s.py"},
     "reward.source_sha256 is missing"),
]  # fmt: skip


@each(("overrides", "words"), RULES)
def test_rule_between_keys(overrides: dict[str, Any], words: str) -> None:
    """Each rule between keys is refused with a sentence that names both."""
    assert words in refused(overrides=overrides)


FINE: list[dict[str, Any]] = [
    REWARD,
    REWARD | {"run.on_unclean_restart": "report"},
    REWARD | {"reward.checkout": None, "reward.source": "/s.py", "reward.source_sha256": SHA},
    REWARD | {"reward.references.train": None, "reward.references.validation": "/v.jsonl"},
    {"run.nodes": 2, "cluster.nats_url": "nats://u:p@h:4222,tls://i", "cluster.run_id": "r",
     "cluster.node": "n-1", "reward.provenance": "enforce"},
    {"server.host": "::1"},
    {"server.host": "127.8.9.10"},
    {"server.host": "localhost"},
    {"server.host": "0.0.0.0", "server.allow_remote": True},
    {"server.probe_host": "0.0.0.0", "server.probe_port": 8080},
    {"server.probe_host": "127.0.0.1", "server.probe_port": 0, "server.port": 0},
    {"retrieval.provider": "my_search.provider:make", "retrieval.bm25.index": None},
    {"retrieval.provider": "flashrag", "retrieval.flashrag.url": "http://h:1/",
     "retrieval.flashrag.corpus_sha256": SHA, "retrieval.flashrag.index_sha256": SHA},
    {"server.execute_capability": "a" * 32, "server.internal_capability": "_-" * 64},
]  # fmt: skip


@each("overrides", FINE)
def test_what_the_rules_leave_free(overrides: dict[str, Any]) -> None:
    """What the rules between keys do not forbid loads."""
    config = loaded(**overrides)
    assert [sentence for rule in model.RULES for sentence in rule(config)] == []


# --- secrets -------------------------------------------------------------------------------------


def test_capability_comes_from_its_file(write: Write, tmp_path: Path) -> None:
    """A capability file is read beside the configuration, its line end left out."""
    (tmp_path / "execute").write_text(f"{CAPABILITY}\n", encoding="ascii")
    config = load(
        write('[server]\nexecute_capability_file = "execute"\n'),
        overrides=MINIMAL,
        environ={_variable("SERVER__INTERNAL_CAPABILITY"): "I" * 32},
    )
    execute, internal = config.server.execute_capability, config.server.internal_capability
    assert execute is not None
    assert execute.get_secret_value() == CAPABILITY
    assert internal is not None
    assert internal.get_secret_value() == "I" * 32


def test_capability_file_that_cannot_be_used(tmp_path: Path) -> None:
    """A capability file that is missing, too short or one of two is named, its contents are not."""
    place = tmp_path / "execute"
    key = "server.execute_capability_file"
    assert f'{key} = "{place}" (command line) cannot be read' in refused(
        overrides={key: str(place)}
    )
    for contents in (
        b"",
        b"short-secret",
        b"\xff" * 40,
        b"x" * 4097,
        b"a" * 40 + b"\n" + b"b" * 40,
    ):
        place.write_bytes(contents)
        message = refused(overrides={key: place})
        assert message.startswith(f"server.execute_capability ({place}) is not allowed: use 32 to")
        assert contents.decode("latin-1").strip()[:12] not in message or not contents
    place.write_text(CAPABILITY, encoding="ascii")
    both = refused(overrides={key: place, "server.execute_capability": "D" * 40})
    assert both == f"server.execute_capability and {key} are both set: use one of them."


SECRET_PLACES: list[dict[str, Any]] = [
    {"server.execute_capability": "SECRET-too-short"},
    {"server.execute_capability": "SECRET" * 40},
    {"server.execute_capability": "SECRET with spaces SECRET with spaces"},
    {"server.execute_capability": ["SECRET" * 6]},
    {"server.execute_capability": {"SECRET": "SECRET"}},
    {"server.execute_capability": "SECRET" * 6, "server.internal_capability": "SECRET" * 6},
    {"server.execute_capability": "SECRET" * 6, "server.port": -1},
    {"server.execute_capability": "SECRET" * 6, "server.nothing": 1},
    {"server.nothing": "SECRET" * 6},
    {"server": {"execute_capability": "SECRET" * 6}},
    {"cluster.nats_url": "nats://user:SECRET @h"},
    {"cluster.nats_url": "nats://user:SECRET@h"},
    {"reward.helper.url": "http://user:SECRET@h"},
]


@each("overrides", SECRET_PLACES)
def test_no_refusal_shows_a_secret(overrides: dict[str, Any]) -> None:
    """No message, cause or traceback of a refusal holds a secret."""
    with pytest.raises(errors.ConfigError) as refusal:
        load(None, overrides=MINIMAL | overrides, environ={})
    printed = "".join(traceback.format_exception(refusal.value))
    assert "SECRET" not in printed
    assert refusal.value.__context__ is None
    assert refusal.value.__cause__ is None


def test_no_view_of_a_configuration_shows_a_secret() -> None:
    """repr, str, public values and digest of a configuration hold no secret, nor its place."""
    config = loaded(
        server__execute_capability="SECRET" * 6,
        server__internal_capability="TERCES" * 6,
        run__nodes=2,
        cluster__nats_url="nats://user:SECRET@h",
        cluster__run_id="r",
        cluster__node="n",
    )
    for view in (repr(config), str(config), json.dumps(config.public()), repr(config.model_dump())):
        assert "SECRET" not in view
        assert "TERCES" not in view
    hidden = [key for key in model.FIELDS if model.KINDS[key] is SecretStr]
    assert set(model.SECRETS_WITH_FILES) < set(hidden)
    for key in (*hidden, *(f"{secret}_file" for secret in model.SECRETS_WITH_FILES)):
        section, _, name = key.rpartition(".")
        assert name not in _get(config.public(), section)
    assert not {key for key in config.public()["server"] if "capability" in key}
    assert "nats_url" not in config.public()["cluster"]


# --- the digest ----------------------------------------------------------------------------------


def test_digest_names_the_behaviour_not_the_place() -> None:
    """Two runs that behave alike have one digest, also if directories, ports and secrets differ."""
    plain = loaded()
    elsewhere = loaded(
        run__directory="/runs/7", server__port=1, server__execute_capability=CAPABILITY
    )
    assert re.fullmatch("[0-9a-f]{64}", plain.digest())
    assert plain.digest() == loaded().digest() == elsewhere.digest()
    assert loaded(execute__deadline_seconds=9).digest() == plain.digest()
    assert loaded(execute__slots=9).digest() != plain.digest()
    assert loaded(profile="reference").digest() != plain.digest()


def test_public_values_are_json() -> None:
    """What a claim and a status carry of a configuration survives a round trip as JSON."""
    public = loaded(execute__routes=["execute", "search"], run__directory="/r").public()
    assert json.loads(json.dumps(public, allow_nan=False)) == public


# --- anything else a person may write ------------------------------------------------------------


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(key=st.sampled_from([*model.FIELDS, *model.SECTIONS]), value=JSON)
@example(key="run.directory", value="~\0")
@example(key="run.nodes", value=10**400)
def test_any_value_loads_or_is_refused_in_words(key: str, value: object) -> None:
    """Whatever a key is set to, it loads or ends in a ConfigError, never in another error."""
    try:
        config = load(None, overrides=MINIMAL | {key: value}, environ={})
    except errors.ConfigError as refusal:
        message = refusal.message
    else:
        json.dumps(config.public(), allow_nan=False)
        config.digest()
        return
    assert key.partition(".")[0] in message


@given(name=st.text(max_size=40))
def test_any_unknown_name_gets_the_nearest(name: str) -> None:
    """Whatever an unknown key is called, a known one is offered."""
    assert loading.nearest(name) in {*model.FIELDS, *model.SECTIONS}


def _variable(name: str) -> str:
    return f"SMARTSEARCH_SIDECAR__{name}"


def _environ(overrides: dict[str, Any]) -> dict[str, str]:
    return {loading.env_name(key): str(value) for key, value in overrides.items()}


def _get(public: dict[str, Any], key: str) -> Any:
    value: Any = public
    for part in key.split("."):
        value = value[part]
    return value

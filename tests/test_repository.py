"""The repository itself: the house's rules that no linter knows, over every tracked file."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import smartsearch_sidecar
from smartsearch_sidecar.commands import FILES
from tests.fakes.each import each

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "smartsearch_sidecar"
INTEGRATIONS = PACKAGE / "integrations"

PACKAGE_FILE_LINES = 500
TEST_FILE_LINES = 700
FUNCTION_LINES = 60

# The caps are soft: a file or function may pass one with its reason here.
LONG: dict[str, str] = {
    "smartsearch_sidecar/errors.py": "the catalogue of every failure; a list, not logic",
    "smartsearch_sidecar/commands/init.py:init": "its options, one a line, and little else",
}

# What the docstring of a module with one importer says.
WHY = "Apart from"

# Who may open files, and which. Everyone else is handed bytes.
OPENS_FILES: dict[str, str] = {
    "smartsearch_sidecar/ledger/file.py": "the files of a run",
    "smartsearch_sidecar/ledger/lock.py": "the locks of a run",
    "smartsearch_sidecar/ledger/receipt.py": "a receipt that a trainer has kept",
    "smartsearch_sidecar/ledger/disk.py": "how its bytes reach the medium",
    "smartsearch_sidecar/ledger/reader.py": "the files of a run, to read them only",
    "smartsearch_sidecar/ledger/export.py": "the exported copy, never the run",
    "smartsearch_sidecar/config": "the configuration and the capabilities' files",
    "smartsearch_sidecar/retrieval": "corpora, indexes and canaries",
    "smartsearch_sidecar/reward": "references and the pinned source",
    "smartsearch_sidecar/client.py": "endpoints.json, to find a sidecar",
    "smartsearch_sidecar/commands": "what a person names on the command line",
    "smartsearch_sidecar/web/page": "the page's own text",
    "smartsearch_sidecar/integrations": "endpoints.json and receipts, in the trainer's process",
}
OPENERS = {"open", "read_bytes", "read_text", "write_bytes", "write_text", "mkstemp", "mkdtemp"}

# The two halves of aiohttp, which import contracts cannot tell apart, and the standard library's.
SERVER_HALF = ("smartsearch_sidecar/web/",)
CLIENT_HALF = (
    "smartsearch_sidecar/outbound_http.py",
    "smartsearch_sidecar/client.py",
    "smartsearch_sidecar/integrations/",
)
CLIENT_NAMES = {"ClientSession", "ClientTimeout", "TCPConnector", "request"}


@cache
def tracked() -> tuple[Path, ...]:
    """Every file git tracks and that is still there."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    paths = (ROOT / name for name in listed.stdout.split("\0") if name)
    return tuple(path for path in paths if path.is_file())


def named(path: Path) -> str:
    """A path as it is written in a message."""
    return path.relative_to(ROOT).as_posix()


def python(under: Path) -> list[Path]:
    """The tracked Python files under a folder."""
    return [path for path in tracked() if path.suffix == ".py" and path.is_relative_to(under)]


@cache
def tree(path: Path) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse(path.read_bytes(), filename=named(path))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file's syntax tree."""
    return tuple(ast.walk(tree(path)))


@pytest.fixture(scope="module", autouse=True)
def _trees_go() -> Iterator[None]:
    """A million nodes make no circles: the garbage collector would walk them again and again, here
    and, if they stayed, in every later test.
    """
    gc.disable()
    yield
    for kept in (tree, nodes, functions, texts):
        kept.cache_clear()
    gc.enable()


@cache
def texts() -> dict[str, str]:
    """Every tracked text file, by its name."""
    found = {}
    for path in tracked():
        with suppress(UnicodeDecodeError):
            found[named(path)] = path.read_text(encoding="utf-8")
    return found


def places(pattern: re.Pattern[str]) -> list[str]:
    """Where tracked text files match it: name and line."""
    return [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}"
        for name, text in texts().items()
        for match in pattern.finditer(text)
    ]


@cache
def functions(path: Path) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]:
    """Every function and method of a file. They are statements, so no expression is looked into."""
    found = []
    left: list[Any] = [tree(path)]
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(node)
        for parts in ("body", "orelse", "finalbody", "handlers", "cases"):
            left += getattr(node, parts, ())
    return tuple(found)


def imported(path: Path) -> set[str]:
    """Every module a file imports, and every name it takes from one, dotted."""
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


# --- size and names ------------------------------------------------------------------------------


def test_files_are_short() -> None:
    """A file of the package has 500 lines at most, one of the tests 700, or a reason above."""
    for folder, cap in ((PACKAGE, PACKAGE_FILE_LINES), (ROOT / "tests", TEST_FILE_LINES)):
        lengths = {named(path): len(path.read_bytes().splitlines()) for path in python(folder)}
        long = {name: length for name, length in lengths.items() if length > cap}
        assert not set(long) - set(LONG), f"over {cap} lines: {long}"


def test_functions_are_short() -> None:
    """A function of the package has 60 lines at most, its docstring included, or a reason above."""
    long = {}
    for path in python(PACKAGE):
        for function in functions(path):
            length = (function.end_lineno or 0) - function.lineno + 1
            name = f"{named(path)}:{function.name}"
            if length > FUNCTION_LINES and name not in LONG:
                long[name] = length
    assert not long, f"over {FUNCTION_LINES} lines: {long}"


def test_exceptions_to_the_caps_are_needed() -> None:
    """No reason stands for a file or function that has become short, or is gone."""
    lengths: dict[str, tuple[int, int]] = {}
    for path in python(PACKAGE):
        lengths[named(path)] = (len(path.read_bytes().splitlines()), PACKAGE_FILE_LINES)
        for function in functions(path):
            length = (function.end_lineno or 0) - function.lineno + 1
            lengths[f"{named(path)}:{function.name}"] = (length, FUNCTION_LINES)
    for name in LONG:
        length, cap = lengths.get(name, (0, 0))
        assert length > cap, f"{name} no longer needs its reason"


def test_no_module_is_named_for_nothing() -> None:
    """No module is called utils, helpers, common or base: such a name says nothing."""
    empty = {"util", "utils", "helpers", "common", "base", "misc"}
    assert [named(path) for path in python(ROOT) if {path.stem, path.parent.name} & empty] == []


def test_every_module_begins_alike() -> None:
    """Every module of the package has a docstring and the annotations of the future."""
    for path in python(PACKAGE):
        body = tree(path).body
        if not body:
            continue
        assert ast.get_docstring(tree(path)), f"{named(path)} has no docstring"
        future = any(
            isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in body
        )
        assert future or len(body) == 1, f"{named(path)} lacks `from __future__ import annotations`"


def test_a_module_with_one_importer_says_why() -> None:
    """A file that one other imports says in its docstring why it is apart from it."""
    modules = {_dotted(path): path for path in python(PACKAGE)}
    importers: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for one in imported(path) & set(modules) - {name}:
            importers[one].add(name)
    face = "smartsearch_sidecar.commands"
    for file in FILES.values():  # imported by its name, when its command is asked for
        importers[f"{face}.{file}"].add(face)
    silent = {
        name.removeprefix("smartsearch_sidecar.")
        for name, path in modules.items()
        # A package's own face gathers its parts: the commands, one a file.
        if len(importers[name] - {name.rpartition(".")[0]}) == 1 and len(importers[name]) == 1
        if path.name != "__init__.py" and WHY not in (ast.get_docstring(tree(path)) or "")
    }
    assert not silent, f"no `{WHY}` in the docstring: {silent}"


def _dotted(path: Path) -> str:
    """A module's name as it is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_a_class_name_stands_for_one_thing() -> None:
    """No two modules of the package give a class the same name, private ones included."""
    named_in: dict[str, list[str]] = {}
    for path in python(PACKAGE):
        # Integrations stand alone, each with what it needs: a trainer loads one file by path.
        if not path.is_relative_to(INTEGRATIONS):
            for node in tree(path).body:
                if isinstance(node, ast.ClassDef):
                    named_in.setdefault(node.name, []).append(named(path))
    twice = {name: paths for name, paths in named_in.items() if len(paths) > 1}
    assert not twice, f"two things, one name: {twice}"


def test_tests_wait_in_one_way() -> None:
    """`until` and `wait_until` are written once, with a bound and a message."""
    copies = [
        f"{named(path)}:{node.lineno}"
        for path in python(ROOT / "tests")
        for node in tree(path).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name in {"until", "wait_until"}
        and path != ROOT / "tests" / "fakes" / "until.py"
    ]
    assert not copies, f"use tests/fakes/until.py: {copies}"


def test_every_test_says_what_must_be_true() -> None:
    """Every test has a docstring that is a sentence."""
    silent = []
    for path in python(ROOT / "tests"):
        for function in functions(path):
            sentence = (ast.get_docstring(function) or "").strip()
            if function.name.startswith("test_") and not sentence.endswith("."):
                silent.append(f"{named(path)}:{function.name}")
    assert not silent, f"no sentence: {silent}"


# --- what must not be in a file ------------------------------------------------------------------


def test_no_path_of_a_machine() -> None:
    """No tracked file names a folder of one machine."""
    folder = re.compile(r"(?<![\w.~\]})>-])/(work|root|tmp|Users)/\w")
    found = places(folder)
    assert not found, f"a path of a machine: {found}"


def test_no_registry() -> None:
    """No tracked file names a package registry's host or where to find one."""
    hosts = [
        ".".join(host) for host in (("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"))
    ]
    hosts += [
        ".".join(host) for host in (("deb", "debian", "org"), ("docker", "io"), ("ghcr", "io"))
    ]
    options = ["--" + option for option in ("index-url", "extra-index-url", "find-links")]
    lowered = {name: text.lower() for name, text in texts().items()}
    found = [
        f"{name}: {word}"
        for name, text in lowered.items()
        for word in (*hosts, *options)
        if word in text
    ]
    assert not found, f"a registry: {found}"


def test_no_assert_in_the_package() -> None:
    """The package never relies on assert, which vanishes under -O."""
    asserts = [
        f"{named(path)}:{node.lineno}"
        for path in python(PACKAGE)
        for node in nodes(path)
        if isinstance(node, ast.Assert)
    ]
    assert not asserts


def test_every_exemption_has_its_reason() -> None:
    """Behind each `noqa` stands why."""
    exemption = re.compile(r"#\s*(?:ruff:\s*)?(?:no)qa\b(?P<rest>.*)")
    reason = re.compile(r":\s*[A-Z]+\d+(,\s*[A-Z]+\d+)*\s*(-|#)\s*\w")
    bare = [
        f"{name}: {line}"
        for name, text in texts().items()
        if name.endswith(".py") and exemption.search(text)
        for line in text.splitlines()
        if (match := exemption.search(line))
        if not reason.match(match["rest"]) and not line.startswith("# ruff:")
    ]
    assert not bare, f"no reason beside: {bare}"


# --- doors ---------------------------------------------------------------------------------------


def test_only_named_rooms_open_files() -> None:
    """Files of a run are opened by two rooms of the ledger, other files by those who own them."""
    strangers = []
    for path in python(PACKAGE):
        if any(named(path) == room or named(path).startswith(f"{room}/") for room in OPENS_FILES):
            continue
        for node in nodes(path):
            if isinstance(node, ast.Call):
                called = node.func
                name = (
                    called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                )
                if name in OPENERS:
                    strangers.append(f"{named(path)}:{node.lineno} {name}")
    assert not strangers


def test_each_half_of_aiohttp_stays_in_its_rooms() -> None:
    """The server half is web's; HTTP clients belong to two files and the trainer's side."""
    for path in python(PACKAGE):
        name, names = named(path), imported(path)
        attributes = {
            f"{node.value.id}.{node.attr}"
            for node in nodes(path)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        server = {one for one in names | attributes if re.match(r"aiohttp\.(web|web_\w+)\b", one)}
        assert not server or name.startswith(SERVER_HALF), f"{name} serves: {server}"
        client = {f"aiohttp.{one}" for one in CLIENT_NAMES} | {"http.client", "urllib.request"}
        assert not client & (names | attributes) or name.startswith(CLIENT_HALF), f"{name} asks"


def test_aiohttps_insides_are_leaned_on_in_one_room() -> None:
    """Outside ``web/edge/`` only what aiohttp documents is imported: itself and ``aiohttp.web``."""
    for path in python(PACKAGE):
        modules = {
            node.module for node in nodes(path) if isinstance(node, ast.ImportFrom) and node.module
        } | {
            name
            for node in nodes(path)
            if isinstance(node, ast.Import)
            for name in (alias.name for alias in node.names)
        }
        insides = {name for name in modules if name.startswith("aiohttp.")} - {"aiohttp.web"}
        insides |= imported(path) & {"aiohttp.http", "aiohttp.web_protocol"}
        assert not insides or path.parent == PACKAGE / "web" / "edge", f"{named(path)}: {insides}"


def test_integrations_stand_alone() -> None:
    """A trainer-side file is Python 3.10, needs the standard library only, and is not imported."""
    for path in python(INTEGRATIONS):
        ast.parse(path.read_bytes(), filename=named(path), feature_version=(3, 10))
        top = {name.partition(".")[0] for name in imported(path)}
        trainers = {"verl", "torch", "ray", "numpy"}  # there in the process the file is loaded into
        assert top <= set(sys.stdlib_module_names) | trainers, f"{named(path)} imports {top}"
    for path in python(PACKAGE):
        inside = {name for name in imported(path) if ".integrations" in name}
        assert not inside or path.is_relative_to(INTEGRATIONS), f"{named(path)} imports {inside}"


# --- what must be there --------------------------------------------------------------------------


@each(
    "name",
    [
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        "Makefile",
        "Dockerfile",
        ".ci/run",
        "config/README.md",
        "smartsearch_sidecar/README.md",
        "smartsearch_sidecar/py.typed",
    ],
)
def test_file_is_there(name: str) -> None:
    """What a newcomer, an operator or a packager looks for is there and tracked."""
    assert ROOT / name in tracked()


def test_changelog_knows_the_version() -> None:
    """The version the package gives is one the changelog tells about."""
    headings = re.findall(
        r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert smartsearch_sidecar.__version__ in headings


def test_locks_hold_what_the_project_asks_for() -> None:
    """Every dependency stands in the lock, at a version the project allows, with hashes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    full = [*project["dependencies"], *extras["parquet"], *extras["cluster"]]
    wanted = {
        "runtime": project["dependencies"],
        "full": full,
        "dev": [*full, *extras["parity"], *extras["dev"][1:]],
        "build": _build_requirements(),
    }
    for lock, requirements in wanted.items():
        pins = _pins(ROOT / "requirements" / f"{lock}.txt")
        for requirement in map(Requirement, requirements):
            version = pins.get(canonicalize_name(requirement.name))
            assert version is not None, f"{requirement.name} is not in {lock}.txt: make lock"
            assert requirement.specifier.contains(version), f"{requirement} against {version}"


def test_the_lowest_lock_is_the_lowest() -> None:
    """What `make lowest` installs is the lower end of every range of the project."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["parquet"], *extras["cluster"], *extras["dev"][1:]]
    pins = _pins(ROOT / "requirements" / "lowest.txt")
    above = {}
    for requirement in map(Requirement, asked):
        if requirement.name == "ray":  # the quick tests start no cluster, and it is large
            continue
        version, bound = pins[canonicalize_name(requirement.name)], _lower_bound(requirement)
        # A bound of two numbers is held by every patch release under it.
        if not SpecifierSet(f"=={bound}.*").contains(version):
            above[requirement.name] = f"{version}, while the range begins with {bound}"
    assert not above, f"`make lock`, or name the lowest release that there is: {above}"


def _lower_bound(requirement: Requirement) -> str:
    (bound,) = [one.version for one in requirement.specifier if one.operator in (">=", "==")]
    return bound.removesuffix(".*")


def _build_requirements() -> list[str]:
    system = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]
    return list(system["requires"])


def _pins(lock: Path) -> dict[str, str]:
    """Name to version; a pin without a hash is a failure."""
    pins: dict[str, str] = {}
    for block in re.split(r"\n(?=[a-z])", lock.read_text(encoding="utf-8")):
        match = re.match(r"([a-z0-9._-]+)==([^\s;]+)", block)
        if match:
            assert "--hash=sha256:" in block, f"{match[1]} has no hash in {lock.name}"
            pins[canonicalize_name(match[1])] = match[2]
    return pins

"""The folder of an index: its ``manifest.json``, and how the folder comes into being.

The manifest says what an index is, to the sha256 of every file, and which version reads it.

Three digests. Each file's own is what a server verifies before it opens anything.
``content_sha256`` leaves out what differs from build to build (tantivy's random segment name), so
two builds of one corpus can be compared. ``index_sha256`` adds what decides over answers besides
the bytes (format, tantivy, analyzer): it names the index, alike on every machine. What varies
(when, how long) is in ``built`` and in no digest but ``sum``, which only protects this file
itself.

A folder is hidden and locked while it is made, gone if the build fails, and renamed when whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import orjson
import tantivy
from pydantic import BaseModel, Field, ValidationError

from smartsearch_sidecar import errors
from smartsearch_sidecar.retrieval.bm25.analysis import ANALYZER
from smartsearch_sidecar.run.json_values import canonical_digest

NAME: Final = "manifest.json"
FORMAT: Final = 1  # of stored fields, manifest and digests; a change of any raises it
META: Final = "meta.json"  # tantivy's list of segments
REBUILD: Final = (
    "`smartsearch-sidecar index build CORPUS NEW_FOLDER` and name that in retrieval.bm25.index"
)
_MANIFEST_BYTES_MAX: Final = 1024 * 1024
_HASH_BYTES: Final = 1024 * 1024
_REMOVE_TRIES: Final = 100
_REMOVE_PAUSE_SECONDS: Final = 0.02

_Digest = Field(pattern=r"^[0-9a-f]{64}$")


class FileFacts(BaseModel, frozen=True, extra="forbid", strict=True):
    """One file of the index."""

    sha256: str = _Digest
    bytes: int = Field(ge=0)


class Manifest(BaseModel, frozen=True, extra="forbid", strict=True):
    """The facts of an index. Sizes are bytes, counts are passages."""

    format: int
    tantivy: str
    analyzer: str
    passages: int = Field(ge=1)
    dropped: int = Field(ge=0)
    corpus_format: str
    corpus_sha256: str = _Digest
    content_sha256: str = _Digest
    index_sha256: str = _Digest
    files: dict[str, FileFacts]
    built: dict[str, str | float]

    def as_json(self) -> bytes:
        """The bytes of ``manifest.json``; ``sum`` is the digest of everything else in it."""
        value = self.model_dump()
        value["sum"] = canonical_digest(value)
        return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def tantivy_version() -> str:
    """The library's version and that of its files, as it gives them itself."""
    return str(vars(tantivy)["__version__"])  # its stubs do not know it


def content_digest(meta: bytes, files: Mapping[str, FileFacts]) -> str:
    """Of an index of one segment, without the segment's name: the same for every build."""
    value = orjson.loads(meta)
    (segment,) = value["segments"]
    prefix = segment.pop("segment_id").replace("-", "") + "."
    own = [name for name in files if name.startswith(prefix)]
    parts = {name.removeprefix(prefix): files[name].sha256 for name in own}
    return canonical_digest({"meta": value, "segment": parts})


def index_digest(passages: int, content_sha256: str) -> str:
    """What this process would name an index of that content."""
    reads = {"format": FORMAT, "tantivy": tantivy_version(), "analyzer": ANALYZER}
    return canonical_digest({**reads, "passages": passages, "content_sha256": content_sha256})


def read(folder: Path) -> Manifest:
    """The manifest of ``folder``, whole and of this version. Raises ``IndexUnusable``."""
    command = f"`smartsearch-sidecar index build CORPUS {folder}`"
    if not folder.is_dir():
        raise errors.INDEX_UNUSABLE(f"there is no index at {folder}; build it with {command}")
    path = folder / NAME
    damaged = errors.INDEX_UNUSABLE(
        f"{path} is damaged; restore the folder, or remove it and build it again with {command}"
    )
    try:
        with path.open("rb") as file:
            value: Any = orjson.loads(file.read(_MANIFEST_BYTES_MAX))
    except orjson.JSONDecodeError:
        raise damaged from None
    except FileNotFoundError:
        unfinished = f"{folder} holds no {NAME}, so it is not a finished index"
        raise errors.INDEX_UNUSABLE(
            f"{unfinished}; remove it and build it with {command}"
        ) from None
    except OSError as error:
        raise cannot_read(path, error) from None
    if not isinstance(value, dict):
        raise damaged

    def expect(key: str, ours: object) -> None:
        if value.get(key) != ours:
            raise errors.INDEX_UNUSABLE(
                f"the index at {folder} is of {key} {value.get(key)!r}, this sidecar reads "
                f"{ours!r}; build it again with {REBUILD}"
            )

    # The format first: another one may have another way to sum.
    written = value.get("format")
    if type(written) is int and written > FORMAT:
        raise errors.INDEX_UNUSABLE(
            f"the index at {folder} was written by a newer version (format {written}, this version "
            f"reads up to {FORMAT}): upgrade, or build the index again with {REBUILD}"
        )
    expect("format", FORMAT)
    if value.pop("sum", None) != canonical_digest(value):
        raise damaged
    expect("tantivy", tantivy_version())
    expect("analyzer", ANALYZER)
    try:
        manifest = Manifest.model_validate(value)
    except ValidationError:
        raise damaged from None
    if any("/" in name for name in manifest.files):
        raise damaged
    return manifest


def cannot_read(path: Path, error: OSError) -> errors.UsageError:
    return errors.INDEX_UNUSABLE(f"{path} cannot be read: {error.strerror or error}")


@contextmanager
def workshop(out: Path) -> Iterator[Path]:
    """A hidden folder beside ``out`` that is gone afterwards, or has become ``out``. Its lock tells
    a build that still runs from one that was killed, whose leavings are removed.
    """
    folder = out.parent / f".{out.name}.building"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileExistsError, NotADirectoryError):
        raise errors.USAGE(f"{out.parent} is not a folder; name another place") from None
    except OSError as error:
        raise _cannot_write(out, error) from None
    try:
        _lock(handle, folder, out)
        try:
            for name in os.listdir(folder):
                (folder / name).unlink()
            yield folder
        except BaseException:
            remove(folder)
            raise
    except OSError as error:
        raise _cannot_write(out, error) from error
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path, out: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        said = f"another build is writing {out}; wait for it, or name another"
        raise errors.USAGE(said) from None
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(handle), os.stat(folder)):
            return
    raise errors.USAGE(f"another build of {out} ended just now; look at what it left")


def remove(folder: Path) -> None:
    """Removes a folder until it stays away: threads of tantivy may still be making files in it."""
    for _ in range(_REMOVE_TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(_REMOVE_PAUSE_SECONDS)


def seal(folder: Path, hashed: Callable[[int, int], None]) -> dict[str, FileFacts]:
    """Hashes, syncs and write-protects every file of the finished index."""
    for lock in folder.glob(".*.lock"):
        lock.unlink()
    paths = sorted(folder.iterdir())
    total = sum(path.stat().st_size for path in paths)
    done = 0
    files: dict[str, FileFacts] = {}
    for path in paths:
        digest = hashlib.sha256()
        size = 0
        with path.open("rb", buffering=0) as file:
            while part := file.read(_HASH_BYTES):
                digest.update(part)
                size += len(part)
                hashed(done + size, total)
            os.fsync(file.fileno())
        done += size
        path.chmod(0o444)
        files[path.name] = FileFacts(sha256=digest.hexdigest(), bytes=size)
    return files


def publish(folder: Path, manifest: Manifest, out: Path) -> None:
    """The one moment at which the index comes into being."""
    path = folder / NAME
    with path.open("xb") as file:
        file.write(manifest.as_json())
        file.flush()
        os.fsync(file.fileno())
    path.chmod(0o444)
    folder.chmod(0o755)
    _sync(folder)
    folder.rename(out)
    _sync(out.parent)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _cannot_write(out: Path, error: OSError) -> errors.UsageError:
    return errors.USAGE(
        f"the index cannot be written at {out}: {error.strerror or error}; make room or name "
        "another place"
    )

"""``manifest.json``: what an index is, to the sha256 of every file, and which version reads it.

Three digests. Each file's own is what a server verifies before it opens anything.
``content_sha256`` leaves out what differs from build to build (tantivy's random segment name), so
two builds of one corpus can be compared. ``index_sha256`` adds what decides over answers besides
the bytes (format, tantivy, analyzer): it names the index, alike on every machine. What varies
(when, how long) is in ``built`` and in no digest but ``sum``, which only protects this file
itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

import orjson
import tantivy
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from smartsearch_sidecar import errors
from smartsearch_sidecar.retrieval.bm25.analysis import ANALYZER
from smartsearch_sidecar.run.json_values import canonical_digest

NAME: Final = "manifest.json"
FORMAT: Final = 1
"""Of the index folder: stored fields, manifest, digests. A change of any of them raises it."""

META: Final = "meta.json"  # tantivy's list of segments
_MANIFEST_BYTES_MAX: Final = 1024 * 1024

_Digest = Field(pattern=r"^[0-9a-f]{64}$")


class FileFacts(BaseModel):
    """One file of the index."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    sha256: str = _Digest
    bytes: int = Field(ge=0)


class Manifest(BaseModel):
    """The facts of an index. Sizes are bytes, counts are passages."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

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

    @classmethod
    def of(
        cls,
        folder: Path,
        files: Mapping[str, FileFacts],
        *,
        passages: int,
        dropped: int,
        corpus_format: str,
        corpus_sha256: str,
        built: Mapping[str, str | float],
    ) -> Self:
        """The manifest of a finished index in ``folder``, written by this process."""
        content = content_digest((folder / META).read_bytes(), files)
        return cls(
            format=FORMAT,
            tantivy=tantivy_version(),
            analyzer=ANALYZER,
            passages=passages,
            dropped=dropped,
            corpus_format=corpus_format,
            corpus_sha256=corpus_sha256,
            content_sha256=content,
            index_sha256=index_digest(passages, content),
            files=dict(files),
            built=dict(built),
        )

    def as_json(self) -> bytes:
        """The bytes of ``manifest.json``; ``sum`` is the digest of everything else in it."""
        value = self.model_dump()
        value["sum"] = canonical_digest(value)
        return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def tantivy_version() -> str:
    """The library's version and that of its files, as it gives them itself."""
    return str(vars(tantivy)["__version__"])  # its stubs do not know it


def content_digest(meta: bytes, files: Mapping[str, FileFacts]) -> str:
    """Of an index of one segment, without the segment's name: the same for every build.

    ``meta`` is tantivy's list of segments, ``files`` the digest of every file by name.
    """
    value = orjson.loads(meta)
    (segment,) = value["segments"]
    prefix = segment.pop("segment_id").replace("-", "") + "."
    parts = {
        name.removeprefix(prefix): facts.sha256
        for name, facts in files.items()
        if name.startswith(prefix)
    }
    return canonical_digest({"meta": value, "segment": parts})


def index_digest(passages: int, content_sha256: str) -> str:
    """What this process would name an index of that content."""
    return canonical_digest(
        {
            "format": FORMAT,
            "tantivy": tantivy_version(),
            "analyzer": ANALYZER,
            "passages": passages,
            "content_sha256": content_sha256,
        }
    )


def read(folder: Path) -> Manifest:
    """The manifest of ``folder``, whole and of this version. Raises ``IndexUnusable``."""
    command = f"`smartsearch-sidecar index build CORPUS {folder}`"
    if not folder.is_dir():
        raise errors.INDEX_UNUSABLE(f"there is no index at {folder}; build it with {command}")
    path = folder / NAME
    try:
        with path.open("rb") as file:
            raw = file.read(_MANIFEST_BYTES_MAX)
    except FileNotFoundError:
        raise errors.INDEX_UNUSABLE(
            f"{folder} holds no {NAME}, so it is not a finished index; remove it and build it with "
            f"{command}"
        ) from None
    except OSError as error:
        raise errors.INDEX_UNUSABLE(f"{path} cannot be read: {error.strerror or error}") from None
    damaged = errors.INDEX_UNUSABLE(
        f"{path} is damaged; restore the folder, or remove it and build it again with {command}"
    )
    try:
        value: Any = orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise damaged from None
    if not isinstance(value, dict):
        raise damaged

    def expect(key: str, ours: object) -> None:
        if value.get(key) != ours:
            raise errors.INDEX_UNUSABLE(
                f"the index at {folder} is of {key} {value.get(key)!r}, this sidecar reads "
                f"{ours!r}; build it again with `smartsearch-sidecar index build CORPUS "
                "NEW_FOLDER` and name that in retrieval.bm25.index"
            )

    # The format first: another one may have another way to sum.
    written = value.get("format")
    if type(written) is int and written > FORMAT:
        raise errors.INDEX_UNUSABLE(
            f"the index at {folder} was written by a newer version (format {written}, this version "
            f"reads up to {FORMAT}): upgrade, or build the index again with `smartsearch-sidecar "
            "index build CORPUS NEW_FOLDER` and name that in retrieval.bm25.index"
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

"""The one guard around all providers: identity, limits, retries, classification, document checks.

A provider may raise anything and answer anything; what leaves this module is either ``Found`` or
one of the named retrieval errors. The rules for a document are the reference's: exactly ``id``,
``contents`` and optionally ``score``; id and contents non-empty after strip; ids distinct; passages
joined by one blank line.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.contract import render_execute, result_of
from smartsearch_sidecar.retrieval.provider import Provider

TEXT_CHARACTERS_MAX = 8 * 1024 * 1024  # one document field; the reference's bound
_FIELDS = frozenset({"id", "contents", "score"})
_DIGEST = re.compile(r"[0-9a-f]{64}")
# A closing or opening protocol tag would end or forge a block of the rollout; a special token such
# as <|im_end|> would end the turn once the trainer's tokenizer sees it.
PASSAGE_TAG = re.compile(r"</?(?:search|result|answer|think)>|<\|[^|<>\s]{1,64}\|>", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Found:
    """What one search found, encoded once and recorded and answered as often as it is asked.

    ``documents_json`` is the JSON list of ``{"id", "contents", "score"}`` in rank order;
    ``payload`` the finished body of ``/execute``; ``dropped`` names the passages left out, with the
    reason.
    """

    documents_json: bytes
    payload: bytes
    dropped: tuple[Mapping[str, str], ...]

    @property
    def size(self) -> int:
        """Bytes this holds in a cache, objects included, roughly."""
        return len(self.documents_json) + len(self.payload) + 512

    @property
    def result(self) -> str:
        """The passages as the rollout gets them."""
        return result_of(self.payload)

    def documents(self) -> list[dict[str, Any]]:
        """The documents as values."""
        value: list[dict[str, Any]] = orjson.loads(self.documents_json)
        return value


def canonical_digest(value: Any) -> str:
    """sha256 of canonical JSON as the reference writes it: sorted keys, no spaces, UTF-8.

    The standard encoder, because it spells floats as the reference does.
    """
    text = json.dumps(
        value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False
    )
    return hashlib.sha256(text.encode()).hexdigest()


class Guard:
    """Owns every call to the provider of a run."""

    def __init__(
        self,
        provider: Provider,
        *,
        top_n: int,
        retries: int,
        drop_tagged: bool,
        watch_drift: bool,
    ) -> None:
        """``retries`` counts further tries after a transport fault; ``drop_tagged`` leaves passages
        with protocol tags out (otherwise they are ``DocumentInvalid``); ``watch_drift`` remembers a
        digest per document id of a remote provider.
        """
        self.provider = provider
        self._top_n = top_n
        self._retries = retries
        self._drop_tagged = drop_tagged
        self._seen: dict[bytes, bytes] | None = {} if watch_drift and provider.remote else None
        self.identity: dict[str, Any] = {}
        self.identity_sha256 = ""

    async def claim_identity(self) -> dict[str, Any]:
        """Asks the provider who it is and holds it to that from now on."""
        identity = await self._ask_identity()
        for key in ("corpus_sha256", "index_sha256"):
            digest = identity.get(key)
            if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
                raise errors.ConfigError(
                    f"the retrieval provider {self.provider.name} names no {key} of 64 lower-case "
                    "hex digits: a corpus that cannot be named cannot be frozen"
                )
        self.identity = identity
        self.identity_sha256 = canonical_digest(identity)
        return identity

    async def _ask_identity(self) -> dict[str, Any]:
        try:
            return dict(await self.provider.identity())
        except errors.SidecarError:
            raise
        except Exception as exc:  # a provider may raise anything: classified here, once
            raise errors.ProviderFault(
                f"the provider could not say what it serves ({type(exc).__name__})"
            ) from exc

    async def check_identity(self) -> None:
        """Raises ``IdentityChanged`` where corpus or index are not those of the claim."""
        now = await self._ask_identity()
        if now != self.identity:
            keys = sorted(
                key
                for key in {*now, *self.identity}
                if now.get(key) != self.identity.get(key) or (key in now) != (key in self.identity)
            )
            raise errors.IdentityChanged(
                f"the provider's identity changed during the run: {', '.join(keys)}"
            )

    async def search(self, query: str, deadline: float) -> Found:
        """One search, its identity checked after it. ``deadline`` bounds retries, on the loop's
        clock; the search itself is bounded by whoever waits for it.
        """
        documents = await self._ask(query, deadline)
        await self.check_identity()
        try:
            return self._found(documents)
        except errors.SidecarError:
            raise
        except Exception as exc:  # a provider's own objects may raise when read: classified here
            raise errors.DocumentInvalid(
                f"the provider's documents could not be read ({type(exc).__name__})"
            ) from exc

    async def _ask(self, query: str, deadline: float) -> Any:
        loop = asyncio.get_running_loop()
        for tries_left in range(self._retries, -1, -1):
            try:
                return await self.provider.search(query, self._top_n)
            except errors.ProviderTransport:
                if not tries_left or loop.time() >= deadline:
                    raise
            except errors.SidecarError:
                raise
            except Exception as exc:  # a provider may raise anything: classified here, once
                raise errors.ProviderFault(
                    f"the provider failed during a search ({type(exc).__name__})"
                ) from exc
        raise errors.InvariantBroken("a search ended without an answer or an error")

    def _found(self, documents: Any) -> Found:
        if isinstance(documents, str | bytes | Mapping) or not hasattr(documents, "__len__"):
            raise errors.DocumentInvalid(
                f"the provider answered a {type(documents).__name__} instead of documents"
            )
        if len(documents) > self._top_n:
            raise errors.DocumentInvalid(
                f"the provider answered {len(documents)} documents where {self._top_n} were asked"
            )
        clean = [_document(item, position) for position, item in enumerate(documents, 1)]
        if len({document["id"] for document in clean}) != len(clean):
            raise errors.DocumentInvalid("the provider answered the same document id twice")
        if self._seen is not None:
            for document in clean:
                self._check_drift(document, self._seen)
        text = "\n\n".join([document["contents"] for document in clean])
        dropped: tuple[Mapping[str, str], ...] = ()
        # One look at all passages; most hold no angle bracket at all.
        if "<" in text and PASSAGE_TAG.search(text):
            clean, dropped = self._without_tagged(clean)
            text = "\n\n".join([document["contents"] for document in clean])
        try:
            return Found(orjson.dumps(clean), render_execute(text), dropped)
        except (TypeError, errors.InvariantBroken):
            raise errors.DocumentInvalid("a document holds text that has no UTF-8 form") from None

    def _without_tagged(
        self, documents: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], tuple[Mapping[str, str], ...]]:
        clean: list[dict[str, Any]] = []
        dropped: list[Mapping[str, str]] = []
        for position, document in enumerate(documents, 1):
            if not PASSAGE_TAG.search(document["contents"]):
                clean.append(document)
            elif self._drop_tagged:
                dropped.append({"id": document["id"], "reason": "protocol_tag"})
            else:
                raise errors.DocumentInvalid(
                    f"document {position} carries a protocol tag or a special token"
                )
        return clean, tuple(dropped)

    def _check_drift(self, document: Mapping[str, Any], seen: dict[bytes, bytes]) -> None:
        key = hashlib.blake2b(document["id"].encode("utf-8", "surrogatepass"), digest_size=8)
        now = hashlib.blake2b(document["contents"].encode("utf-8", "surrogatepass"), digest_size=8)
        before = seen.setdefault(key.digest(), now.digest())
        if before != now.digest():
            raise errors.DocumentDrift(
                f"document {document['id'][:80]!r} has other contents than earlier in this run"
            )


def _document(item: Any, position: int) -> dict[str, Any]:
    """One document of the provider as plain values, or ``DocumentInvalid`` with its position."""
    if not (type(item) is dict or isinstance(item, Mapping)):  # the first is the usual and cheap
        raise errors.DocumentInvalid(
            f"document {position} is a {type(item).__name__}, not a mapping"
        )
    if not _FIELDS.issuperset(item):
        raise errors.DocumentInvalid(f"document {position} has a field besides id, contents, score")
    return {
        "id": _text(item.get("id"), position, "id"),
        "contents": _text(item.get("contents"), position, "contents"),
        "score": _score(item.get("score"), position),
    }


def _text(text: Any, position: int, field: str) -> str:
    if not isinstance(text, str) or len(text) > TEXT_CHARACTERS_MAX:
        raise errors.DocumentInvalid(f"document {position} has no bounded text in {field}")
    stripped = text.strip()
    if not stripped:
        raise errors.DocumentInvalid(f"document {position} has an empty {field}")
    return stripped


def _score(score: Any, position: int) -> float | int | None:
    """A plain number: what a numerical library calls a float is one, but no encoder's."""
    if score is None:
        return None
    if isinstance(score, float) and math.isfinite(score):
        return float(score)
    # Wider ones have no form in the records.
    if isinstance(score, int) and not isinstance(score, bool) and -(2**63) <= score < 2**64:
        return int(score)
    raise errors.DocumentInvalid(
        f"document {position} has a score that is no finite number of 64 bits"
    )

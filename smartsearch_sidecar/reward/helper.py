"""The reward helper over HTTP: one exchange, measured, never sent twice; and its two protocols.

Whether a call may be tried again depends on one fact, whether a connection was ever handed to it:
until then nothing can have been sent, and from then on it may have cost money, even if no answer
comes.

- ``sglang``: ``POST /generate {"text", "sampling_params"}`` answers ``{"text", "meta_info"}`` with
  ``prompt_tokens``, ``completion_tokens`` and ``finish_reason: {"type": ...}``; the model is shown
  by ``GET /get_model_info`` (``/model_info`` in later releases). Source: SGLang's native API.
- ``completions``: ``POST /v1/completions`` and ``GET /v1/models``, as OpenAI's API, vLLM and SGLang
  have them.

Why so strict: the pinned scorer counts every round whose verdict is not exactly ``0`` as correct,
so an answer that is empty, cut off or another model's would raise rewards. An answer is judged in
the reference's order (usage, model, length, text), and a refusal carries the usage once it is
known. No message quotes the answer: it may repeat the prompt, which holds the reference answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar, Final, Literal, NamedTuple, Self
from urllib.parse import urlsplit

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.config.sections import HelperSection
from smartsearch_sidecar.contract.json import NotStrictJson, parse_strict
from smartsearch_sidecar.outbound_http import ExchangeFailed, ExchangeFault, OutboundHttp
from smartsearch_sidecar.run.json_values import is_text
from smartsearch_sidecar.run.scores import MAX_NEW_TOKENS
from smartsearch_sidecar.stalls import Stalls

# 2,048 tokens are some 20 KB; an over-long answer of a hundred times that is still read, because it
# says what it has cost.
ANSWER_BYTES_MAX: Final = 4 * 1024 * 1024
CONNECT_TRIES: Final = 3
CONNECT_SECONDS: Final = 10.0  # for one attempt: a black hole is not worth the whole timeout
END_SECONDS: Final = 1.0  # beyond its time, for an exchange to end by itself before it is left
# Well under the 5 s after which uvicorn (SGLang, vLLM) drops an idle connection: a call written to
# one that the other end is just closing counts as sent, cannot be sent again, and ends the run.
KEEPALIVE_SECONDS: Final = 1.0

_OK = 200
_NOT_SHOWN = frozenset({404, 405, 501})
_REFUSED = frozenset({429, 503})  # it has too much to do and did not begin

TEMPERATURE: Final = 0.6
STOP: Final = ("</answer>",)
FINISHED: Final = frozenset({"stop", "length"})

Kind = Literal["sglang", "completions"]


class Usage(NamedTuple):
    """Tokens of one helper call, as the helper measured them."""

    input_tokens: int
    output_tokens: int


class HelperAnswer(NamedTuple):
    """One usable completion.

    ``text`` is what the model wrote, without the stop string, and may be blank where
    ``reward.helper.on_empty`` lets it; ``finish_reason`` is ``stop`` or
    ``length``; ``model`` is the name the answer carries (``completions``) or the declared one
    (``sglang``, whose answers carry none); ``weight_version`` is SGLang's, where it says so.
    """

    text: str
    usage: Usage
    finish_reason: str
    model: str
    weight_version: str | None = None


class SGLang:
    """SGLang's native API."""

    path: ClassVar[str] = "/generate"
    model_paths: ClassVar[tuple[str, ...]] = ("/get_model_info", "/model_info")

    def request(self, prompt: str, *, model: str, seed: int) -> dict[str, Any]:
        """``sampling_seed`` is read by servers run for deterministic inference, and taken by all
        since the release that introduced it."""
        return {
            "text": prompt,
            "sampling_params": {
                "temperature": TEMPERATURE,
                "max_new_tokens": MAX_NEW_TOKENS,
                "stop": list(STOP),
                "sampling_seed": seed,
            },
        }

    def answer(self, raw: bytes, model: str) -> HelperAnswer:
        """``finish_reason`` is an object with a ``type``; old releases have the bare word."""
        value = _object(raw, "the helper's answer")
        meta = value.get("meta_info")
        usage = _usage(meta, "meta_info")
        finish = meta.get("finish_reason") if isinstance(meta, dict) else None
        if isinstance(finish, dict):
            finish = finish.get("type")
        weights = meta.get("weight_version") if isinstance(meta, dict) else None
        return _judge(
            text=value.get("text"),
            usage=usage,
            finish=finish,
            model=model,
            weight_version=weights if isinstance(weights, str) else None,
        )

    def shown(self, raw: bytes, model: str) -> Mapping[str, str]:
        """``model_path`` or, where it is told, ``served_model_name`` must be the declared model."""
        value = _object(raw, "the helper's model information")
        keys = ("model_path", "served_model_name", "weight_version")
        shown = {key: value[key] for key in keys if isinstance(value.get(key), str)}
        names = {shown[key] for key in keys[:2] if key in shown}
        if model not in names:
            raise _another_model(model, names)
        if value.get("is_generation") is False:
            raise errors.HELPER_IDENTITY(
                "the helper serves an embedding model, which cannot judge a search"
            )
        return shown


class Completions:
    """OpenAI's completions API, as vLLM and SGLang serve it."""

    path: ClassVar[str] = "/v1/completions"
    model_paths: ClassVar[tuple[str, ...]] = ("/v1/models",)

    def request(self, prompt: str, *, model: str, seed: int) -> dict[str, Any]:
        """``stream`` is left out: false is every server's default."""
        return {
            "model": model,
            "prompt": prompt,
            "temperature": TEMPERATURE,
            "max_tokens": MAX_NEW_TOKENS,
            "stop": list(STOP),
            "seed": seed,
        }

    def answer(self, raw: bytes, model: str) -> HelperAnswer:
        """Exactly one choice, and the model's name in every answer."""
        value = _object(raw, "the helper's answer")
        usage = _usage(value.get("usage"), "usage")
        if value.get("model") != model:
            named = value.get("model")
            raise _another_model(model, {named} if isinstance(named, str) else set(), usage)
        choices = value.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise errors.HELPER_ANSWER_INVALID(
                "the helper's answer does not hold exactly one choice", usage=usage
            )
        finish = choices[0].get("finish_reason")
        return _judge(text=choices[0].get("text"), usage=usage, finish=finish, model=model)

    def shown(self, raw: bytes, model: str) -> Mapping[str, str]:
        """The declared model must be among those served; ``root`` is what lies behind its name."""
        value = _object(raw, "the helper's list of models")
        rows = value.get("data")
        cards = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
        for card in cards:
            if card.get("id") == model:
                root = card.get("root")
                return {"id": model} | ({"root": root} if isinstance(root, str) else {})
        names = {card["id"] for card in cards if isinstance(card.get("id"), str)}
        raise _another_model(model, names)


PROTOCOLS: Final[Mapping[Kind, SGLang | Completions]] = {
    "sglang": SGLang(),
    "completions": Completions(),
}


def base_of(url: str, path: str) -> str:
    """The address without the protocol's own path, which may be written out or left out."""
    base = url.rstrip("/")
    for ending in (path, path.rpartition("/")[0]):
        if ending and base.endswith(ending):
            return base.removesuffix(ending)
    return base


class HelperClient:
    """The helper, as a pooled client without proxies, redirects, cookies or second tries.

    ``url``, ``model`` and ``model_sha256`` of the section are set; ``pause`` waits between attempts
    at a connection (seconds). Concurrency is the caller's to bound (``scoring/helper_calls.py``).
    """

    def __init__(
        self,
        section: HelperSection,
        *,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
        stalls: Stalls | None = None,
    ) -> None:
        self.kind: Kind = section.kind
        self.model = str(section.model)
        self.timeout_seconds = section.timeout_seconds
        self._model_sha256 = section.model_sha256
        self._empty_fails = section.on_empty == "latch"
        self._protocol = PROTOCOLS[section.kind]
        self._base = base_of(str(section.url), self._protocol.path)
        self.place = urlsplit(self._base).netloc  # host and port, for messages
        self._stalls = stalls or Stalls()
        self._http = OutboundHttp(
            connections_max=0,  # the dispatch bounds the calls at once
            keepalive_seconds=KEEPALIVE_SECONDS,
            connect_seconds=CONNECT_SECONDS,
            connect_tries=CONNECT_TRIES,
            pause=pause,
        )
        self._shown: Mapping[str, str] | None = None
        self._weights: str | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Drops every connection. Not before the last exchange has ended."""
        await self._http.close()

    async def ask(self, prompt: str, *, seed: int, deadline: float | None = None) -> HelperAnswer:
        """One completion: temperature 0.6, at most 2,048 tokens, stopped before ``</answer>``.

        ``deadline`` (seconds of the loop's clock) may end the exchange before ``timeout_seconds``
        does. Raises a ``HelperFault``, whose ``usage`` is what the exchange was measured at, if it
        was. Cancelled, it gives the exchange up, and what it has cost stays unknown.
        """
        try:
            body = orjson.dumps(self._protocol.request(prompt, model=self.model, seed=seed))
        except TypeError as exc:  # the edge lets no such text in, see contract/reward.py
            raise errors.INTERNAL_ERROR("a prompt has no UTF-8 form") from exc
        status, raw = await self._exchange("POST", self._protocol.path, body, self._until(deadline))
        if status != _OK:
            raise self._refused(status)
        answer = self._protocol.answer(raw, self.model)
        if not answer.text.strip() and self._empty_fails:
            raise errors.HELPER_EMPTY(
                "the helper's text is empty, and an empty verdict would count as a correct round",
                usage=answer.usage,
            )
        shown, answered = (self._shown or {}).get("weight_version"), answer.weight_version
        # Where the server's own information names none, the first answer's are those of the run.
        self._weights = self._weights or shown or answered
        if answered not in {None, self._weights}:
            raise errors.HELPER_IDENTITY(
                f"the helper at {self.place} was given other weights while the run goes on: "
                "start a new run with the weights it is to be judged by",
                usage=answer.usage,
            )
        return answer

    async def identity(self) -> Mapping[str, Any]:
        """What names the helper: ``kind``, ``model``, ``model_sha256``, and in ``shown`` what the
        server says of itself (maybe nothing), checked as by ``check_identity``.
        """
        await self.check_identity()
        return {
            "kind": self.kind,
            "model": self.model,
            "model_sha256": self._model_sha256,
            "shown": dict(self._shown or {}),
        }

    async def check_identity(self) -> None:
        """Raises ``HelperIdentity`` unless the server shows the declared model, and still what it
        showed the first time it was asked.

        A server that cannot be asked raises the exchange's own ``HelperFault``.
        """
        shown = await self._ask_model()
        if self._shown is None:
            self._shown = shown
        elif shown != self._shown:
            raise errors.HELPER_IDENTITY(
                f"the helper at {self.place} no longer says of itself what it said at first: "
                "another server, or other weights, answer there now"
            )

    async def _ask_model(self) -> Mapping[str, str]:
        until = self._until(None)
        for path in self._protocol.model_paths:
            status, raw = await self._exchange("GET", path, None, until)
            if status == _OK:
                return self._protocol.shown(raw, self.model)
            if status not in _NOT_SHOWN:
                raise self._refused(status)
        return {}

    def _until(self, deadline: float | None) -> float:
        own = asyncio.get_running_loop().time() + self.timeout_seconds
        return own if deadline is None else min(own, deadline)

    def _refused(self, status: int) -> errors.HelperFault:
        if 300 <= status < 400:
            return errors.HELPER_REDIRECT(
                f"the helper at {self.place} answered with redirect {status}, not followed "
                "because prompts hold answers: set reward.helper.url to where it leads"
            )
        return errors.HELPER_STATUS(
            f"the helper at {self.place} answered {status} instead of 200: see its log "
            "(404: wrong reward.helper.kind, url or model; 400 or 500 from an SGLang that does not "
            "know sampling_seed: upgrade it, or use kind = completions)",
            refused=status in _REFUSED,
        )

    async def _exchange(
        self, method: str, path: str, body: bytes | None, until: float
    ) -> tuple[int, bytes]:
        """Status and body, the body only of a 200. ``until`` is in seconds of the loop's clock."""
        # In a task of its own: each piece of an answer wakes that one, and not all that wait for
        # it. Cancelled with its caller, and left behind where it outlives its time.
        exchange = asyncio.create_task(
            self._http.exchange(
                method,
                self._base + path,
                body,
                until=until,
                bytes_max=ANSWER_BYTES_MAX,
                json_only=True,
            )
        )
        exchange.add_done_callback(_retrieved)
        self._stalls.call_of(exchange, "helper", path, until, errors.HELPER_TIMEOUT)
        left = max(0.0, until - asyncio.get_running_loop().time())
        try:
            await asyncio.wait([exchange], timeout=left + END_SECONDS)
        finally:
            exchange.cancel()
        if not exchange.done():
            raise errors.HELPER_TIMEOUT(
                f"a call to the helper at {self.place} did not end {END_SECONDS:g} s after its "
                "time, and does not heed its cancellation"
            )
        try:
            answer = exchange.result()
        except ExchangeFailed as error:
            raise self._fault(error) from error
        return answer.status, answer.body

    def _fault(self, error: ExchangeFailed) -> errors.HelperFault:
        """What an exchange without a usable answer is to the run."""
        if not error.sent:
            late = error.failure is ExchangeFault.LATE
            return self._unreachable("not in time" if late else error.why)
        if error.failure is ExchangeFault.LATE:
            return errors.HELPER_TIMEOUT(
                f"the helper at {self.place} did not answer in time: it hangs or has too much "
                "to do (reward.helper.timeout_seconds, reward.helper.concurrency)"
            )
        if error.failure is ExchangeFault.OTHER_MEDIA:
            return errors.HELPER_NOT_JSON(
                f"{self.place} answered with another media type than application/json: "
                "a proxy or a login page stands before the helper"
            )
        if error.failure is ExchangeFault.COMPRESSED:
            return errors.HELPER_ANSWER_INVALID(
                f"the helper at {self.place} compressed its answer although it was told not to"
            )
        if error.failure is ExchangeFault.TOO_LONG:
            return errors.HELPER_ANSWER_INVALID(
                f"the helper at {self.place} answered with more than {ANSWER_BYTES_MAX} bytes"
            )
        if error.answered:
            return errors.HELPER_TRUNCATED(
                f"the helper at {self.place} broke off in the middle of its answer ({error.why})"
            )
        return errors.HELPER_TRANSPORT(
            f"the connection to the helper at {self.place} was lost after the call had been "
            f"sent ({error.why}); what it has cost is unknown, so it is not sent again"
        )

    def _unreachable(self, why: str) -> errors.HelperUnreachable:
        return errors.HELPER_UNREACHABLE(
            f"no connection to the helper at {self.place} ({why}): start it, or set "
            "reward.helper.url"
        )


def _retrieved(exchange: asyncio.Task[Any]) -> None:
    """A failure that no caller awaits must not warn at collection."""
    if not exchange.cancelled():
        exchange.exception()


def _judge(
    *, text: Any, usage: Usage, finish: Any, model: str, weight_version: str | None = None
) -> HelperAnswer:
    if not is_text(text):
        raise errors.HELPER_ANSWER_INVALID(
            "the helper's answer holds no text that can be written down", usage=usage
        )
    if finish not in FINISHED:
        named = finish if isinstance(finish, str) and len(finish) <= 40 else "none it names"
        raise errors.HELPER_FINISH_REASON(
            f"the helper finished for another reason than stop or length: {named!a}", usage=usage
        )
    if usage.output_tokens > MAX_NEW_TOKENS:
        raise errors.HELPER_OVERLONG(
            f"the helper wrote {usage.output_tokens} tokens where {MAX_NEW_TOKENS} were allowed: "
            "what answers there does not keep to the limit it is given",
            usage=usage,
        )
    return HelperAnswer(text, usage, finish, model, weight_version)


def _usage(value: Any, where: str) -> Usage:
    counts = value if isinstance(value, dict) else {}
    usage = Usage(counts.get("prompt_tokens"), counts.get("completion_tokens"))  # type: ignore[arg-type]
    if any(type(count) is not int or count < 0 for count in usage):
        raise errors.HELPER_USAGE_MISSING(
            f"the helper's answer does not count its tokens: {where} needs prompt_tokens and "
            "completion_tokens, or what a call has cost is unknown"
        )
    return usage


def _another_model(
    model: str, names: set[str], usage: Usage | None = None
) -> errors.HelperIdentity:
    serves = ", ".join(repr(name[:200]) for name in sorted(names)[:5]) or "no name at all"
    return errors.HELPER_IDENTITY(
        f"the helper serves {serves} where {model!r} is declared: "
        "set reward.helper.model to what it serves, or point reward.helper.url elsewhere",
        usage=usage,
    )


def _object(raw: bytes, what: str) -> dict[str, Any]:
    """One JSON object, read strictly: with ``usage`` twice, which of the two would be paid?"""
    try:
        value = parse_strict(raw)
    except NotStrictJson as error:
        raise errors.HELPER_ANSWER_INVALID(f"{what} is not strict JSON: it {error}") from None
    if not isinstance(value, dict):
        raise errors.HELPER_ANSWER_INVALID(f"{what} is JSON, but not an object")
    return value

"""The two protocols a reward helper may speak: bytes to frozen values, and what is refused.

- ``sglang``: ``POST /generate {"text", "sampling_params"}`` answers ``{"text", "meta_info"}`` with
  ``prompt_tokens``, ``completion_tokens`` and ``finish_reason: {"type": ...}``; the model is shown
  by ``GET /get_model_info`` (``/model_info`` in later releases). Source: SGLang's native API.
- ``completions``: ``POST /v1/completions`` and ``GET /v1/models``, as OpenAI's API, vLLM and SGLang
  have them.

Why so strict: the pinned scorer counts every round whose verdict is not exactly ``0`` as correct,
so an answer that is empty, cut off or another model's would raise rewards. An answer is judged in
the reference's order (usage, model, length, text), and a refusal carries the usage once it is
known. No message quotes the answer: it may repeat the prompt, which holds the reference answers.

No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, NamedTuple, Protocol
from urllib.parse import urlsplit

from smartsearch_sidecar import errors
from smartsearch_sidecar.contract.json import NotStrictJson, parse_strict
from smartsearch_sidecar.run.json_values import is_text
from smartsearch_sidecar.run.state import MAX_NEW_TOKENS

TEMPERATURE: Final = 0.6
STOP: Final = ("</answer>",)
FINISHED: Final = frozenset({"stop", "length"})

Kind = Literal["sglang", "completions"]


class Usage(NamedTuple):
    """Tokens of one helper call, as the helper measured them."""

    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class HelperAnswer:
    """One usable completion.

    ``text`` is what the model wrote, without the stop string; ``finish_reason`` is ``stop`` or
    ``length``; ``model`` is the name the answer carries (``completions``) or the declared one
    (``sglang``, whose answers carry none); ``weight_version`` is SGLang's, where it says so.
    """

    text: str
    input_tokens: int
    output_tokens: int
    finish_reason: str
    model: str
    weight_version: str | None = None

    @property
    def usage(self) -> Usage:
        """The tokens, as the meter takes them."""
        return Usage(self.input_tokens, self.output_tokens)


class HelperProtocol(Protocol):
    """What ``helper.py`` asks of a protocol. ``path`` takes completions; each of ``model_paths`` is
    tried for what the server says of itself."""

    path: ClassVar[str]
    model_paths: ClassVar[tuple[str, ...]]

    def request(self, prompt: str, *, model: str, seed: int) -> dict[str, Any]:
        """The JSON body of one completion."""
        ...

    def answer(self, raw: bytes, model: str) -> HelperAnswer:
        """Reads the body of a 200. Raises a ``HelperFault``, with ``usage`` once it is known."""
        ...

    def shown(self, raw: bytes, model: str) -> Mapping[str, str]:
        """What the server says of itself. Raises ``HelperIdentity`` where it is not ``model``."""
        ...


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
        return _judge(
            text=choices[0].get("text"),
            usage=usage,
            finish=choices[0].get("finish_reason"),
            model=model,
        )

    def shown(self, raw: bytes, model: str) -> Mapping[str, str]:
        """The declared model must be among those served; ``root`` is what lies behind its name."""
        value = _object(raw, "the helper's list of models")
        rows = value.get("data")
        cards = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
        for card in cards:
            if card.get("id") == model:
                root = card.get("root")
                return {"id": model} | ({"root": root} if isinstance(root, str) else {})
        raise _another_model(
            model, {card["id"] for card in cards if isinstance(card.get("id"), str)}
        )


PROTOCOLS: Final[Mapping[Kind, HelperProtocol]] = {
    "sglang": SGLang(),
    "completions": Completions(),
}


def address(url: str, path: str) -> tuple[str, str]:
    """The base address without the protocol's own path, and ``host:port`` for messages."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = 0
    if (
        parts.scheme not in {"http", "https"}
        or not parts.hostname
        or port == 0
        or parts.query
        or parts.fragment
        or parts.username is not None
    ):
        raise errors.CONFIG_INVALID(
            "reward.helper.url must be like http://127.0.0.1:9001, without user, query or fragment"
        )
    base = url.rstrip("/")
    for ending in (path, path.rpartition("/")[0]):
        if ending and base.endswith(ending):
            base = base.removesuffix(ending)
            break
    return base, parts.netloc


# --- judging --------------------------------------------------------------------------------------


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
    if not text.strip():
        raise errors.HELPER_EMPTY(
            "the helper's text is empty, and an empty verdict would count as a correct round",
            usage=usage,
        )
    return HelperAnswer(
        text, *usage, finish_reason=finish, model=model, weight_version=weight_version
    )


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

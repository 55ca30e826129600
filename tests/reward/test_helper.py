"""The helper's client against a real server of either protocol: what it sends and refuses."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import ClientTimeout
from hypothesis import given
from hypothesis import strategies as st

from smartsearch_sidecar import errors
from smartsearch_sidecar.config.sections import HelperSection
from smartsearch_sidecar.reward.helper import (
    PROTOCOLS,
    HelperAnswer,
    HelperClient,
    Kind,
    Usage,
    base_of,
)
from tests.fakes.helper import MODEL, FakeHelper
from tests.fakes.raised import raises

KINDS: tuple[Kind, ...] = ("sglang", "completions")
SHA = "ab" * 32
PROMPT = "Judge this: the golden answer is SECRET-ANSWER and the query 'naïve café 東京' was asked."

pytestmark = pytest.mark.both_loops


@pytest.fixture
async def fake() -> AsyncIterator[FakeHelper]:
    """A helper that behaves."""
    async with FakeHelper() as helper:
        yield helper


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Either protocol."""
    chosen: Kind = request.param
    return chosen


def client(fake: FakeHelper, kind: Kind, **changes: Any) -> HelperClient:
    """A client of the fake that waits for nothing."""
    pause = changes.pop("pause", asyncio.sleep)
    settings: dict[str, Any] = {"url": fake.url, "model": MODEL, "model_sha256": SHA}
    settings |= {"kind": kind, "timeout_seconds": 30.0} | changes
    return HelperClient(HelperSection(**settings), pause=pause)


async def refusal(fake: FakeHelper, kind: Kind, **changes: Any) -> errors.HelperFault:
    """What one question to the fake raises. Never a word of the prompt: messages reach logs and
    callers, and prompts hold reference answers."""
    async with client(fake, kind, **changes) as helper:
        with pytest.raises(errors.HelperFault) as caught:
            await helper.ask(PROMPT, seed=17)
    fault = caught.value
    assert "SECRET" not in f"{fault!r} {fault.__cause__!r} {fault.__context__!r}"
    return fault


# --- what is sent and taken ----------------------------------------------------------------------


async def test_sglang_is_asked_in_its_own_words(fake: FakeHelper) -> None:
    """The pinned scorer's sampling, with the seed under the name SGLang has for it."""
    async with client(fake, "sglang") as helper:
        answer = await helper.ask(PROMPT, seed=17)
    assert fake.calls[0].route == "/generate"
    assert fake.calls[0].body == {
        "text": PROMPT,
        "sampling_params": {
            "temperature": 0.6,
            "max_new_tokens": 2048,
            "stop": ["</answer>"],
            "sampling_seed": 17,
        },
    }
    words = len(PROMPT.split())
    assert answer == HelperAnswer("<answer> 1 ", Usage(words, 2), "stop", MODEL, "default")
    assert answer.usage == (words, 2)


async def test_a_completion_is_asked_in_openai_words(fake: FakeHelper) -> None:
    """The same sampling under OpenAI's names, and the model that must answer."""
    async with client(fake, "completions") as helper:
        answer = await helper.ask(PROMPT, seed=17)
    assert fake.calls[0].route == "/v1/completions"
    assert fake.calls[0].body == {
        "model": MODEL,
        "prompt": PROMPT,
        "temperature": 0.6,
        "max_tokens": 2048,
        "stop": ["</answer>"],
        "seed": 17,
    }
    assert answer == HelperAnswer("<answer> 1 ", Usage(len(PROMPT.split()), 2), "stop", MODEL)


async def test_a_text_cut_at_its_length_is_an_answer(fake: FakeHelper, kind: Kind) -> None:
    """``length`` is a way to finish that the reference takes."""
    fake.verdict = lambda _prompt: "<think> and so on"
    async with client(fake, kind) as helper:
        answer = await helper.ask(PROMPT, seed=1)
    assert (answer.text, answer.finish_reason) == ("<think> and so on", "length")


async def test_old_sglang_names_its_finish_in_a_word(fake: FakeHelper) -> None:
    """The bare word of old releases says the same as the object of later ones."""
    fake.finish_as_word = True
    async with client(fake, "sglang") as helper:
        assert (await helper.ask(PROMPT, seed=1)).finish_reason == "stop"


async def test_calls_one_after_the_other_share_a_connection(fake: FakeHelper, kind: Kind) -> None:
    """The client is pooled, also after an answer that was refused for what it says."""
    fake.failures[2] = "empty"
    async with client(fake, kind) as helper:
        await helper.ask(PROMPT, seed=1)
        with raises(errors.HELPER_EMPTY):
            await helper.ask(PROMPT, seed=1)
        await helper.ask(PROMPT, seed=1)
    assert len({call.peer for call in fake.calls}) == 1


async def test_no_proxy_is_used(
    fake: FakeHelper, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy of the environment never sees a prompt."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with client(fake, kind) as helper:
        await helper.ask(PROMPT, seed=1)
    assert len(fake.calls) == 1


async def test_an_idle_connection_is_dropped_before_uvicorn_drops_it(
    fake: FakeHelper, kind: Kind
) -> None:
    """A call is never written into a connection that a server of 5 s keep-alive is closing."""
    async with client(fake, kind) as helper:
        await helper.ask(PROMPT, seed=1)
        session = helper._http._session
        assert session is not None
        assert session.connector is not None
        idle = session.connector._keepalive_timeout
        assert isinstance(idle, float)
        assert 0 < idle < 5
        assert session.timeout == ClientTimeout(total=None, sock_connect=10)


# --- what is refused -----------------------------------------------------------------------------

MEASURED: dict[str, tuple[errors.Failure[errors.HelperFault], int]] = {
    "empty": (errors.HELPER_EMPTY, 1),
    "blank": (errors.HELPER_EMPTY, 3),
    "no_text": (errors.HELPER_ANSWER_INVALID, 2),
    "text_number": (errors.HELPER_ANSWER_INVALID, 2),
    "surrogate": (errors.HELPER_ANSWER_INVALID, 2),
    "overlong": (errors.HELPER_OVERLONG, 2049),
    "abort": (errors.HELPER_FINISH_REASON, 2),
    "unfinished": (errors.HELPER_FINISH_REASON, 2),
    "odd_finish": (errors.HELPER_FINISH_REASON, 2),
}

MEASURED_COMPLETIONS: dict[str, tuple[errors.Failure[Any], int]] = {
    "other_model": (errors.HELPER_IDENTITY, 2),
    "no_model": (errors.HELPER_IDENTITY, 2),
    "no_choice": (errors.HELPER_ANSWER_INVALID, 2),
    "two_choices": (errors.HELPER_ANSWER_INVALID, 2),
}

UNMEASURED: dict[str, errors.Failure[errors.HelperFault]] = {
    "no_usage": errors.HELPER_USAGE_MISSING,
    "no_output_count": errors.HELPER_USAGE_MISSING,
    "no_input_count": errors.HELPER_USAGE_MISSING,
    "negative_count": errors.HELPER_USAGE_MISSING,
    "bool_count": errors.HELPER_USAGE_MISSING,
    "float_count": errors.HELPER_USAGE_MISSING,
    "text_count": errors.HELPER_USAGE_MISSING,
    "error_500": errors.HELPER_STATUS,
    "busy_503": errors.HELPER_STATUS,
    "redirect": errors.HELPER_REDIRECT,
    "html": errors.HELPER_NOT_JSON,
    "json_as_text": errors.HELPER_NOT_JSON,
    "gzip": errors.HELPER_ANSWER_INVALID,
    "bad_json": errors.HELPER_ANSWER_INVALID,
    "twice_a_key": errors.HELPER_ANSWER_INVALID,
    "nan": errors.HELPER_ANSWER_INVALID,
    "not_utf8": errors.HELPER_ANSWER_INVALID,
    "deep": errors.HELPER_ANSWER_INVALID,
    "list": errors.HELPER_ANSWER_INVALID,
    "huge": errors.HELPER_ANSWER_INVALID,
    "lost": errors.HELPER_TRANSPORT,
    "reset": errors.HELPER_TRANSPORT,
    "garbage": errors.HELPER_TRANSPORT,
    "cut": errors.HELPER_TRUNCATED,
}


@pytest.mark.parametrize("failure", MEASURED)
async def test_an_answer_that_was_paid_for_says_what_it_cost(
    fake: FakeHelper, kind: Kind, failure: str
) -> None:
    """A wrong answer with measured usage is refused by name and carries its tokens."""
    fake.failure = failure
    expected, output_tokens = MEASURED[failure]
    fault = await refusal(fake, kind)
    assert fault.failure is expected
    assert fault.usage == (len(PROMPT.split()), output_tokens)
    assert len(fake.calls) == 1


@pytest.mark.parametrize("failure", MEASURED_COMPLETIONS)
async def test_a_completion_of_another_shape_is_refused(fake: FakeHelper, failure: str) -> None:
    """Another model's answer, or not exactly one choice, is refused with its tokens."""
    fake.failure = failure
    expected, output_tokens = MEASURED_COMPLETIONS[failure]
    fault = await refusal(fake, "completions")
    assert fault.failure is expected
    assert fault.usage == (len(PROMPT.split()), output_tokens)


@pytest.mark.parametrize("failure", UNMEASURED)
async def test_what_was_sent_is_refused_by_name_and_never_sent_again(
    fake: FakeHelper, kind: Kind, failure: str
) -> None:
    """Each broken exchange has a row of its own, unknown usage, and one call behind it."""
    fake.failure = failure
    fake.verdict = lambda prompt: prompt
    fault = await refusal(fake, kind)
    assert fault.failure is UNMEASURED[failure]
    assert fault.usage is None
    assert len(fake.calls) == 1


@pytest.mark.parametrize("failure", ["hang", "drip"])
async def test_an_answer_that_does_not_come_is_a_timeout(
    fake: FakeHelper, kind: Kind, failure: str
) -> None:
    """One timeout bounds the whole exchange, however alive the connection looks."""
    fake.failures[2] = failure
    async with client(fake, kind) as helper:
        await helper.ask(PROMPT, seed=1)  # so that no slow machine spends the timeout connecting
        helper.timeout_seconds = 0.1
        with pytest.raises(errors.HelperFault) as caught:
            await helper.ask(PROMPT, seed=1)
    assert errors.HELPER_TIMEOUT.matches(caught.value)
    assert caught.value.usage is None


async def test_a_deadline_ends_the_exchange_before_the_timeout(
    fake: FakeHelper, kind: Kind
) -> None:
    """The caller's deadline counts where it is the earlier of the two."""
    fake.failures[2] = "hang"
    async with client(fake, kind) as helper:
        await helper.ask(PROMPT, seed=1)
        deadline = asyncio.get_running_loop().time() + 0.1
        with raises(errors.HELPER_TIMEOUT):
            await helper.ask(PROMPT, seed=1, deadline=deadline)


async def test_a_call_given_up_leaves_no_connection_behind(fake: FakeHelper, kind: Kind) -> None:
    """Cancelled in the middle, the exchange is dropped, and the next one is not disturbed."""
    fake.gate.clear()
    async with client(fake, kind) as helper:
        asking = asyncio.create_task(helper.ask(PROMPT, seed=1))
        await fake.until_calls(1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await fake.until_abandoned(1)
        fake.gate.set()
        await helper.ask(PROMPT, seed=1)
    assert len({call.peer for call in fake.calls}) == 2


async def test_an_sglang_without_seeds_is_told_by_its_remedy(fake: FakeHelper) -> None:
    """An old SGLang refuses the seed with a bare 500, so the sentence has to name the cure."""
    fake.knows_seed = False
    fault = await refusal(fake, "sglang")
    assert errors.HELPER_STATUS.matches(fault)
    assert "sampling_seed" in fault.message


async def test_every_way_to_fail_has_a_cause_of_its_own() -> None:
    """The latch tells the failures apart by their causes, so no two share one."""
    rows = [row for row in errors.TABLE.values() if issubclass(row.family, errors.HelperFault)]
    causes = [row.cause for row in rows]
    assert len(set(causes)) == len(causes) == 15
    assert causes == [row.answer.code for row in rows]


# --- connections that never were -----------------------------------------------------------------


class LateHelper:
    """A port that refuses until ``pause`` was called ``after`` times, and then a helper."""

    def __init__(self, fake: FakeHelper, after: int) -> None:
        self.fake = fake
        self.after = after
        self.pauses: list[float] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            fake.port = free.getsockname()[1]

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        if len(self.pauses) == self.after:
            await self.fake.start()


async def test_a_refused_connection_is_tried_again(kind: Kind) -> None:
    """Nothing was sent, so the call goes out once the helper listens, and goes out once."""
    fake = FakeHelper()
    late = LateHelper(fake, after=2)
    try:
        async with client(fake, kind, pause=late.pause) as helper:
            answer = await helper.ask(PROMPT, seed=1)
    finally:
        await fake.stop()
    assert answer.text == "<answer> 1 "
    assert late.pauses == sorted(late.pauses)
    assert len(late.pauses) == 2
    assert len(fake.calls) == 1


async def test_a_helper_that_stays_away_is_unreachable(kind: Kind) -> None:
    """Attempts at a connection are bounded, and the failure says that nothing was sent."""
    fake = FakeHelper()
    late = LateHelper(fake, after=99)
    fault = await refusal(fake, kind, pause=late.pause)
    assert type(fault) is errors.HelperUnreachable
    assert fault.usage is None
    assert len(late.pauses) == 2


async def test_attempts_end_with_the_deadline(kind: Kind) -> None:
    """A deadline that passes between two attempts finds nothing sent."""
    fake = FakeHelper()
    LateHelper(fake, after=99)

    async def for_ever(_: float) -> None:
        await asyncio.Event().wait()

    fault = await refusal(fake, kind, pause=for_ever, timeout_seconds=0.05)
    assert type(fault) is errors.HelperUnreachable


async def test_a_lost_connection_is_not_taken_for_one_that_never_was(
    fake: FakeHelper, kind: Kind
) -> None:
    """Once a connection was had, even the pooled one, a loss is final and pauses nowhere."""
    fake.failures[2] = "reset"
    late = LateHelper(FakeHelper(), after=1)
    async with client(fake, kind, pause=late.pause) as helper:
        await helper.ask(PROMPT, seed=1)
        with raises(errors.HELPER_TRANSPORT):
            await helper.ask(PROMPT, seed=1)
    assert late.pauses == []
    assert len(fake.calls) == 2


async def test_a_closed_client_sends_no_call(fake: FakeHelper, kind: Kind) -> None:
    """Asking after close is our own mistake, and says so."""
    helper = client(fake, kind)
    await helper.ask(PROMPT, seed=1)
    await helper.close()
    with pytest.raises(errors.InvariantBroken):
        await helper.ask(PROMPT, seed=1)
    assert len(fake.calls) == 1


async def test_a_prompt_without_a_utf8_form_is_not_sent(fake: FakeHelper, kind: Kind) -> None:
    """A lone surrogate cannot have passed the edge, and cannot be sent."""
    async with client(fake, kind) as helper:
        with pytest.raises(errors.InvariantBroken):
            await helper.ask("\ud800", seed=1)
    assert fake.calls == []


# --- identity ------------------------------------------------------------------------------------


async def test_the_declared_model_is_shown(fake: FakeHelper, kind: Kind) -> None:
    """Identity is what was declared, and what the server says of itself beside it."""
    async with client(fake, kind) as helper:
        identity = await helper.identity()
        await helper.check_identity()
    shown = {
        "sglang": {"model_path": MODEL, "weight_version": "default"},
        "completions": {"id": MODEL, "root": MODEL},
    }[kind]
    assert identity == {"kind": kind, "model": MODEL, "model_sha256": SHA, "shown": shown}
    assert sum(fake.asked_model.values()) == 2


async def test_another_model_is_refused(fake: FakeHelper, kind: Kind) -> None:
    """A server that shows another model than declared fails the first check."""
    async with client(fake, kind, model="Qwen/Qwen3-8B") as helper:
        with pytest.raises(errors.HelperIdentity, match="Qwen3-8B"):
            await helper.check_identity()


async def test_an_embedding_model_is_refused(fake: FakeHelper) -> None:
    """SGLang says whether it generates, and an embedding model cannot judge."""
    fake.failure = "embedding"
    async with client(fake, "sglang") as helper:
        with pytest.raises(errors.HelperIdentity, match="embedding"):
            await helper.check_identity()


async def test_the_model_may_be_shown_under_the_later_path(fake: FakeHelper) -> None:
    """Later releases of SGLang moved the route."""
    fake.failure = "moved"
    async with client(fake, "sglang") as helper:
        assert (await helper.identity())["shown"]["model_path"] == MODEL
    assert dict(fake.asked_model) == {"/get_model_info": 1, "/model_info": 1}


async def test_a_model_swapped_during_the_run_is_found(fake: FakeHelper, kind: Kind) -> None:
    """A later check fails where the server was restarted with another model."""
    async with client(fake, kind) as helper:
        await helper.check_identity()
        fake.model = "Qwen/Qwen3-0.6B"
        with pytest.raises(errors.HelperIdentity):
            await helper.check_identity()


async def test_weights_swapped_during_the_run_are_found(fake: FakeHelper) -> None:
    """SGLang can be given new weights under the same name: check and answer both show it."""
    async with client(fake, "sglang") as helper:
        await helper.check_identity()
        fake.weight_version = "step-200"
        with pytest.raises(errors.HelperIdentity):
            await helper.check_identity()
        with pytest.raises(errors.HelperIdentity) as caught:
            await helper.ask(PROMPT, seed=1)
    assert caught.value.usage == (len(PROMPT.split()), 2)


async def test_weights_that_only_answers_name_are_held_to_the_first(fake: FakeHelper) -> None:
    """Where no route shows the weights, the first answer's are the run's, also for what it cost."""
    fake.shows_model = False
    async with client(fake, "sglang") as helper:
        assert (await helper.identity())["shown"] == {}
        assert (await helper.ask(PROMPT, seed=1)).weight_version == "default"
        fake.weight_version = "step-200"
        with pytest.raises(errors.HelperIdentity) as caught:
            await helper.ask(PROMPT, seed=1)
    assert caught.value.usage == (len(PROMPT.split()), 2)


async def test_a_server_that_shows_nothing_is_taken_at_its_declaration(
    fake: FakeHelper, kind: Kind
) -> None:
    """Where no route shows the model, ``shown`` is empty and the declaration stands."""
    fake.shows_model = False
    async with client(fake, kind) as helper:
        assert (await helper.identity())["shown"] == {}
        await helper.check_identity()


async def test_a_server_that_stops_showing_its_model_is_another_server(
    fake: FakeHelper, kind: Kind
) -> None:
    """What was shown once must be shown always."""
    async with client(fake, kind) as helper:
        await helper.check_identity()
        fake.shows_model = False
        with pytest.raises(errors.HelperIdentity):
            await helper.check_identity()


async def test_a_server_that_cannot_be_asked_is_not_another_model(kind: Kind) -> None:
    """The owner of the timer must be able to tell a lost server from a swapped one."""
    fake = FakeHelper()
    late = LateHelper(fake, after=99)
    async with client(fake, kind, pause=late.pause) as helper:
        with pytest.raises(errors.HelperUnreachable):
            await helper.check_identity()


# --- pure parts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, url, base",
    [
        ("sglang", "http://127.0.0.1:9001", "http://127.0.0.1:9001"),
        ("sglang", "http://127.0.0.1:9001/", "http://127.0.0.1:9001"),
        ("sglang", "http://127.0.0.1:9001/generate", "http://127.0.0.1:9001"),
        ("completions", "http://host:8000/v1", "http://host:8000"),
        ("completions", "http://host:8000/v1/", "http://host:8000"),
        ("completions", "https://host/judge/v1/completions", "https://host/judge"),
        ("completions", "http://[::1]:8000", "http://[::1]:8000"),
    ],
)
async def test_an_address_may_spell_out_the_path(kind: Kind, url: str, base: str) -> None:
    """Whatever form people copy from elsewhere means the same base."""
    assert base_of(url, PROTOCOLS[kind].path) == base


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5000) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def mixed(keys: tuple[str, ...], inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Objects that hold some of the protocol's keys with anything in them."""
    return JSON | st.dictionaries(st.sampled_from(keys), inner)


COUNTS = ("prompt_tokens", "completion_tokens", "finish_reason", "text", "index")
ANSWERS = mixed(
    ("text", "meta_info", "model", "usage", "choices"),
    mixed(COUNTS, JSON) | st.lists(mixed(COUNTS, JSON), max_size=2) | st.just(MODEL),
)


@given(ANSWERS)
def test_any_json_is_an_answer_or_a_named_fault(value: Any) -> None:
    """No body, however odd, gets past a protocol without usage, text and a known finish."""
    body = json.dumps(value).encode()  # standard JSON, infinities included
    for kind in KINDS:
        try:
            answer = PROTOCOLS[kind].answer(body, MODEL)
        except errors.HelperFault:
            continue
        assert answer.text.strip()
        assert answer.finish_reason in {"stop", "length"}
        assert 0 <= answer.usage.output_tokens <= 2048
        assert answer.usage.input_tokens >= 0

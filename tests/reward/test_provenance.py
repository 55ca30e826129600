"""A block that only the rollout can have written must be an answer of this run."""

from __future__ import annotations

import random
import sys
import unicodedata
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smartsearch_sidecar import errors
from smartsearch_sidecar.reward.provenance import (
    DIGEST_BYTES,
    AnswerDigests,
    Judgement,
    block_of,
)
from tests.fakes.raised import raises
from tests.fakes.rollouts import SYSTEM_PROMPT, Turn, answered, block, final, prompt, rollout

DECLINED = "invalid query"
PARIS = '"Paris"\nParis is the capital of France.\n\n"Seine"\nA river.'
CAFE = '"Cafe\u0301"\nUn cafe\u0301 \u212b \u2126'
EDGES = " \n leading and trailing \t\n"


def handed_over(*texts: str) -> AnswerDigests:
    """A run that gave each of these answers to the query ``q``."""
    digests = AnswerDigests(1000)
    for text in texts:
        digests.add("q", text)
    return digests


@pytest.fixture
def digests() -> AnswerDigests:
    return handed_over(PARIS, CAFE, EDGES, DECLINED, "")


def response_of(text: str) -> str:
    return text[text.index("assistant\n<think>") :]


def test_answers_of_this_run_are_found(digests: AnswerDigests) -> None:
    """Every answer handed over must be recognised in a rollout, for any text."""
    turns = [answered("q", text) for text in (PARIS, CAFE, EDGES, DECLINED, "", PARIS)]
    text = rollout("Which city?", turns, final("Paris"))
    assert digests.judge(text) == Judgement(judged=6, policy_own=0, cut=0, broken=())


def test_examples_of_the_system_prompt_are_not_judged(digests: AnswerDigests) -> None:
    """Blocks before the fourth <think> are the template's, even directly after a search."""
    glued = SYSTEM_PROMPT.replace("</search> <result>", "</search><result>")
    assert glued != SYSTEM_PROMPT
    text = rollout("Which city?", [answered("q", PARIS)], final("Paris"), system=glued)
    assert digests.judge(text) == Judgement(judged=1, policy_own=0, cut=0, broken=())


@pytest.mark.parametrize(
    "met",
    [
        "error: 502",
        "error: execution timed out",
        "HTTPConnectionPool(host='127.0.0.1', port=8765): Max retries exceeded with url: /x",
        "result: \nParis is the capital of France.",
        f"result: \n{PARIS} ",
        f"result: \n{PARIS}\n\nMore.",
        f"result: {PARIS}",
        PARIS,
        "result:",
        f"output: \n{PARIS}",
        f"result: \n{PARIS}\noutput: \nx",
        f"result: \n{PARIS.lower()}",
    ],
)
def test_what_we_did_not_say_is_broken(digests: AnswerDigests, met: str) -> None:
    """A block of the rollout that is no answer of this run must be named by its place."""
    turns = [answered("q", PARIS), Turn("q", met), answered("q", CAFE)]
    text = rollout("Which city?", turns, final("Paris"))
    second = text.index("</search><result>", text.index(PARIS) + len(PARIS)) + len("</search>")
    assert digests.judge(text) == Judgement(judged=3, policy_own=0, cut=0, broken=(second,))


def test_an_empty_answer_counts_only_when_given() -> None:
    """An empty block must be broken in a run that never gave an empty answer."""
    text = rollout("Which city?", [answered("q", "")], final("Paris"))
    assert handed_over("").judge(text).broken == ()
    assert len(handed_over(PARIS).judge(text).broken) == 1


def test_answers_of_another_run_are_broken(digests: AnswerDigests) -> None:
    """An answer that only another run gave must not pass."""
    text = rollout("Which city?", [answered("q", "Lyon is a city.")], final("Paris"))
    assert handed_over("Lyon is a city.").judge(text).broken == ()
    assert len(digests.judge(text).broken) == 1


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_composition_does_not_matter(digests: AnswerDigests, form: str) -> None:
    """Text must be recognised whether or not a tokenizer composed it."""
    written = prompt("Which city?") + answered("q", CAFE).written + final("Paris")
    text = unicodedata.normalize(form, written)  # type: ignore[arg-type]
    assert digests.judge(text) == Judgement(judged=1, policy_own=0, cut=0, broken=())


def test_text_of_the_policy_is_counted_and_never_refused(digests: AnswerDigests) -> None:
    """A result the policy wrote itself must be counted, wherever it is but after its own search."""
    forged = [
        f" I recall. <result>result: \n{PARIS}\n</result> ",
        "</search> words <result>words between</result>",
        "</search>\n</think><result>a tag between\n</result>",
        "</Search><result>another tag</result>",
        "<result>never closed",
    ]
    for number, text in enumerate(forged):
        turn = Turn("q", "", thought=text)
        honest = prompt("Which city?") + turn.thought + answered("q", PARIS).written
        found = digests.judge(honest)
        assert (found.judged, found.policy_own, found.broken) == (1, 1, ()), number


def test_tags_inside_an_answer_are_part_of_it() -> None:
    """A block that holds an opening tag must be judged as a whole."""
    inner = "A passage with <result> and <search> in it."
    text = rollout("Which city?", [answered("q", inner)], final("Paris"))
    assert handed_over(inner).judge(text) == Judgement(1, 0, 0, ())
    assert handed_over(PARIS).judge(text).judged == 1


def test_a_cut_block_is_known_at_any_length(digests: AnswerDigests) -> None:
    """A rollout cut anywhere must never be broken by the cut, nor hide a whole block."""
    turns = [answered("q", PARIS), answered("q", CAFE), answered("q", "")]
    text = rollout("Which city?", turns, final("Paris"))
    start = len(text) - len(response_of(text)) + len("assistant\n<think>")
    for length in range(start, len(text) + 1):
        piece = text[:length]
        found = digests.judge(piece)
        whole = piece.count("\n</result>", start)
        opened = piece.count("</search><result>", start)
        assert found == Judgement(opened, 0, opened - whole, ()), piece[-40:]


def test_a_cut_error_is_judged_as_a_whole_one_before_it_is(digests: AnswerDigests) -> None:
    """A block that was cut is broken where it cannot be ours, as one that merely lacks its end."""
    lost = Turn("q", "error: 502")
    text = rollout("Which city?", [lost, lost], "")
    cut = text[: text.rindex("\n</result>")]
    both = (text.index("<result>error"), text.rindex("<result>error"))
    assert digests.judge(cut) == Judgement(2, 0, 1, both)
    unclosed = cut.replace("\n</result>\n<think>", "\n<think>", 1)
    found = digests.judge(unclosed)
    both = (unclosed.index("<result>error"), unclosed.rindex("<result>error"))
    assert found == Judgement(2, 0, 1, both)


@pytest.mark.parametrize("text", ["", prompt("q").removesuffix("<think>"), "<think>" * 3])
def test_without_a_response_the_template_differs(digests: AnswerDigests, text: str) -> None:
    """A text without a fourth <think> must be refused, not judged as empty."""
    with raises(errors.TEMPLATE_DIFFERS, match="fourth <think>"):
        digests.judge(text)


def test_a_response_without_blocks_is_fine() -> None:
    """A rollout that never searched must be judged as that."""
    text = rollout("Which city?", [], final("Paris"))
    assert AnswerDigests(1).judge(text) == Judgement(0, 0, 0, ())


passages = st.text(st.characters(exclude_characters="<"), max_size=60)


@settings(max_examples=150, deadline=None)
@given(
    given_texts=st.lists(passages, max_size=5), met=passages, spaces=st.text(" \n\t\u3000\x1c\x85")
)
def test_any_text_survives_client_and_tokenizer(
    given_texts: list[str], met: str, spaces: str
) -> None:
    """Whatever text is handed over must be recognised, and any other must not."""
    texts = [*given_texts, spaces, given_texts[0] + spaces if given_texts else ""]
    digests = handed_over(*texts)
    turns = [answered("q", text) for text in texts]
    judged = digests.judge(rollout("Which city?", turns, final("Paris")))
    assert judged == Judgement(len(texts), 0, 0, ())
    other = rollout("Which city?", [answered("q", f"{met}<other")], final("Paris"))
    assert len(digests.judge(other).broken) == 1


# --- the set --------------------------------------------------------------------------------------


def test_a_block_is_asked_for_as_it_stands() -> None:
    """Membership must be of the block in the rollout, and of nothing else."""
    digests = handed_over(CAFE)
    stands = block(answered("q", CAFE).text).removesuffix("\n")
    assert stands == block_of(CAFE)
    assert digests.has("q", stands)
    assert digests.has("q", unicodedata.normalize("NFC", stands))
    assert not digests.has("q", CAFE)
    assert not digests.has("q", stands + "\n")
    assert not digests.has("another", stands)


def test_a_lone_surrogate_is_only_unknown(digests: AnswerDigests) -> None:
    """Text that has no UTF-8 form must be judged, not crash the judge."""
    text = rollout("Which city?", [Turn("q", "result: \n\ud800")], final("Paris"))
    assert len(digests.judge(text).broken) == 1


def test_the_set_is_exact_while_it_grows() -> None:
    """Everything added must be found, and nothing else, however much there is."""
    draw = random.Random(3)
    digests, known = AnswerDigests(12_000), set[bytes]()
    for number in range(12_000):
        digest = draw.randbytes(DIGEST_BYTES)
        assert digests.add_digest(digest)
        known.add(digest)
        if number % 7 == 0:
            assert not digests.add_digest(digest)
    assert len(digests) == len(known) == 12_000
    assert held(digests) == known
    for text in ("a", "b", ""):
        assert not digests.has("q", block_of(text))


def held(digests: AnswerDigests) -> set[bytes]:
    """What the shards hold, digest by digest."""
    shards = [bytes(shard) for shard in digests._shards if shard]
    size = DIGEST_BYTES
    return {shard[at : at + size] for shard in shards for at in range(0, len(shard), size)}


def nbytes(digests: AnswerDigests) -> int:
    return sum(len(shard) for shard in digests._shards if shard is not None)


def memory(digests: AnswerDigests) -> int:
    """Of the set and its objects, with what they hold in advance."""
    shards = [shard for shard in digests._shards if shard is not None]
    return sys.getsizeof(digests._shards) + sum(map(sys.getsizeof, shards))


def test_memory_is_bounded_by_what_is_held() -> None:
    """A distinct answer must cost at most 32 bytes at any capacity, and a repeat no memory."""
    draw = random.Random(5)
    digests = AnswerDigests(100_000)
    assert memory(digests) < 8_000
    for number in range(1, 100_001):
        digests.add_digest(draw.randbytes(DIGEST_BYTES))
        if number % 10_000 == 0:
            assert nbytes(digests) <= 32 * number
    assert memory(digests) <= 32 * 100_000
    digests = AnswerDigests(100_000)
    digests.add("q", PARIS)
    before = memory(digests)
    for _ in range(5_000):
        digests.add("q", PARIS)
    assert memory(digests) == before
    assert memory(AnswerDigests(1)) < 1_000


def test_more_answers_than_attempts_are_refused() -> None:
    """The set must not grow without bound when more is handed over than was admitted."""
    digests = AnswerDigests(3)
    for number in range(3):
        digests.add("q", str(number))
    digests.add("q", "0")
    with pytest.raises(errors.InvariantBroken, match="max_calls"):
        digests.add("q", "one more")
    with pytest.raises(errors.InvariantBroken, match="max_calls"):
        digests.add("another", "0")


def test_judging_beside_adding_finds_what_was_there() -> None:
    """A judge in another thread must find every earlier answer while tables grow."""
    digests = handed_over(PARIS, CAFE)
    text = rollout("Which city?", [answered("q", PARIS), answered("q", CAFE)], final("Paris"))
    with ThreadPoolExecutor(2) as threads:
        judging = threads.submit(lambda: {digests.judge(text) for _ in range(1500)})
        for number in range(900):
            digests.add("q", f"answer {number}")
        assert judging.result() == {Judgement(2, 0, 0, ())}

"""``ledger show``: which records, each readable, and nothing that a terminal obeys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from smartsearch_sidecar import errors
from smartsearch_sidecar.commands import ledger
from smartsearch_sidecar.ledger.describe import Filter, Tone, json_line, printable, shown
from smartsearch_sidecar.run.line import Line, decode_line
from smartsearch_sidecar.run.record import KINDS, record_of
from tests.fakes.each import each
from tests.fakes.journals import (
    Written,
    answered,
    closed,
    failed,
    latched,
    requested,
    searches,
    write_run,
)

HOSTILE = "\x1b]0;owned\x07 \x9b31m \u202eesrever \u200b \ud800 \r\n\t \x7f"


def line(
    kind: str, number: int | None, data: dict[str, Any], at: str = "2026-12-02T04:13:00Z"
) -> Line:
    """A record as it is read."""
    return Line(1, at, "0" * 64, "f" * 64, record_of(kind, number, data), data)


# --- letters --------------------------------------------------------------------------------------


def test_control_characters_are_written_out() -> None:
    """Escape sequences, reversed lines and surrogates are shown as what they are."""
    text = printable(HOSTILE)
    assert text.isprintable()
    assert "\\x1b]0;owned\\x07" in text
    assert "\\x9b31m" in text
    assert "\\u202eesrever" in text
    assert "\\r\\n\\t" in text
    text.encode()


def test_ordinary_text_is_left_as_it_is() -> None:
    """Accents, Chinese and pictures are letters."""
    text = 'Ærøskøbing 中文 🙂 "quoted" \\ [bold]not markup[/]'
    assert printable(text) == text


def test_long_text_is_cut() -> None:
    """With a mark, before it is escaped."""
    assert printable("x" * 500, 10) == "x" * 9 + "…"


@given(st.text() | st.text(st.characters(categories=["Cs", "Cc", "Cf", "Zl", "Zp"])))
def test_any_text_becomes_one_printable_line(text: str) -> None:
    """Whatever a policy writes."""
    assert printable(text).isprintable()


# --- which ----------------------------------------------------------------------------------------


def wants(kind: str = "run.closed", number: int | None = None, at: str = "", **words: Any) -> bool:
    """Whether a filter of these words wants such a record."""
    data = {"latched": False, "code": "c", "cause": "c", "detail": "d"}
    return Filter(**words).wants(line(kind, number, data, at))


def test_filter_by_kind_and_group() -> None:
    """A whole kind, or what stands before its dot; several are alternatives."""
    assert wants("retrieval.failed", 1, kinds=["retrieval.failed"])
    assert wants("retrieval.failed", 1, kinds=["run", "retrieval"])
    assert not wants("retrieval.failed", 1, kinds=["run"])
    with pytest.raises(errors.UsageError, match=r"no kind of record is called 'retr'"):
        Filter(kinds=["retr"])


def test_filter_by_number() -> None:
    """A search by its number; records without one are left out."""
    assert wants("retrieval.failed", 3, numbers=[3, 4])
    assert not wants("retrieval.failed", 5, numbers=[3, 4])
    assert not wants(numbers=[3])


@pytest.mark.parametrize(
    ("since", "until", "wanted"),
    [
        ("2026-12-02", None, True),
        ("2026-12-02T04:13:00Z", None, True),
        ("2026-12-02T04:13:00.000001Z", None, False),
        ("2026-12-02T05:13:00+01:00", "2026-12-02T05:13:00.1+01:00", True),
        (None, "2026-12-02T04:13:00", False),
        (None, "2026-12-02T04:13:01", True),
    ],
)
def test_filter_by_time(since: str | None, until: str | None, wanted: bool) -> None:
    """From the first moment on, before the second, in UTC unless a zone is given."""
    assert wants(at="2026-12-02T04:13:00.000000Z", since=since, until=until) == wanted


def test_time_that_is_none_is_refused() -> None:
    """With the form that is taken."""
    with pytest.raises(errors.UsageError, match="'yesterday' is no time"):
        Filter(since="yesterday")


# --- how ------------------------------------------------------------------------------------------

TITLES = [
    {"id": "1", "contents": '"Ada Lovelace"\nAda was', "score": 1.0},
    {"id": "2", "contents": HOSTILE.replace("\ud800", ""), "score": None},
]
CHECKPOINT = {"step": 1200, "path": "ckpt/1200", "manifest_sha256": None}
ASKED = {"prompt_sha256": "ab" * 32, "seed": 17}
MEASURED = {"finish_reason": "stop", "model": "m"}


@each(
    ("event", "tone", "words"),
    [
        (requested(3, "who was Ada?"), Tone.PLAIN, ["who was Ada?"]),
        (("retrieval.requested", 1, {"env": "e", "call": "odd()"}), Tone.PLAIN, ["odd()"]),
        (
            ("retrieval.requested", 1, {"route": "search", "query": HOSTILE, "top_n": 3}),
            Tone.PLAIN,
            ["/search, 3 passages", "\\x1b]0;owned"],
        ),
        (answered(3, "", TITLES), Tone.GOOD, ["Ada Lovelace · ", "miss, 0.0 ms"]),
        (answered(3, "", []), Tone.GOOD, ["no passage"]),
        (failed(3), Tone.BAD, ["retrieval_failed: the provider failed"]),
        (
            ("retrieval.declined", 1, {"reason": "empty", "env": "e", "call": "c"}),
            Tone.WARN,
            ["empty", "c"],
        ),
        (latched("deadline", 3), Tone.BAD, ["deadline: for a test (search 3)"]),
        (
            ("run.claimed", None, {"max_calls": 10_000, "claim_sha256": "ab" * 32}),
            Tone.RUN,
            ["10,000 searches", "abababab"],
        ),
        (
            (
                "run.resumed",
                None,
                {
                    "clean": False,
                    "ending": "torn",
                    "torn_bytes": 9,
                    "set_aside": "torn-1",
                    "unsettled": [4],
                },
            ),
            Tone.RUN,
            ["not orderly", "9 torn bytes in torn-1", "1 searches unsettled"],
        ),
        (closed(3), Tone.RUN, ["healthy, 3 of 3 searches answered"]),
        (
            ("checkpoint.accepted", 1, {**CHECKPOINT, "occurrence": 1, "usage": {}}),
            Tone.GOOD,
            ["step 1,200 ckpt/1200"],
        ),
        (
            ("checkpoint.refused", 1, {**CHECKPOINT, "state": "pending"}),
            Tone.WARN,
            ["the run is pending"],
        ),
        (("delivery.lost", 3, {"stage": "waiting"}), Tone.BAD, ["had gone: waiting"]),
        (("delivery.repeated", 3, {"loss": 2}), Tone.WARN, ["client of loss 2 asked again"]),
        (
            ("reward.requested", 2, {"split": "train", "key": "k", "solution_str": HOSTILE}),
            Tone.PLAIN,
            [f"train: a rollout of {len(HOSTILE)} characters"],
        ),
        (
            ("reward.answered", 2, {"split": "train", "reward": 0.5, "verdicts": ["1", "0"]}),
            Tone.GOOD,
            ["train: reward 0.5, verdicts 1, 0"],
        ),
        (("reward.reused", None, {"split": "train", "of": 2}), Tone.GOOD, ["of score 2 again"]),
        (
            (
                "reward.failed",
                2,
                {"split": "train", "code": "helper_empty", "detail": "no text"},
            ),
            Tone.BAD,
            ["train: helper_empty: no text"],
        ),
        (
            (
                "helper.requested",
                9,
                {"split": "train", "score": 2, "prompt_bytes": 4000, **ASKED},
            ),
            Tone.PLAIN,
            ["train score 2: 4,000 bytes"],
        ),
        (
            (
                "helper.answered",
                9,
                {
                    "split": "train",
                    "score": 2,
                    "text": HOSTILE,
                    "input_tokens": 900,
                    "output_tokens": 3,
                    **MEASURED,
                },
            ),
            Tone.GOOD,
            ["900 tokens read, 3 written", "\\x1b]0;owned"],
        ),
        (
            (
                "helper.failed",
                9,
                {
                    "split": "train",
                    "score": 2,
                    "code": "helper_timeout",
                    "detail": "late",
                    "usage": None,
                    "sent": True,
                },
            ),
            Tone.BAD,
            ["train score 2: helper_timeout: late"],
        ),
    ],
)
def test_each_kind_reads_as_a_sentence(event: Any, tone: Tone, words: list[str]) -> None:
    """What a person wants to know of it, in letters alone."""
    row = shown(line(*event))
    assert row.tone is tone
    assert row.text.isprintable()
    for word in words:
        assert word in row.text


@pytest.mark.parametrize(
    "event",
    [
        ("run.closed", None, {"latched": False, "other": "owned"}),
        ("retrieval.answered", 1, {"documents": ["owned"], "cache": "hit", "took_us": 1}),
        ("retrieval.answered", 1, {"cache": "owned", "took_us": 1}),
        ("delivery.lost", 1, {"stage": "s", "others": 7, "other": "owned"}),
    ],
)
def test_data_of_another_shape_is_shown_as_it_is(event: Any) -> None:
    """A record that cannot be put into words is no reason to stop."""
    row = shown(line(*event))
    assert "owned" in row.text
    assert row.text.isprintable()


@each("kind", sorted(KINDS))
def test_further_keys_are_no_reason_to_stop(kind: str) -> None:
    """A key of a later version is passed over; a record without its own keys is named as damage."""
    with pytest.raises(errors.LedgerCorrupt, match=f"a {kind} record lacks"):
        record_of(kind, 1, {"other": HOSTILE})


def test_json_is_the_recorded_value_in_safe_letters(tmp_path: Path) -> None:
    """Reading the line back gives the record; no byte of it is a control character."""
    text = HOSTILE.replace("\ud800", "\U000e0001 é 🙂")
    run = write_run(tmp_path / "run", [requested(1, "q"), answered(1, "q", [{"id": text}])])
    read = decode_line(run.lines[2])
    told = json_line(read)
    assert told.isprintable()
    assert "é 🙂" in told
    assert json.loads(told) == json.loads(run.lines[2])


# --- from a shell ---------------------------------------------------------------------------------


def shell(*words: object) -> Any:
    """Runs ``ledger show …`` as typed."""
    return CliRunner().invoke(ledger.app, ["show", *map(str, words)])


@pytest.fixture
def run(tmp_path: Path) -> Written:
    """Two searches and an orderly end."""
    return write_run(tmp_path / "run", [*searches(2), closed(2)])


def test_shell_lists_a_line_a_record(run: Written) -> None:
    """In order, with number, time, kind and words."""
    told = shell(run.directory)
    lines = told.stdout.splitlines()
    assert (told.exit_code, len(lines)) == (0, 6)
    assert lines[1].split()[:4] == ["2", "2026-12-02", "04:13:00.000000", "retrieval.requested"]
    assert "#1" in lines[1]
    assert "“query 1”" in lines[1]


def test_shell_filters(run: Written) -> None:
    """All words at once narrow it down."""
    assert len(shell(run.directory, "--kind", "retrieval").stdout.splitlines()) == 4
    one = shell(run.directory, "--kind", "retrieval.answered", "--number", 2).stdout
    assert len(one.splitlines()) == 1
    assert "#2" in one
    assert shell(run.directory, "--until", "2026-12-02").stdout == ""
    assert isinstance(shell(run.directory, "--kind", "x").exception, errors.UsageError)


def test_shell_gives_json_a_line_a_record(run: Written) -> None:
    """The recorded lines themselves, for other programs."""
    told = shell(run.directory, "--json")
    assert [json.loads(text) for text in told.stdout.splitlines()] == list(
        map(json.loads, run.lines)
    )


def test_shell_shows_up_to_the_damage(run: Written) -> None:
    """What is sound is shown; then the place of the damage, and exit 1."""
    data = bytearray(run.segment.read_bytes())
    data[len(b"".join(run.lines[:3])) + 9] ^= 1
    run.segment.write_bytes(bytes(data))
    told = shell(run.directory)
    assert told.exit_code == 1
    assert len(told.stdout.splitlines()) == 3
    assert "line 4" in told.stderr


def test_shell_says_that_the_last_line_is_incomplete(run: Written) -> None:
    """On standard error: what is shown is whole."""
    run.segment.write_bytes(run.segment.read_bytes() + b"{")
    told = shell(run.directory)
    assert (told.exit_code, len(told.stdout.splitlines())) == (0, 6)
    assert "incomplete" in told.stderr


def test_shell_sends_no_escape_codes(tmp_path: Path) -> None:
    """A query and a passage full of them stay letters, as words and as JSON."""
    hostile = HOSTILE.replace("\ud800", "")
    documents = [{"id": "1", "contents": hostile, "score": 1.0}]
    run = write_run(tmp_path / "run", [requested(1, hostile), answered(1, "", documents)])
    for words in ([], ["--json"]):
        told = shell(run.directory, *words)
        assert told.exit_code == 0
        assert all(text.isprintable() for text in told.stdout.split("\n"))

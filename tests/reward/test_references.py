"""A reward is computed only against declared answers, found the way the scorer finds questions."""

from __future__ import annotations

import hashlib
import json
import sys
import unicodedata
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from smartsearch_sidecar import errors
from smartsearch_sidecar.reward.references import Located, References, user_question
from smartsearch_sidecar.reward.scorer import Scorer
from smartsearch_sidecar.reward.source import verify_file
from tests.fakes.raised import raises
from tests.fakes.rollouts import cases, final, prompt, rollout

SECRET = "Zanzibar"


def jsonl(path: Path, rows: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def parquet(path: Path, rows: list[dict[str, object]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def trainer_row(question: str, answers: object) -> dict[str, object]:
    """A row as the trainer's own preparation writes it."""
    return {
        "data_source": "re_call",
        "question": question,
        "ability": "re_call",
        "reward_model": {"style": "rule", "ground_truth": answers},
        "extra_info": {"env": "def f(): ...", "func_schemas": "[]"},
    }


@pytest.fixture
def references(tmp_path: Path) -> References:
    train = [{"question": "Which island?", "golden_answers": [SECRET, "Unguja"]}]
    train.append({"question": " Cafe\u0301? \n", "golden_answers": ["the\u0301"]})
    validation = [{"question": "By whom?", "ground_truth": "Gounod"}]
    return References.load(
        jsonl(tmp_path / "train.jsonl", train), jsonl(tmp_path / "validation.jsonl", validation)
    )


# --- lookup ---------------------------------------------------------------------------------------


def test_the_split_is_the_one_that_declares_the_question(references: References) -> None:
    """A rollout must be located in the split that declares its question and answers."""
    asked = rollout("Which island?", [], final("x"))
    assert references.lookup(asked, [SECRET, "Unguja"]) == Located("train", "Which island?")
    assert references.lookup(prompt("By whom?"), "Gounod") == Located("validation", "By whom?")
    assert references.counts == {"train": 2, "validation": 1}
    assert sum(references.counts.values()) == 3


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize("answers", [["the\u0301"], ["th\u00e9"], ("th\u00e9",), "th\u00e9"])
def test_white_space_and_composition_do_not_matter(
    references: References, form: str, answers: str | list[str]
) -> None:
    """A question must be found with white space around it and in either form of Unicode."""
    question = unicodedata.normalize(form, "\tCafe\u0301?  ")  # type: ignore[arg-type]
    assert references.lookup(prompt(question), answers).split == "train"


@pytest.mark.parametrize(
    "question, answers",
    [
        ("Which islands?", [SECRET, "Unguja"]),
        ("which island?", [SECRET, "Unguja"]),
        ("", [SECRET, "Unguja"]),
        ("Which island?", ["Unguja", SECRET]),
        ("Which island?", [SECRET]),
        ("Which island?", SECRET),
        ("Which island?", [SECRET, "Unguja", "Pemba"]),
        ("Which island?", [SECRET, "unguja"]),
        ("Which island?", [SECRET, "Unguja "]),
        ("Which island?", []),
        ("By whom?", [SECRET, "Unguja"]),
    ],
)
def test_what_was_not_declared_is_refused(
    references: References, question: str, answers: str | list[str]
) -> None:
    """Another question, or other answers in any way, must be refused without naming an answer."""
    with raises(errors.REFERENCE_MISMATCH) as caught:
        references.lookup(prompt(question), answers)
    assert SECRET not in str(caught.value)
    assert "Unguja" not in str(caught.value)
    is_declared = question in ("Which island?", "By whom?")
    assert ("declared ones" if is_declared else "not among") in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "user\nWhich island?\nassistant\n<think>",
        "<|im_start|>user\nWhich island?",
        "<|im_end|><|im_start|>user\nWhich island?",
        "<|im_start|>user Which island?<|im_end|>",
    ],
)
def test_a_text_without_a_user_turn_is_named_as_such(references: References, text: str) -> None:
    """A missing user turn must be told apart from a mismatch: template or decoding differ."""
    with raises(errors.NO_USER_TURN, match="template"):
        references.lookup(text, [SECRET, "Unguja"])


def test_the_first_turn_counts() -> None:
    """Only the first user turn must be read, and a turn may span lines."""
    text = prompt("one\n\ntwo ") + "<|im_start|>user\nthree<|im_end|>"
    assert user_question(text) == "one\n\ntwo"


def test_the_question_is_the_scorers_own(tmp_path: Path) -> None:
    """The question found must be the one the scorer puts into its prompts."""
    fake = Path(__file__).parents[1] / "fakes" / "scorer_source.py"
    scorer = Scorer(verify_file(fake, hashlib.sha256(fake.read_bytes()).hexdigest()))
    checked = 0
    for case in cases(60, seed=5):
        for asked in scorer.collect_prompts(case.solution_str, case.ground_truth):
            assert f"Asked: {user_question(case.solution_str)}\nExpected:" in asked
            checked += 1
    assert checked > 20


# --- files ----------------------------------------------------------------------------------------


def test_parquet_and_jsonl_say_the_same(tmp_path: Path) -> None:
    """The same references must have one digest in any layout, order and number of repetitions."""
    rows = [("Which island?", [SECRET, "Unguja"]), ("Who?", ["Gounod"]), ("Caf\u00e9?", ["x"])]
    table = parquet(tmp_path / "a", [trainer_row(question, said) for question, said in rows])
    nested = jsonl(tmp_path / "b", [trainer_row(question, said) for question, said in rows[::-1]])
    flat = jsonl(
        tmp_path / "c",
        [
            {"question": unicodedata.normalize("NFD", f" {q}\n"), "golden_answers": a}
            for q, a in rows
        ]
        + [{"question": "Who?", "ground_truth": "Gounod"}],
    )
    loaded = [References.load(path) for path in (table, nested, flat)]
    assert len({references.digest for references in loaded}) == 1
    assert [sum(references.counts.values()) for references in loaded] == [3, 3, 3]
    loaded[0].lookup(prompt("Who?"), ["Gounod"])


def test_parquet_takes_single_answers_and_flat_columns(tmp_path: Path) -> None:
    """A column of plain texts, nested or not, must be read as one answer each."""
    nested = References.load(parquet(tmp_path / "a", [trainer_row("Who?", "Gounod")]))
    flat = References.load(
        parquet(tmp_path / "b", [{"question": "Who?", "ground_truth": "Gounod"}])
    )
    assert nested.digest == flat.digest


def test_a_large_parquet_is_read_through(tmp_path: Path) -> None:
    """Rows beyond the first batch must be read and numbered on."""
    rows = [trainer_row(f"Number {number}?", [str(number)]) for number in range(3000)]
    references = References.load(parquet(tmp_path / "a", rows))
    assert references.lookup(prompt("Number 2999?"), ["2999"]).split == "train"
    rows[2500]["question"] = None
    with raises(errors.REFERENCES_INVALID, match="row 2501: question"):
        References.load(parquet(tmp_path / "a", rows))


def test_digest_is_the_documented_one(references: References) -> None:
    """Anybody must be able to compute the digest from the documented lines."""
    lines = [
        '["train","Caf\u00e9?",["th\u00e9"]]',
        f'["train","Which island?",["{SECRET}","Unguja"]]',
        '["validation","By whom?",["Gounod"]]',
    ]
    text = "".join(f"{line}\n" for line in lines)
    assert references.digest == hashlib.sha256(text.encode()).hexdigest()


def test_digest_depends_on_everything(tmp_path: Path) -> None:
    """Another split, question, answer or order of answers must give another digest."""
    base = {"question": "Who?", "golden_answers": ["a", "b"]}
    changed = [
        base,
        {**base, "question": "Whom?"},
        {**base, "golden_answers": ["b", "a"]},
        {**base, "golden_answers": ["a", "b", "c"]},
        {**base, "golden_answers": ["ab"]},
    ]
    files = [jsonl(tmp_path / str(number), [row]) for number, row in enumerate(changed)]
    digests = {References.load(path).digest for path in files}
    digests.add(References.load(None, files[0]).digest)
    assert len(digests) == 6


def test_repetition_is_allowed_when_the_answers_agree(tmp_path: Path) -> None:
    """A repeated question must be taken once when its answers agree, and refused when not."""
    row = {"question": "Who?", "golden_answers": [SECRET]}
    again = {"question": " Who? ", "ground_truth": SECRET}
    assert References.load(jsonl(tmp_path / "a", [row, again])).counts == {"train": 1}
    other = {"question": "Who?", "golden_answers": ["Pemba"]}
    with raises(errors.REFERENCES_INVALID, match=r"row 3: .* other answers") as caught:
        References.load(jsonl(tmp_path / "b", [row, again, other]))
    assert SECRET not in str(caught.value)


def test_splits_are_disjoint(tmp_path: Path) -> None:
    """A question of both splits must be refused, even with the same answers."""
    row = {"question": "Who?", "golden_answers": [SECRET]}
    train = jsonl(tmp_path / "a", [row])
    validation = jsonl(tmp_path / "b", [{"question": "New?", "golden_answers": ["y"]}, row])
    with raises(errors.REFERENCES_INVALID, match=r"validation .*row 2: .*train split"):
        References.load(train, validation)


GOOD = '{"question": "Good?", "golden_answers": ["Zanzibar"]}'


@pytest.mark.parametrize(
    "line, said",
    [
        ("{", "JSON"),
        ("[]", "not a JSON object"),
        ("null", "not a JSON object"),
        ("[" * 100_000, "JSON"),
        ('{"question": "q", "ground_truth": "a", "ground_truth": "b"}', "JSON: .*a key twice"),
        ('{"question": "q", "ground_truth": "a", "score": NaN}', "JSON: .*NaN"),
        ('{"golden_answers": ["a"]}', "question"),
        ('{"question": 7, "golden_answers": ["a"]}', "question"),
        ('{"question": " \\n", "golden_answers": ["a"]}', "question"),
        ('{"question": "\\ud800", "golden_answers": ["a"]}', "question"),
        ('{"question": "a<|im_end|>b", "golden_answers": ["a"]}', "im_end"),
        ('{"question": "q"}', "no answers"),
        ('{"question": "q", "golden_answers": null}', "no answers"),
        ('{"question": "q", "golden_answers": []}', "answers are not"),
        ('{"question": "q", "golden_answers": [""]}', "answers are not"),
        ('{"question": "q", "golden_answers": ["a", 7]}', "answers are not"),
        ('{"question": "q", "golden_answers": ["\\udfff"]}', "answers are not"),
        ('{"question": "q", "golden_answers": {"a": "b"}}', "answers are not"),
        ('{"question": "q", "golden_answers": ["a"], "ground_truth": "b"}', "differ"),
        (
            '{"question": "q", "ground_truth": "a", "reward_model": {"ground_truth": ["b"]}}',
            "differ",
        ),
    ],
)
def test_bad_rows_are_named_by_number(tmp_path: Path, line: str, said: str) -> None:
    """Every way a row can be unusable must be named by file and line, blank lines counted."""
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n{GOOD}\n")
    with raises(errors.REFERENCES_INVALID, match=rf"bad\.jsonl: row 3: .*{said}") as caught:
        References.load(path)
    assert SECRET not in str(caught.value)


def test_bad_bytes_are_named_by_number(tmp_path: Path) -> None:
    """A line that is not UTF-8 must be named like any other bad line."""
    path = tmp_path / "bad.jsonl"
    path.write_bytes(GOOD.encode() + b'\n{"question": "\xff"}\n' + GOOD.encode("utf-16"))
    with raises(errors.REFERENCES_INVALID, match="row 2: not a line of JSON"):
        References.load(path)


def test_many_bad_rows_are_summed_up(tmp_path: Path) -> None:
    """A file that is wrong throughout must be refused with a sentence of bounded length."""
    path = jsonl(tmp_path / "bad.jsonl", [{"question": "q"}] * 500)
    with raises(errors.REFERENCES_INVALID, match=r"row 5: .*and 495 more") as caught:
        References.load(path)
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize("text", [b"", b"\n\n"])
def test_a_file_without_rows_is_refused(tmp_path: Path, text: bytes) -> None:
    """A split that declares nothing must be refused, not accepted as empty."""
    (tmp_path / "empty").write_bytes(text)
    with raises(errors.REFERENCES_INVALID, match="no rows"):
        References.load(tmp_path / "empty")


def test_an_empty_parquet_is_refused(tmp_path: Path) -> None:
    """A Parquet file without rows must be refused like an empty file."""
    table = pa.Table.from_pylist([trainer_row("Who?", ["a"])]).slice(0, 0)
    pq.write_table(table, tmp_path / "empty")
    with raises(errors.REFERENCES_INVALID, match="no rows"):
        References.load(tmp_path / "empty")


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    """No file, a folder, a damaged Parquet file and no split at all must each be a sentence."""
    good = parquet(tmp_path / "good", [trainer_row("Who?", ["a"])]).read_bytes()
    (tmp_path / "cut").write_bytes(good[:-20])
    (tmp_path / "magic").write_bytes(b"PAR1")
    for name in ("absent", "", "cut", "magic"):
        with raises(errors.REFERENCES_INVALID):
            References.load(tmp_path / name)
    with raises(errors.REFERENCES_INVALID, match=r"reward\.references"):
        References.load(None, None)


def test_parquet_without_pyarrow_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installation without the extra must say its name, and read JSONL all the same."""
    table = parquet(tmp_path / "a", [trainer_row("Who?", ["a"])])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with raises(errors.NOT_AVAILABLE, match=r"\[parquet\]"):
        References.load(table)
    assert References.load(jsonl(tmp_path / "b", [trainer_row("Who?", ["a"])])).counts == {
        "train": 1
    }

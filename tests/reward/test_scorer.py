"""The scorer's two passes, checked against the source itself run in one piece."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.reward.scorer import Scorer
from smartsearch_sidecar.reward.source import verify_file
from tests.fakes.pinned_scorer import MISSING, pinned_scorer
from tests.fakes.raised import raises
from tests.fakes.rollouts import Case, answered, cases, final, rollout

FAKE = Path(__file__).parents[1] / "fakes" / "scorer_source.py"


def scorer_of(path: Path) -> Scorer:
    return Scorer(verify_file(path, hashlib.sha256(path.read_bytes()).hexdigest()))


def written(folder: Path, entry: str, *, extra: str = "") -> Scorer:
    """A scorer whose source is written for one test; ``entry`` is the body of its entry."""
    path = folder / "source.py"
    path.write_text(
        f"{extra}\n"
        "def generate_response(prompt):\n    return ''\n"
        "def get_model_score(prompt):\n    return generate_response(prompt)\n"
        f"def compute_score_with_format(tokenizer, solution_str, ground_truth):\n    {entry}\n"
    )
    return scorer_of(path)


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    return scorer_of(FAKE)


def in_one_piece(path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Case], object]:
    """The whole file run as a module, imports and transport included, with only the network
    replaced: what the trainer itself would compute for the same helper texts.
    """
    texts: Iterator[str] = iter(())
    requests = types.ModuleType("requests")
    requests.post = lambda *_a, **_k: types.SimpleNamespace(  # type: ignore[attr-defined]
        json=lambda: {"text": next(texts)}
    )
    monkeypatch.setitem(sys.modules, "requests", requests)
    names: dict[str, Any] = {"__name__": "trainer", "print": lambda *_: None}
    code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True, optimize=0)
    exec(code, names)  # noqa: S102 - our own file, or the pinned one that the developer names
    if path == FAKE:
        names["generate_response"] = lambda _prompt: next(texts) + "</answer>"

    def score(case: Case) -> object:
        nonlocal texts
        texts = iter(case.texts)
        return names["compute_score_with_format"](None, case.solution_str, case.ground_truth)

    return score


def both_passes(scorer: Scorer, case: Case) -> float:
    prompts = scorer.collect_prompts(case.solution_str, case.ground_truth)
    answers = list(zip(prompts, case.texts, strict=False))
    return scorer.score(case.solution_str, case.ground_truth, answers)


def one_pass(scorer: Scorer, case: Case) -> float:
    texts = iter(case.texts)
    return scorer.score_serial(case.solution_str, case.ground_truth, lambda _prompt: next(texts))


def check_equal(path: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> set[float]:
    expected, scorer = in_one_piece(path, monkeypatch), scorer_of(path)
    seen = set()
    for case in cases(count, seed=4):
        truth = expected(case)
        serial = one_pass(scorer, case)
        assert (both_passes(scorer, case), serial) == (truth, truth), case
        seen.add(serial)
    return seen


def test_rewards_equal_the_source_run_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both passes, and the serial pass, must give exactly the source's own reward."""
    assert len(check_equal(FAKE, 400, monkeypatch)) > 10


@pytest.mark.may_skip("the pinned file is the operator's, never shipped")
def test_rewards_equal_the_pinned_scorer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pinned file itself, run locally, must give the same rewards."""
    path = pinned_scorer()
    if path is None:
        pytest.skip(MISSING)
    assert len(check_equal(path, 2000, monkeypatch)) > 8


def test_a_tuple_counts_as_a_list(scorer: Scorer) -> None:
    """Answers given as a tuple must read in the prompts as they do over JSON."""
    text = rollout("Which city?", [answered("q", "Paris")], final("Paris"))
    assert scorer.collect_prompts(text, ("Paris", "Lutetia")) == scorer.collect_prompts(
        text, ["Paris", "Lutetia"]
    )


@pytest.mark.process
def test_optimized_interpreter_gives_the_same_rewards(scorer: Scorer) -> None:
    """Rewards must not depend on ``-OO``, although the source relies on ``assert``."""
    script = (
        "import sys, json\n"
        "from pathlib import Path\n"
        "from smartsearch_sidecar.reward.scorer import Scorer\n"
        "from smartsearch_sidecar.reward.source import verify_file\n"
        "scorer = Scorer(verify_file(Path(sys.argv[1]), sys.argv[2]))\n"
        "rows = json.load(sys.stdin)\n"
        "out = []\n"
        "for text, truth, texts in rows:\n"
        "    prompts = scorer.collect_prompts(text, truth)\n"
        "    out.append(scorer.score(text, truth, list(zip(prompts, texts))))\n"
        "json.dump([sys.flags.optimize, out], sys.stdout)\n"
    )
    chosen = [*cases(60, seed=9), fbox_case()]
    done = subprocess.run(
        [sys.executable, "-OO", "-c", script, str(FAKE), scorer.source.sha256],
        input=json.dumps([[c.solution_str, c.ground_truth, c.texts] for c in chosen]),
        capture_output=True,
        text=True,
        cwd=FAKE.parent.parent.parent,
        check=True,
    )
    assert json.loads(done.stdout) == [2, [both_passes(scorer, case) for case in chosen]]


def fbox_case() -> Case:
    """A right answer in the wrong box: only the source's ``assert`` tells it from a right box."""
    text = rollout("Which city?", [], " So. </think><answer> \\fbox{xParis} </answer>")
    return Case(solution_str=text, ground_truth="Paris", texts=())


def test_assert_of_the_source_decides(scorer: Scorer) -> None:
    """The case above must be one whose reward an optimized compile would change."""
    assert both_passes(scorer, fbox_case()) == 0.0
    names: dict[str, Any] = {}
    exec(compile(FAKE.read_bytes(), "fake", "exec", optimize=1), names)  # noqa: S102 - our own file
    fbox = fbox_case()
    assert names["compute_score_with_format"](None, fbox.solution_str, fbox.ground_truth) == 1.0


def test_nothing_but_functions_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Imports and module level code of the source must not run, and its prints must go nowhere."""
    ran = f"open({str(tmp_path / 'ran')!r}, 'w').close()"
    extra = f"import no_such_module\n{ran}\nclass Loud:\n    {ran}"
    scorer = written(tmp_path, "print('scored'); return 0.5", extra=extra)
    assert scorer.score_serial("", "", lambda _: "") == 0.5
    assert not (tmp_path / "ran").exists()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "entry, raised",
    [
        ("return 0, 'no user turn here'", errors.TEMPLATE_DIFFERS),
        ("return (0.7, 'why')", errors.TEMPLATE_DIFFERS),
        ("return ()", errors.TEMPLATE_DIFFERS),
        ("return True", errors.SCORER_FAILED),
        ("return None", errors.SCORER_FAILED),
        ("return '0.5'", errors.SCORER_FAILED),
        ("return [0.5]", errors.SCORER_FAILED),
        ("return float('nan')", errors.NONFINITE_REWARD),
        ("return float('inf')", errors.NONFINITE_REWARD),
        ("return float('-inf')", errors.NONFINITE_REWARD),
        ("return 10 ** 400", errors.NONFINITE_REWARD),
        ("return requests.get('x')", errors.SCORER_FAILED),
    ],
)
def test_what_is_not_a_reward_is_refused(
    tmp_path: Path, entry: str, raised: errors.Failure[Any]
) -> None:
    """Whatever the source returns but a finite number must be refused under its own name."""
    scorer = written(tmp_path, entry)
    with raises(raised):
        scorer.score("", "", [])
    with raises(raised):
        scorer.score_serial("", "", lambda _: "")


def test_an_integer_is_a_reward(tmp_path: Path) -> None:
    """An integer must come back as the number it is."""
    reward = written(tmp_path, "return 1").score("", "", [])
    assert (reward, type(reward)) == (1.0, float)


def test_template_is_refused_before_anybody_is_asked(scorer: Scorer) -> None:
    """A text the source cannot read must fail in the first pass, with a sentence that says why."""
    text = rollout("Which city?", [], final("Paris"))
    for broken in (text.replace("<|im_start|>user", "user"), text.replace("<think>", "")):
        with raises(errors.TEMPLATE_DIFFERS, match="template"):
            scorer.collect_prompts(broken, "Paris")


def test_failures_name_the_place_and_not_the_text(tmp_path: Path) -> None:
    """A failure inside the source must name type and line, never rollout or answers."""
    scorer = written(tmp_path, "raise ValueError(ground_truth)")
    with pytest.raises(errors.ScorerFailed, match=r"ValueError at line 7 of source\.py") as caught:
        scorer.collect_prompts("text", "the secret answer")
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


# --- the second pass ------------------------------------------------------------------------------


@pytest.fixture
def asked(scorer: Scorer) -> tuple[str, list[tuple[str, str]]]:
    turns = [answered("one", "Paris"), answered("two", "Lyon")]
    text = rollout("Which city?", turns, final("Paris"))
    return text, [(prompt, "<answer>1") for prompt in scorer.collect_prompts(text, "Paris")]


def test_answers_are_used_in_order(scorer: Scorer, asked: Any) -> None:
    """Each answer must count for the prompt it answers."""
    text, answers = asked
    assert scorer.score(text, "Paris", answers) == 1.125
    answers[1] = (answers[1][0], "<answer>0")
    assert scorer.score(text, "Paris", answers) == 1.0


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda answers: answers[:1], id="missing"),
        pytest.param(lambda answers: [], id="none"),
        pytest.param(lambda answers: [*answers, answers[0]], id="surplus"),
        pytest.param(lambda answers: answers[::-1], id="order"),
        pytest.param(lambda answers: [(answers[0][0] + " ", "1"), answers[1]], id="text"),
    ],
)
def test_other_prompts_fail_the_score(
    scorer: Scorer,
    asked: tuple[str, list[tuple[str, str]]],
    change: Callable[[list[tuple[str, str]]], list[tuple[str, str]]],
) -> None:
    """A second pass that asks anything but the first pass's prompts must not give a reward."""
    text, answers = asked
    with raises(errors.PROMPTS_DIFFER):
        scorer.score(text, "Paris", change(answers))


def test_a_source_that_swallows_cannot_hide_a_failure(tmp_path: Path) -> None:
    """What the transport raised must come out, even where the source turns it into a reward."""
    body = (
        "try:\n        get_model_score('p')\n    except BaseException:\n        pass\n"
        "    try:\n        get_model_score('q')\n    except BaseException:\n        return 1.0"
    )
    scorer = written(tmp_path, body)
    fault = errors.HELPER_TIMEOUT("the helper did not answer")
    cause = OSError("gone")
    asked: list[str] = []

    def ask(prompt: str) -> str:
        asked.append(prompt)
        raise fault from cause

    with raises(errors.HELPER_TIMEOUT) as caught:
        scorer.score_serial("", "", ask)
    assert caught.value is fault
    assert caught.value.__cause__ is cause
    assert asked == ["p"]
    with raises(errors.PROMPTS_DIFFER):
        scorer.score("", "", [])


def test_a_helper_fault_keeps_its_name(scorer: Scorer, asked: Any) -> None:
    """A fault of the helper must not be reported as a fault of the scorer."""

    def ask(_prompt: str) -> str:
        raise errors.HELPER_EMPTY("the helper's text is empty")

    with raises(errors.HELPER_EMPTY):
        scorer.score_serial(asked[0], "Paris", ask)


def test_threads_do_not_mix(scorer: Scorer) -> None:
    """Scores computed at once must be those computed one after another."""
    chosen = list(cases(120, seed=21))
    alone = [both_passes(scorer, case) for case in chosen]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda case: both_passes(scorer, case), chosen * 3))
    assert together == alone * 3


# --- verdicts and surface -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, verdict",
    [
        ("<answer>0", "0"),
        ("<answer>\n1 ", "1"),
        ("<answer>Score: 0", "other"),
        ("<answer>0.0", "other"),
        ("<answer>\u0660", "other"),
        ("<answer>", "other"),
        ("", "empty"),
        (" \n", "empty"),
        ("0", "other"),
        ("<answer>0</answer><answer>1", "0"),
    ],
)
def test_verdict_is_what_the_source_reads(scorer: Scorer, text: str, verdict: str) -> None:
    """A verdict must be classified by the source's own extraction, stop string appended."""
    assert scorer.verdict(text) == verdict


def test_verdicts_are_counted(scorer: Scorer) -> None:
    """Counts must separate the two verdicts the prompt asks for from everything else."""
    texts = ["<answer>0", "<answer>1", "<answer>1", "yes", ""]
    assert Counter(map(scorer.verdict, texts)) == {"0": 1, "1": 2, "other": 1, "empty": 1}


def test_an_extraction_of_another_type_is_other(tmp_path: Path) -> None:
    """An extraction that gives no text must count as unparsed, not fail."""
    scorer = written(tmp_path, "return 0.0")
    path = scorer.source.path
    path.write_text(path.read_text().replace("return generate_response(prompt)", "return ['0']"))
    assert scorer_of(path).verdict("<answer>0") == "other"


@pytest.mark.parametrize(
    "name", ["compute_score_with_format", "generate_response", "get_model_score"]
)
def test_a_source_without_our_seams_is_refused(tmp_path: Path, name: str) -> None:
    """A file that lacks one of the functions we lean on must be refused at start."""
    path = tmp_path / "source.py"
    path.write_bytes(FAKE.read_bytes().replace(name.encode(), b"other_" + name.encode()))
    with pytest.raises(errors.ScorerSourceError, match=name):
        scorer_of(path)


@pytest.mark.parametrize("text", [b"def broken(:\n", b"x = '\x00'\n", b"x = '\xff'\n"])
def test_a_source_that_is_not_python_is_refused(tmp_path: Path, text: bytes) -> None:
    """A file that does not compile must be refused at start with a sentence."""
    path = tmp_path / "source.py"
    path.write_bytes(text)
    with pytest.raises(errors.ScorerSourceError, match="not Python"):
        scorer_of(path)

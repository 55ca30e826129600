"""A scorer of our own, with the surface of the pinned trainer's ``re_call.py``.

Tests read this file's bytes, pin them by digest and compile them as they would the real one. It
judges the same things (boxed answer, one verdict per round, repeated passages, tags), with numbers
and a prompt of its own; what it shares with the pinned file is what the package leans on:

- the names of the functions, and only functions: module level code must never run;
- ``assert`` as control flow, so that ``-O`` would change rewards;
- a transport that turns every failure into an empty text, and verdicts that count unless ``0``;
- ``(0, reason)`` for a text without a user turn or a fourth ``<think>``.
"""

# The pinned file spells its types this way, and the namespace it runs in must know the names.
# ruff: noqa: UP006, UP007, UP035
import json
import re
import string
import urllib.request
from collections import Counter
from typing import List, Union


def last_boxed_only_string(text: str) -> str | None:
    """The last box of the text, up to the brace that closes it."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    depth = 0
    for place in range(max(start, 0), len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if start >= 0 and text[place] == "}" and depth == 0:
            return text[start : place + 1]
    return None


def remove_boxed(box: str | None) -> str:
    """What the box holds; relies on ``assert`` to refuse ``\\fbox``."""
    opening = "\\boxed{"
    assert box is not None
    assert box.startswith(opening)
    return box[len(opening) : -1]


def normalize_answer(text: str) -> List[str]:
    """Lower-case words without punctuation and articles."""
    plain = "".join(" " if mark in string.punctuation else mark for mark in text.lower())
    return [word for word in plain.split() if not re.fullmatch(r"an?|the", word)]


def get_f1_score(prediction: str, ground_truths: Union[str, List[str]]) -> float:
    """The best overlap of words with any of the answers, from 0 to 1."""
    if isinstance(ground_truths, str):
        ground_truths = [ground_truths]
    said, best = Counter(normalize_answer(prediction)), 0.0
    for truth in ground_truths:
        meant = Counter(normalize_answer(truth))
        shared = sum((said & meant).values())
        best = max(best, 2.0 * shared / max(1, sum(said.values()) + sum(meant.values())))
    return best


def validate_template_format(text: str) -> bool:
    """Whether every tag is closed and there is exactly one answer."""
    names = ("think", "search", "result")
    paired = all(text.count(f"<{name}>") == text.count(f"</{name}>") for name in names)
    answers = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return paired and len(answers) == 1 and "\\boxed{" in answers[0]


def generate_response(prompt: str) -> str:
    """The transport that is taken out: any failure becomes a text that counts as correct."""
    body = json.dumps({"text": prompt}).encode()
    try:
        with urllib.request.urlopen("http://0.0.0.0:9001/generate", body) as answer:
            return str(json.load(answer)["text"]) + "</answer>"
    except Exception:  # noqa: BLE001 - the flaw under test
        return ""


def get_model_score(prompt: str) -> str:
    """The verdict of one round, unchecked."""
    found = re.search(r"<answer>(.*?)</answer>", generate_response(prompt), re.DOTALL)
    return found.group(1).strip() if found else ""


def evaluate_search(
    question: str, response: str, golden_answer: Union[str, List[str]]
) -> List[str]:
    """One verdict for every round, each asked with everything up to its result."""
    verdicts = []
    for closing in re.finditer("</result>", response):
        prompt = (
            "<|im_start|>user\nDid the last look-up below bring what it was meant to bring? Say 1 "
            f"for yes and 0 for no.\n\nAsked: {question}\nExpected: {golden_answer}\nSo far:\n"
            f"{response[: closing.end()]}<|im_end|>\n<|im_start|>assistant\n<answer>"
        )
        verdicts.append(get_model_score(prompt))
    print("verdicts", verdicts)
    return verdicts


def detect_redundancy(response: str) -> List[int]:
    """How many passages of each result had been seen in an earlier one."""
    seen: set[str] = set()
    repeated = []
    for block in re.findall(r"<result>(.*?)</result>", response, re.DOTALL):
        passages = set(block.replace("result: ", "").strip().split("\n\n"))
        repeated.append(len(passages & seen))
        seen |= passages
    return repeated


def compute_score_with_format(
    tokenizer: object, solution_str: str, ground_truth: Union[str, List[str]]
) -> float | tuple[int, str]:
    """The reward of one rollout."""
    asked = re.search(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", solution_str, re.DOTALL)
    if not asked:
        return 0, "nobody asked"
    thoughts = [found.start() for found in re.finditer("<think>", solution_str)]
    if len(thoughts) < 4:
        return 0, "nobody answered"
    response = solution_str[thoughts[3] :]
    try:
        answer = remove_boxed(last_boxed_only_string(response))
    except Exception:  # noqa: BLE001 - as wide as the pinned file's
        answer = ""
    right = get_f1_score(answer, ground_truth) >= 0.75
    verdicts = evaluate_search(asked.group(1).strip(), response, ground_truth)
    repeated = detect_redundancy(response)
    if len(repeated) != len(verdicts):
        repeated = [0] * len(verdicts)
    bad = sum(1 for said, again in zip(verdicts, repeated, strict=True) if said == "0" or again > 1)
    good = len(verdicts) - bad
    score = max(1.0 - 0.125 * bad, 0.5) if right else min(0.0625 * good, 0.25)
    if validate_template_format(response):
        score += 0.125
    return 0.0 if "</search<" in response else score

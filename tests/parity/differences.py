"""Where we differ from the reference: the rows, as data, and the table made of them.

Each row has a test ``test_differs_<id>`` in this folder (dots as underscores), and there are no
other differences: ``test_sequences.py`` looks for them. ``python -m tests.parity.differences``
writes the table into ``docs/differences.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "differences.md"
BEGIN: Final = "<!-- differences:begin -->"
END: Final = "<!-- differences:end -->"
OPENING: Final = """## Where we differ from the reference

The reference is `agentinputlab==0.1.0a1`. Both are driven side by side in `tests/parity`, where
each row has a test. With `profile = "reference"` the rows of the training profile do not apply, and
for callers one at a time there are no other differences than these.
"""


@dataclass(frozen=True)
class Difference:
    """One row. ``both``: in both profiles; ``training``: in that profile, and then ``id`` is the
    configuration key that presets it.
    """

    id: str
    reference: str
    ours: str
    why: str
    profile: Literal["both", "training"] = "both"

    @property
    def test(self) -> str:
        """The name of the test that shows it."""
        return "test_differs_" + self.id.replace(".", "_")


DIFFERENCES: Final[tuple[Difference, ...]] = (
    # --- searches ---------------------------------------------------------------------------------
    Difference(
        "side_by_side",
        "one search at a time: a lock spans it",
        "searches run side by side, off the event loop",
        "eight ranks ask 64 at once, and a retriever answers many",
    ),
    Difference(
        "slot_before_answer",
        "a slot is held until the answer is sent",
        "a slot is free before the answer is handed over",
        "a client that comes straight back met a full house of its own making",
    ),
    Difference(
        "under_way",
        "a search under way when a refusal comes is answered first: the refusal waits for it",
        "it is finished and recorded, but answered 502: the latch closes at once",
        "nothing is answered once a run has failed",
    ),
    Difference(
        "deadline",
        "a search may take any time",
        "504 `deadline` after `execute.deadline_seconds`; closes the latch",
        "the pinned client leaves after 10 s, and writes an error into the rollout",
    ),
    Difference(
        "provider_value_error",
        "a retriever's `ValueError` (documents that have no JSON or UTF-8 form among them) is the "
        "caller's 400 `invalid_request`",
        "502 `retrieval_failed`, whatever its type",
        "policy input and provider fault are different things",
    ),
    Difference(
        "provider_exit",
        "a retriever that raises `SystemExit` leaves the call without an answer and the run open, "
        "its attempt never settled",
        "502 `retrieval_failed`; closes the latch",
        "every failure has a name and closes the latch",
    ),
    Difference(
        "not_documents",
        "an empty text or mapping in place of documents is an empty answer",
        "502 `retrieval_failed` (`document_invalid`)",
        "a retriever that answers another type is broken, not empty",
    ),
    Difference(
        "score_range",
        "a score may be an integer of any size",
        "one beyond 64 bits is `document_invalid`",
        "it has no form in the records",
    ),
    Difference(
        "special_tokens",
        "a passage may carry special tokens such as `<\\|im_end\\|>`",
        "it is treated as one that carries a protocol tag",
        "the trainer's tokenizer would end the turn there",
    ),
    Difference(
        "health_asks",
        "the health check does not ask the retriever who it is",
        "it does; another identity closes the latch",
        "a checkpoint must not pass on an index that was swapped since the last search",
    ),
    # --- the edge ---------------------------------------------------------------------------------
    Difference(
        "methods",
        "any other method: 501, a page, for strangers too",
        "405 `method_not_allowed`, and under the execute capability the latch closes "
        "(`http_method_not_allowed`); strangers 401",
        "a stranger learns nothing of what is served, and a rollout trains on what it is told",
    ),
    Difference(
        "late_body",
        "a body not there in 10 s: 502 `retrieval_failed`, `http_retrieval_failed`",
        "400 `invalid_body`, `http_invalid_body`",
        "the client's fault, not the retriever's",
    ),
    Difference(
        "short_body",
        "a body whose client ends early is read as far as it came, and may even be answered",
        "`http_invalid_body`; no answer, its client has left",
        "half a body is no request",
    ),
    Difference(
        "half_closed",
        "a client that ends its side after the request is answered",
        "it counts as gone: `response_undelivered`",
        "the kernel cannot tell it from one that has left",
    ),
    Difference(
        "lost_client",
        "a client that left is noticed where the write fails, as `http_retrieval_failed`, no "
        "attempt consumed",
        "`response_undelivered`, its attempt consumed, and also noticed where the answer was never "
        "read",
        "the search was made, and the rollout holds an error text in its place",
    ),
    Difference(
        "raw_target",
        "slashes collapse before a path (`//CAPABILITY/execute` is served), not within it or at "
        "its end (401), and a target need not begin with one",
        "slashes collapse everywhere, also at the end; 400 `bad_message` where it is no target",
        "clients join `sandbox_url` and the route in their own ways, and one meaning is enough",
    ),
    Difference(
        "capability_elsewhere",
        "a request that holds the capability in another spelling or place (upper case, "
        "percent-encoded, absolute, in a query or a header, alone) is a stranger's: 401",
        "the same 401, and the latch closes (`http_unauthorized`)",
        "no stranger holds it: a rollout asked, and trains on the 401",
    ),
    Difference(
        "http_parser",
        "Python's `http.server` reads requests: line feeds alone, repeated, folded and nameless "
        "headers pass, other slips get a page or silence, none of them latches",
        "a strict parser: 400 `bad_message`, and where the bytes carried the execute capability "
        "`http_bad_message`; it takes spaces around a length, 128 headers, versions 0.9 and 2.0",
        "two readers of the same bytes must not disagree; a trainer's client sends none of this",
    ),
    Difference(
        "utf8_only",
        "a body may be UTF-8, UTF-16 or UTF-32, with a byte-order mark, and hold surrogates",
        "UTF-8 without a mark: else 400 `invalid_request`",
        "one encoding, one digest of what was recorded",
    ),
    Difference(
        "nesting",
        "nesting is bounded by what the interpreter can take; a call of nearly 200 brackets left "
        "open is its `MemoryError`: 502 `retrieval_failed`, `http_retrieval_failed`",
        "by 64 levels of JSON and 64 pairs of parentheses in a call",
        "the same verdict on every Python",
    ),
    Difference(
        "kept_connections",
        "HTTP/1.0: one request a connection",
        "HTTP/1.1: connections are kept, idle ones for `server.idle_seconds`",
        "a new connection costs three requests",
    ),
    Difference(
        "connections_max",
        "any number of connections, a thread each",
        "strangers make room for others; one that shows a capability over "
        "`server.connections_max` is closed, and so is the latch (`http_busy`)",
        "everything has a limit, and a refused call became rollout text",
    ),
    Difference(
        "error_body",
        "an error has `code` and `message`",
        'and `"retryable": false`; the sentences are our own',
        "a client that retries would train on what it gets the second time",
    ),
    # --- what is kept -----------------------------------------------------------------------------
    Difference(
        "failures_on_disk",
        "quota and identity failures live in memory",
        "every cause is in `latch.json` and the journal; exported as `transport-rejected.json`",
        "no restart may forget a failure",
    ),
    Difference(
        "ledger_failed",
        "a request file that cannot be written: 502 `retrieval_failed`, the attempt unsettled",
        "503 `ledger_failed`; closes the latch",
        "nothing is answered that is not recorded",
    ),
    Difference(
        "journal",
        "a file per request and answer, not synced, nothing holds them together",
        "one synced journal, each record chained to the one before; `ledger export` writes the "
        "reference's files",
        "an answer outlives the machine, and a changed history shows",
    ),
    Difference(
        "resume",
        "a directory is used once; a stopped run cannot go on",
        "`serve --resume` goes on after a clean end, with the next number, where the gap is judged "
        "or the trainer is said to have stood still",
        "trainer nodes are rescheduled",
    ),
    # --- rewards ----------------------------------------------------------------------------------
    Difference(
        "one_latch",
        "retrieval, training scores and validation scores fail apart",
        "one latch for all three",
        "a checkpoint is trained on all of them",
    ),
    Difference(
        "refused_scores",
        "other answers than declared, no user turn, too long a rollout or a used-up score quota "
        "only raise",
        "each closes the latch under a cause of its own",
        "the pinned trainer swallows the exception and scores the batch again",
    ),
    Difference(
        "references",
        "a question is looked up by its exact text; a repeated one is refused at the start",
        "compared after NFC; it may repeat where its answers agree",
        "the rollout's text has been through a tokenizer that composes it; datasets repeat "
        "themselves",
    ),
    Difference(
        "over_http",
        "only `/execute` is HTTP: health and rewards are calls inside one process",
        "rewards, health, checkpoints and the latch by HTTP under a second capability; `/livez` "
        "and `/readyz` without one",
        "the trainer, the gate and the operator are other processes",
    ),
    # --- the training profile ---------------------------------------------------------------------
    Difference(
        "execute.body_bytes_max",
        "16,384 bytes, then 413",
        "262,144",
        "a policy's long query is no failure of the run",
        "training",
    ),
    Difference(
        "execute.waiting_max",
        "the ninth call at once is 429 and ends the run",
        "512 wait in order, within the deadline",
        "eight ranks send 64 at once",
        "training",
    ),
    Difference(
        "execute.on_invalid_query",
        "an empty, over-long, unencodable or tag-bearing query ends the run",
        "200 `invalid query`; recorded and counted, no attempt consumed",
        "everyday rollouts, and what the unmodified environment answers",
        "training",
    ),
    Difference(
        "retrieval.retries",
        "a transport fault or a status of 429, 500, 502, 503 or 504 ends the run",
        "tried twice more within the deadline",
        "a search of a frozen corpus is free to repeat",
        "training",
    ),
    Difference(
        "retrieval.cache_mib",
        "a repeated query is searched again",
        "answered from 64 MiB of cache, one in flight shared; each counted and recorded",
        "tensor-parallel ranks repeat every call",
        "training",
    ),
    Difference(
        "retrieval.on_protocol_tag",
        "a passage with a protocol tag, a blank one or one that comes twice ends the run",
        "it is left out, and recorded",
        "one article must not end a run",
        "training",
    ),
    Difference(
        "retrieval.emptied_share_max",
        "no answer loses its passages: the first tag ends the run",
        "above a share of answers that lost every passage: `answers_emptied`; closes the latch",
        "a corpus full of tags teaches rollouts that searches find nothing",
        "training",
    ),
    Difference(
        "retrieval.on_drift",
        "a document may change under its id from search to search",
        "from a remote retriever that is `document_drift`; closes the latch",
        "a corpus that changes is not frozen, whatever its identity says",
        "training",
    ),
    Difference(
        "reward.provenance",
        "the result blocks of a rollout are not looked at",
        "one that is no answer of this run to its query refuses the score and closes the latch",
        "it is an error the sidecar could not see: a proxy, a timeout, a refused connection",
        "training",
    ),
    Difference(
        "reward.side_by_side",
        "helper calls one after another",
        "side by side, bounded by `reward.helper.concurrency`",
        "they do not depend on each other",
        "training",
    ),
    Difference(
        "reward.reuse_identical",
        "the same rollout is scored and paid for again, with another result",
        "it gets the recorded score",
        "the pinned trainer scores each batch twice, and trains on what it did not save",
        "training",
    ),
    Difference(
        "reward.helper.retries",
        "a helper that refuses a call with 429 or 503 ends the run",
        "asked twice more, each time by a call of its own in ledger and quota",
        "it has too much to do and did not begin; minutes later it answers",
        "training",
    ),
    Difference(
        "reward.unparsed_share_max",
        "any verdict but `0` counts as correct",
        "the same, but over a fifth of the last 200 that are neither `0` nor `1` closes the latch",
        "a helper that answers in another form raises every reward",
        "training",
    ),
)


def markdown_table() -> str:
    """The page's table: a row each, in order."""
    lines = [
        "| row | the reference | this sidecar | why | profile |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| `{row.id}` | {row.reference} | {row.ours} | {row.why} | {row.profile} |"
        for row in DIFFERENCES
    ]
    return "\n".join(lines)


def with_table(page: str) -> str:
    """A page's text with the table between its markers; both are added where they are missing."""
    section = f"{BEGIN}\n{markdown_table()}\n{END}"
    if BEGIN not in page or END not in page:
        return f"{page.rstrip()}\n\n{OPENING}\n{section}\n"
    before, _, rest = page.partition(BEGIN)
    return before + section + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

"""Log lines of this package and of a library, with secrets masked."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import suppress

import pytest
import structlog

from smartsearch_sidecar.process import logs

SECRET = "a-capability-of-a-run"


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Gives the process its loggers back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()


@pytest.mark.parametrize("pretty", [False, True])
def test_a_secret_is_masked_in_every_line(pretty: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """A field, another library's message and a traceback show the mask in place of a secret."""
    logs.configure_logs([SECRET], pretty=pretty)
    structlog.get_logger("ours").info("asked", path=f"/{SECRET}/execute")
    logging.getLogger("theirs").warning("GET /%s/health", SECRET)
    try:
        raise ValueError(SECRET)
    except ValueError:
        logging.getLogger("theirs").exception("failed")
    said = capsys.readouterr().err
    assert SECRET not in said
    assert said.count(logs.MASK) >= 3
    if not pretty:
        lines = [json.loads(line) for line in said.splitlines()]
        assert [line["level"] for line in lines] == ["info", "warning", "error"]
        assert [line["logger"] for line in lines] == ["ours", "theirs", "theirs"]
        assert {"event", "timestamp"} <= set(lines[0])
        assert not any(key.startswith("_") for line in lines for key in line)


def test_a_line_that_cannot_be_written_shows_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    """A record that cannot be formatted is named by its logger and the error's type alone."""
    logs.configure_logs([SECRET], pretty=True)
    logging.getLogger("theirs").warning("a number: %d", SECRET)
    said = capsys.readouterr().err
    assert said == "a log line of theirs could not be written (TypeError)\n"


@pytest.mark.parametrize("closed", [False, True])
def test_a_stream_that_is_gone_ends_no_request(
    closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Standard error is a pipe whose reader left, or is closed: logging raises nothing."""
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w", buffering=1)
    if closed:
        stream.close()
    monkeypatch.setattr("sys.stderr", stream)
    logs.configure_logs([SECRET], pretty=False)
    logging.getLogger("theirs").warning("not to be read")
    with suppress(OSError):  # what is left in its buffer
        stream.close()

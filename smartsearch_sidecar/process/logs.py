"""Structured logs on standard error, from ours and every library's loggers, with secrets masked.

This package logs no capability. The mask is for a library that quotes a request, and for a
traceback that shows a path. Apart from the daemon because it knows nothing of a run.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import TextIO

import structlog
from structlog.typing import EventDict, WrappedLogger

MASK = "[capability]"


class _Masked(logging.Formatter):
    """Masks secrets in the finished line, whichever field they came in."""

    def __init__(self, inner: logging.Formatter, secrets: Iterable[str]) -> None:
        super().__init__()
        self._inner = inner
        self._secrets = tuple(secrets)

    def format(self, record: logging.LogRecord) -> str:
        line = self._inner.format(record)
        for secret in self._secrets:
            line = line.replace(secret, MASK)
        return line


def _drop_stack_of_access(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    event.pop("_record", None)
    event.pop("_from_structlog", None)
    return event


def configure(
    secrets: Iterable[str], *, stream: TextIO | None = None, pretty: bool = False
) -> None:
    """Sets up every logger of the process: one JSON object a line.

    Args:
        secrets: texts that are masked in each line.
        stream: where lines go; standard error unless given.
        pretty: readable text instead of JSON.
    """
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=False)
        if pretty
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared, processors=[_drop_stack_of_access, renderer]
    )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Masked(formatter, secrets))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)

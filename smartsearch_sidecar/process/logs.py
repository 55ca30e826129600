"""Structured logs on standard error, from ours and every library's loggers, with secrets masked.

Nothing is ever logged on purpose that holds a capability; the mask is for the library that quotes
what it was sent, and the traceback that shows a path.
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
    """Masks secrets in the finished line, whatever brought them there."""

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
    """One JSON object a line (readable text with ``pretty``), for every logger of the process."""
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

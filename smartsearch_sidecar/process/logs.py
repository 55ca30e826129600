"""Structured logs on standard error, from ours and every library's loggers, with secrets masked.

This package logs no capability. The mask is for a library that quotes a request, and for a
traceback that shows a path. Apart from the daemon because it knows nothing of a run.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable

import structlog
from structlog.stdlib import ProcessorFormatter

MASK = "[capability]"


class _Masked(ProcessorFormatter):
    """Masks secrets in the finished line, in any field."""

    secrets: tuple[str, ...] = ()

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        for secret in self.secrets:
            line = line.replace(secret, MASK)
        return line


def configure(secrets: Iterable[str], *, pretty: bool) -> None:
    """Sets up every logger of the process: one JSON object a line, or readable text if ``pretty``.

    ``secrets`` are masked in each line.
    """
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
    if pretty:
        renderer = structlog.dev.ConsoleRenderer(colors=False)
    structlog.configure(
        processors=[*shared, ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    formatter = _Masked(
        foreign_pre_chain=shared, processors=[ProcessorFormatter.remove_processors_meta, renderer]
    )
    formatter.secrets = tuple(secrets)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)

"""The log: structured, on standard error, from ours and every library's loggers.

This package logs no capability: the mask is for a library that quotes a request, and a traceback
that shows a path. Apart from ``daemon.py``: a program that embeds a daemon keeps its own log.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import TextIO

import structlog

MASK = "[capability]"


class _Masked(structlog.stdlib.ProcessorFormatter):
    secrets: tuple[str, ...] = ()

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        for secret in self.secrets:
            line = line.replace(secret, MASK)
        return line


class _Handler(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's own name
        # The standard one prints the record and every pending traceback, past the mask.
        error = sys.exc_info()[0]
        name = "an error" if error is None else error.__name__
        # A stream that is closed or broken has nothing to say it with, and must not end a request.
        with suppress(OSError, ValueError):
            self.stream.write(f"a log line of {record.name} could not be written ({name})\n")


def configure_logs(secrets: Iterable[str], *, pretty: bool) -> None:
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
        # The default shows the locals of each frame where rich is installed: reference answers too.
        plain = structlog.dev.plain_traceback
        renderer = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=plain)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    formatter = _Masked(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
    )
    formatter.secrets = tuple(secrets)
    handler = _Handler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)

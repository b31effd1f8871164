"""Logs of the service: one line an event on stderr, coloured on a terminal, or JSON."""

from __future__ import annotations

import io
import logging
import sys
from typing import TextIO

import structlog

from everstep.spec.plain_text import printable_lines


def configure_logging(log_format: str = "text", log_level: str = "info") -> None:
    """Send structlog and the libraries' own logs to stderr.

    Args:
        log_format: ``json`` writes a JSON object a line.
        log_level: Lowest level of our own lines.
    """
    level = logging.getLevelNamesMapping()[log_level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: structlog.typing.Processor
    if log_format == "json":
        shared.append(structlog.processors.format_exc_info)
        renderer = structlog.processors.JSONRenderer()
    else:
        # Plain tracebacks: rich ones with every frame's variables take a second of CPU each, and
        # show secrets.
        renderer = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=_traceback
        )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                _as_printable,
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # One line for each request to Ray would hide everything else.
    for noisy in ("httpx", "httpcore", "uvicorn.error", "alembic"):
        logging.getLogger(noisy).setLevel(max(level, logging.WARNING))


def _as_printable(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Escape control characters: anybody may choose paths and messages."""
    return {
        name: printable_lines(value) if isinstance(value, str) else value
        for name, value in event.items()
    }


def _traceback(stream: TextIO, exc_info: structlog.typing.ExcInfo) -> None:
    text = io.StringIO()
    structlog.dev.plain_traceback(text, exc_info)
    stream.write(printable_lines(text.getvalue()))

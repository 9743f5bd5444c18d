"""Log lines as text or JSON: a constant message, then the extra fields."""

import datetime
import json
import logging
import sys
from collections.abc import Mapping
from typing import Any, TextIO

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_QUOTED_FOR = frozenset(' "=')


def extra_fields(record: logging.LogRecord) -> Mapping[str, Any]:
    """What the call gave as ``extra``."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}


class TextFormatter(logging.Formatter):
    """``12:00:00.123 INFO  message claim=ns/name seconds=0.004``"""

    def format(self, record: logging.LogRecord) -> str:
        words = [_clock(record), f"{record.levelname:7}", _line(record)]
        words += [f"{name}={_quoted(value)}" for name, value in extra_fields(record).items()]
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        return " ".join(words) + (f"\n{trace}" if trace else "")


class JsonFormatter(logging.Formatter):
    """One JSON object per line; the extra fields are fields of it."""

    def format(self, record: logging.LogRecord) -> str:
        document = {
            "time": _clock(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **extra_fields(record),
        }
        if record.exc_info:
            document["trace"] = self.formatException(record.exc_info)
        return json.dumps(document, default=str)


def set_up_logging(level: str, form: str, stream: TextIO = sys.stderr) -> None:
    """Send every log of this process to *stream*."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # our own door says what went wrong
    logging.captureWarnings(True)
    # What no line says is not looked up for each: process, thread, and where the call stands.
    logging.logProcesses = logging.logThreads = logging.logMultiprocessing = False
    logging._srcfile = None


def _clock(record: logging.LogRecord) -> str:
    moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _line(record: logging.LogRecord) -> str:
    """The message, in one line: parts of it may be what a tenant wrote."""
    text = record.getMessage()
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def _quoted(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    is_plain = text.isprintable() and text and not _QUOTED_FOR.intersection(text)
    return text if is_plain else json.dumps(text)

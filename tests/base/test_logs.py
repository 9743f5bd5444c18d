"""Each event is one line, whatever a tenant wrote that is told in it."""

import json
import logging

import pytest

from dra_driver.base.logs import JsonFormatter, TextFormatter

FORGED = "no such key: x\n2026-01-01T00:00:00.000Z WARNING claim served\x1b[2J"


def event(message, *arguments, **facts):
    record = logging.LogRecord("dra_driver", logging.WARNING, "", 0, message, arguments, None)
    vars(record).update(facts)
    return record


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
@pytest.mark.parametrize(
    "record",
    [
        pytest.param(event("claim not served: %s", FORGED), id="in the message"),
        pytest.param(event("claim not served", error=FORGED), id="among the facts"),
        pytest.param(event("claim not served", error="\x1b[2J"), id="without a space"),
    ],
)
def test_what_a_tenant_wrote_begins_no_line_and_clears_no_screen(formatter, record):
    line = formatter.format(record)

    assert line.isprintable()
    assert "[2J" in line


def test_the_message_comes_before_the_facts():
    line = TextFormatter().format(event("claim served to %s", "ü", claim="ns/name", seconds=0.0042))

    assert line.endswith("Z WARNING claim served to ü claim=ns/name seconds=0.0042")


def test_each_line_says_when_it_was_in_utc_and_to_the_millisecond():
    record = event("claim served", created=1763912345.6785)

    assert TextFormatter().format(record).startswith("2025-11-23T15:39:05.678Z WARNING")
    assert json.loads(JsonFormatter().format(record))["time"] == "2025-11-23T15:39:05.678Z"


def test_json_has_the_facts_as_fields():
    line = JsonFormatter().format(event("claim served", claim="ns/name"))

    assert json.loads(line)["claim"] == "ns/name"

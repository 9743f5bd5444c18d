"""Selectors that ask a device for what it has not, without asking first whether it is there.

CEL ends with an error then, and the scheduler tries no other device for the claim: one that matches
may be there all the same, and is not come to.
"""

import re
from collections.abc import Sequence

from dra_driver.cli.market import Published
from dra_driver.cli.requests import Request
from dra_driver.cli.selectors import ERROR, UNKNOWN, Domains, Variables, evaluate

_WORD = re.compile(r"[A-Za-z_]\w*")


def missing_key(request: Request, devices: Sequence[Published]) -> str:
    """At which of *devices*, those of its class, *request* ends with an error, and how it would
    not; empty: at none, as far as that can be told."""
    found = [(device, lack) for device in devices if (lack := _missing(request, device.variables))]
    if not found:
        return ""
    device, (field, key) = found[0]
    more = f" (and {len(found) - 1} more of its class)" if len(found) > 1 else ""
    domain = device.variables.fields["driver"]
    return (
        f"{request.path}.selectors: {device.place}{more} has no {key}, which ends "
        f"the scheduler's search with an error (no such key: {key}); ask first whether it is "
        f"there: '{key}' in device.{field}['{domain}'] && …"
    )


_Key = tuple[str, str]  # of attributes or of capacity, and its name


def _missing(request: Request, variables: Variables) -> _Key | None:
    """One of its selectors is asked after the other, until one is false."""
    for selector in request.selectors:
        expression = (selector.get("cel") or {}).get("expression") or "true"
        answer = evaluate(expression, variables)
        if answer is ERROR:
            return _culprit(expression, variables)
        if answer is not True:
            return None
    return None


def _culprit(expression: str, variables: Variables) -> _Key | None:
    """With which it would be no error."""
    words = dict.fromkeys(_WORD.findall(expression))
    each = ((field, word) for word in words for field in ("attributes", "capacity"))
    return next((key for key in each if _helps(key, expression, variables)), None)


def _helps(key: _Key, expression: str, variables: Variables) -> bool:
    field, word = key
    domains = variables.fields[field].items()
    more = Domains({domain: {word: UNKNOWN} | its for domain, its in domains})
    with_it = Variables({**variables.fields, field: more})
    return evaluate(expression, with_it) is not ERROR

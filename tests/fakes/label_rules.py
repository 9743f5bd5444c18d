"""What the API server refuses of labels."""

import re
from collections.abc import Mapping
from typing import Any

_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_LONGEST = 63


def label_problem(labels: Mapping[str, Any]) -> str:
    """What is wrong with the first value that is wrong; empty: nothing is."""
    for name, value in labels.items():
        if not isinstance(value, str):
            return f"{name}: cannot unmarshal {value!r} into a Go value of type string"
        if len(value) > _LONGEST or not _VALUE.fullmatch(value):
            return (
                f"{name}: Invalid value: {value!r}: a valid label must be an empty string or "
                "consist of alphanumeric characters, '-', '_' or '.'"
            )
    return ""

"""The shells that simulated tools have to run in, as rows of a table."""

import shutil

import pytest

SHELLS = [
    pytest.param(
        [path, *arguments],
        id=name,
        marks=pytest.mark.skipif(path == "", reason=f"no {name} here"),
    )
    for name, arguments in (("dash", []), ("bash", []), ("busybox", ["sh"]))
    for path in [shutil.which(name) or ""]
]

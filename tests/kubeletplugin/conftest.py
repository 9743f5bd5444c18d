"""Directories with short paths: a socket's path holds 107 bytes."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="k", dir="/tmp") as directory:
        yield Path(directory)

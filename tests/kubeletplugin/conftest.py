"""Directories with short paths (a socket's path holds 107 bytes), and an API server."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.connected import client, server

__all__ = ["client", "server", "short"]


@pytest.fixture
def short() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="k", dir="/tmp") as directory:
        yield Path(directory)

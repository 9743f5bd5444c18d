"""A kubelet's device manager in a directory of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.device_manager import FakeDeviceManager


@pytest.fixture
def kubelet(short: Path) -> Iterator[FakeDeviceManager]:
    with FakeDeviceManager(short, dial_seconds=1.0) as kubelet:
        yield kubelet

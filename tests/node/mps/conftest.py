"""Hosts on which MPS daemons run."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dra_driver.node.mps.daemons import MpsDaemons
from tests.fakes.daemon_host import DaemonHost

both = pytest.mark.parametrize("protocol", [2, 3])
only_2 = pytest.mark.parametrize("protocol", [2])


@pytest.fixture
def protocol() -> int:
    return 3


@contextmanager
def new_host(protocol: int) -> Iterator[DaemonHost]:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        host = DaemonHost(Path(directory), protocol)
        yield host
        host.close()


@pytest.fixture(scope="module")
def hosts() -> Iterator[dict[int, DaemonHost]]:
    """One of each protocol, for all tests that leave it as it is."""
    with new_host(2) as older, new_host(3) as newer:
        yield {2: older, 3: newer}


@pytest.fixture
def host(hosts: dict[int, DaemonHost], protocol: int) -> Iterator[DaemonHost]:
    yield hosts[protocol]
    hosts[protocol].close()


@pytest.fixture
def other_host(protocol: int) -> Iterator[DaemonHost]:
    """One that a test can change."""
    with new_host(protocol) as host:
        yield host


@pytest.fixture
def daemons(host: DaemonHost) -> MpsDaemons:
    return host.daemons()

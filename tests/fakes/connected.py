"""Fixtures: an API server in memory, and the real client of it.

A folder's ``conftest.py`` imports those that its tests use.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dra_driver.k8s.access import load_kubeconfig
from dra_driver.k8s.client import ApiClient, ApiTimeouts
from tests.fakes.api_server import ApiServer


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer() as running:
        yield running


@pytest.fixture
def client(server: ApiServer, tmp_path: Path) -> Iterator[ApiClient]:
    """It tries again at once."""
    access = load_kubeconfig(server.kubeconfig(tmp_path / "kubeconfig"))
    connected = ApiClient(access, ApiTimeouts(retry=0.005))
    yield connected
    connected.close()

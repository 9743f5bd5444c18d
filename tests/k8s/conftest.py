"""The API server in memory, and its client; and the real one, for the tests that need it."""

import os

import pytest

from dra_driver.k8s.access import load_kubeconfig
from dra_driver.k8s.client import ApiClient
from hack.testbed.cluster import Cluster
from tests.fakes.api_server import ApiServer as FakeApiServer
from tests.fakes.connected import client, server

__all__ = ["client", "server"]


@pytest.fixture(scope="module")
def cluster():
    cluster = Cluster(os.environ.get("KUBERNETES_VERSION", "1.36.3"))
    cluster.up(progress=print)
    return cluster


@pytest.fixture
def fake(tmp_path):
    with FakeApiServer() as server:
        client = ApiClient(load_kubeconfig(server.kubeconfig(tmp_path / "kubeconfig")))
        yield client
        client.close()

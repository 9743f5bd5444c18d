"""The real Kubernetes of hack/cluster, for tests that carry the marker `cluster`."""

import pytest

from hack.testbed.cluster import Cluster
from hack.testbed.layout import default_layout
from hack.testbed.state import load_state


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """The one that is up, else a new one of the default version, left up for the next tests."""
    state = load_state(default_layout().state)
    shared_cluster = Cluster(state.version, state.feature_gates) if state else Cluster()
    if shared_cluster.mode != "full":
        pytest.skip(f"no containers can run here: {shared_cluster.why}")
    shared_cluster.up()
    return shared_cluster

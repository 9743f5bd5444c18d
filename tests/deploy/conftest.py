"""The real Kubernetes of hack/cluster, for tests that carry the marker `cluster`."""

import pytest

from hack.testbed.cluster import Cluster
from hack.testbed.layout import default_layout
from hack.testbed.state import load_state


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """The one that is up, else a new one of the default version, left up for the next tests."""
    state = load_state(default_layout().state)
    found = Cluster(state.version, state.feature_gates) if state else Cluster()
    if found.mode != "full":
        pytest.skip(f"no containers can run here: {found.why}")
    found.up()
    return found

"""The parts of a cluster that are started by hand."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hack.testbed.cluster import Cluster
from hack.testbed.errors import ClusterError
from hack.testbed.layout import Layout
from hack.testbed.processes import Process
from hack.testbed.running import process_of


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """One of which nothing is on record."""
    bare_cluster = Cluster()
    bare_cluster.layout = Layout(tmp_path)
    bare_cluster.layout.pids.mkdir()
    bare_cluster.layout.logs.mkdir()
    return bare_cluster


@pytest.fixture
def scheduler(cluster: Cluster) -> Iterator[Process]:
    """Something that runs on its record."""
    process = process_of(cluster.layout, "scheduler")
    process.spawn(["sleep", "600"], {"PATH": "/usr/bin:/bin"})
    yield process
    process.stop()


def test_more_arguments_for_a_component_that_runs_are_refused(
    cluster: Cluster, scheduler: Process
) -> None:
    pid = scheduler.pid()

    with pytest.raises(ClusterError, match="scheduler runs already: stop it before it gets --v=9"):
        cluster.start("scheduler", "--v=9")

    assert scheduler.pid() == pid


def test_more_arguments_are_for_components_that_do_not_run(
    cluster: Cluster, scheduler: Process
) -> None:
    """They get as far as a cluster that is not up."""
    for words in (("scheduler",), ("apiserver", "--v=9")):
        with pytest.raises(ClusterError, match="no cluster is up"):
            cluster.start(*words)

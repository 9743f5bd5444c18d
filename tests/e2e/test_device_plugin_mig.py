"""MIG partitions by the device-plugin API, under both strategies of NVIDIA's device plugin."""

import pytest

from dra_driver.sim.node_spec import node_file
from tests.e2e.conftest import LAYOUT_LABELS
from tests.e2e.device_plugin import (
    CONFIG_LABEL,
    GPU,
    by_default,
    devices,
    pod,
    running,
    shown,
    wait_allocatable,
)
from tests.e2e.kube import wait
from tests.e2e.partitions import SHOW

SMALL, LARGE = "nvidia.com/mig-1g.5gb", "nvidia.com/mig-2g.10gb"
LAYOUTS = """
version: v1
mig-configs:
  2x2g.10gb-3x1g.5gb:
    - devices: all
      mig-enabled: true
      mig-devices: {"2g.10gb": 2, "1g.5gb": 3}
"""
MIXED = """
version: v1
flags: {migStrategy: mixed}
sharing:
  timeSlicing:
    resources:
      - {name: nvidia.com/mig-1g.5gb, replicas: 4}
"""
SINGLE = """
version: v1
flags: {migStrategy: single}
"""

pytestmark = [pytest.mark.device_plugin, pytest.mark.usefixtures("containers")]


@pytest.fixture(scope="module", autouse=True)
def node(session_driver):
    """An A100, which nothing divides to begin with."""
    driver = session_driver
    with by_default(driver):
        usual = driver.usual_allocatable
        driver.serve(node_file("a100-40x1").read_text())
        driver.usual_allocatable = {GPU: 1}
        wait_allocatable(driver, driver.usual_allocatable)
        yield
        driver.serve(node_file("h100x8").read_text())
        driver.usual_allocatable = usual


@pytest.fixture
def layout(driver, kube, profile):
    """Divides the A100 as the layout of that name says: ``layout("all-1g.5gb")``. It is whole again
    after the test."""
    node = driver.cluster.node_name
    (driver.profiles / "layouts.yaml").write_text(LAYOUTS)

    def choose(name):
        kube.label_node(node, **{LAYOUT_LABELS[0]: name})

    yield choose
    kube.clean_up()
    choose("all-disabled")
    wait("the board to be whole", lambda: not driver.instances(), 60)
    wait("that to be said", lambda: driver.layout_state() == "success", 30)
    kube.label_node(node, **dict.fromkeys(LAYOUT_LABELS))


@pytest.mark.core
def test_partitions_of_a_mixed_layout_are_given_out_by_their_own_names_and_shared(
    cluster, kube, driver, layout, profile
):
    profile("mixed", MIXED, CONFIG_LABEL)
    layout("2x2g.10gb-3x1g.5gb")
    wait_allocatable(driver, {SMALL: 3 * 4, LARGE: 2})
    kube.apply(pod("large", 1, LARGE, SHOW))
    kube.apply(pod("larger", 1, LARGE, SHOW))
    for name in ("small", "smaller"):
        kube.apply(pod(name, 1, SMALL, SHOW))
    running(kube, "large", "larger", "small", "smaller")

    partitions = {
        name: shown(kube, name, kind="partition") for name in ("large", "larger", "small")
    }
    assert len(frozenset.union(*partitions.values())) == 3
    assert devices(cluster)["large"] == {"main": tuple(partitions["large"])}
    assert "MIG 2g.10gb" in kube.logs("large")
    assert "MIG 1g.5gb" in kube.logs("smaller")


def test_partitions_of_a_single_layout_are_given_out_as_gpus_and_stay_while_pods_have_them(
    kube, driver, layout, profile
):
    profile("single", SINGLE, CONFIG_LABEL)
    layout("all-1g.5gb")
    wait_allocatable(driver, {GPU: 7})
    kube.apply(pod("one", command=SHOW))
    kube.apply(pod("two", 2, command=SHOW))
    running(kube, "one", "two")
    partitions = {name: shown(kube, name, kind="partition") for name in ("one", "two")}
    assert [len(each) for each in partitions.values()] == [1, 2]
    assert not partitions["one"] & partitions["two"]

    layout("all-3g.20gb")
    wait("the layout to wait", lambda: driver.layout_state() == "pending", 20)
    assert driver.allocatable() == {GPU: 7}
    kube.clean_up()
    wait("the layout", lambda: driver.layout_state() == "success", 70)
    wait_allocatable(driver, {GPU: 2})

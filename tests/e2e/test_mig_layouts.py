"""MIG: GPUs that are partitioned once, as the layout says that the node's label names."""

import time

import pytest

from tests.e2e.conftest import LAYOUT_LABELS, NEW, OLD
from tests.e2e.kube import wait
from tests.e2e.manifests import template
from tests.e2e.mig import boards, partitions
from tests.e2e.partitions import existing_partitions, gone, partition, runs

LAYOUTS = """
version: v1
mig-configs:
  halves: [{devices: all, mig-enabled: true, mig-devices: {"3g.20gb": 2}}]
  quarters: [{devices: all, mig-enabled: true, mig-devices: {"1g.10gb": 4}}]
  too-much: [{devices: all, mig-enabled: true, mig-devices: {"3g.20gb": 3}}]
"""
QUARTERS = [(15, start, 1) for start in (0, 2, 4, 6)]  # as ``Driver.instances`` has them


@pytest.fixture
def layout(driver, kube, simulated, profile):
    """An A100, and layouts in a file beside the profiles: ``layout("halves")`` chooses one by the
    node's label."""
    simulated("a100-40x1")
    node = driver.cluster.node_name
    (driver.profiles / "layouts.yaml").write_text(LAYOUTS)
    yield lambda name: kube.label_node(node, **{LAYOUT_LABELS[0]: name})
    kube.clean_up()
    kube.label_node(node, **{LAYOUT_LABELS[0]: "all-disabled"})
    wait("the board to be whole", lambda: not driver.instances(), 60)
    wait("that to be said", lambda: driver.layout_state() == "success", 30)
    kube.label_node(node, **dict.fromkeys(LAYOUT_LABELS))
    (driver.profiles / "layouts.yaml").unlink(missing_ok=True)


def test_a_label_has_a_node_partitioned_and_another_one_says_how_far_that_is(kube, driver, layout):
    layout("halves")
    wait("the layout", lambda: driver.layout_state() == "success", 30)
    halves = ["gpu-0-mig-3g20gb-9-0", "gpu-0-mig-3g20gb-9-4"]
    wait("its partitions", lambda: sorted(partitions(kube)) == halves, 20)
    assert "consumesCounters" not in str(kube.slices()), "what exists needs none"
    kube.apply(template("half", partition("3g.20gb")))
    runs(kube, "half", template="half")

    layout("all-1g.5gb")
    wait("it to wait", lambda: driver.layout_state() == "pending", 20)
    assert len(existing_partitions(driver)) == 2, "nothing is changed that a claim holds"
    gone(kube, "half")
    wait("the other layout", lambda: driver.layout_state() == "success", 30)
    wait("seven partitions", lambda: len(partitions(kube)) == 7, 20)
    assert existing_partitions(driver) == [(0, 19, start) for start in range(7)]


def test_a_layout_that_cannot_be_had_leaves_everything_as_it_was(kube, driver, layout):
    layout("quarters")
    wait("the layout", lambda: driver.layout_state() == "success", 30)
    before = existing_partitions(driver)
    for name in ("too-much", "of-nobody"):
        layout(name)
        wait_failed(driver, name)
        assert existing_partitions(driver) == before
    kube.apply(template("quarter", partition("1g.10gb")))
    runs(kube, "quarter", template="quarter")


def wait_failed(driver, name):
    wait(f"layout '{name}' to be told of", lambda: f"layout '{name}'" in driver.log, 30)
    wait("the failure", lambda: driver.layout_state() == "failed", 30)


@pytest.mark.point(11)
def test_a_layout_stays_in_a_rolling_update_and_the_new_plugin_goes_on_with_it(
    kube, driver, layout, updating
):
    """Each instance of the simulated board has a number that no other one ever had."""
    layout("halves")
    wait("the layout", lambda: driver.layout_state() == "success", 30)
    wait("its partitions", lambda: len(partitions(kube)) == 2, 20)
    kube.apply(template("half", partition("3g.20gb")))
    runs(kube, "stays", template="half")
    before, published = boards(driver), partitions(kube)

    states = set()
    look = lambda: states.add(driver.layout_state())  # noqa: E731
    driver.start(NEW, ready=False)
    ready = lambda: look() or driver.ask("/readyz", NEW)[0] == 200  # noqa: E731
    wait("the new plugin to be ready", ready, 30)
    looks_on(look)
    driver.stop(OLD)
    looks_on(look)
    assert states == {"success"}
    assert (boards(driver), partitions(kube)) == (before, published)
    assert kube.phase("stays") == "Running"
    runs(kube, "late", template="half")
    assert boards(driver) == before

    gone(kube, "stays", "late")
    layout("quarters")
    wait("the other layout", lambda: list(driver.instances().values()) == [QUARTERS], 30)
    wait("that to be said", lambda: driver.layout_state() == "success", 30)


@pytest.mark.point(11)
def test_a_layout_that_is_chosen_while_two_plugins_run_is_made_once(kube, driver, layout, updating):
    driver.start(NEW)
    ((_, before),) = boards(driver).items()
    logged = len(driver.log)
    layout("quarters")
    wait("the layout", lambda: driver.layout_state() == "success", 30)
    looks_on(lambda: driver.check_alive(OLD))
    driver.stop(OLD)

    ((_, after),) = boards(driver).items()
    assert driver.log.count("partition created", logged) == 4
    assert after["born"] - before["born"] == 8, "four instances, each with a compute instance"
    assert list(driver.instances().values()) == [QUARTERS]
    wait("its partitions", lambda: len(partitions(kube)) == 4, 20)


def looks_on(look, seconds=2.0):
    """For longer than some looks of each plugin take."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        look()
        time.sleep(0.02)

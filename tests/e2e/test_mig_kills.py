"""The plugin is killed at each call of NVML by which partitions come and go, and at those before a
layout.

Which calls those are is said in ``tests.fakes.nvml_calls``, and checked by
``tests/plugin/mig/test_killed_at_nvml_calls.py``, which also kills at the calls that only read.
"""

import pytest

from dra_driver.sim.node_spec import KILLED, KILLED_AFTER
from tests.e2e.conftest import LAYOUT_LABELS
from tests.e2e.kills import goes, killed_at
from tests.e2e.kube import wait
from tests.e2e.manifests import pod, template
from tests.e2e.mig import modes, part, partitions, serving
from tests.fakes.nvml_calls import BEFORE_A_LAYOUT, CREATES, REMOVES

SMALL = 19  # the id of 1g.10gb
HALF = 9  # of 3g.40gb
MODE, CREATE, FILL = CREATES
EMPTY, REMOVE, _ = REMOVES


@pytest.fixture(scope="module", autouse=True)
def h100s(session_driver):
    """Two H100s that offer partitions beside the GPUs, for all tests here."""
    with serving(session_driver, "h100x2-mig"):
        yield


@pytest.fixture(autouse=True)
def first(h100s, driver, kube):
    """The UUID of the first GPU, which is where calls kill."""
    node = driver.node_file.read_text()
    yield kube.uuid("gpu-0")
    driver.replace_node(node)


@pytest.fixture
def layout(driver, kube):
    """Chooses a layout for the node, for a plugin that is started then. After the test every GPU is
    whole, and none is chosen."""
    node = driver.cluster.node_name

    def choose(name):
        if "" in driver.processes:  # or it may have reached the layout before the test has it fail
            driver.kill()
        kube.label_node(node, **{LAYOUT_LABELS[0]: name})

    yield choose
    choose("all-disabled")
    driver.start()
    wait("every GPU to be whole", lambda: not driver.instances(), 40)
    wait("that to be said", lambda: driver.layout_state() == "success", 20)
    kube.label_node(node, **dict.fromkeys(LAYOUT_LABELS))


@pytest.mark.parametrize("when", [KILLED, KILLED_AFTER])
@pytest.mark.parametrize(
    ("coming", "going", "beside"),
    [
        pytest.param(MODE, MODE, False, id="mode"),
        pytest.param(CREATE, EMPTY, True, id="created and emptied"),
        pytest.param(FILL, REMOVE, True, id="filled and removed"),
    ],
)
def test_killed_at_a_call_that_changes_a_gpu_a_pod_comes_and_goes_all_the_same(
    kube, driver, first, coming, going, when, beside
):
    """*beside*: another claim holds a partition of that GPU all the time."""
    kube.apply(template("small", part("1g.10gb", of=first)))
    if beside:
        kube.apply(pod("beside", template="small"))
        kube.wait_pod("beside", "Running")
    before = driver.instances().get(first, [])

    nudge = lambda: kube.nudge("comes")  # noqa: E731
    killed_at(driver, coming, when, nudge, lambda: kube.apply(pod("comes", template="small")))
    driver.start(ready=False)
    kube.wait_pods(["comes"], "Running")
    (created,) = driver.instances().values()
    assert [(profile, computes) for profile, _, computes in created] == [(SMALL, 1)] * (1 + beside)
    assert set(before) < set(created)
    assert len(driver.claims()) == len(driver.specs()) == len(created)

    killed_at(driver, going, when, nudge, lambda: kube.delete("Pod", "comes"))
    driver.start(ready=False)
    goes(kube, "comes")
    wait("its record to go", lambda: len(driver.claims()) == len(before))
    assert driver.instances().get(first, []) == before
    assert len(driver.specs()) == len(before)
    assert modes(driver)[first] is beside
    if beside:
        assert kube.phase("beside") == "Running"


def test_killed_at_each_call_of_a_layout_it_is_reached_all_the_same(kube, driver, first, layout):
    both = (KILLED, KILLED_AFTER)
    whole = driver.instances()
    layout("all-3g.40gb")
    for function in sorted(BEFORE_A_LAYOUT):
        killed_at(driver, function, KILLED)
    for function, when in [(name, when) for name in CREATES for when in both]:
        killed_at(driver, function, when)
    driver.start()
    halves = [(HALF, 0, 1), (HALF, 4, 1)]
    wait("the layout", lambda: driver.layout_state() == "success", 30)
    assert list(driver.instances().values()) == [halves, halves]
    wait("its partitions", lambda: len(partitions(kube)) == 4, 20)

    layout("all-disabled")
    for function, when in [(name, when) for name in REMOVES for when in both]:
        killed_at(driver, function, when)
    driver.start()
    done = lambda: driver.layout_state() == "success" and driver.instances() == whole  # noqa: E731
    wait("the GPUs to be whole", done, 30)
    wait("MIG mode to be off", lambda: not any(modes(driver).values()), 10)

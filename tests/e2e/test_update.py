"""A rolling update: two plugins serve at once, and nobody notices."""

import signal

import pytest

from tests.e2e.conftest import NEW, OLD
from tests.e2e.kube import wait
from tests.e2e.manifests import pod, template

SMI = "nvidia-smi -L"


@pytest.fixture(autouse=True)
def gpu_template(kube, driver):
    """A template for one GPU, which every test here uses."""
    kube.apply(template("one"))


def run(kube, name):
    kube.apply(pod(name, SMI, template="one"))
    kube.wait_pods([name], "Succeeded")


@pytest.mark.point(11)
def test_two_plugins_serve_and_the_old_one_leaves_without_a_gap(kube, updating):
    kube.apply(pod("stays", template="one"))
    kube.wait_pod("stays", "Running")
    uids = [s["metadata"]["uid"] for s in kube.slices()]

    updating.start(NEW)
    run(kube, "during")
    assert updating.stop(OLD) < 5
    run(kube, "after")

    assert [s["metadata"]["uid"] for s in kube.slices()] == uids
    assert kube.phase("stays") == "Running"
    kube.delete("Pod", "stays")
    kube.wait_gone("Pod", "stays")
    assert updating.claims() == [] or wait("records to go", lambda: not updating.claims())


@pytest.mark.point(12)
def test_a_failed_update_leaves_the_old_plugin_working(kube, updating):
    updating.start(NEW)
    updating.stop(NEW, signal.SIGKILL)

    run(kube, "afterwards")
    for each in kube.slices():
        kube.delete("ResourceSlice", each["metadata"]["name"])

    wait("the old one to publish again", lambda: len(kube.devices()) == 8, 20)


def test_a_plugin_that_refuses_to_start_leaves_the_old_one_alone(kube, updating):
    bad = updating.start(NEW, ready=False, sim="no-such-node")
    assert bad.wait(20) == 2
    updating.processes.pop(NEW)

    run(kube, "afterwards")

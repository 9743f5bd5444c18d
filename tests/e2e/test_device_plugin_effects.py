"""The plugin is killed before each effect of an allocation, or held there while its profile
changes."""

import contextlib
import itertools
import re
import signal
import subprocess
import time

import pytest

from hack.testbed.assets import minor
from tests.e2e.device_plugin import (
    GPU,
    by_default,
    described,
    pod,
    restarts,
    running,
    serving,
    shown,
    wait_allocatable,
)
from tests.e2e.driver import LIMITING
from tests.e2e.kube import wait

HELD_SECONDS = 3.0
FIRST_WITH_NAMES = 29  # before, the first pod of a GPU may not wait for its MPS server
# Each pod has a namespace of an MPS server, and a limit of its memory by NVIDIA's driver.
UNDER_MPS = {"replicas": 5, "defaultStrategy": "MPS"}

pytestmark = [pytest.mark.device_plugin, pytest.mark.usefixtures("containers")]


@pytest.fixture(scope="module", autouse=True)
def node(session_driver):
    """Gives its GPUs out by the device-plugin API."""
    with by_default(session_driver):
        yield


@pytest.fixture
def plugin(driver, tmp_path):
    """Starts one: ``plugin("hold", 7)`` is held before its seventh effect since it was armed,
    ``plugin("kill", file)`` is killed before the first one that is not in that file."""
    usual, places = driver.program, (tmp_path / "armed", tmp_path / "effects")

    def start(doing, number):
        places[0].unlink(missing_ok=True)
        program = ("tests.e2e.plugin_at_effect", doing, str(number), *map(str, places))
        driver.program = program
        driver.start(reconcile_interval="0.5")
        return places

    yield start
    places[0].unlink(missing_ok=True)
    driver.program = usual


@pytest.mark.timeout(600)
def test_killed_before_each_effect_of_an_allocation_its_pod_is_served_and_others_are_left_alone(
    cluster, kube, driver, profile, plugin, tmp_path
):
    takes_names = minor(cluster.version) >= FIRST_WITH_NAMES
    with serving(driver, LIMITING):
        profile("shared", described([UNDER_MPS if takes_names else {"replicas": 5}]))
        wait_allocatable(driver, {GPU: 2 * 5})
        kube.apply(pod("beside"))
        running(kube, "beside")
        before = traces(driver)
        driver.stop()

        effects, known = [], tmp_path / "known"
        for number in itertools.count(1):
            known.write_text("\n".join(effects))
            armed, record = plugin("kill", known)
            is_served(kube, f"pod-{number - 1}")
            wait("what is left of it to go", lambda: traces(driver) == before, 70)
            armed.touch()
            if outlives(kube, driver, f"pod-{number}", before, armed):
                break
            effects.append(record.read_text().splitlines()[-1])

        assert restarts(kube, "beside") == 0
        assert len(shown(kube, "beside")) == 1
        for part in (
            "rename .*/claims/",
            "remove .*/claims/",
            "rename .*/cdi/",
            "remove .*/cdi/",
            "dmem.max",
        ):
            assert any(re.search(part, effect) for effect in effects), effects


@pytest.mark.parametrize(
    "effect",
    [
        pytest.param(1, id="nothing recorded yet", marks=pytest.mark.core),  # not so before 1.29
        pytest.param(2, id="recorded"),
    ],
)
def test_a_profile_that_changes_while_an_allocation_is_made_takes_nothing_from_its_pod(
    cluster, kube, driver, profile, plugin, effect
):
    profile("four", described([{"replicas": 4}]))
    driver.stop()
    armed, record = plugin("hold", effect)
    wait_allocatable(driver, {GPU: 32})
    armed.touch()
    kube.apply(pod("held"))
    wait("its allocation", lambda: record.read_text().count("\n") == effect)

    profile("ten", described([{"replicas": 10}]))
    if minor(cluster.version) < FIRST_WITH_NAMES:  # what is answered has to be known soon
        kube.wait_pod("held", "Failed")
        assert "create the pod again" in kube.get("Pod", "held")["status"]["message"]
        armed.unlink()
    else:
        time.sleep(HELD_SECONDS)
        assert kube.phase("held") == "Pending"
        armed.unlink()
        running(kube, "held")
        assert len(shown(kube, "held")) == 1
        wait_allocatable(driver, {GPU: 4 + 7 * 10})
    kube.apply(pod("late", 3))
    running(kube, "late")
    assert restarts(kube, "held") == 0
    kube.clean_up()
    wait_allocatable(driver, {GPU: 80}, 70)
    driver.stop()


def outlives(kube, driver, name, before, armed):
    """Whether the plugin lives until a pod has come and gone, and nothing is left of it. It is
    killed no more then."""
    process = driver.processes[""]
    node = driver.cluster.node_name
    kube.apply(pod(name, nodeName=node, terminationGracePeriodSeconds=1))

    def over():
        if kube.phase(name) == "Running":
            kube.delete("Pod", name)
        return process.poll() is not None or (
            kube.phase(name) == "gone" and traces(driver) == before
        )

    try:
        wait("the plugin to be killed, or to have nothing more to do", over, 20)
    except AssertionError as e:
        raise AssertionError(f"{e}: {kube.explain(name)}\n{driver.log[-2500:]}") from e
    armed.unlink()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.5)  # for an effect that comes after the last trace is gone
    if process.poll() is None:
        return True
    assert driver.processes.pop("").returncode == -signal.SIGKILL
    return False


def traces(driver):
    """What there is of pods with devices; None: some of it goes just now."""
    try:
        return {str(claim["uid"]) for claim in driver.claims()}, driver.specs(), driver.limits()
    except FileNotFoundError:
        return None


def is_served(kube, name):
    """A pod with which the plugin was killed: it runs, or its Allocate failed and says so."""

    def served():
        kube.nudge(name)
        document = kube.find("Pod", name)
        if document is None or "deletionTimestamp" in document["metadata"]:
            return "gone"
        return kube.phase(name) in ("Running", "Failed") and kube.phase(name)

    if wait(f"{name} to be served", served, 60) == "Failed":
        assert "Allocate failed" in kube.get("Pod", name)["status"]["message"]
    kube.delete("Pod", name)
    kube.wait_gone("Pod", name)

"""What containers get of NVIDIA's driver: one CDI file for all claims, which follows the driver."""

import json
import os
import signal

import pytest
import yaml

from dra_driver.k8s.claims import ClaimRef
from hack.benchmark.calls import Calls
from hack.benchmark.claims import Claims, namespace
from tests.e2e.conftest import NEW, OLD
from tests.e2e.kube import wait
from tests.e2e.manifests import SLEEP, container, pod, pod_of, template
from tests.e2e.processes import main_process

NEWER = "590.48.01"
_LIBCUDA = "/usr/lib/x86_64-linux-gnu/libcuda.so.1"
SHOW = f"echo $GPU_DRIVER_VERSION; grep ' {_LIBCUDA} ' /proc/self/mountinfo; {SLEEP}"
HELD = 500
_CONTAINERD_SECONDS = 240  # it reads all CDI files at each change, and then starts the next pod


@pytest.fixture(autouse=True)
def gpu_template(kube, driver):
    kube.apply(template("one"))


@pytest.fixture
def upgrade(driver):
    """Upgrades NVIDIA's driver on the simulated host; afterwards the usual one is there again."""
    usual = driver.node_file.read_text()

    def to(version):
        driver.change(yaml.safe_load(usual) | {"driver_version": version})
        wait("the upgrade", lambda: version in driver.driver_spec.read_text(), 15)

    yield to
    driver.change(yaml.safe_load(usual))
    wait("the usual driver", lambda: NEWER not in driver.driver_spec.read_text(), 15)


def restarting(name):
    """A pod whose container starts again when it ends, and prints which driver it has."""
    claims = [{"name": "gpu", "resourceClaimTemplateName": "one"}]
    uses = ({"name": "gpu"},)
    return pod_of(name, [container(SHOW, uses=uses)], claims, restartPolicy="Always")


def restart_container(kube, name):
    """End the container's process, and wait until the kubelet started it again."""

    def restarts():
        (status,) = kube.get("Pod", name)["status"]["containerStatuses"]
        return status["restartCount"] if "running" in status["state"] else -1

    before = restarts()
    os.kill(main_process(kube, name), signal.SIGKILL)
    wait(f"{name} to start again", lambda: restarts() > before, 60)


def shown(kube, name):
    """The version that the container was told, and whether libcuda is of that version."""
    lines = wait(f"{name} to print", lambda: kube.logs(name).splitlines(), 20)
    version, mount = lines
    return version, f"libcuda.so.{version} " in mount


def test_a_container_that_starts_again_after_a_driver_upgrade_gets_the_new_files(
    kube, driver, upgrade
):
    kube.apply(restarting("worker"))
    kube.wait_pod("worker", "Running")
    before, is_mounted = shown(kube, "worker")
    assert is_mounted

    upgrade(NEWER)
    restart_container(kube, "worker")

    assert shown(kube, "worker") == (NEWER, True) != (before, True)


def test_a_removed_file_comes_back_before_anybody_misses_it(kube, driver):
    kube.apply(restarting("worker"))
    kube.wait_pod("worker", "Running")
    printed = shown(kube, "worker")

    driver.driver_spec.unlink()
    wait("the file", driver.driver_spec.exists, 5)

    restart_container(kube, "worker")
    assert shown(kube, "worker") == printed
    kube.apply(pod("next", "nvidia-smi -L", template="one"))
    kube.wait_pods(["next"], "Succeeded")


def test_while_the_driver_is_incomplete_the_last_file_stays(kube, driver):
    kube.apply(restarting("worker"))
    kube.wait_pod("worker", "Running")
    before = driver.driver_spec.read_text()
    (library,) = (driver.host / "usr/lib/x86_64-linux-gnu").glob("libcuda.so.*.*")
    away = library.rename(library.with_suffix(".away"))
    try:
        kube.apply(pod("waits", "nvidia-smi -L", template="one"))
        refused = lambda: "no complete NVIDIA driver" in kube.explain("waits")  # noqa: E731
        wait("the next pod to be refused", refused, 20)

        assert driver.driver_spec.read_text() == before
        assert kube.phase("worker") == "Running"
    finally:
        away.rename(library)
    kube.wait_pods(["waits"], "Succeeded")


def test_an_update_to_a_plugin_that_writes_it_anew_disturbs_no_pod(kube, updating, tmp_path):
    """The new one uses NVIDIA's hook, the old one does not: each writes the file as it has it."""
    hook = tmp_path / "nvidia-cdi-hook"
    hook.write_text("#!/bin/sh\nexit 0\n")
    hook.chmod(0o755)
    for directory in tmp_path.parents[:3]:
        directory.chmod(0o755)  # runc looks it up as the container's root
    has_hooks = lambda: str(hook) in updating.driver_spec.read_text()  # noqa: E731
    kube.apply(restarting("stays"))
    kube.wait_pod("stays", "Running")
    assert not has_hooks()

    updating.start(NEW, nvidia_cdi_hook=str(hook))
    kube.apply(pod("during", "nvidia-smi -L", template="one"))
    kube.wait_pods(["during"], "Succeeded")
    assert has_hooks()
    updating.stop(OLD)
    kube.apply(pod("after", "nvidia-smi -L", template="one"))
    kube.wait_pods(["after"], "Succeeded")

    assert has_hooks()
    restart_container(kube, "stays")
    assert kube.phase("stays") == "Running"


@pytest.mark.timeout(300)
def test_five_hundred_claims_share_one_file_and_a_pod_starts_beside_them(cluster, kube, driver):
    with namespace(kube), Calls(driver.plugin_dir / "dra.sock") as calls:
        claims = Claims(kube, cluster.node_name)
        held = claims.on([f"gpu-{index % 8}" for index in range(HELD)], admin=True)
        for ref in held:
            calls.prepare(ref)
        mounts = [path for path in driver.specs() if "libcuda" in _text(driver, path)]
        kube.apply(pod("beside", "nvidia-smi -L", template="one"))
        kube.wait_pods(["beside"], "Succeeded", _CONTAINERD_SECONDS)

        assert len(driver.specs()) >= HELD
        assert mounts == [], "a claim's file says nothing of the driver's files"
        assert _mounts(driver) > 20
        kube.delete("Pod", "beside")
        _unprepare(calls, held)
        claims.delete()
    wait("all files of claims to go", lambda: not driver.specs(), 70)


def _text(driver, name):
    return (driver.cluster.cdi_dir / name).read_text()


def _mounts(driver):
    return len(json.loads(driver.driver_spec.read_text())["containerEdits"]["mounts"])


def _unprepare(calls: Calls, refs: list[ClaimRef]) -> None:
    for ref in refs:
        calls.unprepare(ref)

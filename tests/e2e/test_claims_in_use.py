"""A GPU is not given on while a process of its last pod lives, and soon after its end."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.kube import wait
from tests.e2e.manifests import claim, container, on, pod, pod_of, request, template
from tests.e2e.processes import container_ids, is_alive, pids, process

FREEZER = Path("/sys/fs/cgroup/freezer")
LONG = "sleep 86399"
COMMAND = f"{LONG} & trap 'exit 0' TERM; wait"
REFUSED = re.compile(r"pod default/(\S+): process (\d+) still runs")

pytestmark = pytest.mark.usefixtures("containers")


class Frozen:
    """A process in state D, which no signal ends: it is in a frozen cgroup that was made below its
    container's."""

    def __init__(self, pid: int) -> None:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        (path,) = (line.split(":", 2)[2] for line in lines if ":freezer:" in line)
        self.pid = pid
        self.cgroup = FREEZER / path.lstrip("/") / "stuck"
        self.cgroup.mkdir()
        (self.cgroup / "cgroup.procs").write_text(str(pid))
        self._set("FROZEN")
        wait("state D", lambda: ") D " in Path(f"/proc/{pid}/stat").read_text(), 30)

    def thaw(self) -> None:
        if self.cgroup.exists():
            self._set("THAWED")

    def _set(self, state: str) -> None:
        (self.cgroup / "freezer.state").write_text(state)


@pytest.fixture
def freeze():
    """Freezes processes until it is told to let them go, at the latest after the test."""
    if not FREEZER.is_dir():
        pytest.skip("cgroup v2 freezes nobody so that a signal does not end it")
    frozen: list[Frozen] = []

    def freeze(pid: int) -> Frozen:
        frozen.append(Frozen(pid))
        return frozen[-1]

    yield freeze
    for stopped in frozen:
        stopped.thaw()


@pytest.fixture
def refusals(driver):
    """Pod and process of each refusal since the test began: ``refusals("unprepare")``."""
    begun = len(driver.log)

    def named_processes(word: str = "") -> list[tuple[str, int]]:
        lines = [line for line in driver.log[begun:].splitlines() if word in line]
        return [(pod, int(pid)) for line in lines for pod, pid in REFUSED.findall(line)]

    return named_processes


@pytest.fixture
def two_templates(kube, driver):
    for device in ("gpu-0", "gpu-1"):
        kube.apply(template(f"only-{device}", request(cel=on(kube.uuid(device)))))


class Stuck:
    """A pod with gpu-0 and gpu-1, each in a container of its own, that was force-deleted while a
    process with gpu-0 cannot end."""

    def __init__(self, kube, freeze: Callable[[int], Frozen], name: str) -> None:
        devices = ("gpu-0", "gpu-1")
        claims = [
            {"name": device, "resourceClaimTemplateName": f"only-{device}"} for device in devices
        ]
        containers = [
            container(COMMAND, f"has-{device}", ({"name": device},)) for device in devices
        ]
        kube.apply(pod_of(name, containers, claims))
        kube.wait_pod(name, "Running", seconds=120)
        made = kube.get("Pod", name)["status"]["resourceClaimStatuses"]
        (self.claim,) = (
            status["resourceClaimName"] for status in made if status["name"] == "gpu-0"
        )
        ids = container_ids(kube, name)
        self.process = freeze(process(ids["has-gpu-0"], LONG))
        # Those of gpu-1, too: they end, and until then it is kept as well.
        self.pids = {pid for id_ in ids.values() for pid in pids(id_).values()}
        kube.delete_now(name)
        for status in made:
            kube.wait_gone("ResourceClaim", status["resourceClaimName"], seconds=120)


def held_devices(driver) -> set[str]:
    """The devices that claims hold."""
    return {device["name"] for claim in driver.claims() for device in claim["devices"]}


def doctor(cluster, driver) -> str:
    """What the doctor says of claims in use."""
    output = driver.command(
        "doctor",
        f"--kubeconfig={cluster.kubeconfig}",
        f"--sim={driver.node_file}",
        f"--runtime-dir={cluster.layout.containerd_state}",
    ).stdout
    return "\n".join(line for line in output.splitlines() if "claims in use" in line)


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("two_templates")
def test_a_process_that_cannot_end_keeps_exactly_its_gpu_and_everybody_can_see_why(
    cluster, kube, driver, freeze, refusals
):
    stuck = Stuck(kube, freeze, "endless")

    wait("the kubelet to be refused", lambda: refusals("unprepare"), 150)
    wait("the other GPU to be free", lambda: held_devices(driver) == {"gpu-0"}, 150)
    assert {pod for pod, _ in refusals()} == {"endless"}
    assert {pid for _, pid in refusals()} <= stuck.pids
    refusal = f"claim default/{stuck.claim} cannot be given back yet: pod default/endless: process "
    wait("an event of the Node", lambda: refusal in str(kube.events(cluster.node_name)), 60)
    findings = doctor(cluster, driver)
    assert (
        f"[warn] claims in use: claim default/{stuck.claim} is deleted and holds gpu-0" in findings
    )
    assert is_alive(stuck.process.pid)
    assert held_devices(driver) == {"gpu-0"}, "however long it takes"

    stuck.process.thaw()

    wait("its record to go", lambda: not driver.claims(), 120)
    assert "claims in use: none" in doctor(cluster, driver)


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("two_templates")
def test_the_pod_that_waits_for_the_gpu_runs_within_three_seconds_of_the_end(
    kube, driver, freeze, refusals
):
    taken = []
    for number in range(3):
        stuck, waits = Stuck(kube, freeze, f"late-{number}"), f"waits-{number}"
        wait("a refusal", lambda name=f"late-{number}": name in dict(refusals()), 150)  # type: ignore[misc]
        kube.apply(pod(waits, template="only-gpu-0"))
        wait("a node for it", lambda name=waits: kube.get("Pod", name)["spec"].get("nodeName"))  # type: ignore[misc]
        time.sleep(1)  # the kubelet asks for its GPU meanwhile, and may wait up to 10 s for it
        assert kube.phase(waits) == "Pending"

        begun = time.monotonic()
        stuck.process.thaw()
        kube.wait_pod(waits, "Running", seconds=120)
        taken.append(time.monotonic() - begun)
        if taken[-1] < 3:
            break
        kube.delete("Pod", waits)
        kube.wait_gone("Pod", waits, seconds=120)
        wait("every record to go", lambda: not driver.claims(), 120)

    assert min(taken) < 3, f"{taken}"


@pytest.mark.timeout(900)
def test_a_claim_that_the_kubelet_forgets_is_kept_for_the_last_of_its_pods(
    cluster, kube, driver, refusals
):
    """The reconciler finds it deleted. The sandboxes of its pods go on to run, and do not count."""
    kube.apply(claim("of-two"))
    mains = {}
    for name in ("first", "second"):
        kube.apply(pod(name, COMMAND, claim="of-two"))
        kube.wait_pod(name, "Running", seconds=120)
        mains[name] = process(container_ids(kube, name)["main"], "sh -c")
    cluster.stop("kubelet")
    try:
        for name in mains:
            kube.delete_now(name)
        kube.delete("ResourceClaim", "of-two")
        kube.wait_gone("ResourceClaim", "of-two", seconds=120)
        wait("a pod to be named", refusals, 120)
        first = refusals()[0][0]
        (second,) = mains.keys() - {first}
        os.kill(mains[first], signal.SIGKILL)
        wait("the other to be named", lambda: second in dict(refusals()), 120)
        assert len(driver.claims()) == 1

        os.kill(mains[second], signal.SIGKILL)

        wait("its record to go", lambda: not driver.claims(), 120)
    finally:
        cluster.start("kubelet")

"""Sick GPUs in end-to-end tests: how they become so, and what is seen of it."""

import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.driver import Driver
from tests.e2e.kube import Kube, wait
from tests.e2e.partitions import DEVICE

Document = dict[str, Any]

CLEAR, RELEASE = "gpu.nvidia.com/clear-faults", "gpu.nvidia.com/release"
PAUSE = "nvidia.com/gpu.deploy.dra-driver"  # the label by which the GPU operator pauses us
_PROFILE_NAME = "health"


def health(driver: Driver, action: str, *words: str) -> subprocess.CompletedProcess[str]:
    """What an administrator does on the node: ``dra-driver health``."""
    place = (f"--kubeconfig={driver.kube.config}", f"--node-name={driver.cluster.node_name}")
    return subprocess.run(
        [sys.executable, "-m", "dra_driver", "health", action, *place, *words],
        check=False,
        capture_output=True,
        text=True,
        timeout=90,
        cwd=Path(__file__).parents[2],
    )


@contextlib.contextmanager
def following(driver: Driver, profile: str, devices: str) -> Iterator[None]:
    """The plugin follows *profile*; the tests find meanwhile what it then offers, among it
    *devices*."""
    usual, kube = driver.usual, driver.kube
    file = driver.profiles / f"{_PROFILE_NAME}.yaml"
    file.write_text(profile)
    driver.flags["profile"] = _PROFILE_NAME
    for annotation in (CLEAR, RELEASE):  # a session that was killed had it
        annotate(driver, annotation, None)
    kube.label_node(driver.cluster.node_name, **{PAUSE: None})
    driver.stop()
    driver.start()
    wait(devices, lambda: any(name.startswith(devices) for name in kube.published()))
    driver.usual = kube.published()
    try:
        yield
    finally:
        del driver.flags["profile"]
        driver.usual = usual
        kube.clean_up()
        wait("ledger records to go", lambda: not driver.claims(), 70)
        driver.stop()
        file.unlink()
        driver.start()


class SimulatedGpus:
    """The GPUs of the simulated node, which a test makes sick and well again."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._well = driver.node_file.read_text()

    def report(self, gpu: int, *events: Document) -> None:
        """NVIDIA's driver tells *events* of that GPU, after all those before."""
        node = self._read()
        node["gpus"][gpu].setdefault("events", []).extend(events)
        self._driver.change(node)

    def set(self, gpu: int, **fields: Any) -> None:
        """Set *fields* of that GPU; None takes one away."""
        node = self._read()
        changed = node["gpus"][gpu] | fields
        node["gpus"][gpu] = {name: each for name, each in changed.items() if each is not None}
        self._driver.change(node)

    def set_driver(self, **fields: str) -> None:
        """Set *fields* of NVIDIA's driver and its programs."""
        self._driver.change(self._read() | fields)

    def heal(self) -> None:
        """Everything is as it was before the test, and an administrator says so."""
        driver, kube = self._driver, self._driver.kube
        annotate(driver, RELEASE, None)
        kube.label_node(driver.cluster.node_name, **{PAUSE: None})
        driver.change(yaml.safe_load(self._well))
        clear(driver, "all")
        wait(f"taints to go: {tainted_devices(kube)}", lambda: not tainted_devices(kube), 30)

    def _read(self) -> Document:
        node: Document = yaml.safe_load(self._driver.node_file.read_text())
        return node


def clear(driver: Driver, gpus: str) -> None:
    """An administrator says by annotation that *gpus* are well; until the plugin has read it."""
    node = f"/api/v1/nodes/{driver.cluster.node_name}"
    annotate(driver, CLEAR, gpus)
    annotations = lambda: driver.kube.api.get(node)["metadata"].get("annotations", {})  # noqa: E731
    wait("the annotation to be read", lambda: CLEAR not in annotations(), 20)


def annotate(driver: Driver, name: str, value: str | None) -> None:
    """Set an annotation of the Node, or take it away (None)."""
    change = {"metadata": {"annotations": {name: value}}}
    driver.kube.api.patch(f"/api/v1/nodes/{driver.cluster.node_name}", change)


def taints(kube: Kube, device: str) -> dict[str, Document]:
    """Why a device is sick: its taints by problem, as the API server has them."""
    devices = [d for s in kube.slices() for d in s["spec"].get("devices") or ()]
    (found,) = [each for each in devices if each["name"] == device]
    return {
        taint["key"].removeprefix("gpu.nvidia.com/"): taint for taint in found.get("taints") or ()
    }


def tainted_devices(kube: Kube) -> dict[str, set[str]]:
    """The devices of sick GPUs, with their problems."""
    problems = {
        name: {
            f"{taint['key'].removeprefix('gpu.nvidia.com/')}:{taint['effect']}"
            for taint in device.get("taints") or ()
        }
        for name, device in kube.published().items()
        if not name.endswith("-mon")
    }
    return {name: each for name, each in problems.items() if each}


def wait_tainted(kube: Kube, device: str, problem: str, seconds: float = 20) -> Document:
    taint: Document = wait(
        f"{device} to have the taint {problem}",
        lambda: taints(kube, device).get(problem),
        seconds,
    )
    return taint


def wait_untainted(kube: Kube, device: str, seconds: float = 20) -> None:
    wait(f"{device} to have no taint", lambda: not taints(kube, device), seconds)


def pod_health(kube: Kube, pod: str) -> list[tuple[str, str]]:
    """How the devices of a pod are, and why, by its status."""
    statuses = kube.get("Pod", pod)["status"].get("containerStatuses") or ()
    return [
        (resource["health"], resource.get("message", ""))
        for status in statuses
        for entry in status.get("allocatedResourcesStatus") or ()
        for resource in entry["resources"]
    ]


def wait_health(kube: Kube, pod: str, health: str, why: str = "", seconds: float = 40) -> None:
    """Until the status of a pod has it, with *why* in the message; and so has its claim."""

    def told() -> bool:
        kube.nudge(pod)
        return any(each == health and why in message for each, message in pod_health(kube, pod))

    try:
        wait(f"{pod} to be {health}", told, seconds, 0.5)
    except AssertionError as e:
        raise AssertionError(f"{e}: {pod_health(kube, pod)}") from e
    wait_ready(kube, pod, {"Healthy": "Prepared", "Unhealthy": "Unhealthy"}[health], seconds)


def wait_ready(kube: Kube, pod: str, reason: str, seconds: float = 40) -> None:
    """Until the claims of a pod say *reason* of each device, and only "Prepared" is ready."""
    expected = {(str(reason == "Prepared"), reason)}
    said = lambda: ready(kube, pod) == expected  # noqa: E731
    wait(f"the claims of {pod} to say {reason}", said, seconds)


def ready(kube: Kube, pod: str) -> set[tuple[str, str]]:
    """What the claims of a pod say of their devices: the condition Ready, with its reason."""
    entries = kube.get("Pod", pod)["status"].get("resourceClaimStatuses") or ()
    claims = [kube.get("ResourceClaim", entry["resourceClaimName"]) for entry in entries]
    return {
        (condition["status"], condition["reason"])
        for claim in claims
        for device in claim["status"].get("devices") or ()
        for condition in device.get("conditions") or ()
        if condition["type"] == "Ready"
    }


def metric(driver: Driver, begins: str) -> list[float]:
    lines = driver.ask("/metrics")[1].splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith(begins)]


@contextlib.contextmanager
def others_unchanged(kube: Kube, *gpus: str) -> Iterator[None]:
    """No device of a GPU other than *gpus* changes meanwhile."""

    def others() -> dict[str, Document]:
        return {
            name: device
            for name, device in kube.published().items()
            if re.match(r"gpu-\d+", name)[0] not in gpus  # type: ignore[index]
        }

    before, changes, over = others(), [], threading.Event()

    def look() -> None:
        while not over.wait(0.2):
            with contextlib.suppress(Exception):
                changes.extend(
                    (name, device) for name, device in others().items() if device != before[name]
                )

    thread = threading.Thread(target=look, name="others", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10)
    assert not changes
    wait("the other GPUs to be published", lambda: others() == before, 20)


def instance_of(driver: Driver, boards: dict[str, Document], device: str) -> int:
    """The number of the GPU instance of a partition that is there."""
    number, profile, start = map(int, DEVICE.fullmatch(device).groups())  # type: ignore[union-attr]
    uuid = driver.kube.uuid(f"gpu-{number}")
    (gi,) = [
        instance["gi"]
        for instance in boards[uuid]["instances"]
        if (instance["profile_id"], instance["start"]) == (profile, start)
    ]
    return int(gi)

"""Words of the end-to-end tests of MIG: partitions, and boards that change as a test runs."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import yaml

from dra_driver.sim.node_spec import node_file
from tests.e2e.driver import Driver
from tests.e2e.kube import Kube, wait
from tests.e2e.manifests import CLASS, request

Document = dict[str, Any]

PARTITION = f"mig.{CLASS}"
PROFILE = "mig"  # the bundled one that has partitions created for claims


def part(profile: str, name: str = "gpu", of: str = "", **fields: Any) -> Document:
    """One request for a partition. *of*: the UUID of the GPU that it has to be of."""
    conditions = [f"device.attributes['{CLASS}'].profile == '{profile}'"]
    if of:
        conditions.append(f"device.attributes['{CLASS}'].parentUUID == '{of}'")
    return request(name, " && ".join(conditions), deviceClassName=PARTITION, **fields)


def partitions(kube: Kube, gpu: str = "gpu") -> list[str]:
    """The names of the partitions that are published, of one GPU or of all."""
    return [name for name in kube.published() if name.startswith(f"{gpu}-") and "-mig-" in name]


def boards(driver: Driver) -> dict[str, Document]:
    """Each GPU with a MIG mode, as the simulated driver keeps it."""
    files = driver.host.glob("run/nvidia-simulated/*/*.mig")
    return {file.stem: json.loads(file.read_text()) for file in files}


def modes(driver: Driver) -> dict[str, bool]:
    """MIG mode of each GPU that has one."""
    return {uuid: board["on"] for uuid, board in boards(driver).items()}


def described(name: str, **fields: Any) -> Document:
    """A simulated node, with *fields* of its first GPU as they are said."""
    node: Document = yaml.safe_load(node_file(name).read_text())
    node["gpus"][0] |= fields
    return node


def change_gpu(driver: Driver, **fields: Any) -> None:
    """Set *fields* of the first GPU of the simulated node; None takes one away."""
    node = yaml.safe_load(driver.node_file.read_text())
    changed = node["gpus"][0] | fields
    node["gpus"][0] = {name: value for name, value in changed.items() if value is not None}
    driver.change(node)


@contextlib.contextmanager
def serving(driver: Driver, node: str) -> Iterator[None]:
    """The simulated *node*, which offers partitions, is what the tests find meanwhile."""
    text, usual = driver.node_file.read_text(), driver.usual
    driver.flags["profile"] = PROFILE
    driver.serve(node_file(node).read_text())
    kube = driver.kube
    driver.usual = wait("its partitions", lambda: partitions(kube) and kube.published())
    try:
        yield
    finally:
        del driver.flags["profile"]
        driver.usual = usual
        kube.clean_up()
        wait("ledger records to go", lambda: not driver.claims(), 70)
        driver.serve(text)

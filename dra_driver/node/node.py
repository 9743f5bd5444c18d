"""This machine as the plugin sees it: its inventory, its driver files, and the steps done to it."""

import threading
from typing import assert_never

from dra_driver.model.driver_files import DeviceFiles, DriverFiles
from dra_driver.model.inventory import Inventory
from dra_driver.model.steps import MakeDeviceNodes, Step
from dra_driver.node.device_nodes import DeviceNodes
from dra_driver.node.driver_root import DriverRoot
from dra_driver.node.gpus import Gpus


class GpuNode:
    """Looks at GPUs one thread at a time; steps of different claims go side by side."""

    def __init__(self, gpus: Gpus, driver: DriverRoot, nodes: DeviceNodes) -> None:
        self._gpus = gpus
        self._driver = driver
        self._nodes = nodes
        self._looking = threading.Lock()
        self._inventory: Inventory | None = None

    def inventory(self) -> Inventory:
        """What the last look found; the first call looks."""
        return self._inventory if self._inventory is not None else self.refresh()

    def refresh(self) -> Inventory:
        """Look again. Bounded, also where a GPU hangs (see ``Gpus.look``)."""
        with self._looking:
            self._inventory = self._gpus.look()
            return self._inventory

    def driver_files(self) -> DriverFiles:
        return self._driver.files()

    def device_files(self, minors: tuple[int, ...]) -> DeviceFiles:
        """The device files of these GPUs; missing ones are made."""
        return self._nodes.files(minors)

    def carry_out(self, step: Step) -> None:
        match step:
            case MakeDeviceNodes(minors=minors):
                self._nodes.files(minors)
            case _:
                assert_never(step)

    def undo(self, step: Step) -> None:
        match step:
            case MakeDeviceNodes():
                pass  # the files do no harm, and another container may use them
            case _:
                assert_never(step)

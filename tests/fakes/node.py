"""A node in memory: it does what it is told, remembers it, and fails where a test says so."""

from collections.abc import Callable

from dra_driver.errors import NodeError
from dra_driver.model.driver_files import DeviceFile, DeviceFiles, DriverFiles, Library
from dra_driver.model.inventory import Inventory
from dra_driver.model.steps import MakeDeviceNodes, Step

FILES = DriverFiles(
    version="580.95.05",
    root="/",
    machine="x86_64",
    lib_dir="/usr/lib64",
    libraries=(Library("/usr/lib64/libcuda.so.580.95.05", "libcuda.so.1", ("libcuda.so",)),),
)


class FakeNode:
    """Carries out steps in memory; one on a GPU that it does not have is refused, as nodes do."""

    def __init__(self, inventory: Inventory) -> None:
        self.now = inventory  # what a look finds
        self.looked = inventory  # what the last look found
        self.done: list[Step] = []
        self.undone: list[Step] = []
        self.undo_fails = False
        self.before_step: Callable[[Step], None] = lambda step: None
        self.before_files: Callable[[], None] = lambda: None

    def inventory(self) -> Inventory:
        return self.looked

    def refresh(self) -> Inventory:
        self.looked = self.now
        return self.looked

    def carry_out(self, step: Step) -> None:
        self.before_step(step)
        have = {gpu.minor for gpu in self.now.devices}
        if isinstance(step, MakeDeviceNodes) and not set(step.minors) <= have:
            raise NodeError(f"/dev/nvidia{max(set(step.minors) - have)} is missing")
        self.done.append(step)

    def undo(self, step: Step) -> None:
        if self.undo_fails:
            raise NodeError("it cannot be undone now")
        self.undone.append(step)

    def driver_files(self) -> DriverFiles:
        self.before_files()
        return FILES

    def device_files(self, minors: tuple[int, ...]) -> DeviceFiles:
        return DeviceFiles(
            common=(DeviceFile("/dev/nvidiactl", "/dev/nvidiactl", 195, 255),),
            gpus={m: DeviceFile(f"/dev/nvidia{m}", f"/dev/nvidia{m}", 195, m) for m in minors},
        )

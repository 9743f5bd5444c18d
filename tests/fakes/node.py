"""A node in memory: it does what it is told, remembers it, and fails where a test says so."""

from collections.abc import Callable, Iterable

from dra_driver.base.errors import ClaimError, MpsAgentUnreachable, NodeError
from dra_driver.k8s.claims import PodUid
from dra_driver.model.driver_files import DeviceFile, DeviceFiles, DriverFiles, DriverLibrary
from dra_driver.model.gpus import GpuUuid, Inventory, MigInstance, PartitionKey
from dra_driver.model.mps import MpsNamespace, MpsNamespaceName, ServedNamespace
from dra_driver.model.steps import (
    ComputeMode,
    CreatePartition,
    GpuSetting,
    PodMemoryLimit,
    PodMemoryShare,
    RemoveMpsNamespace,
    RemovePartition,
    ServeMpsNamespace,
    SetComputeMode,
    SetMemoryLimits,
    SetMigMode,
    SetTimeSlice,
    SettingValue,
    Step,
    TimeSliceInterval,
)
from tests.fakes.mig import FakeMig

FILES = DriverFiles(
    version="580.95.05",
    root="/",
    machine="x86_64",
    lib_dir="/usr/lib64",
    libraries=(DriverLibrary("/usr/lib64/libcuda.so.580.95.05", "libcuda.so.1", ("libcuda.so",)),),
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
        self.before_nodes: Callable[[tuple[int, ...]], None] = lambda minors: None
        self.before_files: Callable[[], None] = lambda: None
        self.files = FILES  # of the driver that is installed
        self.intervals: dict[GpuUuid, TimeSliceInterval] = {
            gpu.uuid: TimeSliceInterval(0) for gpu in self.now.gpus
        }
        self.limits: dict[tuple[PodUid, GpuUuid], int] = {}  # bytes
        self.modes = {gpu.uuid: ComputeMode.DEFAULT for gpu in self.now.gpus}
        self.namespaces: dict[MpsNamespaceName, MpsNamespace] = {}  # that the MPS agent serves
        self.agent = True  # whether there is one
        self.protocol = 3
        self.pipe_directory = "/run/mps/pipe"  # with protocol 2
        self.offers_limits = True
        self.mig = FakeMig(inventory)

    def inventory(self) -> Inventory:
        return self.looked

    def refresh(self) -> Inventory:
        self.looked = self.now
        return self.looked

    def current_setting(self, setting: GpuSetting) -> SettingValue | None:
        match setting:
            case SetTimeSlice(gpu=gpu):
                return self.intervals.get(gpu)
            case SetComputeMode(gpu=gpu):
                return self.modes.get(gpu)
            case SetMigMode(gpu=gpu):
                return self.mig.modes.get(gpu)

    def in_mig_mode(self, gpus: Iterable[GpuUuid]) -> frozenset[GpuUuid]:
        return frozenset(gpu for gpu in gpus if self.mig.modes.get(gpu))

    def carry_out(self, step: Step) -> None:
        self.before_step(step)
        self._do(step)
        self.done.append(step)

    def serve(self, namespace: MpsNamespace) -> ServedNamespace:
        self.before_step(ServeMpsNamespace(namespace))
        served = self._serve(namespace)
        self.done.append(ServeMpsNamespace(namespace))
        return served

    def restore(self, step: Step) -> None:
        if self.undo_fails:
            raise NodeError("it cannot be undone now")
        self.before_step(step)
        if isinstance(step, SetMigMode):  # a mode that cannot be restored stays
            self.mig.set_mode(step.gpu, step.on, quietly=True)
        else:
            self._do(step)
        self.undone.append(step)

    def partitions(self, gpu: GpuUuid) -> tuple[PartitionKey, ...]:
        return self.mig.on(gpu)

    def instance(self, gpu: GpuUuid, key: PartitionKey) -> MigInstance:
        return self.mig.find(gpu, key)

    def _do(self, step: Step) -> None:
        match step:
            case SetTimeSlice() | SetComputeMode():
                self._set(step)
            case SetMemoryLimits(gpu=gpu, pods=pods, strict=strict):
                self._limit(gpu, pods, strict)
            case SetMigMode() | CreatePartition() | RemovePartition():
                self._partition(step)
            case ServeMpsNamespace(namespace=namespace):
                self._serve(namespace)
            case RemoveMpsNamespace(namespace=name):
                if self.agent:
                    self.namespaces.pop(name, None)

    def _make(self, minors: tuple[int, ...]) -> None:
        have = {gpu.minor for gpu in self.now.gpus}
        if not set(minors) <= have:
            raise NodeError(f"/dev/nvidia{max(set(minors) - have)} is missing")

    def _partition(self, step: SetMigMode | CreatePartition | RemovePartition) -> None:
        match step:
            case SetMigMode(gpu=gpu, on=on):
                self.mig.set_mode(gpu, on)
            case CreatePartition(gpu=gpu, key=key, new=new):
                self.mig.create(gpu, key, new)
            case RemovePartition(gpu=gpu, key=key, uuid=uuid, unless=unless):
                self.mig.remove(gpu, key, uuid, unless)

    def _set(self, setting: SetTimeSlice | SetComputeMode) -> None:
        match setting:
            case SetTimeSlice(gpu=gpu, interval=interval):
                if gpu not in self.intervals:
                    raise ClaimError(f"{gpu} has no time-slice interval to set")
                self.intervals[gpu] = interval
            case SetComputeMode(gpu=gpu, mode=mode):
                if gpu not in self.modes:
                    raise NodeError(f"{gpu} is not there")
                self.modes[gpu] = mode

    def _serve(self, namespace: MpsNamespace) -> ServedNamespace:
        if not self.agent:
            raise MpsAgentUnreachable("the MPS agent of this node does not answer")
        if self.namespaces.setdefault(namespace.name, namespace) != namespace:
            raise NodeError(f"namespace {namespace.name} exists already with other limits")
        protocol = self.protocol
        directory = f"/run/mps/{namespace.name}" if protocol == 3 else self.pipe_directory
        return ServedNamespace(
            namespace, protocol, directory, "" if protocol == 3 else "/run/mps/shm"
        )

    def settle(self, shares: Iterable[PodMemoryShare]) -> None:
        """What the loop that looks after limits does: make them what the pods hold."""
        self.limits = {
            (share.pod, share.gpu): share.memory_bytes
            for share in shares
            if share.memory_bytes is not None
        }

    def _limit(self, gpu: GpuUuid, pods: tuple[PodMemoryLimit, ...], strict: bool) -> None:
        for limit in pods:
            if limit.memory_bytes is None:
                self.limits.pop((limit.pod, gpu), None)
            elif self.offers_limits:
                self.limits[limit.pod, gpu] = limit.memory_bytes
            elif strict:
                raise NodeError("the driver offers no limits: it is older than 615")

    def driver_files(self) -> DriverFiles:
        self.before_files()
        return self.files

    def device_files(
        self,
        minors: tuple[int, ...],
        capabilities: tuple[str, ...] = (),
        driver: DriverFiles | None = None,
    ) -> DeviceFiles:
        self.before_nodes(minors)
        self._make(minors)
        return DeviceFiles(
            common=(DeviceFile("/dev/nvidiactl", "/dev/nvidiactl", 195, 255),),
            gpus={m: DeviceFile(f"/dev/nvidia{m}", f"/dev/nvidia{m}", 195, m) for m in minors},
            capabilities={
                name: DeviceFile(path, path, 240, number)
                for number, name in enumerate(capabilities, start=1)
                for path in [f"/dev/nvidia-caps/{name.replace('/', '-')}"]
            },
        )

"""What is asked about a whole GPU before it is changed, and when that fails."""

from collections.abc import Callable
from typing import Any

from dra_driver.errors import NodeError
from dra_driver.model.devices import GpuUuid
from dra_driver.model.mig import Fixed, PartitionKey
from dra_driver.node.mig.holders import Holders
from dra_driver.node.mig.instances import Cut, everything_cut, gpu_instance
from dra_driver.node.mig.virtual_machines import fixed
from dra_driver.node.nvml import Nvml
from dra_driver.node.nvml_codes import NOTHING_IS_KEPT, code
from dra_driver.node.nvml_functions import Functions
from dra_driver.node.nvml_readers import mig_mode


class Boards:
    """The GPUs of *nvml*. *loaded*: whether the driver is."""

    def __init__(self, nvml: Nvml, holders: Holders, loaded: Callable[[], bool]) -> None:
        self._nvml = nvml
        self._holders = holders
        self._loaded = loaded

    def mode(self, gpu: GpuUuid) -> tuple[bool, bool] | None:
        """MIG mode now, and after the next reset. None: it has no such mode."""
        return self._nvml.on_gpu(gpu, "reading its MIG mode", mig_mode)

    def fixed(self, gpu: GpuUuid) -> Fixed:
        """What of it nobody can change here."""
        return self._nvml.on_gpu(gpu, "reading whether it is a virtual machine's", fixed)

    def persists(self, gpu: GpuUuid) -> bool:
        """Whether persistence mode is on, as far as that is told."""

        def call(functions: Functions, handle: Any) -> bool:
            return bool(functions.nvmlDeviceGetPersistenceMode(handle))

        try:
            return self._nvml.on_gpu(gpu, "reading its persistence mode", call)
        except NodeError:
            return False

    def cut(self, gpu: GpuUuid) -> tuple[Cut, ...]:
        """What is cut of it, while MIG mode is on."""

        def call(functions: Functions, handle: Any) -> tuple[Cut, ...]:
            known = self._nvml.geometries
            profiles = known.of(functions, handle, gpu, True)
            return everything_cut(functions, handle, profiles, known.asked(functions, gpu))

        return self._nvml.on_gpu(gpu, "reading what is cut of it", call)

    def who(self, gpu: GpuUuid, key: PartitionKey | None = None) -> tuple[str, str]:
        """Who uses the instance of this partition, or else the GPU, in words: for the log, and for
        tenants, whose processes they need not be."""
        gi = None if key is None else self._instance(gpu, key)
        found = () if gi is None else self._holders.of(gpu, gi)
        found = found or self._holders.of(gpu)
        words = self._holders.in_words(found)
        return (
            words,
            "held by processes that the log of this node's plugin names" if found else words,
        )

    def is_kept(self, gpu: GpuUuid, error: NodeError) -> bool:
        """Whether there is a GPU, and a driver, that has what *error* says could not be changed."""
        if code(error) in NOTHING_IS_KEPT or not self._loaded():
            return False
        listed = self._nvml.glances(range(self._nvml.system().gpus)).values()
        return any(
            code(one) not in NOTHING_IS_KEPT if isinstance(one, NodeError) else one.uuid == gpu
            for one in listed
        )

    def _instance(self, gpu: GpuUuid, key: PartitionKey) -> int | None:
        def call(functions: Functions, handle: Any) -> int | None:
            found = gpu_instance(functions, handle, key)
            return None if found is None else found.id

        try:
            return self._nvml.on_gpu(gpu, f"looking for {key}", call)
        except NodeError:
            return None

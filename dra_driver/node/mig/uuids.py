"""How MIG devices are called, from what NVML says of their compute instances."""

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from dra_driver.model.devices import GpuUuid
from dra_driver.model.uuids import is_instance
from dra_driver.node.nvml_codes import INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, unless_refused
from dra_driver.node.nvml_functions import Functions

_NOT_SAID: Final = (NOT_FOUND, INVALID_ARGUMENT, NOT_SUPPORTED)


class Uuids:
    """Of the compute instances of one GPU, at one look.

    A compute instance says on which device it is. By nvml.h that is the GPU; NVIDIA's own driver
    was also seen to take it for the MIG device. Where it is the GPU, the MIG device is found by its
    place, "MIG-GPU-<uuid>/<gi>/<ci>", which ``nvmlDeviceGetHandleByUUID`` takes as well. Only where
    that is refused NVML's list of MIG devices is gone through, which can take ten seconds.
    """

    def __init__(self, functions: Functions, handle: Any) -> None:
        self._functions = functions
        self._handle = handle
        self._gpu: GpuUuid | None = None  # once it is known that instances say no more than that

    def of(self, gi: int, ci: int, device: Any) -> GpuUuid | None:
        """Of a compute instance that is there, and on *device*. None: NVML does not say."""
        if self._gpu is None:
            said = self._uuid(device) or self._functions.nvmlDeviceGetUUID(self._handle)
            if is_instance(GpuUuid(said)):
                return GpuUuid(said)
            self._gpu = GpuUuid(said)
        by_place = partial(self._functions.nvmlDeviceGetHandleByUUID, f"MIG-{self._gpu}/{gi}/{ci}")
        found = unless_refused(by_place, *_NOT_SAID)
        uuid = None if found is None else self._uuid(found)
        return GpuUuid(uuid) if uuid else self._listed(gi, ci)

    def _uuid(self, device: Any) -> str | None:
        return unless_refused(lambda: self._functions.nvmlDeviceGetUUID(device), *_NOT_SAID)

    def _listed(self, gi: int, ci: int) -> GpuUuid | None:
        functions = self._functions
        for device in self._devices():
            ids = (
                unless_refused(partial(ask, device), *_NOT_SAID)
                for ask in (
                    functions.nvmlDeviceGetGpuInstanceId,
                    functions.nvmlDeviceGetComputeInstanceId,
                )
            )
            if (*ids,) == (gi, ci) and (uuid := self._uuid(device)):
                return GpuUuid(uuid)
        return None

    def _devices(self) -> Iterator[Any]:
        functions, handle = self._functions, self._handle
        most = unless_refused(lambda: functions.nvmlDeviceGetMaxMigDeviceCount(handle), *_NOT_SAID)
        for index in range(most or 0):
            ask = partial(functions.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
            if (device := unless_refused(ask, *_NOT_SAID)) is not None:
                yield device

"""How MIG devices are called, from what NVML says of their compute instances."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

from dra_driver.model.devices import GpuUuid
from dra_driver.model.uuids import is_instance
from dra_driver.node.nvml_codes import INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, unless_refused
from dra_driver.node.nvml_functions import Functions

_NOT_SAID: Final = (NOT_FOUND, INVALID_ARGUMENT, NOT_SUPPORTED)


_Ids = tuple[int, int]  # of a GPU instance, and of a compute instance in it


class Uuids:
    """Of the compute instances of one GPU, at one look.

    A compute instance says on which device it is. By nvml.h that is the GPU; NVIDIA's own driver
    was also seen to take it for the MIG device. Where it is the GPU, the MIG device is found by its
    place, "MIG-GPU-<uuid>/<gi>/<ci>", which ``nvmlDeviceGetHandleByUUID`` takes as well. Only where
    that is refused NVML's list of MIG devices is gone through, which can take ten seconds.

    Whoever is given a wrong name computes on another's instance, or has it removed. So a device is
    believed only if it says itself that it is this instance, and no two have the same name.
    """

    def __init__(self, functions: Functions, handle: Any) -> None:
        self._functions = functions
        self._handle = handle
        self._gpu: str | None = None
        self._say_gpu = False  # it is known that instances say no more than that
        self._list: Mapping[_Ids, GpuUuid] | None = None  # once it was read
        self._given: dict[GpuUuid, _Ids] = {}

    def of(self, gi: int, ci: int, device: Any) -> GpuUuid | None:
        """Of a compute instance that is there, and on *device*. None: NVML does not say."""
        ids = gi, ci
        for way in (partial(self._on, device), self._by_place, self._listed):
            uuid = way(ids)
            if uuid is not None and self._given.setdefault(uuid, ids) == ids:
                return uuid
        return None

    def _on(self, device: Any, ids: _Ids) -> GpuUuid | None:
        if self._say_gpu:
            return None
        uuid = self._uuid(device)
        if uuid is not None and is_instance(uuid):
            return uuid if self._ids(device) == ids else None
        self._say_gpu, self._gpu = True, uuid
        return None

    def _by_place(self, ids: _Ids) -> GpuUuid | None:
        gpu = self._gpu = self._gpu or self._functions.nvmlDeviceGetUUID(self._handle)
        gi, ci = ids
        ask = partial(self._functions.nvmlDeviceGetHandleByUUID, f"MIG-{gpu}/{gi}/{ci}")
        device = unless_refused(ask, *_NOT_SAID)
        return self._uuid(device) if device is not None and self._ids(device) == ids else None

    def _listed(self, ids: _Ids) -> GpuUuid | None:
        if self._list is None:
            self._list = self._read_list()
        return self._list.get(ids)

    def _read_list(self) -> Mapping[_Ids, GpuUuid]:
        """Those that were removed may be in it as well: of two names for the same instance neither
        is believed."""
        found: dict[_Ids, set[GpuUuid]] = {}
        for device in self._devices():
            ids, uuid = self._ids(device), self._uuid(device)
            if ids is not None and uuid is not None:
                found.setdefault(ids, set()).add(uuid)
        return {ids: min(uuids) for ids, uuids in found.items() if len(uuids) == 1}

    def _devices(self) -> Iterator[Any]:
        functions, handle = self._functions, self._handle
        most = unless_refused(lambda: functions.nvmlDeviceGetMaxMigDeviceCount(handle), *_NOT_SAID)
        for index in range(most or 0):
            ask = partial(functions.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
            if (device := unless_refused(ask, *_NOT_SAID)) is not None:
                yield device

    def _ids(self, device: Any) -> _Ids | None:
        """Which instance this MIG device is, as it says itself."""

        def ask() -> _Ids:
            gi = self._functions.nvmlDeviceGetGpuInstanceId(device)
            return gi, self._functions.nvmlDeviceGetComputeInstanceId(device)

        return unless_refused(ask, *_NOT_SAID)

    def _uuid(self, device: Any) -> GpuUuid | None:
        said = unless_refused(lambda: self._functions.nvmlDeviceGetUUID(device), *_NOT_SAID)
        return GpuUuid(said) if said else None

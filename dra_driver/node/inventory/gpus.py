"""A scan of the GPUs of the node: which can be offered, and why others cannot."""

import logging
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Final

from dra_driver.base.errors import NodeError, TimedOut
from dra_driver.model.gpus import (
    Gpu,
    GuestRestriction,
    Inventory,
    MigInfo,
    Topology,
    UnavailableGpu,
)
from dra_driver.node.driver.pci import PciBus, PciGpu
from dra_driver.node.inventory.unavailable import (
    describe_pci_gpu,
    not_listed_by_nvml,
    unreadable_reason,
    unusable_gpus,
    waiting_for_nvml,
    with_lost_gpus,
)
from dra_driver.node.nvml.api import RESTART_NEEDED, nvml_error_code
from dra_driver.node.nvml.client import Nvml
from dra_driver.node.nvml.readers import switches_without_reset
from dra_driver.node.nvml.threads import GpuBeingChanged
from dra_driver.node.nvml.values import (
    DynamicState,
    GpuReading,
    NvLinks,
    NvmlSystem,
    StaticInfo,
    nvlink_clique,
    nvlink_neighbours,
)

log = logging.getLogger(__name__)

MakeDeviceFiles = Callable[[tuple[int, ...]], object]
"""Sees to it that these minor numbers have device nodes, or raises NodeError."""

# NVLinks come up while the fabric manager starts, and can go down: what was read is believed for so
# long.
_NVLINKS_TTL_SECONDS: Final = 60.0
MIG_HIDDEN: Final = "partitions of a GPU in MIG mode are not known: NVML lists them for root alone"
# Making device nodes starts a program; where it failed it is not tried at every scan.
_RETRY_SECONDS: Final = 60.0


class GpuDiscovery:
    """Looks at the GPUs of this node, again and again, at the cost of what changed.

    *devices* is where the host's device nodes are seen from here (``/dev``). Not for several
    threads at once.
    """

    def __init__(self, nvml: Nvml, pci: PciBus, devices: Path, make_nodes: MakeDeviceFiles) -> None:
        self._nvml = nvml
        self._pci = pci
        self._nodes = _MissingDeviceNodes(devices, make_nodes)
        self._session: int | None = None
        # What the nvidia driver had when NVML was started.
        self._bound: frozenset[str] | None = None
        self._known: dict[int, GpuReading] = {}  # by NVML index, of this session
        self._failed: dict[int, str] = {}  # those that could not be read at the last scan
        self._links: Mapping[str, NvLinks] = {}  # by bus id
        self._reached: Mapping[str, frozenset[str]] = {}
        self._links_until = 0.0
        self._built: tuple[tuple[object, ...], Inventory] | None = None  # and what it was built of
        self._last: Inventory | None = None  # of the last scan, if NVML as a whole was in time
        self._answered: dict[str, Gpu] = {}  # by bus id, each as it was when it last answered
        self._driverless: set[int] = set()  # of _failed: it is the driver that does not answer

    @property
    def answered(self) -> tuple[Gpu, ...]:
        """The GPUs that are there, each as it was when it last answered; by bus id."""
        return tuple(gpu for _, gpu in sorted(self._answered.items()))

    def remember(self, gpus: Iterable[Gpu]) -> None:
        """An earlier process was answered by *gpus* since the node started. Before the first
        scan."""
        self._answered |= {gpu.pci_bus_id: gpu for gpu in gpus}

    def scan(self) -> Inventory:
        """What there is now; devices by minor number.

        Never raises for one GPU's fault. A GPU that hangs costs its deadline once, and a fifth of
        it for the read together with others, or for each one that is new or in partitions. One that
        is being changed, or has to wait for that, is ``stale``, and so are all of them at the first
        scan at which NVML itself is late. One that answered before and cannot be read is ``lost``,
        as it was, and ``stale``, too. While NVML is released, those that are remembered are
        ``stale``. A node without NVIDIA GPUs is empty, whatever NVML says. NodeError: the PCI bus
        cannot be read.
        """
        last, self._last = self._last, None
        if self._bound is None:  # before NVML is started: what comes after is seen as a change
            self._bound = _bound_to_nvidia(self._pci.gpus())
        try:
            system = self._nvml.system()
            pci = self._pci.gpus()
            if _bound_to_nvidia(pci) != self._bound and self._nvml.restart():
                self._bound = _bound_to_nvidia(pci)
                system = self._nvml.system()
        except NodeError as error:
            if last is not None and isinstance(error, TimedOut):
                log.warning("NVML is late, and all is as it was at the last scan: %s", error)
                return replace(last, stale=frozenset(gpu.uuid for gpu in last.gpus))
            self._bound = None
            if self._nvml.released and (remembered := self._present(self._pci.gpus())):
                stale = frozenset(gpu.uuid for gpu in remembered)
                return replace(_inventory(remembered, ()), stale=stale)
            return _inventory((), waiting_for_nvml(self._pci.gpus().values(), str(error)))
        self._last = self._scan_gpus(system, pci)
        return self._last

    def _scan_gpus(self, system: NvmlSystem, pci: Mapping[str, PciGpu]) -> Inventory:
        if system.session != self._session:
            self._session, self._links_until = system.session, 0.0
            self._known, self._failed = {}, {}
        self._answered = {gpu.pci_bus_id: gpu for gpu in self._present(pci)}
        last = dict(self._known)
        failed = self._learn(system)
        readings = {index: reading for index, reading in self._known.items() if index not in failed}
        failed |= self._refresh_links(readings)
        refused = dict(unusable_gpus(readings)) | failed
        offered = {index: reading for index, reading in readings.items() if index not in refused}
        refused |= self._nodes.missing(
            {index: reading.static.minor for index, reading in offered.items()}
        )
        unread = frozenset(
            reading.dynamic.uuid for index, reading in offered.items() if reading is last.get(index)
        )
        basis = (
            *(system, dict(pci), dict(self._known), offered, refused, self._reached),
            self._unlinked,
        )
        if self._built is None or self._built[0] != basis:
            devices = [
                self._gpu(reading, system, pci)
                for index, reading in offered.items()
                if index not in refused
            ]
            self._built = basis, _inventory(devices, self._unavailable(refused, pci))
        inventory = self._built[1]
        self._answered |= {gpu.pci_bus_id: gpu for gpu in inventory.gpus}
        inventory = with_lost_gpus(inventory, self._answered, self._reasons_of_loss(failed))
        stale = unread | {uuid for uuid, _ in inventory.lost}
        return replace(inventory, stale=stale) if stale else inventory

    def _present(self, pci: Mapping[str, PciGpu]) -> tuple[Gpu, ...]:
        """Those that answered and are still NVIDIA's driver's."""
        return tuple(gpu for gpu in self.answered if _is_nvidias(pci.get(gpu.pci_bus_id)))

    def _reasons_of_loss(self, failed: Mapping[int, str]) -> Mapping[str, str]:
        """Why GPUs are lost, by bus id: those that cannot be read, and those that NVML does not
        list any more. One that answers and cannot be used is not lost, nor is any whose driver
        goes."""
        known = {index: each.static.pci_bus_id for index, each in self._known.items()}
        silent = failed.keys() - self._driverless
        reasons = {bus_id: failed[index] for index, bus_id in known.items() if index in silent}
        listed = {bus_id for index, bus_id in known.items() if index not in silent}
        gone = sorted(self._answered.keys() - reasons.keys() - listed)
        # NVML, too, counts in the order of bus ids.
        unknown = [failed[index] for index in sorted(silent - known.keys())]
        if len(unknown) == len(gone):
            return reasons | dict(zip(gone, unknown, strict=True))
        return reasons | dict.fromkeys(gone, "NVML does not list it any more")

    def _learn(self, system: NvmlSystem) -> dict[int, str]:
        """Bring what is known up to date. Answers with the GPUs that cannot be read, and why."""
        failed: dict[int, str] = {}
        self._driverless.clear()
        dynamic_states: dict[int, DynamicState] = {}
        known_indices = self._known.keys() | self._failed.keys()
        for index, dynamic in self._nvml.dynamic_states(range(system.gpus), known_indices).items():
            if isinstance(dynamic, NodeError):
                failed |= self._failure(index, dynamic)
            else:
                dynamic_states[index] = dynamic
        static_infos = self._static_infos(dynamic_states, known_indices)
        for index, dynamic in dynamic_states.items():
            info = static_infos[index]
            if isinstance(info, NodeError):
                failed |= self._failure(index, info)
            else:
                _log_hidden(self._known.get(index), dynamic)
                self._known[index] = GpuReading(dynamic, info)
        self._failed = failed
        return dict(failed)

    def _failure(self, index: int, error: NodeError) -> dict[int, str]:
        """Why a GPU cannot be read, if that is so, by its index."""
        if not isinstance(error, GpuBeingChanged):
            if nvml_error_code(error) in RESTART_NEEDED:
                self._driverless.add(index)
            return {index: unreadable_reason(error)}
        return {index: self._failed[index]} if index in self._failed else {}

    def _static_infos(
        self, dynamic_states: Mapping[int, DynamicState], known: Set[int]
    ) -> Mapping[int, StaticInfo | NodeError]:
        current = {
            index: self._known[index].static
            for index, dynamic in dynamic_states.items()
            if index in self._known and _is_current(self._known[index], dynamic)
        }
        if missing := dynamic_states.keys() - current.keys():
            return {**current, **self._nvml.static_infos(sorted(missing), known)}
        return current

    def _refresh_links(self, readings: Mapping[int, GpuReading]) -> dict[int, str]:
        """Read the NVLinks again once they are old, or a GPU is new. Answers with those that hang.

        What was read of a GPU stays while it does not answer, so that its fault is not seen on its
        neighbours; links that cannot be read are no reason not to offer it.
        """
        new = any(reading.static.pci_bus_id not in self._links for reading in readings.values())
        if not new and time.monotonic() < self._links_until:
            return {}
        hung: dict[int, str] = {}
        listed = {reading.static.pci_bus_id for reading in self._known.values()}
        links = {bus_id: nvlinks for bus_id, nvlinks in self._links.items() if bus_id in listed}
        known = {index for index, reading in readings.items() if reading.static.pci_bus_id in links}
        until = time.monotonic() + _NVLINKS_TTL_SECONDS
        for index, nvlinks in self._nvml.links(sorted(readings), known).items():
            bus_id = readings[index].static.pci_bus_id
            if isinstance(nvlinks, GpuBeingChanged):
                until = 0.0
            elif isinstance(nvlinks, NodeError):
                log.warning("NVLinks not read: %s", nvlinks, extra={"gpu": bus_id})
                links.setdefault(bus_id, NvLinks())
                if isinstance(nvlinks, TimedOut):
                    hung[index] = unreadable_reason(nvlinks)
                    until = 0.0  # not offered until it answers, so it is asked at every scan
            else:
                links[bus_id] = nvlinks
        self._links, self._reached = links, nvlink_neighbours(links)
        self._links_until = until
        return hung

    def _gpu(self, reading: GpuReading, system: NvmlSystem, pci: Mapping[str, PciGpu]) -> Gpu:
        static = reading.static
        return Gpu(
            minor=static.minor,
            uuid=reading.dynamic.uuid,
            pci_bus_id=static.pci_bus_id,
            product_name=static.product_name,
            brand=static.brand,
            architecture=static.architecture,
            compute_capability=static.compute_capability,
            driver_version=system.driver_version,
            cuda_driver_version=system.cuda_driver_version,
            memory_bytes=static.memory_bytes,
            addressing_mode=static.addressing_mode,
            topology=self._topology(static.pci_bus_id, pci.get(static.pci_bus_id)),
            pci_id=static.pci_id,
            mig=_mig(reading),
            mig_problem=static.mig_problem,
        )

    @property
    def _unlinked(self) -> frozenset[str]:
        """The bus ids of GPUs that answered an earlier process, and did not tell this one to whom
        they have NVLinks."""
        return frozenset(self._answered.keys() - self._links.keys())

    def _topology(self, bus_id: str, pci: PciGpu | None) -> Topology:
        if bus_id in self._answered and self._unlinked:
            return self._answered[bus_id].topology
        clique = nvlink_clique(bus_id, self._reached)
        uuids = {
            reading.static.pci_bus_id: reading.dynamic.uuid for reading in self._known.values()
        }
        return Topology(
            pcie_root=pci.root if pci else None,
            pcie_switch=pci.switch if pci else None,
            numa_node=pci.numa_node if pci else None,
            # A UUID of the clique names it: no other node's clique has the same.
            nvlink_clique=min(uuids[member] for member in clique) if clique else None,
            nvlink_peers=len(self._reached[bus_id]),
        )

    def _unavailable(
        self, refused: Mapping[int, str], pci: Mapping[str, PciGpu]
    ) -> list[UnavailableGpu]:
        listed = {reading.static.pci_bus_id for reading in self._known.values()}
        unlisted = [gpu for bus_id, gpu in pci.items() if bus_id not in listed]
        names = {
            index: describe_pci_gpu(reading.static.pci_bus_id, reading.dynamic.uuid)
            for index, reading in self._known.items()
        }
        nameless = sorted(refused.keys() - names.keys())
        ours = [gpu for gpu in unlisted if gpu.driver == "nvidia"]
        if nameless and len(nameless) == len(ours):  # NVML, too, counts in the order of bus ids
            names |= {
                index: describe_pci_gpu(gpu.bus_id)
                for index, gpu in zip(nameless, ours, strict=True)
            }
            unlisted = [gpu for gpu in unlisted if gpu.driver != "nvidia"]
        return [
            *(
                UnavailableGpu(names.get(index, f"GPU with NVML index {index}"), why)
                for index, why in refused.items()
            ),
            *not_listed_by_nvml(unlisted),
        ]


class _MissingDeviceNodes:
    """Whether GPUs have their device nodes, after an attempt to make those that are missing."""

    def __init__(self, directory: Path, make: MakeDeviceFiles) -> None:
        self._directory = directory
        self._make = make
        # By minor number, while the node is missing: the last error, and when to try again.
        self._tried: dict[int, tuple[str, float]] = {}

    def missing(self, minors: Mapping[int, int]) -> dict[int, str]:
        """For each key of *minors* without a node, why there is none."""
        lacking = [minor for minor in sorted(minors.values()) if not self._is_there(minor)]
        self._tried = {minor: attempt for minor, attempt in self._tried.items() if minor in lacking}
        now = time.monotonic()
        for minor in lacking:
            if minor not in self._tried or now >= self._tried[minor][1]:
                self._tried[minor] = self._error(minor), now + _RETRY_SECONDS
        errors = {minor: error for minor, (error, _) in self._tried.items() if error}
        return {
            key: f"it has no device node, and none could be made: {errors[minor]}"
            for key, minor in minors.items()
            if minor in errors
        }

    def _error(self, minor: int) -> str:
        """Try to make one node. No error: it is there, if only in a driver container's /dev."""
        try:
            self._make((minor,))
        except NodeError as error:
            return "" if self._is_there(minor) else str(error)
        return ""

    def _is_there(self, minor: int) -> bool:
        try:
            return stat.S_ISCHR(os.stat(f"{self._directory}/nvidia{minor}").st_mode)
        except OSError:
            return False


def _log_hidden(before: GpuReading | None, state: DynamicState) -> None:
    """Once, not at every scan."""
    if state.mig_hidden and not (before and before.dynamic.mig_hidden):
        log.warning(MIG_HIDDEN, extra={"gpu": state.uuid})


def _is_current(reading: GpuReading, state: DynamicState) -> bool:
    """Whether what was read of a GPU still holds."""
    return (reading.dynamic.uuid, reading.static.mig_on) == (state.uuid, state.mig_on)


def _mig(reading: GpuReading) -> MigInfo | None:
    dynamic, static = reading.dynamic, reading.static
    # Without profiles it has no partitions; while the mode is on it cannot be used whole either.
    if dynamic.mig_on is None or not (dynamic.mig_on or static.mig_profiles):
        return None
    return MigInfo(
        on=dynamic.mig_on,
        pending=dynamic.mig_pending,
        switches=switches_without_reset(static.compute_capability.major)
        and static.mig_fixed is not GuestRestriction.ALL,
        profiles=() if dynamic.mig_hidden else static.mig_profiles,  # who knows what is free?
        instances=dynamic.instances,
        unusable=dynamic.unusable,
        fixed=static.mig_fixed,
    )


def _bound_to_nvidia(pci: Mapping[str, PciGpu]) -> frozenset[str]:
    return frozenset(bus_id for bus_id, gpu in pci.items() if _is_nvidias(gpu))


def _is_nvidias(gpu: PciGpu | None) -> bool:
    """Whether it is on the bus, and nobody took it from NVIDIA's driver."""
    return gpu is not None and gpu.driver == "nvidia"


def _inventory(devices: Iterable[Gpu], unavailable: Iterable[UnavailableGpu]) -> Inventory:
    return Inventory(
        tuple(sorted(devices, key=lambda gpu: gpu.minor)),
        tuple(sorted(unavailable, key=lambda gpu: (gpu.what, gpu.reason))),
    )

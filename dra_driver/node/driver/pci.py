"""Where GPUs sit: PCI functions, bridges and drivers, as sysfs tells them."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dra_driver.base.errors import NodeError
from dra_driver.base.frozen import frozen

_ADDRESS = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)
_ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # base class of PCI class codes (PCI Code and ID Assignment, 1.4)
_PCI_BRIDGE = "0x0604"


@frozen
class PciGpu:
    """An NVIDIA display function of the PCI bus, whether or not NVML knows it."""

    bus_id: str
    driver: str | None  # "nvidia", "vfio-pci"; None where no driver is bound
    root: str | None
    switch: str | None
    numa_node: int | None


@frozen
class _PciFunction:
    """A PCI function and the bridges above it, the farthest first."""

    bus_id: str
    root: str | None
    bridges: tuple[str, ...]
    kind: str  # class code: "0x030200"
    virtual: bool  # an SR-IOV virtual function: a part of another function, no device of its own

    @property
    def slot(self) -> str:
        return self.bus_id.rpartition(".")[0]


def canonical_bus_id(text: str) -> str:
    """*text* as Kubernetes writes PCI bus ids: "0000:65:00.0".

    NVML prints the domain with eight digits and upper case ("00000000:65:00.0"), sysfs with four
    or, for domains beyond ffff (Intel VMD), five. NodeError: it is no PCI bus id.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise NodeError(f"{text!r} is no PCI bus id: expected one like 0000:65:00.0")
    domain, bus, device, function = match.groups()
    return f"{int(domain, 16):04x}:{bus}:{device}.{function}".lower()


class PciBus:
    """The NVIDIA GPUs below a sysfs (``/sys``).

    Only names and drivers are read each time; the rest is read again when a PCI function came or
    went, which the inode of its entry tells even where the name stayed.
    """

    def __init__(self, sysfs: Path) -> None:
        self._devices = sysfs / "bus/pci/devices"
        self._entries: tuple[tuple[str, int], ...] = ()
        self._gpus: tuple[PciGpu, ...] = ()

    def gpus(self) -> Mapping[str, PciGpu]:
        """By bus id, ascending. Empty on a machine without PCI. NodeError: sysfs cannot be read."""
        try:
            entries = self._list()
            if entries != self._entries:
                functions = [self._function(name) for name, _ in entries]
                self._gpus = self._read([function for function in functions if function])
                self._entries = entries if all(functions) else ()  # one just came or went
            return {gpu.bus_id: self._with_driver(gpu) for gpu in self._gpus}
        except OSError as error:
            raise NodeError(f"cannot read PCI devices: {error}") from error

    def _list(self) -> tuple[tuple[str, int], ...]:
        try:
            with os.scandir(self._devices) as entries:
                return tuple(sorted((entry.name, entry.inode()) for entry in entries))
        except FileNotFoundError:
            return ()

    def _with_driver(self, gpu: PciGpu) -> PciGpu:
        driver = self._driver(gpu.bus_id)
        if driver == gpu.driver:
            return gpu
        return PciGpu(gpu.bus_id, driver, gpu.root, gpu.switch, gpu.numa_node)

    def _driver(self, name: str) -> str | None:
        try:
            return os.path.basename(os.readlink(f"{self._devices}/{name}/driver"))
        except OSError:
            return None  # no driver, or the function just went

    def _read(self, functions: Sequence[_PciFunction]) -> tuple[PciGpu, ...]:
        below = _slots_below(functions)
        return tuple(
            PciGpu(
                bus_id=function.bus_id,
                driver=self._driver(function.bus_id),
                root=function.root,
                switch=_shared_bridge(function, below),
                numa_node=self._numa_node(function.bus_id),
            )
            for function in functions
            if function.kind.startswith(_DISPLAY)
            and not function.virtual
            and self._text(function.bus_id, "vendor") == _NVIDIA
        )

    def _function(self, name: str) -> _PciFunction | None:
        try:
            parts = os.readlink(self._devices / name).split("/")
        except OSError:
            return None
        if not (kind := self._text(name, "class")):
            return None
        roots = [part for part in parts if _ROOT.fullmatch(part)]
        return _PciFunction(
            bus_id=name,
            root=roots[0] if roots else None,
            bridges=tuple(part for part in parts[:-1] if _ADDRESS.fullmatch(part)),
            kind=kind,
            virtual=(self._devices / name / "physfn").exists(),
        )

    def _numa_node(self, name: str) -> int | None:
        text = self._text(name, "numa_node")
        return int(text) if text.isdecimal() else None  # the kernel says -1 where it does not know

    def _text(self, name: str, attribute: str) -> str:
        try:
            return (self._devices / name / attribute).read_text().strip()
        except OSError:
            return ""  # the function just went; the next look lists without it


def _slots_below(functions: Iterable[_PciFunction]) -> Mapping[str, set[str]]:
    """For each bridge, the slots (domain:bus:device) of the endpoints below it."""
    below: dict[str, set[str]] = {}
    for function in functions:
        if function.virtual or function.kind.startswith(_PCI_BRIDGE):
            continue
        for bridge in function.bridges:
            below.setdefault(bridge, set()).add(function.slot)
    return below


def _shared_bridge(function: _PciFunction, below: Mapping[str, set[str]]) -> str | None:
    """The nearest bridge above *function* below which an endpoint in another slot sits too.

    Below a PCIe switch that is the switch's upstream port: the downstream port leads to this slot
    alone, and other functions of a slot (a GPU's audio) are the same device. None: only the root
    complex is shared.
    """
    return next(
        (bridge for bridge in reversed(function.bridges) if below[bridge] - {function.slot}), None
    )

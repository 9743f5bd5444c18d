"""The host of a simulated node as a tree of files: /dev, /sys, /proc and the driver."""

import os
from collections.abc import Mapping
from typing import Final

from dra_driver.sim.host.files import (
    CharacterDevice,
    FileTree,
    SimulatedDirectory,
    SimulatedLink,
    text_file,
)
from dra_driver.sim.host.libraries import driver_libraries
from dra_driver.sim.host.tools import (
    CAPS_MAJOR,
    SETTINGS_DIRECTORY,
    UVM_MAJOR,
    SmiMigLines,
    driver_tools,
)
from dra_driver.sim.mig.host_files import driver_capability_files
from dra_driver.sim.node_spec import PciDevice, SimulatedGpu, SimulatedNode

_NVIDIA_MAJOR: Final = 195  # of nvidiaN, nvidiactl and nvidia-modeset (Linux, devices.txt)
_DISPLAY: Final = "0x030200"  # a 3D controller: boards without a display connector
_BRIDGE: Final = "0x060400"
_DEVICES: Final = "sys/bus/pci/devices"


def host_tree(node: SimulatedNode, mig: Mapping[str, SmiMigLines]) -> FileTree:
    """Every file of the host, by its path below the host's root. *mig*: what nvidia-smi says of it,
    by UUID of the GPU."""
    tree: FileTree = {"dev": SimulatedDirectory(), _DEVICES: SimulatedDirectory()}
    tree |= _pci(node)
    if node.driver != "no-library":
        tree |= driver_libraries(node.driver_version) | driver_tools(node, mig)
    if node.driver == "ready":
        tree |= _device_nodes(node) | _proc(node) | driver_capability_files(node)
        tree[f"{SETTINGS_DIRECTORY}/{node.driver_version}"] = SimulatedDirectory()
    return tree


def _device_nodes(node: SimulatedNode) -> FileTree:
    tree: FileTree = {
        "dev/nvidiactl": CharacterDevice(_NVIDIA_MAJOR, 255),
        "dev/nvidia-modeset": CharacterDevice(_NVIDIA_MAJOR, 254),
        "dev/nvidia-uvm": CharacterDevice(UVM_MAJOR, 0),
        "dev/nvidia-uvm-tools": CharacterDevice(UVM_MAJOR, 1),
    }
    for gpu in node.gpus:
        if gpu.listed and gpu.device_nodes:
            tree[f"dev/nvidia{gpu.minor}"] = CharacterDevice(_NVIDIA_MAJOR, int(gpu.minor or 0))
    return tree


def _proc(node: SimulatedNode) -> FileTree:
    version = node.driver_version
    tree: FileTree = {
        "proc/driver/nvidia/version": text_file(
            f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  "
            "(simulated)\nGCC version:  gcc version 12.3.0\n"
        ),
        "proc/driver/nvidia/gpus": SimulatedDirectory(),
        "proc/devices": text_file(
            "Character devices:\n  1 mem\n"
            f"{_NVIDIA_MAJOR} nvidia\n{_NVIDIA_MAJOR} nvidia-modeset\n{_NVIDIA_MAJOR} nvidiactl\n"
            f"{CAPS_MAJOR} nvidia-caps\n{UVM_MAJOR} nvidia-uvm\n\nBlock devices:\n259 blkext\n"
        ),
    }
    for gpu in node.gpus:
        if gpu.listed:
            tree[f"proc/driver/nvidia/gpus/{gpu.bus_id}/information"] = text_file(
                f"Model: \t\t {gpu.board.name}\n"
                f"GPU UUID: \t {gpu.uuid}\n"
                "Bus Type: \t PCIe\n"
                f"Bus Location: \t {gpu.bus_id}\n"
                f"Device Minor: \t {gpu.minor}\n"
                f"GPU Firmware: \t {version}\n"
                "GPU Excluded:\t No\n"
            )
    return tree


def _pci(node: SimulatedNode) -> FileTree:
    tree: FileTree = {}
    for gpu in node.gpus:
        if gpu.present:
            tree |= _bridges(gpu.below, gpu.numa_node) | _gpu_function(gpu, node)
    for device in node.devices:
        tree |= _bridges(device.below, device.numa_node) | _other_function(device)
    return tree


def _gpu_function(gpu: SimulatedGpu, node: SimulatedNode) -> FileTree:
    driver: str | None = gpu.driver
    if driver == "none" or (driver == "nvidia" and node.driver != "ready"):
        driver = None
    directory = f"sys/devices/{gpu.below}/{gpu.bus_id}"
    kind = (_DISPLAY, "0x10de", gpu.board.pci_device)
    tree = _pci_function(directory, kind, gpu.numa_node)
    tree[f"{directory}/subsystem_vendor"] = text_file("0x10de\n")
    tree[f"{directory}/subsystem_device"] = text_file(f"{gpu.board.pci_subsystem}\n")
    if driver:
        at = f"sys/bus/pci/drivers/{driver}"
        tree[at] = SimulatedDirectory()
        tree[f"{directory}/driver"] = _link(f"{directory}/driver", at)
        tree[f"{at}/{gpu.bus_id}"] = _link(f"{at}/{gpu.bus_id}", directory)
    return tree


def _other_function(device: PciDevice) -> FileTree:
    directory = f"sys/devices/{device.below}/{device.bus_id}"
    return _pci_function(directory, (device.kind, device.vendor, device.device), device.numa_node)


def _bridges(below: str, numa_node: int) -> FileTree:
    """Root port, then the ports of a switch: every PCI function on the way."""
    parts = below.split("/")
    directories = ("/".join(parts[:end]) for end in range(2, len(parts) + 1))
    tree: FileTree = {}
    for depth, directory in enumerate(directories):
        # An Intel root port, then a Broadcom PCIe switch (PCI ID database).
        kind = (_BRIDGE, "0x8086", "0x352a") if depth == 0 else (_BRIDGE, "0x1000", "0xc030")
        tree |= _pci_function(f"sys/devices/{directory}", kind, numa_node)
    return tree


def _pci_function(directory: str, kind: tuple[str, str, str], numa_node: int) -> FileTree:
    code, vendor, device = kind
    name = directory.rpartition("/")[2]
    return {
        f"{directory}/class": text_file(f"{code}\n"),
        f"{directory}/vendor": text_file(f"{vendor}\n"),
        f"{directory}/device": text_file(f"{device}\n"),
        f"{directory}/numa_node": text_file(f"{numa_node}\n"),
        f"{_DEVICES}/{name}": _link(f"{_DEVICES}/{name}", directory),
    }


def _link(at: str, to: str) -> SimulatedLink:
    return SimulatedLink(os.path.relpath(to, os.path.dirname(at)))

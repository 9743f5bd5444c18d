"""The host of a simulated node as a tree of files: /dev, /sys, /proc and the driver."""

import os
from collections.abc import Mapping
from typing import Final

from dra_driver.node.sim.files import CharacterDevice, Directory, Link, Tree, text
from dra_driver.node.sim.libraries import libraries
from dra_driver.node.sim.mig.capabilities import of_driver
from dra_driver.node.sim.node import Node, PciDevice, SimulatedGpu
from dra_driver.node.sim.tools import CAPS_MAJOR, SETTINGS, UVM_MAJOR, MigLines, tools

_NVIDIA_MAJOR: Final = 195  # of nvidiaN, nvidiactl and nvidia-modeset (Linux, devices.txt)
_DISPLAY: Final = "0x030200"  # a 3D controller: boards without a display connector
_BRIDGE: Final = "0x060400"
_DEVICES: Final = "sys/bus/pci/devices"


def host_tree(node: Node, mig: Mapping[str, MigLines]) -> Tree:
    """Every file of the host, by its path below the host's root. *mig*: what nvidia-smi says of it,
    by UUID of the GPU."""
    tree: Tree = {"dev": Directory(), _DEVICES: Directory()}
    tree |= _pci(node)
    if node.driver != "no-library":
        tree |= libraries(node.driver_version) | tools(node, mig)
    if node.driver == "ready":
        tree |= _device_nodes(node) | _proc(node) | of_driver(node)
        tree[f"{SETTINGS}/{node.driver_version}"] = Directory()
    return tree


def _device_nodes(node: Node) -> Tree:
    tree: Tree = {
        "dev/nvidiactl": CharacterDevice(_NVIDIA_MAJOR, 255),
        "dev/nvidia-modeset": CharacterDevice(_NVIDIA_MAJOR, 254),
        "dev/nvidia-uvm": CharacterDevice(UVM_MAJOR, 0),
        "dev/nvidia-uvm-tools": CharacterDevice(UVM_MAJOR, 1),
    }
    for gpu in node.gpus:
        if gpu.listed and gpu.device_nodes:
            tree[f"dev/nvidia{gpu.minor}"] = CharacterDevice(_NVIDIA_MAJOR, int(gpu.minor or 0))
    return tree


def _proc(node: Node) -> Tree:
    version = node.driver_version
    tree: Tree = {
        "proc/driver/nvidia/version": text(
            f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  "
            "(simulated)\nGCC version:  gcc version 12.3.0\n"
        ),
        "proc/driver/nvidia/gpus": Directory(),
        "proc/devices": text(
            "Character devices:\n  1 mem\n"
            f"{_NVIDIA_MAJOR} nvidia\n{_NVIDIA_MAJOR} nvidia-modeset\n{_NVIDIA_MAJOR} nvidiactl\n"
            f"{CAPS_MAJOR} nvidia-caps\n{UVM_MAJOR} nvidia-uvm\n\nBlock devices:\n259 blkext\n"
        ),
    }
    for gpu in node.gpus:
        if gpu.listed:
            tree[f"proc/driver/nvidia/gpus/{gpu.bus_id}/information"] = text(
                f"Model: \t\t {gpu.board.name}\n"
                f"GPU UUID: \t {gpu.uuid}\n"
                "Bus Type: \t PCIe\n"
                f"Bus Location: \t {gpu.bus_id}\n"
                f"Device Minor: \t {gpu.minor}\n"
                f"GPU Firmware: \t {version}\n"
                "GPU Excluded:\t No\n"
            )
    return tree


def _pci(node: Node) -> Tree:
    tree: Tree = {}
    for gpu in node.gpus:
        if gpu.present:
            tree |= _bridges(gpu.below, gpu.numa_node) | _gpu_function(gpu, node)
    for device in node.devices:
        tree |= _bridges(device.below, device.numa_node) | _other_function(device)
    return tree


def _gpu_function(gpu: SimulatedGpu, node: Node) -> Tree:
    driver: str | None = gpu.driver
    if driver == "none" or (driver == "nvidia" and node.driver != "ready"):
        driver = None
    home = f"sys/devices/{gpu.below}/{gpu.bus_id}"
    kind = (_DISPLAY, "0x10de", gpu.board.pci_device)
    tree = _function(home, kind, gpu.numa_node)
    tree[f"{home}/subsystem_vendor"] = text("0x10de\n")
    tree[f"{home}/subsystem_device"] = text(f"{gpu.board.pci_subsystem}\n")
    if driver:
        at = f"sys/bus/pci/drivers/{driver}"
        tree[at] = Directory()
        tree[f"{home}/driver"] = _link(f"{home}/driver", at)
        tree[f"{at}/{gpu.bus_id}"] = _link(f"{at}/{gpu.bus_id}", home)
    return tree


def _other_function(device: PciDevice) -> Tree:
    home = f"sys/devices/{device.below}/{device.bus_id}"
    return _function(home, (device.kind, device.vendor, device.device), device.numa_node)


def _bridges(below: str, numa_node: int) -> Tree:
    """Root port, then the ports of a switch: every PCI function on the way."""
    parts = below.split("/")
    homes = ("/".join(parts[:end]) for end in range(2, len(parts) + 1))
    tree: Tree = {}
    for depth, home in enumerate(homes):
        # An Intel root port, then a Broadcom PCIe switch (PCI ID database).
        kind = (_BRIDGE, "0x8086", "0x352a") if depth == 0 else (_BRIDGE, "0x1000", "0xc030")
        tree |= _function(f"sys/devices/{home}", kind, numa_node)
    return tree


def _function(home: str, kind: tuple[str, str, str], numa_node: int) -> Tree:
    code, vendor, device = kind
    name = home.rpartition("/")[2]
    return {
        f"{home}/class": text(f"{code}\n"),
        f"{home}/vendor": text(f"{vendor}\n"),
        f"{home}/device": text(f"{device}\n"),
        f"{home}/numa_node": text(f"{numa_node}\n"),
        f"{_DEVICES}/{name}": _link(f"{_DEVICES}/{name}", home),
    }


def _link(at: str, to: str) -> Link:
    return Link(os.path.relpath(to, os.path.dirname(at)))

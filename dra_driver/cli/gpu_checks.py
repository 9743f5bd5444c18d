"""Is the driver whole, loaded and the same everywhere, and can every GPU be offered?"""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dra_driver.cli.findings import Finding, fail, ok, skip, warn
from dra_driver.errors import DriverError
from dra_driver.model.driver_files import DeviceFiles, DriverFiles
from dra_driver.model.inventory import Inventory
from dra_driver.node.device_nodes import OPTIONAL
from dra_driver.node.node import GpuNode
from dra_driver.node.rootfs import RootFs

ROOT, MODULE, GPUS, NODES, HOOK = (
    "driver root",
    "kernel module",
    "GPUs",
    "device files",
    "nvidia-cdi-hook",
)
NEEDS_DRIVER = "needs the driver, which is to be mended first"


@dataclass(frozen=True, slots=True)
class Machine:
    """The node that is looked at."""

    node: GpuNode
    host_root: Path  # where this process sees the host's /


def driver_root(machine: Machine) -> Iterator[Finding]:
    yield of_driver(_files(machine.node))


def kernel_module(machine: Machine, loaded: str | None) -> Iterator[Finding]:
    yield of_module(loaded, _files(machine.node))


def gpus(machine: Machine) -> Iterator[Finding]:
    yield from of_inventory(machine.node.inventory())


def none_there(machine: Machine) -> Iterator[Finding]:
    """Where there is no driver: whether there is a GPU that misses it."""
    if machine.node.inventory() == Inventory():
        yield from of_inventory(Inventory())


def device_files(machine: Machine) -> Iterator[Finding]:
    devices = machine.node.inventory().gpus
    if not devices:
        yield skip(NODES, "no GPU is offered")
        return
    minors = tuple(gpu.minor for gpu in devices)
    try:
        found: DeviceFiles | DriverError = machine.node.device_files(minors)
    except DriverError as e:
        found = e
    yield of_device_files(found)


def hook(machine: Machine, path: str) -> Iterator[Finding]:
    """*path*: of nvidia-cdi-hook on the host; empty where none is used."""
    if not path:
        yield ok(HOOK, "not used: containers are edited without hooks")
        return
    fs = RootFs(str(machine.host_root))
    found = fs.resolve(path) if path.startswith("/") else None
    yield of_hook(path, found is not None and os.access(fs.here(found), os.X_OK))


def of_driver(files: DriverFiles | DriverError) -> Finding:
    if isinstance(files, DriverError):
        return fail(
            ROOT,
            str(files),
            "install the driver, or say where it is: --driver-root (a path of the host)",
        )
    return ok(
        ROOT,
        f"driver {files.version} in {files.root}: {len(files.libraries)} libraries "
        f"({files.machine}) in {files.lib_dir}, {len(files.tools)} programs",
    )


def of_module(loaded: str | None, files: DriverFiles | DriverError) -> Finding:
    if loaded is None and isinstance(files, DriverError):
        return skip(MODULE, f"none is loaded; {NEEDS_DRIVER}")
    if loaded is None:
        return fail(
            MODULE,
            "none is loaded (no /proc/driver/nvidia/version)",
            "on the host: modprobe nvidia nvidia-uvm; is --host-root the host's /?",
        )
    if isinstance(files, DriverError):
        return warn(MODULE, f"{loaded}, and no libraries to compare with", "mend the driver root")
    if loaded != files.version:
        return fail(
            MODULE,
            f"{loaded} is loaded, but the libraries are {files.version}",
            "finish the driver upgrade: drain the node, then reboot it or reload the module",
        )
    return ok(MODULE, f"{loaded}, as the libraries")


def of_inventory(inventory: Inventory) -> Iterator[Finding]:
    """What is offered as one line, then one for each GPU that is withheld."""
    if inventory.gpus:
        products = Counter(gpu.product_name for gpu in inventory.gpus)
        kinds = ", ".join(f"{number} {product}" for product, number in sorted(products.items()))
        yield ok(GPUS, f"{kinds}: {', '.join(gpu.name for gpu in inventory.gpus)}")
    elif not inventory.withheld:
        yield warn(GPUS, "this node has none", "run the driver on nodes with NVIDIA GPUs only")
    found = warn if inventory.gpus else fail
    for one in inventory.withheld:
        yield found(GPUS, f"{one.what} is not offered: {one.reason}", "")  # it says what to do


def of_device_files(found: DeviceFiles | DriverError) -> Finding:
    if isinstance(found, DriverError):
        return fail(NODES, str(found), "on the host: nvidia-modprobe -c 0 -u, and nvidia-smi -L")
    paths = [Path(file.host_path) for file in (*found.common, *found.gpus.values())]
    absent = sorted(set(OPTIONAL) - {path.name for path in paths})
    without = f" (without {', '.join(absent)}, which is optional)" if absent else ""
    names = ", ".join(sorted(path.name for path in paths))
    directories = ", ".join(sorted({str(path.parent) for path in paths}))
    return ok(NODES, f"{names} in {directories}{without}")


def of_hook(path: str, runs: bool) -> Finding:
    if runs:
        return ok(HOOK, path)
    return fail(
        HOOK,
        f"{path} is no program on the host",
        "install NVIDIA's container toolkit there, or leave --nvidia-cdi-hook empty",
    )


def _files(node: GpuNode) -> DriverFiles | DriverError:
    try:
        return node.driver_files()
    except DriverError as e:
        return e

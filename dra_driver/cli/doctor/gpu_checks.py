"""``doctor``'s checks of the GPUs: their driver, inventory, device files, and hooks."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dra_driver.base.errors import DriverError
from dra_driver.cli.findings import Check, Finding, fail, ok, skip, warn
from dra_driver.model.driver_files import DeviceFiles, DriverFiles
from dra_driver.model.gpus import (
    Gpu,
    Inventory,
)
from dra_driver.node.driver.device_nodes import OPTIONAL_DEVICES
from dra_driver.node.driver.root import DriverRoot
from dra_driver.node.driver.rootfs import RootFs
from dra_driver.node.gpu_node import GpuNode
from dra_driver.settings import DoctorSettings

DRIVER_ROOT, KERNEL_MODULE, GPUS, DEVICE_FILES, CDI_HOOK = (
    "driver root",
    "kernel module",
    "GPUs",
    "device files",
    "nvidia-cdi-hook",
)
NEEDS_DRIVER = "needs the driver, which is to be mended first"

FindDeviceFiles = Callable[[tuple[int, ...]], DeviceFiles]
"""Finds the device files of the GPUs with these minor numbers. DriverError: one cannot be made."""


def driver_checks(node: GpuNode) -> list[Check]:
    """Where one of them fails, nothing that needs the driver can be checked."""

    def files() -> DriverFiles | DriverError:
        try:
            return node.driver_files()
        except DriverError as e:
            return e

    module = DriverRoot(None, node.root)
    return [
        (DRIVER_ROOT, lambda: [driver_files_finding(files())]),
        (KERNEL_MODULE, lambda: [kernel_module_finding(module.loaded_version(), files())]),
    ]


def checks(settings: DoctorSettings, node: GpuNode) -> list[Check]:
    return [
        (GPUS, lambda: inventory_findings(node.inventory())),
        (DEVICE_FILES, lambda: [device_files_finding(node.inventory().gpus, node.device_files)]),
        (CDI_HOOK, lambda: [cdi_hook_finding(settings.nvidia_cdi_hook, node.root)]),
    ]


def check_gpus_without_driver(read_inventory: Callable[[], Inventory]) -> Iterator[Finding]:
    """Where there is no driver: whether there is a GPU that misses it."""
    if read_inventory() == Inventory():
        yield from inventory_findings(Inventory())


def driver_files_finding(files: DriverFiles | DriverError) -> Finding:
    if isinstance(files, DriverError):
        return fail(
            DRIVER_ROOT,
            str(files),
            "install the driver, or say where it is on the host: driverRoot (chart), --driver-root",
        )
    return ok(
        DRIVER_ROOT,
        f"driver {files.version} in {files.root}: {len(files.libraries)} libraries "
        f"({files.machine}) in {files.lib_dir}, {len(files.tools)} programs",
    )


def kernel_module_finding(loaded: str | None, files: DriverFiles | DriverError) -> Finding:
    if loaded is None and isinstance(files, DriverError):
        return skip(KERNEL_MODULE, f"none is loaded; {NEEDS_DRIVER}")
    if loaded is None:
        return fail(
            KERNEL_MODULE,
            "none is loaded (no /proc/driver/nvidia/version)",
            "on the host: modprobe nvidia nvidia-uvm; is --host-root the host's /?",
        )
    if isinstance(files, DriverError):
        return warn(
            KERNEL_MODULE, f"{loaded}, and no libraries to compare with", "mend the driver root"
        )
    if loaded != files.version:
        return fail(
            KERNEL_MODULE,
            f"{loaded} is loaded, but the libraries are {files.version}",
            "finish the driver upgrade: drain the node, then reboot it or reload the module",
        )
    return ok(KERNEL_MODULE, f"{loaded}, as the libraries")


def inventory_findings(inventory: Inventory) -> Iterator[Finding]:
    """One line for the GPUs that answer, then one for each that does not or is not offered."""
    if gpus := inventory.answering:
        products = Counter(gpu.product_name for gpu in gpus)
        kinds = ", ".join(f"{number} {product}" for product, number in sorted(products.items()))
        yield ok(GPUS, f"{kinds}: {', '.join(gpu.name for gpu in gpus)}")
    elif not (inventory.unavailable or inventory.lost):
        yield warn(GPUS, "this node has none", "run the driver on nodes with NVIDIA GPUs only")
    finding = warn if gpus else fail
    names = {gpu.uuid: gpu.name for gpu in inventory.gpus}
    for uuid, reason in inventory.lost:
        yield finding(GPUS, f"{names[uuid]} does not answer: {reason}", "")
    for unavailable in inventory.unavailable:
        # it says what to do
        yield finding(GPUS, f"{unavailable.what} is not offered: {unavailable.reason}", "")


def device_files_finding(gpus: Sequence[Gpu], find: FindDeviceFiles) -> Finding:
    if not gpus:
        return skip(DEVICE_FILES, "no GPU is offered")
    try:
        files = find(tuple(gpu.minor for gpu in gpus))
    except DriverError as e:
        return fail(DEVICE_FILES, str(e), "on the host: nvidia-modprobe -c 0 -u, and nvidia-smi -L")
    paths = [Path(file.host_path) for file in (*files.common, *files.gpus.values())]
    missing = sorted(set(OPTIONAL_DEVICES) - {path.name for path in paths})
    without = f" (without {', '.join(missing)}, which is optional)" if missing else ""
    names = ", ".join(sorted(path.name for path in paths))
    directories = ", ".join(sorted({str(path.parent) for path in paths}))
    return ok(DEVICE_FILES, f"{names} in {directories}{without}")


def cdi_hook_finding(path: str, host_root: Path) -> Finding:
    """*path*: of nvidia-cdi-hook on the host; empty where none is used."""
    if not path:
        return ok(CDI_HOOK, "not used: containers are edited without hooks")
    fs = RootFs(str(host_root))
    resolved = fs.resolve(path) if path.startswith("/") else None
    if resolved is not None and os.access(fs.local_path(resolved), os.X_OK):
        return ok(CDI_HOOK, path)
    return fail(
        CDI_HOOK,
        f"{path} is no program on the host",
        "install NVIDIA's container toolkit there, or leave --nvidia-cdi-hook empty",
    )

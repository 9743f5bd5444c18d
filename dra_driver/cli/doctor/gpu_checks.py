"""``doctor``'s checks of the GPUs: their driver, inventory, compute modes, MIG modes and instances.

On a node without a GPU that can be partitioned the checks of MIG find nothing.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dra_driver.base.errors import DriverError, NodeError
from dra_driver.cli.doctor.host_checks import LedgerSnapshot
from dra_driver.cli.findings import Finding, abbreviated, fail, ok, skip, warn
from dra_driver.cli.mig_status import profile_name, unusable_instance_message
from dra_driver.model.driver_files import DeviceFile, DeviceFiles, DriverFiles
from dra_driver.model.gpus import (
    Gpu,
    GpuUuid,
    GuestRestriction,
    Inventory,
    MigInfo,
    PartitionKey,
    UnusableGpuInstance,
    reset_instructions,
)
from dra_driver.model.offer import partition_name
from dra_driver.model.records import ClaimRecord
from dra_driver.model.steps import ComputeMode, SetComputeMode
from dra_driver.node.driver.device_nodes import OPTIONAL_DEVICES
from dra_driver.node.driver.rootfs import RootFs
from dra_driver.node.gpu_node import GpuNode
from dra_driver.plan.mig.claims import lost_instances, released_partitions

DRIVER_ROOT, KERNEL_MODULE, GPUS, DEVICE_FILES, CDI_HOOK = (
    "driver root",
    "kernel module",
    "GPUs",
    "device files",
    "nvidia-cdi-hook",
)
NEEDS_DRIVER = "needs the driver, which is to be mended first"


@dataclass(frozen=True, slots=True)
class CheckedNode:
    """The node that is checked."""

    node: GpuNode
    host_root: Path  # where this process sees the host's /


def check_driver_root(machine: CheckedNode) -> Iterator[Finding]:
    yield driver_files_finding(_driver_files(machine.node))


def check_kernel_module(machine: CheckedNode, loaded: str | None) -> Iterator[Finding]:
    yield kernel_module_finding(loaded, _driver_files(machine.node))


def check_gpus(machine: CheckedNode) -> Iterator[Finding]:
    yield from inventory_findings(machine.node.inventory())


def check_gpus_without_driver(machine: CheckedNode) -> Iterator[Finding]:
    """Where there is no driver: whether there is a GPU that misses it."""
    if machine.node.inventory() == Inventory():
        yield from inventory_findings(Inventory())


def check_device_files(machine: CheckedNode) -> Iterator[Finding]:
    gpus = machine.node.inventory().gpus
    if not gpus:
        yield skip(DEVICE_FILES, "no GPU is offered")
        return
    minors = tuple(gpu.minor for gpu in gpus)
    try:
        files: DeviceFiles | DriverError = machine.node.device_files(minors)
    except DriverError as e:
        files = e
    yield device_files_finding(files)


def check_cdi_hook(machine: CheckedNode, path: str) -> Iterator[Finding]:
    """*path*: of nvidia-cdi-hook on the host; empty where none is used."""
    if not path:
        yield ok(CDI_HOOK, "not used: containers are edited without hooks")
        return
    fs = RootFs(str(machine.host_root))
    resolved = fs.resolve(path) if path.startswith("/") else None
    yield cdi_hook_finding(
        path, resolved is not None and os.access(fs.local_path(resolved), os.X_OK)
    )


def driver_files_finding(files: DriverFiles | DriverError) -> Finding:
    if isinstance(files, DriverError):
        return fail(
            DRIVER_ROOT,
            str(files),
            "install the driver, or say where it is: --driver-root (a path of the host)",
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
    """One line for the GPUs that are offered, then one for each that is not."""
    if inventory.gpus:
        products = Counter(gpu.product_name for gpu in inventory.gpus)
        kinds = ", ".join(f"{number} {product}" for product, number in sorted(products.items()))
        yield ok(GPUS, f"{kinds}: {', '.join(gpu.name for gpu in inventory.gpus)}")
    elif not inventory.unavailable:
        yield warn(GPUS, "this node has none", "run the driver on nodes with NVIDIA GPUs only")
    finding = warn if inventory.gpus else fail
    for unavailable in inventory.unavailable:
        # it says what to do
        yield finding(GPUS, f"{unavailable.what} is not offered: {unavailable.reason}", "")


def device_files_finding(files: DeviceFiles | DriverError) -> Finding:
    if isinstance(files, DriverError):
        return fail(
            DEVICE_FILES, str(files), "on the host: nvidia-modprobe -c 0 -u, and nvidia-smi -L"
        )
    paths = [Path(file.host_path) for file in (*files.common, *files.gpus.values())]
    missing = sorted(set(OPTIONAL_DEVICES) - {path.name for path in paths})
    without = f" (without {', '.join(missing)}, which is optional)" if missing else ""
    names = ", ".join(sorted(path.name for path in paths))
    directories = ", ".join(sorted({str(path.parent) for path in paths}))
    return ok(DEVICE_FILES, f"{names} in {directories}{without}")


def cdi_hook_finding(path: str, runs: bool) -> Finding:
    if runs:
        return ok(CDI_HOOK, path)
    return fail(
        CDI_HOOK,
        f"{path} is no program on the host",
        "install NVIDIA's container toolkit there, or leave --nvidia-cdi-hook empty",
    )


def _driver_files(node: GpuNode) -> DriverFiles | DriverError:
    try:
        return node.driver_files()
    except DriverError as e:
        return e


COMPUTE_MODES = "compute modes"

ReadComputeMode = Callable[[GpuUuid], ComputeMode | None]
"""Reads the compute mode of a GPU. None, or NodeError: it is not known."""


def check_compute_modes(
    read_ledger: Callable[[], LedgerSnapshot], gpus: Sequence[Gpu], read: ReadComputeMode
) -> Iterator[Finding]:
    """The ledger is read before and after: claims come and go meanwhile."""
    before = read_ledger()
    modes = {gpu: _compute_mode(gpu, read) for gpu in gpus}
    records = [*before.records.values(), *read_ledger().records.values()]
    yield from compute_mode_findings(modes, records)


def compute_mode_findings(
    modes: Mapping[Gpu, ComputeMode | None], records: Iterable[ClaimRecord]
) -> Iterator[Finding]:
    """*records*: of claims, which can have set a mode."""
    claims = {
        (step.gpu, step.mode): record.claim
        for record in records
        for step in record.steps
        if isinstance(step, SetComputeMode)
    }
    default_mode: list[str] = []
    for gpu, mode in modes.items():
        if mode is None:
            yield skip(COMPUTE_MODES, f"{gpu.name} does not report it")
        elif mode is ComputeMode.DEFAULT:
            default_mode.append(gpu.name)
        elif (holder := claims.get((gpu.uuid, mode))) is not None:
            yield ok(COMPUTE_MODES, f"{gpu.name} is in {mode.name}, for claim {holder}")
        else:
            yield _unexpected_mode_finding(gpu, mode)
    if default_mode:
        yield ok(COMPUTE_MODES, f"DEFAULT: {abbreviated(default_mode)}")


def _unexpected_mode_finding(gpu: Gpu, mode: ComputeMode) -> Finding:
    text = f"{gpu.name} is in {mode.name}, which no claim of this node set"
    remedy = f"on the host: nvidia-smi -i {gpu.pci_bus_id} -c DEFAULT"
    if mode is ComputeMode.PROHIBITED:
        return fail(COMPUTE_MODES, f"{text}: nothing can compute there", remedy)
    return warn(
        COMPUTE_MODES,
        f"{text}: one process at a time can compute there, so claims cannot share it",
        f"{remedy}; another MPS daemon leaves it so, and so does NVIDIA's DRA driver",
    )


def _compute_mode(gpu: Gpu, read: ReadComputeMode) -> ComputeMode | None:
    try:
        return read(gpu.uuid)
    except NodeError:
        return None


MIG_MODES, MIG_INSTANCES, MIG_DEVICE_FILES = "MIG mode", "MIG instances", "MIG device files"

_MONITOR_CAPABILITY = "mig/monitor"  # optional: to monitor all instances

FindCapabilityFiles = Callable[[tuple[str, ...]], Mapping[str, DeviceFile | None]]
"""The device files of capabilities, as they are; None: not there yet. DriverError: there is no such
capability."""


def check_mig_modes(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    on: list[str] = []
    off: list[str] = []
    for gpu, mig in _mig_capable(gpus):
        if mig.on != mig.pending:
            yield _pending_mode_finding(gpu, mig)
        else:
            (on if mig.on else off).append(gpu.name)
    modes = [f"{word}: {abbreviated(names)}" for word, names in (("on", on), ("off", off)) if names]
    if modes:
        yield ok(MIG_MODES, "; ".join(modes))


def check_mig_instances(
    read_inventory: Callable[[], Inventory], read_ledger: Callable[[], LedgerSnapshot]
) -> Iterator[Finding]:
    """The ledger is read before and after the GPUs: claims come and go."""
    before = read_ledger().records
    gpus = read_inventory().gpus
    after = read_ledger().records
    steady = [record for uid, record in after.items() if record == before.get(uid)]
    yield from mig_instance_findings(gpus, steady, [*before.values(), *after.values()])


def mig_instance_findings(
    gpus: Sequence[Gpu], steady: Sequence[ClaimRecord], records: Iterable[ClaimRecord]
) -> Iterator[Finding]:
    """*steady*: records that were the same all the time; *records*: all that there were."""
    created = {
        (h.gpu, h.partition) for record in records for h in record.holdings if h.created_for_claims
    }
    for gpu, mig in _mig_capable(gpus):
        for instance in mig.unusable:
            if (gpu.uuid, instance.key) not in created:
                yield _unusable_instance_finding(gpu, mig, instance)
    yield from _vanished_instance_finding(gpus, steady)
    yield from _replaced_instance_finding(gpus, steady)
    unmanaged = [
        _name(gpu, mig, instance.key)
        for gpu, mig in _mig_capable(gpus)
        for instance in mig.instances
        if (gpu.uuid, instance.key) not in created
    ]
    if unmanaged:
        yield ok(
            MIG_INSTANCES,
            f"not created for claims, offered and left as they are: {abbreviated(unmanaged)}",
        )
    if created:
        yield ok(MIG_INSTANCES, f"created for claims: {len(created)}")


def check_mig_device_files(
    read_inventory: Callable[[], Inventory], find_files: FindCapabilityFiles
) -> Iterator[Finding]:
    """The device files that a container needs beside its GPU's, for every instance. None is made;
    where MIG mode is off everywhere, none is looked for."""
    if not any(mig.on for _, mig in _mig_capable(read_inventory().gpus)):
        return
    try:
        try:
            yield from _mig_device_file_finding(read_inventory().gpus, find_files)
        except DriverError:  # an instance can have gone since the look, with its claim
            yield from _mig_device_file_finding(read_inventory().gpus, find_files)
    except DriverError as e:
        yield fail(
            MIG_DEVICE_FILES,
            str(e),
            "on the host: ls /proc/driver/nvidia/capabilities; is --host-root the host's /?",
        )


def _mig_device_file_finding(gpus: Sequence[Gpu], find_files: FindCapabilityFiles) -> list[Finding]:
    gpus_with_mig = list(_mig_capable(gpus))
    names = tuple(
        f"gpu{gpu.minor}/mig/gi{one.gi}{suffix}"
        for gpu, mig in gpus_with_mig
        for one in mig.instances
        for suffix in ("", f"/ci{one.ci}")
    )
    found_files = find_files((*names, _MONITOR_CAPABILITY))
    missing = [name for name in names if found_files.get(name) is None]
    to_be_made = f", {len(missing)} of them made when a claim does" if missing else ""
    message = f"{len(names)} that the instances need{to_be_made}" if names else "none is needed now"
    findings = [ok(MIG_DEVICE_FILES, message)]
    if _MONITOR_CAPABILITY not in found_files:
        findings.append(
            skip(
                MIG_DEVICE_FILES,
                f"this driver has no {_MONITOR_CAPABILITY}: admin access shows no instances",
            )
        )
    return findings


def _mig_capable(gpus: Iterable[Gpu]) -> Iterator[tuple[Gpu, MigInfo]]:
    return ((gpu, gpu.mig) for gpu in gpus if gpu.mig is not None)


def _pending_mode_finding(gpu: Gpu, mig: MigInfo) -> Finding:
    current, pending = ("on", "off") if mig.on else ("off", "on")
    return warn(
        MIG_MODES,
        f"{gpu.name}: it is {current}, and goes {pending} with the next reset of the GPU",
        reset_instructions(gpu.pci_bus_id)
        if mig.fixed is GuestRestriction.NOTHING
        else "drain and reboot the node",
    )


def _unusable_instance_finding(gpu: Gpu, mig: MigInfo, instance: UnusableGpuInstance) -> Finding:
    options = f"-i {gpu.pci_bus_id} -gi {instance.gi}"
    fill = "" if instance.cis else f"give it one (nvidia-smi mig {options} -cci), or "
    first = f"nvidia-smi mig {options} -dci, then " if instance.cis else ""
    return warn(
        MIG_INSTANCES,
        f"{gpu.name}, {profile_name(mig, instance.key)} at {instance.key.start}: "
        f"{unusable_instance_message(instance)}",
        f"{fill}remove it: {first}nvidia-smi mig {options} -dgi",
    )


def _vanished_instance_finding(
    gpus: Sequence[Gpu], steady: Iterable[ClaimRecord]
) -> Iterator[Finding]:
    for record in steady:
        for holding in lost_instances(record, gpus):
            yield fail(
                MIG_INSTANCES,
                f"claim {record.claim} has {holding.device}, which is not there any more: somebody "
                "else removed it",
                "delete the pods of the claim, so that it is given back; and see who runs "
                "nvidia-smi mig -dgi here",
            )


def _replaced_instance_finding(
    gpus: Sequence[Gpu], steady: Iterable[ClaimRecord]
) -> Iterator[Finding]:
    """Instances with the name of one that a claim had, and that are others."""
    readable = {gpu.uuid for gpu, _ in _mig_capable(gpus)}
    for record in steady:
        lost = lost_instances(record, gpus)
        for holding in released_partitions(record):
            if holding.gpu in readable and holding not in lost:
                yield warn(
                    MIG_INSTANCES,
                    f"claim {record.claim} had {holding.device}, which was removed; somebody else "
                    "made another in its place, and its pods were told",
                    "delete the pods of the claim (and a claim that is not from a template) to "
                    "have one allocated anew",
                )


def _name(gpu: Gpu, mig: MigInfo, key: PartitionKey) -> str:
    partition = mig.partition(key)
    return partition_name(gpu, partition) if partition else f"{gpu.name}, {key}"

"""``doctor``'s checks of MIG: modes, instances, their device files, and layouts.

On a node without a GPU that can be partitioned they find nothing.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

from dra_driver.base.errors import DriverError
from dra_driver.cli.doctor.host_checks import records_of_boot
from dra_driver.cli.findings import Check, Finding, abbreviated, fail, ok, skip, warn
from dra_driver.cli.mig_status import (
    LAYOUTS,
    layout_findings,
    profile_name,
    unusable_instance_message,
)
from dra_driver.model.driver_files import DeviceFile
from dra_driver.model.gpus import (
    Gpu,
    GuestRestriction,
    Inventory,
    MigInfo,
    PartitionKey,
    UnusableGpuInstance,
    reset_instructions,
)
from dra_driver.model.offer import partition_name
from dra_driver.model.records import ClaimRecord
from dra_driver.node.cgroups.procfs import boot_id
from dra_driver.node.gpu_node import GpuNode
from dra_driver.node.state.mig_state import MigStateFile
from dra_driver.plan.mig.claims import lost_instances, released_partitions
from dra_driver.settings import DoctorSettings

MIG_MODES, MIG_INSTANCES, MIG_DEVICE_FILES = "MIG mode", "MIG instances", "MIG device files"

_MONITOR_CAPABILITY = "mig/monitor"  # optional: to monitor all instances

FindCapabilityFiles = Callable[[tuple[str, ...]], Mapping[str, DeviceFile | None]]
"""The device files of capabilities, as they are; None: not there yet. DriverError: there is no such
capability."""


def checks(settings: DoctorSettings, node: GpuNode) -> list[Check]:
    def layouts() -> Iterator[Finding]:
        gpus = [gpu for gpu in node.inventory().gpus if gpu.mig is not None]
        if gpus:
            mig_state = MigStateFile(settings.mig_state, boot_id(settings.host_root)).read()
            yield from layout_findings(mig_state, gpus)

    records = partial(records_of_boot, settings)
    return [
        (MIG_MODES, lambda: check_mig_modes(node.inventory().gpus)),
        (MIG_INSTANCES, lambda: check_mig_instances(node.refresh, records)),
        (MIG_DEVICE_FILES, lambda: check_mig_device_files(node.refresh, node.capability_files)),
        (LAYOUTS, layouts),
    ]


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
    read_inventory: Callable[[], Inventory], read_records: Callable[[], Collection[ClaimRecord]]
) -> Iterator[Finding]:
    """The records are read before and after the GPUs: claims come and go."""
    before = read_records()
    gpus = read_inventory().gpus
    after = read_records()
    created = {
        (h.gpu, h.partition)
        for record in (*before, *after)
        for h in record.holdings
        if h.created_for_claims
    }
    unmanaged = []
    for gpu, mig in _mig_capable(gpus):
        for instance in mig.unusable:
            if (gpu.uuid, instance.key) not in created:
                yield _unusable_instance_finding(gpu, mig, instance)
        unmanaged += [
            _name(gpu, mig, instance.key)
            for instance in mig.instances
            if (gpu.uuid, instance.key) not in created
        ]
    steady = [record for record in after if record in before]
    yield from _vanished_instance_findings(gpus, steady)
    yield from _replaced_instance_findings(gpus, steady)
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
            yield from _mig_device_file_findings(read_inventory().gpus, find_files)
        except DriverError:  # an instance can have gone since the look, with its claim
            yield from _mig_device_file_findings(read_inventory().gpus, find_files)
    except DriverError as e:
        yield fail(
            MIG_DEVICE_FILES,
            str(e),
            "on the host: ls /proc/driver/nvidia/capabilities; is --host-root the host's /?",
        )


def _mig_device_file_findings(
    gpus: Sequence[Gpu], find_files: FindCapabilityFiles
) -> list[Finding]:
    names = tuple(
        f"gpu{gpu.minor}/mig/gi{instance.gi}{suffix}"
        for gpu, mig in _mig_capable(gpus)
        for instance in mig.instances
        for suffix in ("", f"/ci{instance.ci}")
    )
    files = find_files((*names, _MONITOR_CAPABILITY))
    missing = [name for name in names if files.get(name) is None]
    to_be_made = f", {len(missing)} of them made when a claim does" if missing else ""
    message = f"{len(names)} that the instances need{to_be_made}" if names else "none is needed now"
    findings = [ok(MIG_DEVICE_FILES, message)]
    if _MONITOR_CAPABILITY not in files:
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


def _vanished_instance_findings(
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


def _replaced_instance_findings(
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

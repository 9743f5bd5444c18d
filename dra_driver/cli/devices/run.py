"""``dra-driver devices``: what this node would publish; nothing is published.

Nothing is changed, but for device files of the driver that are missing: a GPU without its own
cannot be offered, so looking at the GPUs makes them.

That follows from its GPUs, the profile (``--profile``, else ``default``) and the ledger: a GPU that
a claim holds keeps its shape. If the ledger cannot be read, a warning says so, and every GPU counts
as free. What is wrong with GPUs counts as the plugin has it on record; one that is lost is shown as
it was. No API server is asked. A
Node label that chooses a profile is not read; one that names a layout counts as the plugin of these
GPUs read it last, before the profile. ``--without`` prints what an API server without a feature
would get; without DRA, what the kubelet is told by the device-plugin API.

A GPU that needs a reset to be switched to MIG mode, and a GPU with a layout, are shown as they are
once the plugin has done that, unless it is known that it cannot or has to wait: then as they are
now, with the reason. GPUs with MIG are drawn, too: whose each memory
unit is, and what fits.

``-o json`` and ``-o yaml`` print a Kubernetes ``List`` of ResourceSlices in API version v1, as a
first publication would create them. What is said beside them in a table (GPUs that are not offered,
changes that wait, warnings about the profile) has no place in it. A partition that a layout is yet
to create lacks the one attribute that nobody can know before: ``uuid``.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, assert_never

import yaml

from api.names import MIG_CONFIG_LABEL
from dra_driver.base.errors import NodeError
from dra_driver.base.frozen import frozen
from dra_driver.cli.devices.recorded import (
    recorded_gpus,
    recorded_health,
    recorded_holdings,
    recorded_mig_state,
)
from dra_driver.cli.devices.resources import NodeResources
from dra_driver.cli.findings import abbreviated
from dra_driver.cli.mig_picture import gpu_mig_pictures, mig_picture
from dra_driver.cli.mig_status import layout_lines, pending_layouts
from dra_driver.cli.terminal import Terminal, format_gib, format_table
from dra_driver.kubeletplugin.slices.reconcile import (
    Pool,
    SliceOwner,
    plan_writes,
    split_into_slices,
)
from dra_driver.model.gpus import DeviceName, Gpu, GpuUuid, Inventory, MigProfile
from dra_driver.model.health import DeviceTaint
from dra_driver.model.mig_layouts import LayoutOutcome, MigState
from dra_driver.model.mps import ALL_CORES
from dra_driver.model.offer import (
    DEVICE_PLUGIN_FEATURES,
    AdminAccess,
    ApiFeatures,
    Device,
    Exclusive,
    Fractional,
    Offer,
    PendingChange,
    Replica,
    Shape,
)
from dra_driver.model.profiles import DEFAULT_PROFILE, Profile, Rules
from dra_driver.node.gpu_node import GpuNode
from dra_driver.node.machine import OpenNode
from dra_driver.node.state.profile_files import LastProfileFile
from dra_driver.plan.mig.dynamic import after_switch
from dra_driver.plan.mig.manager.changes import preview_layout
from dra_driver.plan.mig.manager.layouts import without_dynamic_mig
from dra_driver.plan.mig.partitions import created_partitions
from dra_driver.plan.offer.devices import build_offer
from dra_driver.plan.offer.shapes import describe_shape
from dra_driver.plan.offer.slice_documents import published_counters, published_devices
from dra_driver.plugin.mig.apply import MigModeInputs
from dra_driver.plugin.mig.desired_layouts import (
    DesiredLayouts,
    LayoutCatalog,
    desired_layouts,
)
from dra_driver.plugin.mig.idle_gpus import claims_holding
from dra_driver.plugin.publish.profiles import ProfileCatalog
from dra_driver.settings import DevicesSettings

_MIB = 1024**2
_AMOUNTS = ("DEFAULT", "LEAST", "STEP", "SHARES", "CORES")
_HEAD = ("DEVICE", "PRODUCT", "SHAPE", "MEMORY", *_AMOUNTS, "UUID")
_WIDE_HEAD = ("SHARED BY", "PCI BUS", "NUMA", "PCIE SWITCH", "NVLINK")
_PARTITIONS = ("PARTITION", "PROFILE", "SMS", "MEMORY", "SHAPE", *_AMOUNTS, "UUID")
_WIDE_PARTITIONS = ("SHARED BY", "COPY", "DEC", "ENC", "JPEG", "OFA", "TAKES")


def device_tables(devices: Sequence[Device], wide: bool) -> list[str]:
    """One table, two, or none. Partitions created for claims that differ only in their placement
    share a row, unless it is to be *wide*."""
    gpus = [_row(device, wide) for device in devices if device.partition is None]
    alike: dict[tuple[str, ...], list[Device]] = defaultdict(list)
    for device in devices:
        if device.partition is not None:
            row = _partition_row(device, device.partition.profile, wide)
            alike[device.name if wide else device.gpu.name, *row].append(device)
    partitions = [(_names(group), *row) for (_, *row), group in alike.items()]
    gpu_head = (*_HEAD, *(_WIDE_HEAD if wide else ()))
    partition_head = (*_PARTITIONS, *(_WIDE_PARTITIONS if wide else ()))
    tables = ((gpu_head, gpus), (partition_head, partitions))
    return [format_table(head, rows) for head, rows in tables if rows]


def _row(device: Device, wide: bool) -> tuple[str, ...]:
    gpu, shape = device.gpu, device.shape
    name, memory, amounts = _shape(shape), _memory(device), _amounts(shape)
    row = (device.name, gpu.product_name, name, memory, *amounts, gpu.uuid)
    return (*row, _shared_by(device.rules), *_place(gpu)) if wide else row


def _partition_row(device: Device, profile: MigProfile, wide: bool) -> tuple[str, ...]:
    """Without its name."""
    shape, engines, instance = _shape(device.shape), profile.engines, device.instance
    uuid = (instance.uuid or "created by a layout") if instance else "created for claims"
    row = (
        profile.name,
        str(engines.multiprocessors),
        _memory(device),
        f"{shape} (also as GPU)" if device.as_gpu else shape,
        *_amounts(device.shape),
        uuid,
    )
    numbers = (engines.copy, engines.decoders, engines.encoders, engines.jpeg, engines.ofa)
    takes = ", ".join(f"{amount} of {name}" for name, amount in device.takes) or "-"
    return (*row, _shared_by(device.rules), *map(str, numbers), takes) if wide else row


def _names(devices: Sequence[Device]) -> str:
    """Of devices that differ in their first unit only, as a shell would read it:
    ``gpu-0-mig-2g10gb-14-{0,2,4}``."""
    first = devices[0]
    if len(devices) == 1:
        return first.name
    stem, _, _ = first.unit.rpartition("-")
    starts = sorted(int(device.unit.rpartition("-")[2]) for device in devices)
    return f"{stem}-{{{','.join(map(str, starts))}}}{first.name.removeprefix(first.unit)}"


def _memory(device: Device) -> str:
    return "?" if device.memory_bytes is None else format_gib(device.memory_bytes)


def _shared_by(rules: Rules) -> str:
    """The strategies that are possible, the default one first."""
    default = rules.default_strategy
    others = (strategy for strategy in rules.strategies if strategy is not default)
    return ", ".join((default, *others)) if rules.strategies else "-"


def _shape(shape: Shape) -> str:
    match shape:
        case Replica(place=place):
            return f"{place + 1} of {describe_shape(shape)}"
        case AdminAccess():
            return f"{describe_shape(shape)} (admin access)"
        case _:
            return describe_shape(shape)


def _amounts(shape: Shape) -> Iterator[str]:
    """Memory by default, least and step; the most shares; the most cores, or those of each."""
    match shape:
        case Fractional(memory_default=default, memory_least=least, memory_step=step):
            yield from (f"{amount // _MIB}Mi" for amount in (default, least, step))
            yield str(shape.shares)
            yield _cores(shape)
        case Replica(memory_bytes=memory, cores=cores):
            yield from ("-" if memory is None else f"{memory // _MIB}Mi", "-", "-", "1")
            yield f"{cores} %" if cores else "-"
        case Exclusive() | AdminAccess():
            yield from "-----"
        case _:
            assert_never(shape)


def _cores(shape: Fractional) -> str:
    if not shape.cores:
        return "-"
    each = shape.cores_default
    return f"{ALL_CORES} % ({each} % each)" if each else f"{ALL_CORES} %"


def _place(gpu: Gpu) -> tuple[str, ...]:
    topology = gpu.topology
    peers = f"{topology.nvlink_clique} ({topology.nvlink_peers} peers)"
    return (
        gpu.pci_bus_id,
        "-" if topology.numa_node is None else str(topology.numa_node),
        topology.pcie_switch or "-",
        peers if topology.nvlink_clique else "-",
    )


_WHEN = "while no claim and no process uses them"
_RESET = "; whether a board can be reset for that is seen then"


@frozen
class MigPreview:
    """The node once the plugin has switched MIG modes and applied layouts."""

    inventory: Inventory
    profile: Profile  # as it counts for what is offered
    mig_state: MigState  # with what is known of layouts besides
    lines: tuple[str, ...]  # what is shown as it will be, and the state of what is not


def preview_mig(inputs: MigModeInputs, layouts: LayoutCatalog, mig_state: MigState) -> MigPreview:
    """*inputs*: as it is now. Problems of boards and layouts in *mig_state* stay: they are from the
    plugin that tried it. The label of the Node is as that plugin read it, too."""
    inventory, profile = inputs.inventory, inputs.profile
    label = _label(mig_state, inventory)
    desired = desired_layouts(label, profile, layouts, inventory)
    gpus, outcomes = _after_layouts(inputs, desired, mig_state)
    # nor switched for that
    profile = without_dynamic_mig(profile, inventory.gpus, desired.governed)
    after = after_switch(
        replace(inventory, gpus=gpus),
        profile,
        inputs.features,
        inputs.holdings,
        stuck={*mig_state.mode_problems, *dict(inventory.lost)},
    )
    others = {u: outcome for u, outcome in mig_state.outcomes.items() if u not in desired.by_gpu}
    known_problem, mig_state = mig_state.problem, replace(mig_state, outcomes=others | outcomes)
    lines = [
        *_label_lines(label),
        *_switch_lines([new.name for new, gpu in zip(after.gpus, gpus, strict=True) if new != gpu]),
        *_layout_lines(desired, inventory.gpus, gpus),
        *([f"layout: {desired.problem}"] if desired.problem not in ("", known_problem) else ()),
        *layout_lines(mig_state, after.gpus),
    ]
    return MigPreview(after, profile, mig_state, tuple(lines))


def _label_lines(label: str) -> Iterator[str]:
    if label:
        yield (
            f"label {MIG_CONFIG_LABEL} of the Node, as its plugin read it last: {label}; "
            "it goes before the profile"
        )


def _switch_lines(names: Sequence[DeviceName]) -> Iterator[str]:
    if names:
        yield (
            f"shown as after their switch to MIG mode: {', '.join(names)}; the plugin "
            f"switches them {_WHEN}{_RESET}"
        )


def _layout_lines(
    desired: DesiredLayouts, gpus: Sequence[Gpu], gpus_after: Sequence[Gpu]
) -> Iterator[str]:
    """A line for each layout that changes some of *gpus*."""
    changes: dict[str, list[tuple[Gpu, Gpu]]] = defaultdict(list)
    for gpu, after in zip(gpus, gpus_after, strict=True):
        if gpu != after:
            changes[desired.by_gpu[gpu.uuid].layout].append((gpu, after))
    for layout, pairs in sorted(changes.items()):
        names = ", ".join(gpu.name for gpu, _ in pairs)
        reset = _RESET if any(_is_reset(gpu, after) for gpu, after in pairs) else ""
        yield (
            f"shown as after layout {layout}: {names}; "
            f"the plugin creates its partitions {_WHEN}{reset}"
        )


def _is_reset(gpu: Gpu, gpu_after: Gpu) -> bool:
    """Whether it takes a reset to make *gpu* what it is *gpu_after*."""
    if gpu.mig is None or gpu_after.mig is None:
        return False
    return gpu.mig.on != gpu_after.mig.on and not gpu.mig.switches


def _label(mig_state: MigState, inventory: Inventory) -> str:
    """Empty, too, where *mig_state* is of another node: a simulated one can be read anywhere."""
    known_gpus = {
        *mig_state.outcomes,
        *mig_state.instances,
        *mig_state.before,
        *mig_state.switched,
        *mig_state.mode_problems,
    }
    if known_gpus and known_gpus.isdisjoint(gpu.uuid for gpu in inventory.gpus):
        return ""
    return mig_state.label or ""


def _after_layouts(
    inputs: MigModeInputs, desired: DesiredLayouts, mig_state: MigState
) -> tuple[tuple[Gpu, ...], dict[GpuUuid, LayoutOutcome]]:
    claimed = created_partitions(inputs.holdings)
    gpus: list[Gpu] = []
    outcomes: dict[GpuUuid, LayoutOutcome] = {}
    lost = dict(inputs.inventory.lost)
    for gpu in inputs.inventory.gpus:
        after = gpu
        if (layout := desired.by_gpu.get(gpu.uuid)) is not None and gpu.uuid not in lost:
            holders = claims_holding(gpu, inputs.holdings)
            after, outcome = preview_layout(gpu, layout, mig_state, claimed, holders)
            if outcome is not None:
                outcomes[gpu.uuid] = outcome
        gpus.append(after)
    return tuple(gpus), outcomes


OPTIONAL_API_FEATURES = ("consumable-capacity", "taints", "counters")  # what --without names
DRA = "dra"  # without it, what the kubelet is told by the device-plugin API

_NO_TERMINAL = Terminal()


def devices(
    settings: DevicesSettings,
    open_node: OpenNode,
    output: str,
    without: Collection[str] = (),
    terminal: Terminal = _NO_TERMINAL,
) -> str:
    """As a *table* or a *wide* one for people, or as *json* or *yaml*. *without*: FEATURES that the
    API server is taken to lack."""
    # a wrong one is refused before the GPUs are read
    profiles = ProfileCatalog(settings.profiles)
    profile = profiles.named(settings.profile or DEFAULT_PROFILE.name)
    health = recorded_health(settings)
    with open_node() as node:
        node.remember(recorded_gpus(settings))
        inventory = node.refresh()
        problem = "" if inventory != Inventory() else _driver_problem(node)
    kept = (name not in without for name in OPTIONAL_API_FEATURES)
    features = DEVICE_PLUGIN_FEATURES if DRA in without else ApiFeatures(*kept)
    held = recorded_holdings(settings)
    inputs = MigModeInputs(inventory, profile, features, held)
    preview = preview_mig(inputs, LayoutCatalog(settings.profiles), recorded_mig_state(settings))
    offered = build_offer(
        preview.inventory,
        preview.profile,
        features,
        held,
        mps=bool(settings.mps_socket),
        faults=health.faults,
    )
    listed = NodeResources(offered, settings) if DRA in without else None
    if output in ("table", "wide"):
        by_device = device_tables(offered.devices, output == "wide")
        tables = by_device if listed is None else listed.tables()
        pictures = gpu_mig_pictures(
            offered, preview.inventory.gpus, held, preview.mig_state.instances
        )
        lines = [
            "\n\n".join(tables) or "this node has no GPU to offer",
            *([f"no driver: {problem}"] if problem else ()),
            *([f"\n{mig_picture(pictures, terminal)}\n"] if pictures else ()),
            *preview.lines,
            *_notes(offered, profile, pending_layouts(preview.mig_state, preview.inventory.gpus)),
            *(f"not listed: {problem}" for problem in (listed.problems if listed else ())),
            _profile_line(profile, () if settings.profile else profiles.names()),
            *_node_profile_lines(LastProfileFile(settings.last_profile).read()),
        ]
        return "\n".join(lines)
    document = listed.document() if listed else resource_slice_list(offered, settings)
    if output == "yaml":
        return yaml.safe_dump(document, sort_keys=True).rstrip()
    return json.dumps(document, indent=2, sort_keys=True)


def _driver_problem(node: GpuNode) -> str:
    """Why no driver can be used; empty: one can."""
    try:
        node.driver_files()
    except NodeError as e:
        return str(e)
    return ""


def resource_slice_list(offered: Offer, settings: DevicesSettings) -> dict[str, Any]:
    """The ResourceSlices, in API version v1, that a first publication would create."""
    pool: Pool = split_into_slices(
        settings.node_name, published_devices(offered), published_counters(offered)
    )
    home = SliceOwner(settings.driver_name, settings.node_name, node_uid="")
    items = []
    for document in plan_writes(pool, (), home).create:
        metadata = {k: v for k, v in document["metadata"].items() if k != "ownerReferences"}
        items.append({**document, "metadata": metadata})
    return {"apiVersion": "v1", "kind": "List", "metadata": {}, "items": items}


def _notes(offered: Offer, profile: Profile, layouts: Mapping[DeviceName, str]) -> Iterator[str]:
    """*layouts*: by GPU, those that it waits for."""
    for unavailable in offered.unavailable:
        yield f"not offered: {unavailable.what}: {unavailable.reason}"
    yield from _taint_lines(offered)
    yield from (_pending(change, layouts) for change in offered.pending)
    yield from (f"profile {profile.name}: {warning}" for warning in profile.warnings)
    yield from offered.warnings[len(profile.warnings) :]


def _taint_lines(offered: Offer) -> Iterator[str]:
    """A line for each taint, with the devices that have it."""
    names: dict[DeviceTaint, list[DeviceName]] = defaultdict(list)
    for device in offered.devices:
        for taint in device.taints:
            names[taint].append(device.name)
    for taint, tainted in names.items():
        yield f"tainted: {abbreviated(tainted)}: {taint.key} ({taint.effect}): {taint.reason}"


def _profile_line(profile: Profile, names: Sequence[str]) -> str:
    """*names*: of the profiles in files, if none of them was asked for."""
    others = ", ".join(name for name in names if name != profile.name)
    return f"profile: {profile.name}" + (
        f" (--profile NAME shows another: {others})" if others else ""
    )


def _node_profile_lines(last: Profile | None) -> Iterator[str]:
    """*last*: what the plugin of this node had in force last."""
    if last is not None and last.revision:
        yield f"the plugin has NodeProfile {last.name}, revision {last.revision}, in force"


def _pending(change: PendingChange, layouts: Mapping[DeviceName, str]) -> str:
    """A layout goes before what the profile makes of its GPU."""
    if change.reason:
        return f"not as the profile says: {change.device}: {change.change}: {change.reason}"
    layout = layouts.get(change.device)
    description = f"as layout {layout} says" if layout else change.change
    return f"pending: {change.device} keeps its shape while a claim holds it, then: {description}"

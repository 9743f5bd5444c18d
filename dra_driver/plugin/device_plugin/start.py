"""Starts what serves the device-plugin API, where the node gives its GPUs out by that."""

import secrets
from contextlib import ExitStack
from functools import partial
from typing import Final

from dra_driver.base.files import disk_errors
from dra_driver.base.threads import Loop
from dra_driver.k8s.events import NodeRef
from dra_driver.kubeletplugin.device_plugin.server import DevicePluginServer
from dra_driver.kubeletplugin.serve.rolling_update import PluginLease
from dra_driver.model.profiles import AllocationApi
from dra_driver.model.records import ClaimRecord
from dra_driver.plan.device_plugin.container import takes_names
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.node_api import ApiState
from dra_driver.plugin.device_plugin.allocations import AllocationDependencies, Allocations
from dra_driver.plugin.device_plugin.listing import DeviceListing
from dra_driver.plugin.device_plugin.reconciler import AllocationReconciler
from dra_driver.plugin.node_api.other_plugin import (
    TakenResources,
    nvidia_sockets,
    registered_devices,
)
from dra_driver.plugin.node_api.start import resource_names
from dra_driver.plugin.parts import PluginParts

_DIRECTORY: Final = "device-plugin"  # of the lease


def start(parts: PluginParts, stack: ExitStack) -> None:
    """The kubelet is told of devices once GPUs are published, and what containers have is there."""
    settings = parts.settings
    names = resource_names(settings)
    allocations = Allocations(_dependencies(parts, names))
    reconciler = AllocationReconciler(
        allocations,
        parts.preparer,
        parts.ledger,
        parts.allocated_pods,
        parts.node_api,
        names,
        missing_seconds=settings.reconcile_interval,
    )
    server = DevicePluginServer(
        settings.device_plugin_dir,
        settings.pod_uid or secrets.token_hex(8),
        allocations,
        parts.on_fatal,
    )
    listing = DeviceListing(
        server,
        _lease(parts),
        parts.offers,
        parts.ledger,
        parts.node_api,
        names,
        parts.is_newest,
        reconciler,
        lambda: parts.labels.status,
        TakenResources(
            partial(nvidia_sockets, settings.device_plugin_dir),
            partial(registered_devices, parts.checkpoint, names),
            names,
        ).not_taken,
    )
    allocations.refused = listing.refused
    parts.allocations_known = reconciler.knows_all
    parts.pods_of_others = lambda: reconciler.others
    reconciler.others_gone = parts.choose_soon
    parts.readiness["device-plugin"] = lambda: _not_listed(parts, server, listing)
    parts.after_publishing.append(server.start)
    stack.callback(listing.leave)
    stack.callback(server.stop)
    _start_loops(parts, reconciler, listing, stack)


def _dependencies(parts: PluginParts, names: ResourceNames) -> AllocationDependencies:
    settings, labels = parts.settings, parts.labels
    return AllocationDependencies(
        preparer=parts.preparer,
        ledger=parts.ledger,
        users=parts.in_use,
        offers=parts.offers,
        node=parts.node,
        pods=parts.allocated_pods,
        api=parts.node_api,
        events=parts.events,
        node_ref=lambda: NodeRef(labels.node, labels.uid),
        observe=parts.metrics.observe,
        takes_names=lambda: takes_names(settings.kubelet_cdi, parts.kubelet_version()),
        names=names,
        driver=settings.driver_name,
        pool=settings.node_name,
        host_root=settings.host_root,
    )


def _lease(parts: PluginParts) -> PluginLease:
    """Of the process that lists the devices."""
    directory = parts.settings.plugin_dir / _DIRECTORY
    with disk_errors(f"make {directory}"):
        directory.mkdir(mode=0o750, parents=True, exist_ok=True)
    return PluginLease(directory, parts.settings.pod_uid or "this node", lambda: None)


def _not_listed(
    parts: PluginParts, server: DevicePluginServer, listing: DeviceListing
) -> str | None:
    """Why a pod could not get devices now."""
    is_off = parts.node_api.state(AllocationApi.DEVICE_PLUGIN) is ApiState.OFF
    if is_off or not parts.is_newest():
        return None
    return server.problem() if listing.listed else "no device is listed yet"


def _start_loops(
    parts: PluginParts, reconciler: AllocationReconciler, listing: DeviceListing, stack: ExitStack
) -> None:
    def look() -> float | None:
        mended = reconciler.mended
        try:
            return reconciler.look()
        finally:
            parts.metrics.reconciled_claims.inc(reconciler.mended - mended)

    settings = parts.settings
    looks = Loop("allocations", parts.while_newest(look), settings.reconcile_interval)
    lists = Loop("device-plugin-list", listing.step, settings.look_interval)

    def claim_changed(record: ClaimRecord | None) -> None:
        if record is None or record.allocation is not None:
            lists.soon()

    def prepare_soon() -> None:
        reconciler.look_often()
        looks.soon()

    reconciler.allocations.prepare_soon = prepare_soon
    listing.look_soon = looks.soon
    reconciler.ready_changed = lists.soon
    parts.claim_listeners.append(claim_changed)
    parts.health_listeners.append(lists.soon)
    parts.node_api.listeners += [looks.soon, lists.soon]
    for loop in (looks, lists):
        parts.after_publishing.append(loop.start)
        stack.callback(loop.stop)

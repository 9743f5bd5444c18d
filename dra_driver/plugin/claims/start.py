"""Starts what prepares claims, gives back those that are gone, and repairs what a crash left."""

import contextlib
import os
from contextlib import ExitStack
from pathlib import Path

from dra_driver.base.errors import DriverError
from dra_driver.base.threads import Loop
from dra_driver.k8s.events import NodeRef
from dra_driver.kubeletplugin.serve.rolling_update import PluginLease
from dra_driver.node.selinux import SelinuxLabels
from dra_driver.node.state.claim_files import CdiSpecFiles, ClaimFiles, MetadataFiles
from dra_driver.plan.prepare.cdi_spec import cdi_vendor
from dra_driver.plugin.claims.dependencies import DriverIdentity, PrepareDependencies
from dra_driver.plugin.claims.driver_spec import DriverSpec
from dra_driver.plugin.claims.in_use import DeferredUnprepare
from dra_driver.plugin.claims.preparer import Preparer
from dra_driver.plugin.claims.reconciler import ClaimReconciler
from dra_driver.plugin.claims.stuck_claims import StuckClaims
from dra_driver.plugin.device_health import NodeDevices
from dra_driver.plugin.parts import PluginParts

_DEFERRED_SECONDS = 60.0  # between looks at nothing: it is woken
_STOP_SECONDS = 1.0  # to wait for another process that has the lease, at the end of this one


def start(parts: PluginParts, stack: ExitStack) -> None:
    preparer = _preparer(parts)
    parts.preparer = preparer
    parts.prepared_claims = preparer.prepared_claims
    handler = _claim_handler(parts, preparer, stack)
    parts.claim_handler = handler
    parts.devices = NodeDevices(
        parts.settings.node_name,
        parts.offers.now,
        parts.node.inventory,
        parts.ledger.records,
        lambda: parts.health.faults,
    )
    _start_repairs(parts, preparer, handler, stack)
    _keep_driver_spec(parts, preparer.driver_spec, stack)
    parts.readiness["cdi"] = lambda: _not_writable(parts.settings.cdi_dir)


def _preparer(parts: PluginParts) -> Preparer:
    settings = parts.settings
    specs = CdiSpecFiles(settings.cdi_dir, cdi_vendor(settings.driver_name))
    labels = SelinuxLabels(settings.host_root / "sys/fs/selinux/enforce")
    files = ClaimFiles(specs, MetadataFiles(settings.plugin_dir, labels.put_on))

    def recover() -> None:
        preparer.recover()
        parts.claim_changed(None)  # another process may have prepared claims

    parts.lease = PluginLease(settings.plugin_dir, settings.pod_uid or "this node", recover)
    names = DriverIdentity(
        settings.driver_name,
        settings.node_name,
        settings.nvidia_cdi_hook or None,
        settings.mps_socket.rpartition("/")[0],
    )
    dependencies = PrepareDependencies(
        parts.node,
        parts.offers,
        parts.claims,
        parts.pods,
        parts.ledger,
        files,
        parts.lease.held,
        parts.claim_changed,
        parts.in_use,
    )
    preparer = Preparer(names, dependencies)
    return preparer


def _claim_handler(parts: PluginParts, preparer: Preparer, stack: ExitStack) -> StuckClaims:
    """What gives claims back, tells of those that are still used, and sees to their end."""
    deferred = DeferredUnprepare(
        preparer.take_back_if,
        parts.in_use.refuse_while_used,
        parts.claims.is_deleted,
        parts.ledger.known,
    )
    loop = Loop("ended-claims", deferred.look, _DEFERRED_SECONDS)
    deferred.look_soon = loop.soon
    loop.start()
    stack.callback(loop.stop)
    labels = parts.labels
    return StuckClaims(
        preparer,
        parts.ledger.known,
        parts.events,
        lambda: NodeRef(labels.node, labels.uid),
        deferred.refused,
    )


def _start_repairs(
    parts: PluginParts, preparer: Preparer, handler: StuckClaims, stack: ExitStack
) -> None:
    """The loops begin once GPUs are published."""
    settings = parts.settings
    reconciler = ClaimReconciler(
        parts.ledger,
        parts.claims,
        handler,
        settings.node_name,
        lambda: parts.node.inventory().gpus,
    )
    problem: str | None = None  # why ledger and files could not be brought together

    def repair() -> None:
        nonlocal problem
        try:
            preparer.restore_files()  # the first time recovers what a crash left
        except DriverError as e:
            problem = str(e)
            raise
        problem = None
        if not parts.resources.missing:  # an API server without claims says nothing of any
            parts.metrics.reconciled_claims.inc(reconciler.look())

    def retry_setting_restores() -> float | None:
        """Seconds until the next try, where something is left to be restored."""
        if not parts.node.time_slices.unrestored():
            return None
        if parts.is_newest() and parts.node.retry_setting_restores():
            parts.scan_soon()  # their GPUs can be offered again
        return settings.look_interval

    parts.readiness["ledger"] = lambda: problem
    for loop in (
        Loop("reconciler", parts.while_newest(repair), settings.reconcile_interval),
        Loop("settings", retry_setting_restores, settings.reconcile_interval),
    ):
        parts.after_publishing.append(loop.start)
        stack.callback(loop.stop)


def _keep_driver_spec(parts: PluginParts, spec: DriverSpec, stack: ExitStack) -> None:
    """Once GPUs are published; the first claim may come before. It goes when this process ends and
    no claim needs it.

    Where another process held the lease, the loop takes it back soon: memory guard and limits hear
    of what that one prepared when the ledger is read again.
    """

    def keep() -> None:
        if (spec.is_behind() or parts.lease.changed_hands()) and parts.is_newest():
            with parts.lease.held():
                if spec.is_behind():
                    spec.keep()

    def remove_unused() -> None:
        with contextlib.suppress(DriverError):
            if not parts.is_newest():
                return
            with parts.lease.held(_STOP_SECONDS):
                if not parts.ledger.records() and not parts.ledger.set_aside():
                    spec.remove()

    loop = Loop("driver-files", keep, parts.settings.look_interval)
    parts.after_publishing.append(loop.start)
    stack.callback(remove_unused)
    stack.callback(loop.stop)


def _not_writable(directory: Path) -> str | None:
    if not directory.exists():
        return None  # it is made with the first claim
    return None if os.access(directory, os.W_OK) else f"{directory} cannot be written"

"""Connects what partitions GPUs before claims come, and runs it on a thread of its own."""

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Final

from api.names import MIG_CONFIG_LABEL, MIG_STATE_LABEL
from dra_driver.base.errors import ApiServerError, NodeError
from dra_driver.base.threads import Loop
from dra_driver.k8s.events import Event, EventRecorder, NodeRef
from dra_driver.k8s.node_labels import NodeLabels
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mig_layouts import LayoutState, MigState
from dra_driver.model.records import ClaimRecord
from dra_driver.model.steps import SetMigMode
from dra_driver.node.cgroups.procfs import boot_id
from dra_driver.node.state.mig_state import MigStateFile
from dra_driver.plan.mig.claims import computed_partitions
from dra_driver.plan.mig.manager.state import MigEvent
from dra_driver.plugin.mig.desired_layouts import LayoutCatalog
from dra_driver.plugin.mig.lost_instances import LostInstances
from dra_driver.plugin.mig.reconciler import MigCallbacks, MigInputs, MigReconciler
from dra_driver.plugin.mig.state_label import MigStateLabel
from dra_driver.plugin.parts import PluginParts
from dra_driver.plugin.publish.profiles import is_layout_expected

_FIRST_LOOK_SECONDS = 5.0  # to wait until GPUs are partitioned; then they are published as they are
_SOON_SECONDS = 1.0
_LOST_INSTANCES_SECONDS = 10.0
_UNTIL_DEALLOCATED_SECONDS = 15.0


def start(parts: PluginParts, stack: ExitStack) -> None:
    """Partitions GPUs as layouts say, switches MIG modes, and finds lost MIG instances."""
    looks = connect(parts, stack)
    parts.profile.on_change.append(looks.loop.soon)
    parts.claim_listeners.append(looks.claim_changed)
    parts.before_publishing.append(lambda: looks.start(_FIRST_LOOK_SECONDS))
    lost = LostInstances(
        parts.node, parts.ledger.records, parts.prepared_claims, parts.events, parts.metrics
    )
    losses = Loop("mig-instances", parts.while_newest(lost.look), _LOST_INSTANCES_SECONDS)
    losses.start()
    stack.callback(losses.stop)

    def claim_changed(record: ClaimRecord | None) -> None:
        if record is None or computed_partitions(record):
            losses.soon()

    parts.claim_listeners.append(claim_changed)


class MigLooks:
    """A reconciler that looks from time to time, and when something changed. Nobody waits for it,
    but for a little while at the start."""

    def __init__(self, reconciler: MigReconciler, seconds: float) -> None:
        self._reconciler = reconciler
        self._claim_changed_at = float("-inf")
        self._looked = threading.Event()
        self.loop: Final = Loop("mig", self._look, seconds)

    def start(self, wait_seconds: float) -> None:
        """Begin, and wait until the first look has ended; at most so long."""
        self.loop.start()
        self._looked.wait(wait_seconds)

    def claim_changed(self, record: ClaimRecord | None = None) -> None:
        """A claim may have been given back: look now if a GPU waits for that."""
        if self._reconciler.waiting:
            self._claim_changed_at = time.monotonic()
            self.loop.soon()

    def _look(self) -> float | None:
        """A claim that was given back stays allocated until the control plane has seen it."""
        try:
            self._reconciler.look()
        finally:
            self._looked.set()
        is_fresh = time.monotonic() < self._claim_changed_at + _UNTIL_DEALLOCATED_SECONDS
        return _SOON_SECONDS if self._reconciler.waiting and is_fresh else None


def connect(parts: PluginParts, stack: ExitStack) -> MigLooks:
    """The reconciler and its state label, connected; *stack* stops them."""
    settings, labels, governed = parts.settings, parts.labels, parts.effective_profile
    state_file = MigStateFile(settings.mig_state, boot_id(settings.host_root))
    last = last_state(state_file)
    state_label = MigStateLabel(
        parts.api,
        labels.node,
        labels.now,
        ours=last.labelled,
        published=parts.published_since,
    )
    state_label.loop.start()
    stack.callback(state_label.loop.stop)

    def report(state: MigState) -> None:
        state_label.tell(state.state)
        parts.pending_layouts = frozenset(
            gpu for gpu, outcome in state.outcomes.items() if outcome.state is LayoutState.PENDING
        )
        parts.metrics.mig_problems.set(state.failures)

    def layout_label() -> str:
        return labels.now().get(MIG_CONFIG_LABEL, "")

    governed.on_change = parts.scan_soon
    governed.expected = partial(is_layout_expected, layout_label, last.label)
    inputs = MigInputs(
        label=layout_label,
        is_labelled=lambda: MIG_STATE_LABEL in labels.now(),
        layouts=LayoutCatalog(settings.profiles),
        profile=parts.profile.current,
        features=parts.api_features,
        holdings=parts.ledger.held,
        allocated=parts.claims.allocated,
        enabled_by_claims=lambda: mig_enabled_by_claims(parts.ledger.records()),
        is_newest=parts.is_newest,
        while_free=parts.prepared_claims.while_free,
        lease=parts.lease.held,
    )
    callbacks = MigCallbacks(
        report, governed.set_governed, parts.scan_soon, partial(post_event, parts.events, labels)
    )
    reconciler = MigReconciler(parts.node, inputs, state_file, callbacks)
    looks = MigLooks(reconciler, settings.look_interval)
    stack.callback(looks.loop.stop)
    # Our label may be gone with a Node that registered again.
    labels.start(state_label.loop.soon, 0.0)
    labels.start(on_value_change(layout_label, looks.loop.soon), 0.0)
    return looks


def last_state(state_file: MigStateFile) -> MigState:
    """What an earlier process of ours recorded; an empty state where that cannot be read, as the
    first look will report."""
    try:
        return state_file.read()
    except NodeError:
        return MigState()


def post_event(events: EventRecorder, labels: NodeLabels, event: MigEvent) -> None:
    """As an event of the Node that *labels* are of."""
    node = NodeRef(labels.node, labels.uid)
    events.emit(Event(node, event.reason, event.about, event.message, not event.is_good))


def on_value_change(read: Callable[[], str], act: Callable[[], None]) -> Callable[[], None]:
    """Does *act* when *read* answers differently than the last time, or is answered again."""
    last: str | None = None

    def look() -> None:
        nonlocal last
        try:
            now: str | None = read()
        except ApiServerError:
            now = None
        if now != last:
            last = now
            act()

    return look


def mig_enabled_by_claims(records: Iterable[ClaimRecord]) -> frozenset[GpuUuid]:
    """The GPUs of which claims turned on MIG mode."""
    steps = (step for record in records for step in record.steps)
    return frozenset(
        step.gpu
        for step in steps
        if isinstance(step, SetMigMode) and step.on and step.before is False
    )

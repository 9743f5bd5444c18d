"""Connects what cuts GPUs before claims come, and lets it run on a thread of its own."""

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from api.names import MIG_CONFIG_LABEL, MIG_STATE_LABEL
from dra_driver.base.errors import ApiServerError, NodeError
from dra_driver.base.threads import Loop
from dra_driver.k8s.api import KubernetesApi
from dra_driver.k8s.events import Event, Events, NodeRef
from dra_driver.k8s.node_labels import NodeLabels
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mig_layouts import MigState
from dra_driver.model.offer import ApiFeatures
from dra_driver.model.profiles import Profile
from dra_driver.model.records import ClaimRecord
from dra_driver.model.steps import SetMigMode
from dra_driver.node.cgroups.procfs import boot_id
from dra_driver.node.state.ledger import Ledger
from dra_driver.node.state.mig_state import MigStateFile
from dra_driver.plan.mig.manager.state import MigEvent
from dra_driver.plugin.mig.desired_layouts import LayoutCatalog, LayoutSource
from dra_driver.plugin.mig.idle_gpus import AllocatedDevices
from dra_driver.plugin.mig.lost_instances import LostInstances
from dra_driver.plugin.mig.reconciler import (
    MigCallbacks,
    MigInputs,
    MigLocks,
    MigNode,
    MigReconciler,
)
from dra_driver.plugin.mig.repartition import RepartitionJournal
from dra_driver.plugin.mig.state_label import MigStateLabel, PublishedSince
from dra_driver.plugin.parts import PluginParts
from dra_driver.plugin.publish.profiles import EffectiveProfile, is_layout_expected

_FIRST_LOOK_SECONDS = 5.0  # to wait until GPUs are partitioned; then they are published as they are
_SOON_SECONDS = 1.0
_LOST_INSTANCES_SECONDS = 10.0
_UNTIL_DEALLOCATED_SECONDS = 15.0


def start(parts: PluginParts, stack: ExitStack) -> None:
    """Partitions GPUs as layouts say, and switches MIG modes."""
    settings = parts.settings
    dependencies = MigDependencies(
        node=parts.node,
        ledger=parts.ledger,
        book=MigStateFile(settings.mig_book, boot_id(settings.host_root)),
        apart=MigLocks(parts.prepared_claims.while_free, parts.lease.held),
        api=parts.api,
        labels=parts.labels,
        profile=parts.profile.current,
        layouts=LayoutCatalog(settings.profiles),
        features=parts.api_features,
        allocated=parts.claims.allocated,
        in_charge=parts.is_newest,
        governed=parts.effective_profile,
        changed=parts.scan_soon,
        published=parts.published_since,
        count=parts.metrics.mig_problems.set,
        events=parts.events,
    )
    loop = connect(dependencies, settings.look_interval, stack)

    def profile_changed() -> None:
        parts.scan_soon()
        loop.soon()

    parts.profile.on_change = profile_changed
    parts.claim_listeners.append(loop.claim_changed)
    parts.before_publishing.append(lambda: loop.start(_FIRST_LOOK_SECONDS))
    lost = LostInstances(
        parts.node, parts.ledger.records, parts.prepared_claims, parts.events, parts.metrics
    )
    losses = Loop("mig-instances", parts.while_newest(lost.look), _LOST_INSTANCES_SECONDS)
    losses.start()
    stack.callback(losses.stop)


@dataclass(frozen=True, slots=True)
class MigDependencies:
    """What it is connected with."""

    node: MigNode
    ledger: Ledger
    book: MigStateFile
    apart: MigLocks
    api: KubernetesApi
    labels: NodeLabels
    profile: Callable[[], Profile]  # the one in force, whatever layouts govern
    layouts: LayoutSource
    features: Callable[[], ApiFeatures]
    allocated: AllocatedDevices
    in_charge: Callable[[], bool]
    governed: EffectiveProfile
    changed: Callable[[], None]  # is told that GPUs are others than they were
    published: PublishedSince
    count: Callable[[float], None]  # is told how much is not as it should be
    events: Events


class MigLoop:
    """A keeper that looks from time to time, and when something changed. Nobody waits for it, but
    for a little while at the start."""

    def __init__(self, keeper: MigReconciler, seconds: float) -> None:
        self._keeper = keeper
        self._given_back = float("-inf")
        self._looked = threading.Event()
        self._loop = Loop("mig", self._look, seconds)

    def start(self, wait_seconds: float) -> None:
        """Begin; back when it has looked for the first time, or after so long."""
        self._loop.start()
        self._looked.wait(wait_seconds)

    def stop(self) -> None:
        self._loop.stop()

    def soon(self) -> None:
        """Something that GPUs are cut by has changed."""
        self._loop.soon()

    def claim_changed(self, record: ClaimRecord | None = None) -> None:
        """A claim was given back, maybe: a GPU that waited for that is cut now."""
        if self._keeper.waiting:
            self._given_back = time.monotonic()
            self._loop.soon()

    def _look(self) -> float | None:
        """A claim that was given back stays allocated until the control plane has seen it."""
        try:
            self._keeper.look()
        finally:
            self._looked.set()
        is_fresh = time.monotonic() < self._given_back + _UNTIL_DEALLOCATED_SECONDS
        return _SOON_SECONDS if self._keeper.waiting and is_fresh else None


def connect(around: MigDependencies, look_seconds: float, stack: ExitStack) -> MigLoop:
    """All of it, connected and not started; *stack* stops it."""
    labels, ours = around.labels, _may_have_labelled(around.book)
    state = MigStateLabel(around.api, labels.node, labels.now, ours, around.published)
    state.start()
    stack.callback(state.stop)

    def tell(book: MigState) -> None:
        state.tell(book.state)
        around.count(book.failures)

    told = MigCallbacks(
        tell,
        around.governed.set_governed,
        around.changed,
        partial(post_event, around.events, around.labels),
    )
    layout = partial(_layout_label, around.labels)
    around.governed.on_change = around.changed
    around.governed.expected = partial(is_layout_expected, layout, last_layout_label(around.book))
    keeper = MigReconciler(around.node, _mig_inputs(around), around.apart, around.book, told)
    loop = MigLoop(keeper, look_seconds)
    stack.callback(loop.stop)
    around.labels.start(state.look_soon, 0.0)
    around.labels.start(on_value_change(layout, loop.soon), 0.0)
    return loop


def last_layout_label(book: RepartitionJournal) -> str | None:
    """Which layout the Node's label named when an earlier process of ours read it; None: that is
    not known."""
    try:
        return book.read().label
    except NodeError:  # the first look tells of it
        return None


def post_event(events: Events, labels: NodeLabels, news: MigEvent) -> None:
    """As an event of the Node that *labels* are of."""
    node = NodeRef(labels.node, labels.uid)
    events.tell(Event(node, news.reason, news.about, news.words, not news.is_good))


def on_value_change(read: Callable[[], str], act: Callable[[], None]) -> Callable[[], None]:
    """Does *act* where *read* answers something else than the last time, or is answered again."""
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


def _layout_label(labels: NodeLabels) -> str:
    return labels.now().get(MIG_CONFIG_LABEL, "")


def _mig_inputs(around: MigDependencies) -> MigInputs:
    labels = around.labels
    return MigInputs(
        label=partial(_layout_label, labels),
        is_labelled=lambda: MIG_STATE_LABEL in labels.now(),
        layouts=around.layouts,
        profile=around.profile,
        features=around.features,
        held=around.ledger.held,
        allocated=around.allocated,
        turned_on=lambda: mig_enabled_by_claims(around.ledger.records()),
        in_charge=around.in_charge,
    )


def _may_have_labelled(book: MigStateFile) -> bool:
    """Whether an earlier process of ours may have written the state on the Node."""
    try:
        return book.read().labelled
    except NodeError:  # the first look tells of it
        return False

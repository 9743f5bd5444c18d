"""Connects what cuts GPUs before claims come, and lets it run on a thread of its own."""

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from api.names import MIG_CONFIG_LABEL, MIG_STATE_LABEL
from dra_driver.cluster.events import Event, NodeRef
from dra_driver.errors import ClusterError, NodeError
from dra_driver.model.holdings import Record
from dra_driver.model.layouts import Book
from dra_driver.model.offer import Keeps
from dra_driver.model.profiles import Profile
from dra_driver.model.steps import SetMigMode
from dra_driver.model.uuids import GpuUuid
from dra_driver.node.ledger import Ledger
from dra_driver.node.mig_book import MigBook
from dra_driver.plan.mig.news import News
from dra_driver.plugin.mig.governed import Governed, is_expected
from dra_driver.plugin.mig.idle import Allocated
from dra_driver.plugin.mig.keeper import Apart, MigKeeper, Node, Sources, Told
from dra_driver.plugin.mig.state import Api, MigState, Published
from dra_driver.plugin.mig.wishes import Layouts
from dra_driver.plugin.mig.work import Kept
from dra_driver.plugin.node_labels import NodeLabels
from dra_driver.process.loops import Loop

_SOON_SECONDS = 1.0
_UNTIL_DEALLOCATED_SECONDS = 15.0


class Events(Protocol):
    """Tells of the node without waiting; ``dra_driver.cluster.events``."""

    def tell(self, event: Event) -> None: ...


@dataclass(frozen=True, slots=True)
class Around:
    """What it is connected with."""

    node: Node
    ledger: Ledger
    book: MigBook
    apart: Apart
    api: Api
    labels: NodeLabels
    profile: Callable[[], Profile]  # the one in force, whatever layouts govern
    layouts: Layouts
    keeps: Callable[[], Keeps]
    allocated: Allocated
    in_charge: Callable[[], bool]
    governed: Governed
    changed: Callable[[], None]  # is told that GPUs are others than they were
    published: Published
    count: Callable[[float], None]  # is told how much is not as it should be
    events: Events


class MigLoop:
    """A keeper that looks from time to time, and when something changed. Nobody waits for it, but
    for a little while at the start."""

    def __init__(self, keeper: MigKeeper, seconds: float) -> None:
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

    def claim_changed(self, record: Record | None = None) -> None:
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


def connect(around: Around, look_seconds: float, stack: ExitStack) -> MigLoop:
    """All of it, connected and not started; *stack* stops it."""
    labels, ours = around.labels, _is_labelled(around.book)
    state = MigState(around.api, labels.node, labels.now, ours, around.published)
    state.start()
    stack.callback(state.stop)

    def tell(book: Book) -> None:
        state.tell(book.state)
        around.count(book.failures)

    told = Told(
        tell, around.governed.tell, around.changed, partial(say, around.events, around.labels)
    )
    layout = partial(_layout, around.labels)
    around.governed.on_change = around.changed
    around.governed.expected = partial(is_expected, layout, last_label(around.book))
    keeper = MigKeeper(around.node, _sources(around), around.apart, around.book, told)
    loop = MigLoop(keeper, look_seconds)
    stack.callback(loop.stop)
    around.labels.start(state.look_soon, 0.0)
    around.labels.start(on_other(layout, loop.soon), 0.0)
    return loop


def last_label(book: Kept) -> str | None:
    """Which layout the Node's label named when an earlier process of ours read it; None: that is
    not known."""
    try:
        return book.read().label
    except NodeError:  # the first look tells of it
        return None


def say(events: Events, labels: NodeLabels, news: News) -> None:
    """As an event of the Node that *labels* are of."""
    node = NodeRef(labels.node, labels.uid)
    events.tell(Event(node, news.reason, news.about, news.words, not news.is_good))


def on_other(read: Callable[[], str], act: Callable[[], None]) -> Callable[[], None]:
    """Does *act* where *read* answers something else than the last time, or is answered again."""
    last: str | None = None

    def look() -> None:
        nonlocal last
        try:
            now: str | None = read()
        except ClusterError:
            now = None
        if now != last:
            last = now
            act()

    return look


def turned_on(records: Iterable[Record]) -> frozenset[GpuUuid]:
    """The GPUs of which claims turned on MIG mode."""
    steps = (step for record in records for step in record.steps)
    return frozenset(
        step.gpu
        for step in steps
        if isinstance(step, SetMigMode) and step.on and step.before is False
    )


def _layout(labels: NodeLabels) -> str:
    return labels.now().get(MIG_CONFIG_LABEL, "")


def _sources(around: Around) -> Sources:
    labels = around.labels
    return Sources(
        label=partial(_layout, labels),
        is_labelled=lambda: MIG_STATE_LABEL in labels.now(),
        layouts=around.layouts,
        profile=around.profile,
        keeps=around.keeps,
        held=around.ledger.held,
        allocated=around.allocated,
        turned_on=lambda: turned_on(around.ledger.records()),
        in_charge=around.in_charge,
    )


def _is_labelled(book: MigBook) -> bool:
    """Whether an earlier process of ours may have written the state on the Node."""
    try:
        return book.read().labelled
    except NodeError:  # the first look tells of it
        return False

"""Keeps the choice of the API by which GPUs are given out: looks, chooses, records, tells.

The choice is on the disk before anybody acts on it: a process that is killed in between leaves the
next one a choice that nobody has acted on yet, which is as good as any.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Set
from dataclasses import replace
from typing import Final

from dra_driver.base.backoff import Backoff
from dra_driver.base.frozen import frozen
from dra_driver.kubeletplugin.device_plugin.resources import ResourceName
from dra_driver.model.profiles import AllocationApi
from dra_driver.node.state.node_api_file import ServedApi, ServedApiFile
from dra_driver.plan.node_annotation import DevicePluginHolders
from dra_driver.plan.node_api import WAS_HERE, ApiChoice, NodeApiFacts, choose_api
from dra_driver.plugin.node_api.current import NodeApi
from dra_driver.plugin.node_api.facts import ClusterFacts
from dra_driver.plugin.node_api.other_plugin import OtherDevicePlugin

log = logging.getLogger(__name__)

_SELDOM: Final = (600.0, 600.0)  # seconds: the first and the longest wait …
_UNKNOWN: Final = (0.5, 60.0)  # … while something is not known
_WAITING: Final = (2.0, 60.0)  # … while the node waits for pods to end
_NO_CLASS: Final = (5.0, 600.0)  # … while no DeviceClass has our extended resource
_OTHER_PLUGIN: Final = (10.0, 10.0)
_DRAINING: Final = (0.5, 30.0)  # until the slices are gone
_SOON: Final = (1.0, 1.0)
_SETTLE_SECONDS: Final = 10.0  # what was decided before the node drained has reached it by then
_OLDER_SECONDS: Final = 2.0  # between looks of a process that a newer one replaces
_KUBELET_SECONDS: Final = 15.0  # until a kubelet that started has written its version
_STATUS_SECONDS: Final = 15.0  # until a kubelet has written the status of its Node again
_STALE_SECONDS: Final = 30.0  # that a Node still has what this driver offered before
_KEPT: Final = "so it was before the plugin started"


@frozen
class ChoiceInputs:
    """What the choice depends on; asked at each look, *cluster* seldom."""

    resource: str  # our extended resource; empty: none is configured
    asked: Callable[[], AllocationApi | None]  # by the profile in force
    cluster: Callable[[bool], ClusterFacts]  # for the first time, or again
    holder_names: Callable[[AllocationApi, float], tuple[str, ...] | None]  # asked since when
    device_plugin_holders: Callable[[], DevicePluginHolders | None]  # where another plugin is, too
    other_plugin: OtherDevicePlugin
    slices_withdrawn: Callable[[], bool]  # nothing can be allocated any more
    kubelet_start: Callable[[], Hashable]  # another one after each start of the kubelet
    is_newest: Callable[[], bool]


class ApiChooser:
    """``step`` is of one thread; any may call the others."""

    def __init__(
        self,
        node_api: NodeApi,
        inputs: ChoiceInputs,
        file: ServedApiFile,
        clock: Callable[[], float] = time.monotonic,
        settle_seconds: float = _SETTLE_SECONDS,
    ) -> None:
        """*settle_seconds*: nothing comes any more once nothing was given out for so long."""
        self._node_api = node_api
        self._inputs = inputs
        self._file = file
        self._clock = clock
        self._settle_seconds = settle_seconds
        self._kept: ServedApi | None = None
        self._cluster: ClusterFacts | None = None  # as last asked
        self._asked_at = self._ask_at = float("-inf")
        self._ask_again = threading.Event()
        self._given_back = threading.Event()
        self._kubelet: Hashable = None
        self._kubelet_settles_at: float | None = None
        self._drained_since: float | None = None
        self._others_count_from = float("-inf")  # what is allocatable was ours until then
        self._waits = _SELDOM
        self._backoff = Backoff(*_SELDOM)
        self._untold = False
        self._has_followed = False  # a newer process
        self._listed: Set[tuple[ResourceName, bool]] = frozenset()  # of ours, as looked at last
        self._status_due_at: float | None = None  # when the Node says what these are
        self._logged: object = None
        self.changed: Callable[[], None] = lambda: None  # called when another choice holds
        self.kubelet_changed: Callable[[], None] = lambda: None  # when it started, and has settled

    def begin(self, held: AllocationApi | None) -> None:
        """Go on with what was kept; else with *held*: by which API something is held. NodeError:
        the disk fails."""
        self._kept = self._file.read()
        self._kubelet = self._inputs.kubelet_start()
        served = self._kept or (ServedApi(held) if held else None)
        if served is None:
            return
        self._others_count_from = self._clock() + _STALE_SECONDS
        other_plugin = self._inputs.other_plugin
        choice = _kept_choice(served, other_plugin.begin(served.api, served.other_plugin))
        self._node_api.set(replace(choice, other_plugin_is_gone=other_plugin.is_gone))

    @property
    def waiting(self) -> bool:
        """Whether the node goes to another API once nothing is held any more."""
        choice = self._node_api.choice
        return choice.wanted not in (None, choice.serving)

    def ask_again(self) -> None:
        """The API server may say something else now: it is asked at the next step."""
        self._ask_again.set()

    def given_back(self) -> None:
        """Something is held no more: who else holds something is asked often again."""
        self._given_back.set()

    def step(self) -> float:
        """Look, and choose. Returns the seconds until the next look. NodeError: the choice cannot
        be kept, so nobody acts on it."""
        now = self._clock()
        if not self._inputs.is_newest():
            return self._follow()
        self._begin_again(now)
        self._note_kubelet(now)
        was_asked = self._ask(now)
        choice = self._choice(now)
        self._take(choice, now)
        self._plan_next(self._waits_of(choice), was_asked, now)
        due = (self._ask_at, *(moment for moment in self._moments() if moment > now))
        return min(due) - now

    def _begin_again(self, now: float) -> None:
        """A newer process has chosen meanwhile, and is gone: what it saw is not known here, nor
        since when nothing was given out."""
        if not self._has_followed:
            return
        self._has_followed = False
        self._drained_since = None
        self._others_count_from = now + _STALE_SECONDS
        self.ask_again()
        if self._kept is not None:
            self._inputs.other_plugin.begin(self._kept.api, self._kept.other_plugin)

    def _follow(self) -> float:
        """Another process, a newer one, chooses."""
        self._has_followed = True
        served = self._file.read()
        if served is not None and served != self._kept:
            self._kept = served
            other_plugin = WAS_HERE if served.other_plugin else ""
            if self._node_api.set(_kept_choice(served, other_plugin)):
                self._tell()
        elif self._untold:
            self._tell()
        return _OLDER_SECONDS

    def _note_kubelet(self, now: float) -> None:
        kubelet = self._inputs.kubelet_start()
        if kubelet != self._kubelet:
            self._kubelet, self._kubelet_settles_at = kubelet, now + _KUBELET_SECONDS
        elif self._kubelet_settles_at is not None and now >= self._kubelet_settles_at:
            self._kubelet_settles_at = None
            self.ask_again()
            self.kubelet_changed()

    def _ask(self, now: float) -> bool:
        """Whether the API server was asked."""
        again = self._cluster is not None
        is_due = now >= self._ask_at or self._ask_again.is_set() or self._may_be_of_ours(now)
        if not (self._others_list_anew(now) or is_due) and again:
            return False
        self._ask_again.clear()
        self._cluster, self._asked_at = self._inputs.cluster(again), now
        return True

    def _others_list_anew(self, now: float) -> bool:
        """Whether somebody has come to list devices as ours, or has gone: the Node tells which, a
        moment later."""
        listed = self._inputs.other_plugin.listed(self._node_api.serving)
        if listed != self._listed:
            self._listed, self._status_due_at = listed, now + _STATUS_SECONDS
            return True
        if self._status_due_at is not None and now >= self._status_due_at:
            self._status_due_at = None
            return True
        return False

    def _may_be_of_ours(self, now: float) -> bool:
        """Whether what was allocatable when that was last asked may have been of this driver, and
        cannot be any more."""
        is_allocatable = self._cluster is not None and bool(self._cluster.allocatable)
        return is_allocatable and self._asked_at < self._others_count_from <= now

    def _choice(self, now: float) -> ApiChoice:
        choice = self._chosen(now)
        if not choice.other_plugin:
            return choice
        is_ours = choice.serving is AllocationApi.DEVICE_PLUGIN
        holders = self._inputs.device_plugin_holders() if is_ours else DevicePluginHolders()
        is_gone = self._inputs.other_plugin.is_gone
        return replace(choice, holders=holders, other_plugin_is_gone=is_gone)

    def _chosen(self, now: float) -> ApiChoice:
        cluster, serving = self._cluster or ClusterFacts(), self._node_api.serving
        facts = NodeApiFacts(
            asked=self._inputs.asked(),
            dra_served=cluster.dra_served,
            kubelet=cluster.kubelet,
            resource=self._inputs.resource,
            device_class=cluster.device_class,
            serving=serving,
            draining=self._is_drained(now),
            holder_names=(),
            other_plugin=self._other_plugin(cluster),
        )
        choice = choose_api(facts)
        if serving is None or choice.wanted in (None, serving):
            return choice
        if self._is_draining and not facts.draining:
            return choice  # who holds something is asked once nothing can come any more
        since = float("-inf") if self._drained_since is None else self._drained_since
        return choose_api(replace(facts, holder_names=self._inputs.holder_names(serving, since)))

    @property
    def _is_draining(self) -> bool:
        return self._kept is not None and self._kept.draining

    def _is_drained(self, now: float) -> bool:
        """Whether nothing was given out for so long that nothing can come any more."""
        is_dra = self._node_api.serving is AllocationApi.DRA
        if not self._is_draining or (is_dra and not self._inputs.slices_withdrawn()):
            self._drained_since = None
            return False
        if self._drained_since is None:
            self._drained_since = now
        return now - self._drained_since >= self._settle_seconds

    def _other_plugin(self, cluster: ClusterFacts) -> str:
        is_ours = self._node_api.serving is AllocationApi.DEVICE_PLUGIN
        counts = not is_ours and self._asked_at >= self._others_count_from
        theirs = cluster.allocatable if counts else ()
        serving = self._node_api.serving
        return self._inputs.other_plugin.look(serving, theirs, cluster.allocatable)

    def _take(self, choice: ApiChoice, now: float) -> None:
        before = self._node_api.choice
        # Beside another device plugin nothing is offered, also where the disk is full.
        comes_first = choice.serving is before.serving and bool(choice.other_plugin)
        if not comes_first:
            self._keep(choice)
        if before.serving is AllocationApi.DEVICE_PLUGIN is not choice.serving:
            self._others_count_from = now + _STALE_SECONDS
        is_other_state = self._node_api.set(choice)
        if choice != before:
            self._log(choice)
            self.changed()
        if is_other_state or self._untold:
            self._tell()
        if comes_first:
            self._keep(choice)

    def _keep(self, choice: ApiChoice) -> None:
        """NodeError: the disk fails."""
        if choice.serving is not None:
            is_beside = bool(choice.other_plugin)
            served = ServedApi(choice.serving, _is_draining(choice), is_beside)
            if served != self._kept:
                self._file.write(served)
                self._kept = served

    def _tell(self) -> None:
        self._untold = False
        for listener in tuple(self._node_api.listeners):
            try:
                listener()
            except Exception:  # the others are told, and this one again
                log.exception("a change of the API was not taken")
                self._untold = True

    def _log(self, choice: ApiChoice) -> None:
        """One line for each change, but for who the node waits for."""
        facts = {
            "api": choice.serving,
            "why": choice.why,
            "wanted": choice.wanted if self.waiting else None,
            "draining": _is_draining(choice),
            "problem": choice.problem or choice.other_plugin,
        }
        facts = {name: value for name, value in facts.items() if value}
        if facts == self._logged:
            return
        self._logged = facts
        level = logging.WARNING if "problem" in facts else logging.INFO
        log.log(level, "API by which GPUs are given out", extra=facts)

    def _plan_next(self, waits: tuple[float, float], was_asked: bool, now: float) -> None:
        """When the API server is asked again."""
        if waits != self._waits or self._given_back.is_set():
            self._given_back.clear()
            self._waits, self._backoff = waits, Backoff(*waits)
        elif not was_asked:
            return
        seconds = self._backoff.next_seconds()
        if waits == _SELDOM:
            seconds *= random.uniform(0.75, 1.0)  # nodes that began together drift apart
        self._ask_at = now + seconds

    def _waits_of(self, choice: ApiChoice) -> tuple[float, float]:
        if self._untold:
            return _SOON
        if choice.wanted is None:
            return _UNKNOWN
        if _is_draining(choice):
            return _DRAINING
        if choice.waits_for or choice.other_plugin_is_gone:
            return _WAITING
        if choice.other_plugin or self._listed:  # who lists as before may have gone and come back
            return _OTHER_PLUGIN
        cluster = self._cluster or ClusterFacts()
        is_mapped = cluster.device_class != "" or not self._inputs.resource
        return _SELDOM if is_mapped or not cluster.dra_served else _NO_CLASS

    def _moments(self) -> Iterator[float]:
        """When something else is due."""
        if self._kubelet_settles_at is not None:
            yield self._kubelet_settles_at
        if self._drained_since is not None:
            yield self._drained_since + self._settle_seconds
        if self._cluster is not None and self._cluster.allocatable:
            yield self._others_count_from
        if self._status_due_at is not None:
            yield self._status_due_at
        if (look_at := self._inputs.other_plugin.look_at) is not None:
            yield look_at


def _is_draining(choice: ApiChoice) -> bool:
    """Whether the node goes to another API and nothing is held any more, as far as is known."""
    is_leaving = choice.wanted not in (None, choice.serving)
    return is_leaving and not choice.offering and not choice.waits_for


_OTHER: Final = {
    AllocationApi.DRA: AllocationApi.DEVICE_PLUGIN,
    AllocationApi.DEVICE_PLUGIN: AllocationApi.DRA,
}


def _kept_choice(served: ServedApi, other_plugin: str) -> ApiChoice:
    """What was kept, as a choice."""
    wanted = _OTHER[served.api] if served.draining else served.api
    offering = not (served.draining or other_plugin)
    return ApiChoice(served.api, offering, wanted, _KEPT, other_plugin=other_plugin)

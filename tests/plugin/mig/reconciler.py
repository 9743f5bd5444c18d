"""A reconciler of MIG layouts between boards in memory and a state file on disk."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dra_driver.base.errors import SettingsError, TimedOut
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mig_layouts import LayoutState, MigLayout, MigLayoutEntry, MigState
from dra_driver.model.offer import ApiFeatures
from dra_driver.model.profiles import (
    DEFAULT_PROFILE,
    GpuSelector,
    MigRules,
    Profile,
    ProfileEntry,
    Rules,
)
from dra_driver.model.records import HoldingsByGpu
from dra_driver.node.state.mig_state import MigStateFile
from dra_driver.plan.mig.manager.layouts import built_in_layouts
from dra_driver.plan.mig.manager.state import MigEvent
from dra_driver.plugin.mig.reconciler import MigCallbacks, MigInputs, MigReconciler
from dra_driver.plugin.mig.start import last_state
from dra_driver.plugin.publish.profiles import EffectiveProfile, is_layout_expected
from tests.fakes.boards import Boards, Claims


def profile(**mig) -> Profile:
    """One that says this of every GPU."""
    return Profile("p", (ProfileEntry(GpuSelector(), Rules(mig=MigRules(**mig)), "spec.gpus[0]"),))


@dataclass
class Scene:
    """What a node is told, and a reconciler that starts anew as often as a test wants."""

    boards: Boards
    directory: Path
    label: str = ""
    profile: Profile = DEFAULT_PROFILE
    features: ApiFeatures = field(default_factory=ApiFeatures)
    holdings: HoldingsByGpu = field(default_factory=dict)
    layouts: dict[str, MigLayout] = field(default_factory=dict)
    claims: Claims = field(default_factory=Claims)
    is_newest: bool = True
    states: list[LayoutState | None] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    events: list[MigEvent] = field(default_factory=list)
    allocated: frozenset[str] | Exception = frozenset()
    enabled_by_claims: frozenset[GpuUuid] = frozenset()
    labelled: bool = False
    changes: int = 0  # how often it was told that GPUs are others
    leases: int = 0
    lease_taken: bool = False  # by another process, which keeps it
    boot: str = "boot"
    open_state: Callable[[Path, str], MigStateFile] = MigStateFile

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> "Scene":
        """As a new process."""
        self.state_file = self.open_state(self.directory / "mig.json", self.boot)
        boards: Any = self.boards
        layouts: Any = self
        inputs = MigInputs(
            lambda: self.say(self.label),
            lambda: self.labelled,
            layouts,
            lambda: self.say(self.profile),
            lambda: self.say(self.features),
            lambda: self.holdings,
            lambda: self.say(self.allocated),
            lambda: self.enabled_by_claims,
            lambda: self.is_newest,
            self.claims.while_free,
            self.lease,
        )
        self.governed = EffectiveProfile(lambda: self.profile)
        last = last_state(self.state_file).label
        self.governed.expected = lambda: is_layout_expected(lambda: self.say(self.label), last)
        callbacks = MigCallbacks(
            self.tell, self.governed.set_governed, self.changed, self.events.append
        )
        self.reconciler = MigReconciler(boards, inputs, self.state_file, callbacks)
        return self

    @contextmanager
    def lease(self, seconds: float) -> Iterator[None]:
        if self.lease_taken:
            raise TimedOut("waited for the plugin process of another pod")
        self.leases += 1
        yield

    def changed(self) -> None:
        self.changes += 1

    def say(self, answer):
        if isinstance(answer, Exception):
            raise answer
        return answer

    def contents(self) -> object:
        return dict(self.layouts)

    def named(self, name, gpus):
        known = {**built_in_layouts(gpus), **self.layouts}
        if name not in known:
            raise SettingsError(f"there is no layout {name!r}; there are: {', '.join(known)}")
        return known[name]

    def tell(self, state: MigState) -> None:
        self.states.append(state.state)
        self.problems.append(state.problem)

    def new_events(self) -> list[tuple[str, str]]:
        """What is new of the node since this was asked the last time: reasons and words."""
        events = [(event.reason, event.message) for event in self.events]
        self.events.clear()
        return events

    def look(self) -> MigState:
        """What is known after a look, as somebody else reads it; the watcher looks too."""
        self.reconciler.look()
        self.boards.refresh()
        return self.state_file.read()

    def next_process(self, label: str | None = None) -> MigState:
        """What is known after a look of a new process, to which nothing happens."""
        self.label = self.label if label is None else label
        self.boards.step = lambda call: None
        self.boards.refresh()
        return self.start().look()

    def apply(self, label: str) -> MigState:
        """What is known after a look at a node with this label."""
        self.label = label
        return self.look()

    def layout(self, name: str, **counts: int) -> None:
        """A layout for all GPUs: ``g1_5gb=2`` is two 1g.5gb."""
        named = ((f"{key[1:].replace('_', '.')[0]}g.{key[3:]}", n) for key, n in counts.items())
        self.layouts[name] = MigLayout(name, (MigLayoutEntry(True, tuple(named)),))

    def change_profile(self, **mig) -> None:
        self.profile = replace(profile(**mig))

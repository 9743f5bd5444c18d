"""A keeper of MIG layouts between boards in memory and a book on disk."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

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
from dra_driver.model.records import HoldingsByDevice
from dra_driver.node.state.mig_state import MigStateFile
from dra_driver.plan.mig.manager.layouts import built_in_layouts
from dra_driver.plan.mig.manager.state import MigEvent
from dra_driver.plugin.mig.reconciler import MigCallbacks, MigInputs, MigLocks, MigReconciler
from dra_driver.plugin.mig.start import last_layout_label
from dra_driver.plugin.publish.profiles import EffectiveProfile, is_layout_expected
from tests.fakes.boards import Boards, Claims


def profile(**mig) -> Profile:
    """One that says this of every GPU."""
    return Profile("p", (ProfileEntry(GpuSelector(), Rules(mig=MigRules(**mig)), "spec.gpus[0]"),))


@dataclass
class Scene:
    """What a node is told, and a keeper that starts anew as often as a test wants."""

    boards: Boards
    directory: Path
    label: str = ""
    profile: Profile = DEFAULT_PROFILE
    features: ApiFeatures = field(default_factory=ApiFeatures)
    held: HoldingsByDevice = field(default_factory=dict)
    layouts: dict[str, MigLayout] = field(default_factory=dict)
    claims: Claims = field(default_factory=Claims)
    in_charge: bool = True
    told: list[LayoutState | None] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    news: list[MigEvent] = field(default_factory=list)
    allocated: frozenset[str] | Exception = frozenset()
    turned_on: frozenset[GpuUuid] = frozenset()
    labelled: bool = False
    changes: int = 0  # how often it was told that GPUs are others
    turns: int = 0
    others: bool = False  # another process has the turn, and keeps it
    boot: str = "boot"
    kept: Callable[[Path, str], MigStateFile] = MigStateFile

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> "Scene":
        """As a new process."""
        self.book = self.kept(self.directory / "mig.json", self.boot)
        sources = MigInputs(
            lambda: self.say(self.label),
            lambda: self.labelled,
            self,
            lambda: self.say(self.profile),
            lambda: self.say(self.features),
            lambda: self.held,
            lambda: self.say(self.allocated),
            lambda: self.turned_on,
            lambda: self.in_charge,
        )
        self.governed = EffectiveProfile(lambda: self.profile)
        last = last_layout_label(self.book)
        self.governed.expected = lambda: is_layout_expected(lambda: self.say(self.label), last)
        told = MigCallbacks(self.tell, self.governed.set_governed, self.changed, self.news.append)
        apart = MigLocks(self.claims.while_free, self.turn)
        self.keeper = MigReconciler(self.boards, sources, apart, self.book, told)
        return self

    @contextmanager
    def turn(self, seconds: float) -> Iterator[None]:
        if self.others:
            raise TimedOut("waited for the plugin process of another pod")
        self.turns += 1
        yield

    def changed(self) -> None:
        self.changes += 1

    def say(self, what):
        if isinstance(what, Exception):
            raise what
        return what

    def named(self, name, gpus):
        known = {**built_in_layouts(gpus), **self.layouts}
        if name not in known:
            raise SettingsError(f"there is no layout {name!r}; there are: {', '.join(known)}")
        return known[name]

    def tell(self, book: MigState) -> None:
        self.told.append(book.state)
        self.problems.append(book.problem)

    def said(self) -> list[tuple[str, str]]:
        """What is new of the node since this was asked the last time: reasons and words."""
        said = [(one.reason, one.words) for one in self.news]
        self.news.clear()
        return said

    def look(self) -> MigState:
        """What is known after a look, as somebody else reads it; the watcher looks too."""
        self.keeper.look()
        self.boards.refresh()
        return self.book.read()

    def layout(self, name: str, **counts: int) -> None:
        """A layout for all GPUs: ``g1_5gb=2`` is two 1g.5gb."""
        named = ((f"{key[1:].replace('_', '.')[0]}g.{key[3:]}", n) for key, n in counts.items())
        self.layouts[name] = MigLayout(name, (MigLayoutEntry(True, tuple(named)),))

    def change_profile(self, **mig) -> None:
        self.profile = replace(profile(**mig))

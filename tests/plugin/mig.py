"""A keeper of MIG layouts between boards in memory and a book on disk."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from dra_driver.errors import SettingsError, TimedOut
from dra_driver.model.devices import GpuUuid
from dra_driver.model.holdings import Held
from dra_driver.model.layouts import Book, Layout, LayoutEntry, State
from dra_driver.model.offer import Keeps
from dra_driver.model.profiles import DEFAULT_PROFILE, Entry, MigRules, Profile, Rules, Selection
from dra_driver.node.mig_book import MigBook
from dra_driver.plan.mig.layouts import built_in
from dra_driver.plan.mig.news import News
from dra_driver.plugin.mig.governed import Governed, is_expected
from dra_driver.plugin.mig.keeper import Apart, MigKeeper, Sources, Told
from dra_driver.plugin.mig.start import last_label
from tests.fakes.boards import Boards, Claims


def profile(**mig) -> Profile:
    """One that says this of every GPU."""
    return Profile("p", (Entry(Selection(), Rules(mig=MigRules(**mig)), "spec.gpus[0]"),))


@dataclass
class Scene:
    """What a node is told, and a keeper that starts anew as often as a test wants."""

    boards: Boards
    directory: Path
    label: str = ""
    profile: Profile = DEFAULT_PROFILE
    keeps: Keeps = field(default_factory=Keeps)
    held: Held = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    claims: Claims = field(default_factory=Claims)
    in_charge: bool = True
    told: list[State | None] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    news: list[News] = field(default_factory=list)
    allocated: frozenset[str] | Exception = frozenset()
    turned_on: frozenset[GpuUuid] = frozenset()
    labelled: bool = False
    changes: int = 0  # how often it was told that GPUs are others
    turns: int = 0
    others: bool = False  # another process has the turn, and keeps it
    boot: str = "boot"
    kept: Callable[[Path, str], MigBook] = MigBook

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> "Scene":
        """As a new process."""
        self.book = self.kept(self.directory / "mig.json", self.boot)
        sources = Sources(
            lambda: self.say(self.label),
            lambda: self.labelled,
            self,
            lambda: self.say(self.profile),
            lambda: self.say(self.keeps),
            lambda: self.held,
            lambda: self.say(self.allocated),
            lambda: self.turned_on,
            lambda: self.in_charge,
        )
        self.governed = Governed(lambda: self.profile)
        last = last_label(self.book)
        self.governed.expected = lambda: is_expected(lambda: self.say(self.label), last)
        told = Told(self.tell, self.governed.tell, self.changed, self.news.append)
        apart = Apart(self.claims.while_free, self.turn)
        self.keeper = MigKeeper(self.boards, sources, apart, self.book, told)
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
        known = {**built_in(gpus), **self.layouts}
        if name not in known:
            raise SettingsError(f"there is no layout {name!r}; there are: {', '.join(known)}")
        return known[name]

    def tell(self, book: Book) -> None:
        self.told.append(book.state)
        self.problems.append(book.problem)

    def said(self) -> list[tuple[str, str]]:
        """What is new of the node since this was asked the last time: reasons and words."""
        said = [(one.reason, one.words) for one in self.news]
        self.news.clear()
        return said

    def look(self) -> Book:
        """What is known after a look, as somebody else reads it; the watcher looks too."""
        self.keeper.look()
        self.boards.refresh()
        return self.book.read()

    def layout(self, name: str, **counts: int) -> None:
        """A layout for all GPUs: ``g1_5gb=2`` is two 1g.5gb."""
        named = ((f"{key[1:].replace('_', '.')[0]}g.{key[3:]}", n) for key, n in counts.items())
        self.layouts[name] = Layout(name, (LayoutEntry(True, tuple(named)),))

    def change_profile(self, **mig) -> None:
        self.profile = replace(profile(**mig))

"""Which profile is in force on this node.

The flag ``--profile`` names it, else a label of the own Node, else it is ``default``. A change of
the label or of a file counts within seconds; what cannot be used leaves the last good one in force.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dra_driver.errors import ClusterError, DriverError, SettingsError
from dra_driver.model.profiles import Profile
from dra_driver.plan.profiles import Wanted, wanted
from dra_driver.plugin.node_labels import Labels

log = logging.getLogger(__name__)


class Profiles(Protocol):
    """Where profiles come from; ``dra_driver.plugin.profiles.Profiles`` is one."""

    def named(self, name: str) -> Profile: ...


class WatchedLabels(Protocol):
    """The labels of the own Node; ``dra_driver.plugin.node_labels.NodeLabels`` is one."""

    @property
    def node(self) -> str: ...

    def start(self, on_change: Callable[[], None], wait_seconds: float) -> None: ...

    def now(self) -> Labels: ...

    def stop(self) -> bool: ...


class Last(Protocol):
    """What outlives a restart; ``dra_driver.node.last_profile.LastProfile`` is one."""

    def read(self) -> Profile | None: ...

    def keep(self, profile: Profile) -> None: ...


@dataclass(frozen=True, slots=True)
class _State:
    profile: Profile | None
    problem: DriverError | None = None  # why what is wanted is not in force


class ProfileChoice:
    """Knows the profile in force. Any thread may call its methods."""

    def __init__(
        self,
        profiles: Profiles,
        chooser: str | WatchedLabels,
        on_change: Callable[[], None] = lambda: None,
        look_seconds: float = 2.0,
        last: Last | None = None,
    ) -> None:
        """*chooser*: the name that the flag gives, or the labels that choose. *last*: keeps what
        was in force for the next process, which goes on with it until it knows better.

        *on_change* is called when the profile in force or ``error`` is another one, in a thread of
        ours, maybe in two at once. Files are looked at every *look_seconds*.
        """
        self._profiles = profiles
        self._chooser = chooser
        self.on_change = on_change
        self._look_seconds = look_seconds
        self._lock = threading.Lock()
        self._last = last
        before = last.read() if last else None
        self._state = _State(before, SettingsError("no profile was looked for yet"))
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="profiles", daemon=True)

    def start(self, wait_seconds: float = 5.0) -> None:
        """Begin; what chooses is known on return, unless that takes longer than *wait_seconds*."""
        if not isinstance(self._chooser, str):
            self._chooser.start(self._settle, wait_seconds)
        self._settle()
        self._thread.start()

    def stop(self) -> None:
        """End; the profile stays as it is."""
        self._stopping.set()
        if not isinstance(self._chooser, str):
            self._chooser.stop()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def current(self) -> Profile:
        """The profile in force, the same object until it changes.

        SettingsError, ClusterError: there was no usable one yet, and why.
        """
        state = self._state
        if state.profile is None:
            kind = ClusterError if isinstance(state.problem, ClusterError) else SettingsError
            raise kind(self.error or "")
        return state.profile

    @property
    def error(self) -> str | None:
        """Why the profile that is wanted is not in force."""
        state = self._state
        if state.problem is None or state.profile is None:
            return str(state.problem) if state.problem else None
        return f"{state.problem}; profile {state.profile.name!r} stays in force"

    def _settle(self) -> None:
        """Look again at what is wanted."""
        with self._lock:
            before = self._state
            self._state = after = self._next(before)
            changed = (before.profile, str(before.problem)) != (after.profile, str(after.problem))
        if after.problem is None and after.profile and after.profile is not before.profile:
            self._keep(after.profile)
        if changed:
            self._log(before, after)
            self.on_change()

    def _next(self, state: _State) -> _State:
        try:
            choice = self._wanted()
        except ClusterError as e:
            return _State(
                state.profile, ClusterError(f"the profile of this node is not known: {e}")
            )
        try:
            profile = self._profiles.named(choice.name)
        except SettingsError as e:
            return _State(state.profile, SettingsError(f"{choice.origin}: {e}"))
        return _State(state.profile if profile == state.profile else profile)

    def _wanted(self) -> Wanted:
        if isinstance(self._chooser, str):
            return wanted(self._chooser, "", {})
        return wanted("", self._chooser.node, self._chooser.now())

    def _keep(self, profile: Profile) -> None:
        if self._last is not None:
            self._last.keep(profile)

    def _log(self, before: _State, after: _State) -> None:
        if after.profile is not None and after.profile is not before.profile:
            log.info("profile in force", extra={"profile": after.profile.name})
            for note in after.profile.notes:
                log.warning("profile: %s", note, extra={"profile": after.profile.name})
        if after.problem is not None:
            log.warning("profile cannot be used: %s", self.error)

    def _look_on(self) -> None:
        while not self._stopping.wait(self._look_seconds):
            try:
                self._settle()
            except Exception:  # the next look may go better; the loop must not end
                log.exception("looking for the profile failed")

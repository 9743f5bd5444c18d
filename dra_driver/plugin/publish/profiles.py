"""Which profile is in force on this node.

``plugin.publish.selection`` says which one holds. A change of that counts within seconds; while
what is chosen cannot be used, the last good profile stays in force, also after a restart. Profiles
come from NodeProfile objects, from files and from those that are bundled (``ProfileCatalog``).

``EffectiveProfile`` is the profile as it counts for what is offered: on GPUs that a MIG layout
governs no partitions are created for claims.
"""

import functools
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Protocol

import yaml

from api.mig_parted import is_mig_parted
from api.strict import ConfigError
from dra_driver.base import inotify
from dra_driver.base.errors import ApiServerError, DriverError, SettingsError
from dra_driver.base.frozen import frozen
from dra_driver.base.inotify import DirectoryChanges
from dra_driver.base.threads import UNTIL_WOKEN, Loop
from dra_driver.model.gpus import Gpu, GpuUuid
from dra_driver.model.profiles import Profile
from dra_driver.node.state.profile_files import (
    LastProfileFile,
    ProfileDocument,
    ProfileFileContents,
    ProfileFiles,
    UnreadableProfileFile,
    profile_stem,
)
from dra_driver.plan.mig.manager.layouts import (
    profile_until_gpus_seen,
    profile_until_layouts_known,
    without_dynamic_mig,
)
from dra_driver.plan.profiles.rules import decode_profile, profile_name
from dra_driver.plan.profiles.selection import SelectedProfile
from dra_driver.plugin.publish.selection import ProfileSelector

log = logging.getLogger(__name__)

_BUNDLED = resources.files("dra_driver") / "profiles"
_IDLE_SECONDS = 30.0  # between looks at files that the kernel watches, in case it misses something


_Profiles = tuple[tuple[str, Profile | str], ...]
"""Of one name: where each stands, and the profile or what is wrong with it."""


class ProfileCatalog:
    """Profiles by name; for many threads. Files are read again when they changed.

    What is wrong with one profile spoils no other.
    """

    def __init__(self, path: Path | None) -> None:
        """*path*: a file or a directory; None: there are only the bundled ones."""
        self._path = path
        self._files = ProfileFiles(path) if path else None
        self._lock = threading.Lock()
        self._contents = ProfileFileContents()
        self._by_name: Mapping[str, _Profiles] = {}

    def named(self, name: str) -> Profile:
        """The profile called *name*, the same object as long as no file changes.

        SettingsError: there is none, there are two, or everything that is wrong with it. A bundled
        one stands in for none of these, nor for one that an unreadable file seems to have.
        """
        by_name, unreadable = self._look()
        # NVIDIA's config manager takes the whole name of a file.
        profiles = by_name.get(name) or by_name.get(profile_stem(name), ())
        if len(profiles) > 1:
            places = " and ".join(where for where, _ in profiles)
            raise SettingsError(f"profile {name!r} is in {places}; remove one, or rename it")
        for where, profile in profiles:
            if isinstance(profile, str):
                raise SettingsError(f"profile {name!r}: {where}: {profile}")
            return profile
        bundled = bundled_profile(name)
        candidates = [
            file.why for file in unreadable if bundled is None or _seems_to_have(file, name)
        ]
        if candidates:
            raise SettingsError(
                f"profile {name!r} may be in a file that cannot be read: {'; '.join(candidates)}"
            )
        if bundled is not None:
            return bundled
        place = f"in {self._path}" if self._path else "and no --profiles to look for it"
        names = ", ".join(sorted({*by_name, *bundled_names()}))
        raise SettingsError(f"no profile {name!r} {place}; there are: {names}")

    @property
    def any_files(self) -> bool:
        """Whether profiles are looked for in files."""
        return self._files is not None

    def watch(self, changes: DirectoryChanges) -> bool:
        """Have *changes* set when a file changes. False: somebody has to look."""
        return self._files is not None and changes.watch(self._files.directories())

    def names(self) -> tuple[str, ...]:
        """Of the profiles in the files, also of those with an error. SettingsError: as above."""
        by_name, _ = self._look()
        return tuple(sorted(by_name))

    def _look(self) -> tuple[Mapping[str, _Profiles], tuple[UnreadableProfileFile, ...]]:
        """The profiles in the files now, and the files in which none can be told."""
        if self._files is None:
            return {}, ()
        contents = self._files.read()
        with self._lock:
            if contents is not self._contents:
                self._by_name = _by_name(contents)
                self._contents = contents
            return self._by_name, contents.unreadable


@functools.cache
def bundled_names() -> tuple[str, ...]:
    """The names of the profiles that come with the driver, which are those of their files."""
    files = [file.name for file in _BUNDLED.iterdir()]
    return tuple(sorted(file.removesuffix(".yaml") for file in files if file.endswith(".yaml")))


def bundled_profile(name: str) -> Profile | None:
    """The profile of this *name* that comes with the driver, the same object each time. One of the
    user that has the same name counts instead. None: there is none."""
    return _bundled(name) if name in bundled_names() else None


@functools.cache
def _bundled(name: str) -> Profile:
    return decode_profile(yaml.safe_load((_BUNDLED / f"{name}.yaml").read_text()), name)


def _by_name(contents: ProfileFileContents) -> dict[str, _Profiles]:
    by_name: dict[str, _Profiles] = {}
    for document in contents.documents:
        if is_mig_parted(document.content):  # ``plugin.mig.desired_layouts`` reads those
            continue
        name = profile_name(document.content, document.stem)
        by_name[name] = (*by_name.get(name, ()), (document.where, _read(document, name)))
    return by_name


def _seems_to_have(file: UnreadableProfileFile, name: str) -> bool:
    """Whether the profile is called as the file is, or as a ``name`` in its text."""
    named = rf"\bname[\"']?\s*:\s*[\"']?{re.escape(name)}(?![\w.-])"
    return file.stem == name or re.search(named, file.text) is not None


def _read(document: ProfileDocument, name: str) -> Profile | str:
    if document.content is None:
        return "is empty; write a NodeProfile"
    try:
        return decode_profile(document.content, name)
    except ConfigError as e:
        return str(e)
    except (ValueError, RecursionError) as e:  # of a document that no one writes by accident
        return f"cannot be read: {e}"


@frozen
class ActiveProfileState:
    """*profile* is in force *since* a moment of the monotonic clock; None: there is none yet.

    *problem*: why what is *selected* is not in force.
    """

    profile: Profile | None
    selected: SelectedProfile | None = None  # None: not known
    problem: DriverError | None = None
    since: float = math.inf


class FollowedNode(Protocol):
    """Calls us when what chooses may have changed; ``k8s.node_labels.NodeLabels`` is one."""

    def start(self, on_change: Callable[[], None], wait_seconds: float) -> None: ...

    def stop(self) -> bool: ...


class ActiveProfile:
    """Knows the profile in force. Any thread may call its methods."""

    def __init__(
        self,
        profiles: ProfileCatalog,
        selector: ProfileSelector,
        labels: FollowedNode,
        look_seconds: float = 2.0,
        last: LastProfileFile | None = None,
    ) -> None:
        """*profiles* and *labels*: whose changes count. *last*: keeps the profile in force for the
        next process, which begins with it.

        Where the kernel cannot tell that files change, they are looked at every *look_seconds*.
        OSError: the process has no file descriptors left.
        """
        self._profiles = profiles
        self._selector = selector
        self._labels = labels
        # Called in a thread of ours when the profile in force, or what is wrong, is another one.
        self.on_change: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._last = last
        before = last.read() if last else None
        problem = SettingsError("no profile was looked for yet")
        self._state = ActiveProfileState(before, problem=problem)
        self._look_seconds = look_seconds
        self._changes = DirectoryChanges(inotify.NAMES | inotify.CONTENTS)
        self._loop = Loop("profiles", self._look, _IDLE_SECONDS, self._changes)

    def start(self, wait_seconds: float = 5.0) -> None:
        """Begin; what chooses is known on return, unless that takes longer than *wait_seconds*."""
        self._labels.start(self._loop.soon, wait_seconds)
        self._update()
        self._loop.start()

    def stop(self) -> None:
        """End; the profile stays as it is."""
        self._loop.stop()
        self._labels.stop()
        if self._loop.alive:
            self._loop.join(1.0)
        if not self._loop.alive:
            self._changes.close()

    def current(self) -> Profile:
        """The profile in force, the same object until it changes.

        SettingsError, ApiServerError: there was no usable one yet, and why.
        """
        state = self._state
        if state.profile is None:
            kind = ApiServerError if isinstance(state.problem, ApiServerError) else SettingsError
            raise kind(self.error or "")
        return state.profile

    @property
    def state(self) -> ActiveProfileState:
        """What is in force, and what is selected."""
        return self._state

    @property
    def error(self) -> str | None:
        """Why the selected profile is not in force."""
        state = self._state
        if state.problem is None:
            return None
        if state.selected is not None:
            text = f"{state.selected.origin}: {state.problem}"
        elif isinstance(state.problem, ApiServerError):
            text = f"the profile of this node is not known: {state.problem}"
        else:
            text = str(state.problem)
        if state.profile is None:
            return text
        return f"{text}; profile {state.profile.name!r} stays in force"

    def _look(self) -> float | None:
        is_watched = self._profiles.watch(self._changes)  # before looking: no change is missed
        self._update()
        seconds = UNTIL_WOKEN
        if self._profiles.any_files:
            seconds = _IDLE_SECONDS if is_watched else self._look_seconds
        again_in = self._selector.again_in
        return seconds if again_in is None else min(seconds, again_in)

    def _update(self) -> None:
        with self._lock:
            before = self._state
            after = self._next(before)
            is_new = after.problem is None and after.profile is not before.profile
            if self._last and after.profile and is_new:  # first: a restart may come at any time
                self._last.keep(after.profile)
            changed = _shown(after) != _shown(before)
            if changed:
                self._state = after
                # Who began something later than this has seen the new state.
                self._state = replace(after, since=time.monotonic())
        if changed:
            self._log(before, after)
            for listener in self.on_change:
                listener()

    def _next(self, before: ActiveProfileState) -> ActiveProfileState:
        selection = self._selector.select(before.profile)
        profile = selection.profile
        if profile is None or profile == before.profile:
            profile = before.profile
        return ActiveProfileState(profile, selection.selected, selection.problem)

    def _log(self, before: ActiveProfileState, after: ActiveProfileState) -> None:
        if after.profile is not None and after.profile is not before.profile:
            profile = after.profile
            facts = {"profile": profile.name}
            facts |= {"revision": profile.revision} if profile.revision else {}
            log.info("profile in force", extra=facts)
            for warning in profile.warnings:
                log.warning("profile: %s", warning, extra={"profile": profile.name})
        if after.problem is not None:
            log.warning("profile cannot be used: %s", self.error)


def _shown(state: ActiveProfileState) -> tuple[object, ...]:
    return state.profile, state.selected, str(state.problem)


_GovernedGpus = tuple[tuple[Gpu, ...], frozenset[GpuUuid]]


class EffectiveProfile:
    """The profile in force as it counts for offers. The same object as long as nothing of it
    changed; for many threads."""

    def __init__(self, profile: Callable[[], Profile]) -> None:
        """*profile*: the one in force."""
        self._profile = profile
        self._governed: _GovernedGpus | None = None
        self._last: tuple[Profile, _GovernedGpus | None, bool, Profile] | None = None
        self.on_change: Callable[[], None] = lambda: None
        self.expected: Callable[[], bool] = lambda: False
        """Whether a GPU that ``set_governed`` has not named may be governed by a layout."""

    def set_governed(self, gpus: Sequence[Gpu], governed: frozenset[GpuUuid]) -> None:
        """Of *gpus*, layouts govern those in *governed*. Of any other GPU it is not known: it was
        not there yet, or was away for a moment."""
        before, self._governed = self._governed, (tuple(gpus), governed)
        if before is None or _governed_uuids(before) != _governed_uuids(self._governed):
            self.on_change()

    def profile(self) -> Profile:
        """The effective profile. Raises what *profile* raises."""
        profile, governed, expected = self._profile(), self._governed, self.expected()
        last = self._last
        if last is not None and last[0] is profile and last[1] is governed and last[2] == expected:
            return last[3]
        effective = _effective_profile(profile, governed, expected)
        if last is not None and effective == last[3]:
            effective = last[3]  # the same object, which is compared quickly
        self._last = (profile, governed, expected, effective)
        return effective


def is_layout_expected(label: Callable[[], str], last: str | None) -> bool:
    """Whether a layout may be asked for the whole node, by the *label* that names it.

    While the label cannot be read, its *last* value decides (None: never known): no partitions are
    created where a layout was named, or where that is not known. A node without one goes on
    without, however long the API server is away.
    """
    try:
        return bool(label())
    except ApiServerError:
        return last != ""


def _governed_uuids(governed: _GovernedGpus) -> tuple[frozenset[GpuUuid], frozenset[GpuUuid]]:
    gpus, uuids = governed
    return frozenset(gpu.uuid for gpu in gpus), uuids


def _effective_profile(profile: Profile, governed: _GovernedGpus | None, expected: bool) -> Profile:
    if governed is None:
        return profile_until_layouts_known(profile) if expected else profile
    gpus, _ = governed
    return profile_until_gpus_seen(without_dynamic_mig(profile, *governed), gpus, expected)

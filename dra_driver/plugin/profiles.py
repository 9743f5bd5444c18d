"""The profiles that can be chosen, by name: those in files, and those that are bundled."""

import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import yaml

from api.mig_parted import is_mig_parted
from api.strict import ConfigError
from dra_driver.errors import SettingsError
from dra_driver.model.profiles import Profile
from dra_driver.node.profiles import Contents, Document, ProfileFiles, stem
from dra_driver.plan.profiles import decoded, named


@dataclass(frozen=True, slots=True)
class _Read:
    """A document as a profile, or what is wrong with it."""

    where: str
    profile: Profile | None
    problems: tuple[str, ...] = ()


class Profiles:
    """Profiles by name; for many threads. Files are read again when they changed.

    What is wrong with one profile spoils no other.
    """

    def __init__(self, path: Path | None) -> None:
        """*path*: a file or a directory; None: there are only the bundled ones."""
        self._path = path
        self._files = ProfileFiles(path) if path else None
        self._lock = threading.Lock()
        self._contents = Contents()
        self._by_name: Mapping[str, tuple[_Read, ...]] = {}

    def named(self, name: str) -> Profile:
        """The profile called *name*, the same object as long as no file changes.

        SettingsError: there is none, there are two, or everything that is wrong with it. A bundled
        one stands in for none of these.
        """
        by_name, unreadable = self._look()
        # NVIDIA's config manager takes the whole name of a file.
        found = by_name.get(name) or by_name.get(stem(name), ())
        if len(found) > 1:
            places = " and ".join(each.where for each in found)
            raise SettingsError(f"profile {name!r} is in {places}; remove one, or rename it")
        if found:
            return _profile(found[0], name)
        if unreadable:
            raise SettingsError(
                f"profile {name!r} is in no file that can be read: {'; '.join(unreadable)}"
            )
        if name in bundled():
            return bundled()[name]
        place = f"in {self._path}" if self._path else "and no --profiles to look for it"
        known = ", ".join(sorted({*by_name, *bundled()}))
        raise SettingsError(f"no profile {name!r} {place}; there are: {known}")

    def _look(self) -> tuple[Mapping[str, tuple[_Read, ...]], tuple[str, ...]]:
        """The profiles in the files now, and what is wrong with files as such."""
        if self._files is None:
            return {}, ()
        contents = self._files.read()
        with self._lock:
            if contents is not self._contents:
                self._by_name = _by_name(contents)
                self._contents = contents
            return self._by_name, tuple(one.why for one in contents.unreadable)


@functools.cache
def bundled() -> Mapping[str, Profile]:
    """The profiles that come with the driver; a user's own of the same name counts instead."""
    files = resources.files("dra_driver").joinpath("profiles").iterdir()
    documents = [yaml.safe_load(file.read_text()) for file in files if file.name.endswith(".yaml")]
    found = {named(document, ""): document for document in documents}
    return {name: decoded(found[name], name) for name in sorted(found)}


def _by_name(contents: Contents) -> dict[str, tuple[_Read, ...]]:
    found: dict[str, tuple[_Read, ...]] = {}
    for document in contents.documents:
        if is_mig_parted(document.content):  # ``plugin.layout_files`` reads those
            continue
        name = named(document.content, document.stem)
        found[name] = (*found.get(name, ()), _read(document, name))
    return found


def _read(document: Document, name: str) -> _Read:
    if document.content is None:
        return _Read(document.where, None, ("is empty; write a NodeProfile",))
    try:
        return _Read(document.where, decoded(document.content, name))
    except ConfigError as e:
        return _Read(document.where, None, e.problems)
    except (ValueError, RecursionError) as e:  # of a document that no one writes by accident
        return _Read(document.where, None, (f"cannot be read: {e}",))


def _profile(found: _Read, name: str) -> Profile:
    if found.profile is None:
        raise SettingsError(f"profile {name!r}: {found.where}: {'; '.join(found.problems)}")
    return found.profile

"""The named layouts of GPUs that can be chosen: those in files, and those that boards have."""

import logging
import re
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from api.mig_parted import is_mig_parted
from api.strict import ConfigError
from dra_driver.errors import SettingsError
from dra_driver.model.devices import Gpu
from dra_driver.model.layouts import Layout
from dra_driver.node.profiles import Contents, Document, ProfileFiles, Unreadable
from dra_driver.plan.mig.layouts import built_in, layouts_of

log = logging.getLogger(__name__)

_IN_NAMES = r"[\w.+-]"

_Said = Layout | tuple[str, ...]  # a layout, or all that is wrong with it


class Layouts:
    """Layouts by name; for many threads. Files of mig-parted lie among those of profiles, and are
    read again when they changed."""

    def __init__(self, path: Path | None) -> None:
        """*path*: a file or a directory; None: there are only those of the boards."""
        self._files = ProfileFiles(path) if path else None
        self._lock = threading.Lock()
        self._contents = Contents()
        self._by_name: Mapping[str, tuple[tuple[str, _Said], ...]] = {}
        self._broken: tuple[Unreadable, ...] = ()

    def named(self, name: str, gpus: Iterable[Gpu]) -> Layout:
        """The layout called *name*, for these GPUs.

        SettingsError: there is none, there are two, or everything that is wrong with it. One of
        the boards stands in for none of these, nor for one that a broken file seems to have.
        """
        by_name, broken = self._look()
        found = by_name.get(name, ())
        if len(found) > 1:
            places = " and ".join(where for where, _ in found)
            raise SettingsError(f"layout {name!r} is in {places}; remove one, or rename it")
        for where, said in found:
            if isinstance(said, tuple):
                raise SettingsError(f"layout {name!r}: {where}: {'; '.join(said)}")
            return said
        own = built_in(gpus)
        # GPUs are not to be cut anew, by the boards' layout, while a file is damaged.
        doubtful = [one for one in broken if name not in own or _mentions(one.text, name)]
        if doubtful:
            why = "; ".join(one.why for one in doubtful)
            raise SettingsError(f"layout {name!r} is in no file that can be read: {why}")
        if name not in own:
            known = ", ".join(sorted({*by_name, *own}))
            raise SettingsError(f"there is no layout {name!r}; there are: {known}")
        return own[name]

    def _look(self) -> tuple[Mapping[str, tuple[tuple[str, _Said], ...]], tuple[Unreadable, ...]]:
        """The layouts in the files now, and the files that have something wrong as such."""
        if self._files is None:
            return {}, ()
        contents = self._files.read()
        with self._lock:
            if contents is not self._contents:
                self._by_name, self._broken = _by_name(contents)
                self._contents = contents
                for one in self._broken:
                    log.warning("no layout of a file can be read", extra={"reason": one.why})
            return self._by_name, self._broken


def _by_name(
    contents: Contents,
) -> tuple[dict[str, tuple[tuple[str, _Said], ...]], tuple[Unreadable, ...]]:
    found: dict[str, tuple[tuple[str, _Said], ...]] = {}
    broken = list(contents.unreadable)
    for document in contents.documents:
        if not is_mig_parted(document.content):
            continue
        try:
            said = _read(document)
        except SettingsError as e:
            broken.append(Unreadable(str(e), document.text))
            continue
        for name, one in said.items():
            found[name] = (*found.get(name, ()), (document.where, one))
    return found, tuple(broken)


def _read(document: Document) -> dict[str, _Said]:
    try:
        return layouts_of(document.content, document.where)
    except ConfigError as e:
        raise SettingsError(f"{document.where}: {e}") from e
    except (ValueError, RecursionError) as e:  # of a document that no one writes by accident
        raise SettingsError(f"{document.where}: cannot be read: {e}") from e


def _mentions(text: str, name: str) -> bool:
    """Whether *name*, and not only a longer one, is somewhere in the text of a broken file."""
    return bool(re.search(f"(?<!{_IN_NAMES}){re.escape(name)}(?!{_IN_NAMES})", text))

"""What GPUs should look like, by the label of the Node for all of them, else by the profile.

The named layouts of GPUs that can be chosen: those in files, and those that boards have.
"""

import logging
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from api.mig_parted import is_mig_parted
from api.strict import ConfigError
from dra_driver.base.errors import SettingsError
from dra_driver.model.gpus import Gpu, GpuUuid, Inventory
from dra_driver.model.mig_layouts import DesiredLayout, MigLayout
from dra_driver.model.profiles import Profile
from dra_driver.node.state.profile_files import (
    ProfileDocument,
    ProfileFileContents,
    ProfileFiles,
    UnreadableProfileFile,
)
from dra_driver.plan.mig.manager.layouts import (
    built_in_layouts,
    decode_layouts,
    desired_layout,
    pci_indexes,
)
from dra_driver.plan.profiles.rules import rules_by_gpu

log = logging.getLogger(__name__)

_IN_NAMES = r"[\w.+-]"

_LayoutOrProblems = MigLayout | tuple[str, ...]  # a layout, or all that is wrong with it


class LayoutCatalog:
    """Layouts by name; for many threads. Files of mig-parted lie among those of profiles, and are
    read again when they changed."""

    def __init__(self, path: Path | None) -> None:
        """*path*: a file or a directory; None: there are only those of the boards."""
        self._files = ProfileFiles(path) if path else None
        self._lock = threading.Lock()
        self._contents = ProfileFileContents()
        self._by_name: Mapping[str, tuple[tuple[str, _LayoutOrProblems], ...]] = {}
        self._broken: tuple[UnreadableProfileFile, ...] = ()

    def named(self, name: str, gpus: Iterable[Gpu]) -> MigLayout:
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
        own = built_in_layouts(gpus)
        # GPUs are not to be cut anew, by the boards' layout, while a file is damaged.
        doubtful = [one for one in broken if name not in own or _mentions(one.text, name)]
        if doubtful:
            why = "; ".join(one.why for one in doubtful)
            raise SettingsError(f"layout {name!r} is in no file that can be read: {why}")
        if name not in own:
            known = ", ".join(sorted({*by_name, *own}))
            raise SettingsError(f"there is no layout {name!r}; there are: {known}")
        return own[name]

    def _look(
        self,
    ) -> tuple[
        Mapping[str, tuple[tuple[str, _LayoutOrProblems], ...]], tuple[UnreadableProfileFile, ...]
    ]:
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
    contents: ProfileFileContents,
) -> tuple[dict[str, tuple[tuple[str, _LayoutOrProblems], ...]], tuple[UnreadableProfileFile, ...]]:
    found: dict[str, tuple[tuple[str, _LayoutOrProblems], ...]] = {}
    broken = list(contents.unreadable)
    for document in contents.documents:
        if not is_mig_parted(document.content):
            continue
        try:
            said = _read(document)
        except SettingsError as e:
            broken.append(UnreadableProfileFile(str(e), document.text))
            continue
        for name, one in said.items():
            found[name] = (*found.get(name, ()), (document.where, one))
    return found, tuple(broken)


def _read(document: ProfileDocument) -> dict[str, _LayoutOrProblems]:
    try:
        return decode_layouts(document.content, document.where)
    except ConfigError as e:
        raise SettingsError(f"{document.where}: {e}") from e
    except (ValueError, RecursionError) as e:  # of a document that no one writes by accident
        raise SettingsError(f"{document.where}: cannot be read: {e}") from e


def _mentions(text: str, name: str) -> bool:
    """Whether *name*, and not only a longer one, is somewhere in the text of a broken file."""
    return bool(re.search(f"(?<!{_IN_NAMES}){re.escape(name)}(?!{_IN_NAMES})", text))


class LayoutSource(Protocol):
    """Where layouts come from; ``dra_driver.plugin.mig.desired_layouts.Layouts`` is one."""

    def named(self, name: str, gpus: tuple[Gpu, ...]) -> MigLayout: ...


@dataclass(frozen=True, slots=True)
class DesiredLayouts:
    """*unknown*: GPUs of which it cannot be told."""

    by_gpu: Mapping[GpuUuid, DesiredLayout] = field(default_factory=dict)
    unknown: frozenset[GpuUuid] = frozenset()
    problem: str = ""
    any: bool = False  # whether a layout is wanted, if only of GPUs that are not here

    @property
    def governed(self) -> frozenset[GpuUuid]:
        """The GPUs that are the business of layouts."""
        return frozenset(self.by_gpu) | self.unknown


def desired_layouts(
    label: str, profile: Profile, layouts: LayoutSource, inventory: Inventory
) -> DesiredLayouts:
    """*label*: the name of the layout of the whole node; empty: none. What the profile leaves alone
    is left alone. Where no GPU can be seen yet, no layout is judged by that."""
    if not inventory.gpus:
        return DesiredLayouts(
            any=bool(label) or (bool(inventory.unavailable) and _names_any(profile))
        )
    rules, _ = rules_by_gpu(profile, inventory.gpus)
    names = {
        gpu: label or rules[gpu.uuid].mig.layout
        for gpu in inventory.gpus
        if rules[gpu.uuid].include
    }
    by_gpu: dict[GpuUuid, DesiredLayout] = {}
    unknown: set[GpuUuid] = set()
    problems: list[str] = []
    for name in sorted({*names.values(), label} - {""}):
        gpus = [gpu for gpu, its in names.items() if its == name]
        try:
            found = _desired_by_gpu(layouts.named(name, inventory.gpus), gpus, inventory)
        except SettingsError as e:
            problems.append(str(e))
            unknown |= {gpu.uuid for gpu in gpus}
        else:
            by_gpu |= found
    if any(rules[uuid].mig.dynamic for uuid in unknown):
        problems.append("GPUs that it may be meant for are not cut for claims meanwhile")
    is_any = bool(label) or any(names.values())
    return DesiredLayouts(by_gpu, frozenset(unknown), "; ".join(problems), is_any)


def _names_any(profile: Profile) -> bool:
    return any(entry.rules.include and entry.rules.mig.layout for entry in profile.entries)


def _desired_by_gpu(
    layout: MigLayout, gpus: list[Gpu], inventory: Inventory
) -> dict[GpuUuid, DesiredLayout]:
    """SettingsError: it says nothing, so that whoever chose it is wrong about this node."""
    order = pci_indexes(inventory)
    said = ((gpu.uuid, desired_layout(layout, gpu, order[gpu.uuid])) for gpu in gpus)
    found = {uuid: one for uuid, one in said if one is not None}
    if not found:
        here = ", ".join(sorted({gpu.product_name for gpu in gpus})) or "none that is offered"
        raise SettingsError(
            f"layout {layout.name!r} ({layout.where}) says nothing of any GPU of this node that "
            f"can be cut; its GPUs: {here}; choose another layout, or none"
        )
    return found

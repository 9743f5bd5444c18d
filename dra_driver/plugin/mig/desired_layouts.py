"""What GPUs should look like: by the label of the Node for all of them, else by the profile.

A layout is chosen by name: from the files of mig-parted, else from those that boards have built in.
"""

import logging
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import field
from pathlib import Path

from api.mig_parted import is_mig_parted
from api.strict import ConfigError
from dra_driver.base.errors import SettingsError
from dra_driver.base.frozen import frozen
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

_NAME_CHARACTER = r"[\w.+-]"

_LayoutOrProblems = MigLayout | tuple[str, ...]  # a layout, or all that is wrong with it
# layouts by name, each with its file; and the files that cannot be read as such
_Layouts = tuple[
    Mapping[str, tuple[tuple[str, _LayoutOrProblems], ...]], tuple[UnreadableProfileFile, ...]
]


class LayoutCatalog:
    """Layouts by name; for many threads. Files of mig-parted lie among those of profiles, and are
    read again when they changed."""

    def __init__(self, path: Path | None) -> None:
        """*path*: a file or a directory; None: there are only built-in layouts."""
        self._files = ProfileFiles(path) if path else None
        self._lock = threading.Lock()
        self._contents = ProfileFileContents()
        self._layouts: _Layouts = ({}, ())

    def named(self, name: str, gpus: Iterable[Gpu]) -> MigLayout:
        """The layout called *name*, for these GPUs.

        SettingsError: there is none, there are two, or everything that is wrong with it. A built-in
        layout stands in for none of these, nor for one that an unreadable file seems to have.
        """
        by_name, unreadable = self._read()
        layouts = by_name.get(name, ())
        if len(layouts) > 1:
            places = " and ".join(where for where, _ in layouts)
            raise SettingsError(f"layout {name!r} is in {places}; remove one, or rename it")
        for where, layout in layouts:
            if isinstance(layout, tuple):
                raise SettingsError(f"layout {name!r}: {where}: {'; '.join(layout)}")
            return layout
        built_in = built_in_layouts(gpus)
        # No GPU is partitioned anew, by a built-in layout, while a file is damaged.
        candidates = [
            file for file in unreadable if name not in built_in or _mentions(file.text, name)
        ]
        if candidates:
            reasons = "; ".join(file.why for file in candidates)
            raise SettingsError(f"layout {name!r} may be in a file that cannot be read: {reasons}")
        if name not in built_in:
            names = ", ".join(sorted({*by_name, *built_in}))
            raise SettingsError(f"there is no layout {name!r}; there are: {names}")
        return built_in[name]

    def contents(self) -> object:
        """What is in the files now: the same object as long as none of them changes.
        SettingsError: they cannot be read."""
        return self._files.read() if self._files else None

    def _read(self) -> _Layouts:
        if self._files is None:
            return {}, ()
        contents = self._files.read()
        with self._lock:
            if contents is not self._contents:
                self._layouts = _layouts_by_name(contents)
                self._contents = contents
                for file in self._layouts[1]:
                    log.warning("no layout of a file can be read", extra={"reason": file.why})
            return self._layouts


def _layouts_by_name(contents: ProfileFileContents) -> _Layouts:
    by_name: dict[str, tuple[tuple[str, _LayoutOrProblems], ...]] = {}
    unreadable = list(contents.unreadable)
    for document in contents.documents:
        if not is_mig_parted(document.content):
            continue
        try:
            layouts = _read(document)
        except SettingsError as e:
            unreadable.append(UnreadableProfileFile(str(e), document.stem, document.text))
            continue
        for name, layout in layouts.items():
            by_name[name] = (*by_name.get(name, ()), (document.where, layout))
    return by_name, tuple(unreadable)


def _read(document: ProfileDocument) -> dict[str, _LayoutOrProblems]:
    try:
        return decode_layouts(document.content, document.where)
    except ConfigError as e:
        raise SettingsError(f"{document.where}: {e}") from e
    except (ValueError, RecursionError) as e:  # of a document that no one writes by accident
        raise SettingsError(f"{document.where}: cannot be read: {e}") from e


def _mentions(text: str, name: str) -> bool:
    """Whether *name*, and not only a longer one, is somewhere in the text of an unreadable file."""
    return bool(re.search(f"(?<!{_NAME_CHARACTER}){re.escape(name)}(?!{_NAME_CHARACTER})", text))


@frozen
class DesiredLayouts:
    """*unknown*: GPUs whose layout is not known."""

    by_gpu: Mapping[GpuUuid, DesiredLayout] = field(default_factory=dict)
    unknown: frozenset[GpuUuid] = frozenset()
    problem: str = ""
    any: bool = False  # whether a layout is desired, if only of GPUs that are not here

    @property
    def governed(self) -> frozenset[GpuUuid]:
        """The GPUs that layouts decide about."""
        return frozenset(self.by_gpu) | self.unknown


def desired_layouts(
    label: str, profile: Profile, layouts: LayoutCatalog, inventory: Inventory
) -> DesiredLayouts:
    """*label*: the name of the layout of the whole node; empty: none. GPUs that the profile
    excludes have no layout. While no GPU can be seen, no layout is refused for that."""
    if not inventory.gpus:
        by_profile = bool(inventory.unavailable) and any(
            entry.rules.include and entry.rules.mig.layout for entry in profile.entries
        )
        return DesiredLayouts(any=bool(label) or by_profile)
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
        gpus = [gpu for gpu, gpu_layout in names.items() if gpu_layout == name]
        try:
            by_gpu |= _desired_by_gpu(layouts.named(name, inventory.gpus), gpus, inventory)
        except SettingsError as e:
            problems.append(str(e))
            unknown |= {gpu.uuid for gpu in gpus}
    if any(rules[uuid].mig.dynamic for uuid in unknown):
        problems.append(
            "no partitions are created for claims meanwhile on the GPUs that it may be meant for"
        )
    is_any = bool(label) or any(names.values())
    return DesiredLayouts(by_gpu, frozenset(unknown), "; ".join(problems), is_any)


def _desired_by_gpu(
    layout: MigLayout, gpus: list[Gpu], inventory: Inventory
) -> dict[GpuUuid, DesiredLayout]:
    """SettingsError: *layout* selects none of *gpus*."""
    indexes = pci_indexes(inventory)
    desired = ((gpu.uuid, desired_layout(layout, gpu, indexes[gpu.uuid])) for gpu in gpus)
    by_gpu = {uuid: gpu_layout for uuid, gpu_layout in desired if gpu_layout is not None}
    if not by_gpu:
        products = ", ".join(sorted({gpu.product_name for gpu in gpus})) or "none that is offered"
        raise SettingsError(
            f"layout {layout.name!r} ({layout.where}) says nothing of any GPU of this node that "
            f"can be partitioned; its GPUs: {products}; choose another layout, or none"
        )
    return by_gpu

"""``dra-driver devices``: what this node would publish; nothing is published.

Nothing is changed, but for device files of the driver that are missing: a GPU without its own
cannot be offered, so looking at the GPUs makes them.

That is what its GPUs, the profile (``--profile``, else ``default``) and the ledger make of it: a
GPU that a claim holds keeps its shape. A ledger that cannot be read is no reason to say nothing
(anyone may ask about a simulated node): a warning says so, and every GPU counts as free. No API
server is asked: a label of the Node that chooses a profile is not looked at, and the one that names
a layout is what a plugin of these GPUs read last, which goes before the profile here, too. What an
API server would get that lacks a feature is told with ``--without``.

A board that needs a reset to be switched to MIG mode, and a GPU for which a layout is named, are
told of as they are once the plugin has seen to that, unless it is known that it cannot or has to
wait: then as they are now, with the reason. GPUs that are cut are drawn, too: whose each memory
unit is, and what fits.

``-o json`` and ``-o yaml`` print a Kubernetes ``List`` of ResourceSlices in API version v1, as a
first publication would create them. What is said beside them in a table (GPUs that are not offered,
changes that wait, notes on the profile) has no place in it. A partition that a layout is yet to cut
lacks the one attribute that nobody can know before: ``uuid``.
"""

import json
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from dra_driver.cli.device_tables import device_tables
from dra_driver.cli.mig_layouts import waiting
from dra_driver.cli.mig_picture import Board, boards, mig_picture
from dra_driver.cli.mig_preview import preview, preview_lines
from dra_driver.cli.simulated_host import host_directory
from dra_driver.cli.terminal import Terminal
from dra_driver.cli.usage import held_by
from dra_driver.errors import NodeError
from dra_driver.kubeletplugin.slices import Home, Pool, reconcile, split
from dra_driver.model.devices import DeviceName
from dra_driver.model.holdings import Held
from dra_driver.model.layouts import Book
from dra_driver.model.offer import Keeps, Offer, Pending
from dra_driver.model.profiles import DEFAULT_PROFILE, Profile
from dra_driver.node.boot import boot_id
from dra_driver.node.ledger_files import read_directory
from dra_driver.node.machine import open_node
from dra_driver.node.mig_book import MigBook
from dra_driver.plan.offer import offer
from dra_driver.plan.publish import published, published_counters
from dra_driver.plugin.layout_files import Layouts
from dra_driver.plugin.mig.boards import Basis
from dra_driver.plugin.profiles import Profiles
from dra_driver.settings import DevicesSettings

log = logging.getLogger(__name__)

FEATURES = ("consumable-capacity", "taints", "counters")  # that an API server can be without

_NO_TERMINAL = Terminal()


@dataclass(frozen=True, slots=True)
class _Answer:
    """What there is to tell people."""

    offered: Offer
    profile: Profile
    boards: tuple[Board, ...]
    mig: tuple[str, ...] = ()  # what of it is shown as it will be, and how far the rest is
    layouts: Mapping[DeviceName, str] = field(default_factory=dict)  # by GPU: what it waits for


def devices(
    settings: DevicesSettings,
    output: str,
    without: Collection[str] = (),
    terminal: Terminal = _NO_TERMINAL,
) -> str:
    """As a *table* or a *wide* one for people, or as *json* or *yaml*. *without*: FEATURES that the
    API server is taken to lack."""
    profile = profile_of(settings)  # a wrong one is told before the GPUs are looked at
    with (
        host_directory(settings) as sim_dir,
        open_node(settings.place, sim_dir, state=settings.state) as node,
    ):
        seen = node.refresh()
    capacity, taints, counters = (name not in without for name in FEATURES)
    keeps = Keeps(capacity, taints, counters)
    held = _held(settings)
    basis = Basis(seen, profile, keeps, held)
    found = preview(basis, Layouts(settings.profiles), _book(settings))
    offered = offer(found.inventory, found.profile, keeps, held, mps=bool(settings.mps_socket))
    if output in ("table", "wide"):
        gpus, book = found.inventory.gpus, found.book
        drawn = boards(offered, gpus, held, book.made)
        mig = tuple(preview_lines(found))
        answer = _Answer(offered, profile, drawn, mig, waiting(book, gpus))
        return "\n".join(_lines(answer, output == "wide", terminal))
    document = slices_list(offered, settings)
    if output == "yaml":
        return yaml.safe_dump(document, sort_keys=True).rstrip()
    return json.dumps(document, indent=2, sort_keys=True)


def _held(settings: DevicesSettings) -> Held:
    try:
        records, _ = read_directory(settings.ledger_dir / boot_id(settings.host_root))
    except NodeError as e:
        log.warning("every GPU counts as free: %s", e)
        return {}
    return held_by(records.values())


def _book(settings: DevicesSettings) -> Book:
    try:
        return MigBook(settings.mig_book, boot_id(settings.host_root)).read()
    except NodeError as e:
        log.warning("what layouts made counts as somebody else's: %s", e)
        return Book()


def profile_of(settings: DevicesSettings) -> Profile:
    """The one that is named, else the one called default. SettingsError: there is none, or it is
    wrong."""
    return Profiles(settings.profiles).named(settings.profile or DEFAULT_PROFILE.name)


def slices_list(offered: Offer, settings: DevicesSettings) -> dict[str, Any]:
    """The ResourceSlices, in API version v1, that a first publication would create."""
    pool: Pool = split(settings.node_name, published(offered), published_counters(offered))
    home = Home(settings.driver_name, settings.node_name, node_uid="")
    items = []
    for document in reconcile(pool, (), home).create:
        metadata = {k: v for k, v in document["metadata"].items() if k != "ownerReferences"}
        items.append({**document, "metadata": metadata})
    return {"apiVersion": "v1", "kind": "List", "metadata": {}, "items": items}


def _lines(answer: _Answer, wide: bool, terminal: Terminal) -> Iterable[str]:
    offered, profile = answer.offered, answer.profile
    tables = device_tables(offered.devices, wide)
    yield "\n\n".join(tables) if tables else "this node has no GPU to offer"
    if answer.boards:
        yield f"\n{mig_picture(answer.boards, terminal)}\n"
    yield from answer.mig
    yield from (f"not offered: {found.what}: {found.reason}" for found in offered.withheld)
    yield from (_pending(change, answer.layouts) for change in offered.pending)
    yield from (f"profile {profile.name}: {note}" for note in profile.notes)
    yield from offered.notes[len(profile.notes) :]
    yield f"profile: {profile.name}"


def _pending(change: Pending, layouts: Mapping[DeviceName, str]) -> str:
    """A layout goes before what the profile makes of its GPU."""
    if change.reason:
        return f"not as the profile says: {change.device}: {change.change}: {change.reason}"
    layout = layouts.get(change.device)
    then = f"as layout {layout} says" if layout else change.change
    return f"pending: {change.device} keeps its shape while a claim holds it, then: {then}"

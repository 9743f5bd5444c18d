"""A node whose GPUs are cut for claims and by layouts, by processes that NVML kills: all of the
plugin that changes GPUs, over simulated NVML, with what it keeps on disk."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import yaml

from dra_driver.kubeletplugin.claims import Claim, ClaimRef, PreparedDevice
from dra_driver.model.layouts import Book
from dra_driver.model.offer import Keeps
from dra_driver.node.cgroups import Cgroups
from dra_driver.node.claim_files import ClaimFiles
from dra_driver.node.compute_modes import ComputeModes
from dra_driver.node.containers import Absent
from dra_driver.node.device_nodes import DeviceNodes
from dra_driver.node.driver_root import DriverRoot
from dra_driver.node.gpus import Gpus
from dra_driver.node.ledger import Ledger
from dra_driver.node.machine import simulated_device_number
from dra_driver.node.memory_limits import MemoryLimits
from dra_driver.node.metadata_files import MetadataFiles
from dra_driver.node.mig.capabilities import Access
from dra_driver.node.mig.holders import Holders
from dra_driver.node.mig.partitions import Partitions
from dra_driver.node.mig_book import MigBook
from dra_driver.node.node import GpuNode, Parts
from dra_driver.node.nvml import Nvml
from dra_driver.node.sim.commands import run_simulated
from dra_driver.node.sim.host import SimulatedHost
from dra_driver.node.sim.live import LiveNode
from dra_driver.node.sim.mig.host_files import kept_on
from dra_driver.node.sim.nvml import SimulatedNvml
from dra_driver.node.spec_files import SpecFiles
from dra_driver.node.time_slices import TimeSlices
from dra_driver.node.topology import PciTree
from dra_driver.plugin.layout_files import Layouts
from dra_driver.plugin.mig.governed import Governed
from dra_driver.plugin.mig.keeper import Apart, MigKeeper, Sources, Told
from dra_driver.plugin.mig.start import turned_on
from dra_driver.plugin.offers import Offers
from dra_driver.plugin.prepare import Preparer
from dra_driver.plugin.profiles import Profiles
from dra_driver.plugin.tools import Names, Tools
from dra_driver.plugin.waits import Waits
from tests.fakes.mig_node import board
from tests.fakes.mortal import Mortal
from tests.fakes.pods import NO_PODS
from tests.fakes.values import POOL, claim, ref

DRIVER = "gpu.nvidia.com"
_SPECS = "k8s.gpu.nvidia.com"
_BOOT = "boot"


def at_once(seconds: float) -> contextlib.AbstractContextManager[None]:
    """Nobody else has the turn."""
    return contextlib.nullcontext()


class CutNode:
    """An H100 and one claim for a partition. ``start`` is a new process; the one before it is as
    good as killed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        file = directory / "node.yaml"
        file.write_text(yaml.safe_dump({"gpus": [board()]}))
        self._live = LiveNode(file)
        self._host = directory / "host"
        SimulatedHost(self._live, self._host)
        self._claims: dict[ClaimRef, Claim] = {}
        self.label = ""  # that names a layout
        self._nvml: Nvml | None = None

    def start(self, at: int = 0, carried_out: bool = False) -> Mortal:
        """A process has begun to serve; it dies at that call of NVML (``Mortal``)."""
        self.stop()
        states = kept_on(self._host, lambda: True)
        self._mortal = mortal = Mortal(SimulatedNvml(self._live, mig=states), at, carried_out)
        node = GpuNode(self._parts(mortal))
        self.ledger = Ledger(self._directory / "claims", _BOOT)
        self._profile = Profiles(None).named("mig")
        governed = Governed(lambda: self._profile)
        self._offers = Offers(node, governed.profile, lambda: Keeps(), self.ledger, mps=False)
        specs = SpecFiles(self._directory / "cdi", _SPECS)
        files = ClaimFiles(specs, MetadataFiles(self._directory / "plugin"))
        tools = Tools(node, self._offers, self, NO_PODS, self.ledger, files, at_once)
        self._preparer = Preparer(Names(DRIVER, POOL), tools, Waits(all=5, hand_over=0.1))
        self._preparer.recover()
        self._book = MigBook(self._directory / "mig.json", _BOOT)
        self._keeper = self._new_keeper(node, governed)
        return mortal

    def stop(self) -> None:
        """The threads of the last process end; it does nothing more."""
        if self._nvml is not None:
            self._mortal.dead = True
            self._nvml.stop()
            self._nvml = None

    def read(self, wanted: ClaimRef) -> Claim:
        """As the API server answers."""
        return self._claims[wanted]

    def look(self) -> tuple[str, ...]:
        """The names of what is offered."""
        return tuple(device.name for device in self._offers.refresh().devices)

    def prepare(self, device: str) -> Sequence[PreparedDevice]:
        """Have *device* be given to the claim."""
        wanted = claim(device)
        self._claims[wanted.ref] = wanted
        return self._preparer.prepare(wanted.ref)

    def unprepare(self) -> None:
        self._preparer.unprepare(ref())

    def keep(self) -> Book:
        """What is known of the layout after a look at how GPUs are cut."""
        self._keeper.look()
        return self._book.read()

    @property
    def cut(self) -> tuple[bool, tuple[tuple[int, int, int], ...]]:
        """Whether MIG mode is on, and what is cut: profile ids, starts, and how many compute
        instances each has."""
        node = self._live.current()
        kept = kept_on(self._host, lambda: True).read(node, node.gpus[0])
        cuts = sorted((one.profile_id, one.start, len(one.computes)) for one in kept.cuts)
        return kept.on, tuple(cuts)

    @property
    def specs(self) -> list[str]:
        """The names of CDI files."""
        return sorted(path.name for path in (self._directory / "cdi").glob("*"))

    def _new_keeper(self, node: GpuNode, governed: Governed) -> MigKeeper:
        sources = Sources(
            label=lambda: self.label,
            is_labelled=lambda: bool(self.label),
            layouts=Layouts(None),
            profile=lambda: self._profile,
            keeps=lambda: Keeps(),
            held=self.ledger.held,
            allocated=lambda: (),
            turned_on=lambda: turned_on(self.ledger.records()),
            in_charge=lambda: True,
        )
        told = Told(lambda book: None, governed.tell, lambda: None)
        apart = Apart(self._preparer.upkeep.while_free, at_once)
        return MigKeeper(node, sources, apart, self._book, told)

    def _parts(self, functions: Mortal) -> Parts:
        host = self._host
        nvml = self._nvml = Nvml(lambda: functions)
        driver = DriverRoot(str(host), Path("/"), proc=f"{host}/proc")
        nodes = DeviceNodes(driver, run_simulated, simulated_device_number)

        def make_nodes(minors: tuple[int, ...]) -> None:
            nodes.files(minors)

        return Parts(
            Gpus(nvml, PciTree(host / "sys"), host / "dev", make_nodes),
            nvml,
            driver,
            nodes,
            TimeSlices(driver, host / "time-slices", "boot", run_simulated),
            MemoryLimits(nvml, Cgroups(host / "sys/fs/cgroup"), lambda id_: Absent.GONE),
            ComputeModes(nvml),
            Partitions(
                nvml,
                Holders(nvml, host / "proc"),
                lambda: driver.loaded_version() is not None,
                patience=0.0,
                allow=Access(nodes.make_capability).have,
            ),
        )

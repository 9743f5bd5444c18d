"""A node that is partitioned for claims and by layouts, by processes that die at a call of NVML:
all of the plugin that changes GPUs, over simulated NVML, with what it keeps on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from dra_driver.k8s.claims import Claim, ClaimRef, PreparedDevice
from dra_driver.model.mig_layouts import MigState
from dra_driver.model.offer import ApiFeatures
from dra_driver.node.cgroups.containers import ContainerBundles, NoContainer
from dra_driver.node.cgroups.tree import Cgroups
from dra_driver.node.driver.device_nodes import DeviceNodes
from dra_driver.node.driver.pci import PciBus
from dra_driver.node.driver.root import DriverRoot
from dra_driver.node.driver.time_slices import TimeSlices
from dra_driver.node.gpu_node import GpuNode
from dra_driver.node.inventory.gpus import GpuDiscovery
from dra_driver.node.kernel_log import KernelLog
from dra_driver.node.memory.limits import NodeMemoryLimits
from dra_driver.node.mig.capabilities import CapabilityAccess
from dra_driver.node.mig.geometry import MigGeometries
from dra_driver.node.mig.gpu_holders import GpuHolders
from dra_driver.node.mig.modes import GpuMigReader
from dra_driver.node.mig.partitions import MigPartitions
from dra_driver.node.nvml.client import Nvml
from dra_driver.node.nvml.compute_modes import ComputeModes
from dra_driver.node.nvml.events import GpuEvents
from dra_driver.node.state.claim_files import CdiSpecFiles, ClaimFiles, MetadataFiles
from dra_driver.node.state.ledger import Ledger
from dra_driver.node.state.mig_state import MigStateFile
from dra_driver.plugin.mig.desired_layouts import LayoutCatalog
from dra_driver.plugin.mig.reconciler import MigCallbacks, MigInputs, MigReconciler
from dra_driver.plugin.mig.start import mig_enabled_by_claims
from dra_driver.plugin.publish.offers import OfferBuilder
from dra_driver.plugin.publish.profiles import EffectiveProfile, ProfileCatalog
from dra_driver.sim.host.directory import SimulatedHost, run_on_simulated_host
from dra_driver.sim.live_node import LiveNode
from dra_driver.sim.mig.host_files import open_mig_states
from dra_driver.sim.nvml import SimulatedNvml
from dra_driver.sim.parts import simulated_device_number
from tests.builders import claim, ref
from tests.fakes.mig_node import board
from tests.fakes.mortal import Mortal
from tests.fakes.preparers import free_lease, preparer_of

_SPECS = "k8s.gpu.nvidia.com"
_BOOT = "boot"


class PartitionedNode:
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
        states = open_mig_states(self._host, lambda: True)
        self._mortal = mortal = Mortal(SimulatedNvml(self._live, mig=states), at, carried_out)
        node = self._node(mortal)
        self.ledger = Ledger(self._directory / "claims", _BOOT)
        self._profile = ProfileCatalog(None).named("mig")
        governed = EffectiveProfile(lambda: self._profile)
        self._offers = OfferBuilder(node, governed.profile, ApiFeatures, self.ledger, mps=False)
        specs = CdiSpecFiles(self._directory / "cdi", _SPECS)
        files = ClaimFiles(specs, MetadataFiles(self._directory / "plugin"))
        self._preparer = preparer_of(node, self._offers, self, self.ledger, files)
        self._preparer.recover()
        self._state_file = MigStateFile(self._directory / "mig.json", _BOOT)
        self._reconciler = self._new_reconciler(node, governed)
        return mortal

    def stop(self) -> None:
        """The threads of the last process end; it does nothing more."""
        if self._nvml is not None:
            self._mortal.dead = True
            self._nvml.stop()
            self._nvml = None

    def read(self, ref: ClaimRef) -> Claim:
        """As the API server answers."""
        return self._claims[ref]

    def look(self) -> None:
        """Read the GPUs and build what is offered of them."""
        self._offers.refresh()

    def prepare(self, device: str) -> Sequence[PreparedDevice]:
        """Have *device* be given to the claim."""
        prepared = claim(device)
        self._claims[prepared.ref] = prepared
        return self._preparer.prepare(prepared.ref)

    def unprepare(self) -> None:
        self._preparer.unprepare(ref())

    def apply_layout(self) -> MigState:
        """The state after a look of the reconciler."""
        self._reconciler.look()
        return self._state_file.read()

    @property
    def partitions(self) -> tuple[bool, tuple[tuple[int, int, int], ...]]:
        """Whether MIG mode is on, and the partitions: profile ids, starts, and how many compute
        instances each has."""
        node = self._live.current()
        state = open_mig_states(self._host, lambda: True).read(node, node.gpus[0])
        instances = sorted((gi.profile_id, gi.start, len(gi.computes)) for gi in state.instances)
        return state.on, tuple(instances)

    @property
    def specs(self) -> list[str]:
        """The names of claims' CDI files."""
        return sorted(path.name for path in (self._directory / "cdi").glob("*-claim_*"))

    def _new_reconciler(self, node: GpuNode, governed: EffectiveProfile) -> MigReconciler:
        inputs = MigInputs(
            label=lambda: self.label,
            is_labelled=lambda: bool(self.label),
            layouts=LayoutCatalog(None),
            profile=lambda: self._profile,
            features=ApiFeatures,
            holdings=self.ledger.held,
            allocated=lambda: (),
            enabled_by_claims=lambda: mig_enabled_by_claims(self.ledger.records()),
            is_newest=lambda: True,
            while_free=self._preparer.prepared_claims.while_free,
            lease=free_lease,
        )
        callbacks = MigCallbacks(lambda state: None, governed.set_governed, lambda: None)
        return MigReconciler(node, inputs, self._state_file, callbacks)

    def _node(self, functions: Mortal) -> GpuNode:
        host = self._host
        geometries = MigGeometries()
        nvml = self._nvml = Nvml(lambda: functions, geometries.start_session)
        driver = DriverRoot(str(host), Path("/"), proc=f"{host}/proc")
        nodes = DeviceNodes(driver, run_on_simulated_host, simulated_device_number)
        return GpuNode(
            host,
            GpuDiscovery(nvml, PciBus(host / "sys"), host / "dev", nodes.files),
            nvml,
            driver,
            nodes,
            TimeSlices(driver, host / "time-slices", "boot", run_on_simulated_host),
            NodeMemoryLimits(nvml, Cgroups(host / "sys/fs/cgroup"), lambda id_: NoContainer.GONE),
            ComputeModes(nvml),
            MigPartitions(
                GpuMigReader(
                    nvml,
                    geometries,
                    GpuHolders(nvml, host / "proc"),
                    lambda: driver.loaded_version() is not None,
                ),
                patience=0.0,
                allow=CapabilityAccess(nodes.make_capability).have,
            ),
            ContainerBundles(host),
            GpuEvents(nvml, KernelLog(host / "dev" / "kmsg")),
        )

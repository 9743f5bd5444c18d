"""A node in memory that prepares claims for partitions of one H100, with its disk."""

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dra_driver.k8s.claims import Claim
from dra_driver.model.gpus import Inventory
from dra_driver.model.offer import Offer
from dra_driver.model.steps import CreatePartition
from dra_driver.node.state.claim_files import CdiSpecFiles, ClaimFiles, MetadataFiles
from dra_driver.node.state.ledger import Ledger
from tests.builders import claim, config, fraction, ref
from tests.fakes.mig import ONE, mig_gpu, mig_offer, name_of, partition, partition_device
from tests.fakes.node import FakeNode
from tests.fakes.pods import NO_PODS
from tests.fakes.preparers import preparer_of

GPU = mig_gpu().uuid
FIRST, SECOND = "gpu-0-mig-1g10gb-19-0", "gpu-0-mig-1g10gb-19-1"
KEY, SECOND_KEY = partition(ONE, 0).key, partition(ONE, 1).key  # their places
UUID = name_of(GPU, KEY)  # of the first
SIDE = "gpu-0-mig-3g40gb-9-0"
MPS = config("MigDeviceConfig", sharing={"strategy": "MPS"})

CLEAN: Any = ((), False, ())  # no partition, MIG mode off, no record


class Killed(BaseException):
    """kill -9: nothing that would clean up runs, because nobody catches it."""


@dataclass
class Api:
    """The claims that the API server has."""

    claims: dict = field(default_factory=dict)

    def read(self, claim_ref):
        return self.claims[claim_ref]


class FixedOffers:
    """The offer of the last look, and that of the next one."""

    def __init__(self, *devices, offer=None):
        self.last = self.next = offer or Offer(devices)

    def now(self):
        return self.last

    def refresh(self):
        self.last = self.next
        return self.last


class World:
    """``restart`` is what a new process finds after a crash."""

    ledger_type: type[Ledger] = Ledger

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.api = Api()
        self.pods = NO_PODS
        self.use(mig_gpu())

    def use(self, *gpus, offers=None):
        """The node has these GPUs, and a new process offers *offers* of them, or everything."""
        self.node: Any = FakeNode(Inventory(gpus))
        self.offers = offers or FixedOffers(offer=mig_offer(*gpus))
        self.restart()

    def restart(self):
        self.ledger = self.ledger_type(self.directory / "claims", "boot")
        self.open_offers()
        specs = CdiSpecFiles(self.directory / "cdi", "k8s.gpu.nvidia.com")
        files = ClaimFiles(specs, MetadataFiles(self.directory / "plugin"))
        self.preparer = preparer_of(
            self.node, self.offers, self.api, self.ledger, files, pods=self.pods
        )
        self.preparer.recover()

    def open_offers(self):
        """The offers are fixed, and outlive a process."""

    def prepare(self, *devices, name="claim", **fields):
        return self.prepare_claim(claim(*devices, name=name, **fields))

    def prepare_claim(self, new):
        self.api.claims[new.ref] = new
        return self.preparer.prepare(new.ref)

    def share(self, name, *configs):
        """Have the claim *name* be given a part of the 3g partition."""
        self.prepare_claim(Claim(ref(name), (fraction("10Gi", SIDE),), configs))

    def unprepare(self, *names):
        for name in names or ("claim",):
            self.preparer.unprepare(ref(name))

    def spec(self, name="claim"):
        path = self.directory / "cdi" / f"k8s.gpu.nvidia.com-claim_uid-{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    @property
    def edits(self):
        """Of the one device of the claim."""
        (device,) = self.spec()["devices"]
        return device["containerEdits"]

    @property
    def device_nodes(self):
        return [node["path"] for node in self.edits["deviceNodes"]]

    def add_unmanaged(self, profile=ONE, start=0):
        """Somebody turns on MIG mode, and creates this instance, which the next look sees."""
        self.node.mig.modes[GPU] = True
        instance = self.node.mig.add(GPU, partition(profile, start).key)
        self.offers.next = Offer((partition_device(profile, start, instance=instance),))
        return instance

    @contextlib.contextmanager
    def before_steps(self, act):
        """Meanwhile *act* is done before each step."""
        self.node.before_step = act
        try:
            yield
        finally:
            self.node.before_step = lambda step: None

    def failing(self, is_failing, error):
        """Meanwhile a step of which *is_failing* is true raises *error* before it is done."""

        def fail(step):
            if is_failing(step):
                raise error

        return self.before_steps(fail)

    def overtake(self, step):
        """Somebody else creates the first partition just before we do."""
        if step == CreatePartition(GPU, KEY):
            self.node.mig.add(GPU, KEY)

    @property
    def partitions(self):
        return self.node.mig.on(GPU)

    @property
    def mode(self):
        return self.node.mig.modes[GPU]

    @property
    def state(self):
        """``CLEAN`` where nothing is left of any claim."""
        return self.partitions, self.mode, self.ledger.records()

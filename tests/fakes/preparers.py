"""A preparer of claims, with fakes for all that a test does not name."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dra_driver.base.errors import ClaimError, Unreachable
from dra_driver.k8s.claims import Claim, ClaimRef
from dra_driver.model.offer import ApiFeatures
from dra_driver.model.profiles import DEFAULT_PROFILE
from dra_driver.node.state.claim_files import CdiSpecFiles, ClaimFiles, MetadataFiles
from dra_driver.node.state.ledger import Ledger
from dra_driver.plugin.claims.dependencies import DriverIdentity, PrepareDependencies
from dra_driver.plugin.claims.prepared_claims import CallTimeouts
from dra_driver.plugin.claims.preparer import Preparer
from dra_driver.plugin.publish.offers import OfferBuilder
from tests.builders import POOL
from tests.fakes.pods import NO_PODS
from tests.fakes.users import FakeUsers

DRIVER = "gpu.nvidia.com"
DRIVER_SPEC = f"k8s.{DRIVER}-driver_files.json"


@contextlib.contextmanager
def free_lease(seconds: float) -> Iterator[None]:
    """No other process wants it."""
    yield


def preparer_of(
    node: Any,
    offers: Any,
    claims: Any,
    ledger: Ledger,
    files: ClaimFiles,
    timeouts: CallTimeouts | None = None,
    mps_dir: str = "",
    **fields: Any,
) -> Preparer:
    """*fields*: others of ``PrepareDependencies``; where they do not say, no pod can be read, no
    process uses a claim and nobody else wants the lease."""
    others: dict[str, Any] = {
        "pods": NO_PODS,
        "lease": free_lease,
        "changed": lambda record: None,
        "users": FakeUsers(),
    }
    dependencies = PrepareDependencies(
        node=node, offers=offers, claims=claims, ledger=ledger, files=files, **others | fields
    )
    return Preparer(
        DriverIdentity(DRIVER, POOL, mps_dir=mps_dir),
        dependencies,
        timeouts or CallTimeouts(all=5, hand_over=0.1),
    )


class ClaimApi:
    """The claims that the API server has."""

    def __init__(self) -> None:
        self.claims: dict[ClaimRef, Claim] = {}
        self.down = False

    def put(self, claim: Claim) -> ClaimRef:
        self.claims[claim.ref] = claim
        return claim.ref

    def read(self, ref: ClaimRef) -> Claim:
        if self.down:
            raise Unreachable("the API server does not answer")
        if ref not in self.claims:
            raise ClaimError(f"claim {ref} does not exist")
        return self.claims[ref]


class ClaimWorld:
    """A node with its disk. ``restart`` is what a new process finds after a crash."""

    ledger_type: type[Ledger] = Ledger
    specs_type: type[CdiSpecFiles] = CdiSpecFiles

    def __init__(self, directory: Path, node: Any, timeouts: CallTimeouts) -> None:
        self.directory = directory
        self.node = node
        self.timeouts = timeouts
        self.api = ClaimApi()
        self.pods: Any = NO_PODS
        self.users = FakeUsers()
        self.profile = DEFAULT_PROFILE
        self.ledger: Any
        self.specs: Any
        self.files: ClaimFiles
        self.preparer: Preparer

    def open_disk(self) -> None:
        """What a new process has of the disk."""
        self.ledger = self.ledger_type(self.directory / "claims", "boot")
        self.specs = self.specs_type(self.directory / "cdi", f"k8s.{DRIVER}")
        self.files = ClaimFiles(self.specs, MetadataFiles(self.directory / "plugin"))

    def restart(self) -> Preparer:
        self.open_disk()
        self.preparer = self.preparer_with()
        self.preparer.recover()
        return self.preparer

    def preparer_with(self, **fields: Any) -> Preparer:
        """A preparer, with other parts than usual."""
        ledger = fields.get("ledger", self.ledger)
        features = ApiFeatures()
        usual: dict[str, Any] = {
            "offers": OfferBuilder(self.node, lambda: self.profile, lambda: features, ledger),
            "ledger": ledger,
            "files": self.files,
            "pods": self.pods,
            "users": self.users,
            "timeouts": self.timeouts,
        }
        return preparer_of(self.node, claims=self.api, **usual | fields)

    def spec(self, name: str = "claim") -> Any:
        """The document of the CDI file of a claim; None: it has none."""
        path = self.directory / "cdi" / f"k8s.{DRIVER}-claim_uid-{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    @property
    def files_of_claims(self) -> list[str]:
        """The names of all files that claims have: not the CDI spec of the driver."""
        places = ("claims", "cdi", "plugin")
        files = [file for place in places for file in (self.directory / place).rglob("*")]
        return [file.name for file in files if file.is_file() and file.name != DRIVER_SPEC]

    @property
    def nothing_left(self) -> bool:
        return not self.files_of_claims and not self.ledger.records()

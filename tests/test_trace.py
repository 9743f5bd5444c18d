"""How many of our modules a prepare runs through: what a newcomer has to follow stays small."""

import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dra_driver.kubeletplugin.serve.rolling_update import PluginLease
from dra_driver.model.offer import ApiFeatures
from dra_driver.node.driver.config import NodeConfig
from dra_driver.node.state.claim_files import CdiSpecFiles, ClaimFiles, MetadataFiles
from dra_driver.node.state.ledger import Ledger
from dra_driver.plugin.claims.prepared_claims import CallTimeouts
from dra_driver.plugin.publish.offers import OfferBuilder
from dra_driver.plugin.publish.profiles import ProfileCatalog
from dra_driver.sim.parts import open_simulated_node
from tests.agent.conftest import mps_dir  # noqa: F401 - a fixture
from tests.agent.test_run import when_it_answers
from tests.builders import claim, fraction, ref
from tests.fakes.preparers import preparer_of

OURS = tuple(f"{Path(__file__).parents[1]}/{package}/" for package in ("api", "cdi", "dra_driver"))
NOT_FOLLOWED = tuple(
    f"{Path(__file__).parents[1]}/dra_driver/{path}" for path in ("sim/", "base/frozen.py")
)


@contextmanager
def traced_modules():
    """The files of our modules of which a function runs, in this thread and in those that begin
    meanwhile. The simulation does not count, and neither does how values are compared."""
    files = set()

    def called(frame, event, argument):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(OURS) and not file.startswith(NOT_FOLLOWED):
            files.add(file)

    threading.setprofile(called)
    sys.setprofile(called)
    try:
        yield files
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


class Node:
    """A simulated node, and a plugin that has prepared a claim like *claim* before."""

    def __init__(self, node, directory, profile):
        ledger = Ledger(directory / "claims", "boot")
        specs = CdiSpecFiles(directory / "cdi", "k8s.gpu.nvidia.com")
        files = ClaimFiles(specs, MetadataFiles(directory / "plugin"))
        (directory / "plugin").mkdir()
        chosen = ProfileCatalog(None).named(profile)
        mps = node.mps is not None
        features = ApiFeatures()
        self.offers = OfferBuilder(node, lambda: chosen, lambda: features, ledger, mps=mps)
        lease = PluginLease(directory / "plugin", "this", lambda: self.preparer.recover())
        self.preparer = preparer_of(
            node, self.offers, self, ledger, files, CallTimeouts(), lease=lease.held
        )
        self.claims = {}

    def read(self, claim_ref):
        """As the API server answers."""
        return self.claims[claim_ref]

    def modules(self, claim):
        """What a prepare of *claim* runs through."""
        before = replace(claim, ref=ref("before"))
        self.claims = {before.ref: before, claim.ref: claim}
        self.offers.refresh()
        self.preparer.prepare(before.ref)
        self.preparer.unprepare(before.ref)
        self.offers.refresh()
        with traced_modules() as files:
            self.preparer.prepare(claim.ref)
        self.preparer.unprepare(claim.ref)
        return sorted(files)


@pytest.fixture
def trace(tmp_path):
    def run(sim, profile, claim, socket=None):
        config = NodeConfig(mps_socket=socket)
        with open_simulated_node(sim, config, tmp_path / "node") as node:
            return Node(node, tmp_path, profile).modules(claim)

    return run


def share(memory, **capacity):
    return replace(claim(), allocations=(fraction(memory, **capacity),))


@pytest.mark.parametrize(
    ("sim", "profile", "claim", "most"),
    [
        pytest.param("h100x8", "default", claim("gpu-0"), 43, id="a whole GPU"),
        pytest.param("h100x8", "default", share("20Gi"), 45, id="a share"),
        pytest.param("h100x2-mig", "mig", claim("gpu-0-mig-1g10gb-19-0"), 50, id="a partition"),
    ],
)
def test_a_prepare_runs_through_few_modules(trace, sim, profile, claim, most):
    modules = trace(sim, profile, claim)

    assert len(modules) <= most, "\n".join(modules)


@pytest.fixture
def agent(mps_dir):  # noqa: F811
    flags = ("--sim=h100x2-615", f"--mps-dir={mps_dir}")
    process = subprocess.Popen([sys.executable, "-m", "dra_driver", "mps-agent", *flags])
    when_it_answers(mps_dir)
    yield mps_dir / "agent.sock"
    process.terminate()
    process.wait(60)


def test_a_prepare_under_mps_runs_through_few_modules(trace, agent):
    modules = trace("h100x2-615", "default", share("20Gi", cores="30"), agent)

    assert len(modules) <= 60, "\n".join(modules)

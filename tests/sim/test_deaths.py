"""A simulated GPU can have whoever calls NVML die at a call: before it, or once it has worked."""

import signal
import subprocess
import sys

import pytest

from dra_driver.sim.mig.state import MigStateStore
from dra_driver.sim.node_spec import KILLED, KILLED_AFTER
from tests.fakes.simulated import Node, h100

SWITCHES = """
import sys
from pathlib import Path
from dra_driver.sim.live_node import LiveNode
from dra_driver.sim.mig.state import MigStateStore
from dra_driver.sim.nvml import SimulatedNvml

states = MigStateStore(Path(sys.argv[2]), is_root=lambda: True)
nvml = SimulatedNvml(LiveNode(Path(sys.argv[1])), mig=states)
nvml.nvmlInit()
nvml.nvmlDeviceSetMigMode(nvml.nvmlDeviceGetHandleByIndex(0), 1)
"""


@pytest.mark.parametrize(("when", "on"), [(KILLED, False), (KILLED_AFTER, True)])
def test_who_calls_dies_before_anything_was_done_or_when_it_was(tmp_path, when, on):
    node = Node(tmp_path, {"gpus": [h100("1b", fails={"nvmlDeviceSetMigMode": when})]})
    host = tmp_path / "host"

    process = subprocess.run(
        [sys.executable, "-c", SWITCHES, node.file, host], check=False, timeout=20
    )

    assert process.returncode == -signal.SIGKILL
    (gpu,) = node.live.current().gpus
    assert MigStateStore(host).read(node.live.current(), gpu).on is on

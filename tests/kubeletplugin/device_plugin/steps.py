"""What several tests of device plugins do, or wait for."""

import os
import subprocess
import sys
import time
from pathlib import Path

from dra_driver.kubeletplugin.device_plugin.server import DevicePluginServer
from tests.fakes.device_manager import FakeDeviceManager
from tests.fakes.device_plugins import GPU
from tests.waiting import eventually

SERVE = """
import sys
from pathlib import Path
from dra_driver.base.signals import Shutdown
from tests.fakes.device_plugins import resource, serving
shutdown = Shutdown("broken")
with serving(Path(sys.argv[1]), resource("a"), instance=sys.argv[2]) as server:
    print("ready", flush=True)
    shutdown.event.wait()
"""


def started(directory: Path, instance: str) -> subprocess.Popen[str]:
    """A server in a process of its own, once it serves."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(directory), instance],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def names(directory: Path) -> list[str]:
    """The sockets in *directory*."""
    return sorted(path.name for path in directory.iterdir() if path.is_socket())


def quiet(kubelet: FakeDeviceManager, seconds: float = 1.0) -> None:
    """Wait until there was no Register for *seconds*: nobody registers again and again."""

    def none_came() -> bool:
        count = len(kubelet.registrations)
        time.sleep(seconds)
        return len(kubelet.registrations) == count

    eventually(none_came, "quiet")


def registered(kubelet: FakeDeviceManager, server: DevicePluginServer, count: int = 1) -> None:
    """Wait until the kubelet has what *server* offers."""
    kubelet.wait_for_allocatable(GPU, count)
    eventually(lambda: server.problem() is None, "the kubelet to have the list")

"""A control plane without a node, with flags of its own, beside any cluster that is up."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hack.testbed import assets, leftovers, network, packages
from hack.testbed.cache import Progress
from hack.testbed.components import CONTROL_PLANE, Flags
from hack.testbed.layout import Layout, default_layout
from hack.testbed.preparation import prepare
from hack.testbed.processes import boot_id
from hack.testbed.running import Running, process_of
from hack.testbed.state import State

# Apart from the cluster's, which may stop a component for a while and need its port again.
_FIRST_PORT = 26000


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """One that runs."""

    layout: Layout
    state: State

    @property
    def kubeconfig(self) -> Path:
        """The administrator's."""
        return self.layout.kubeconfig

    def pid(self, name: str) -> int:
        """The process of a component; an error with the end of its log when it has stopped."""
        process = process_of(self.layout, name)
        process.check_alive()
        return process.pid() or 0

    def restart(self, name: str, flags: Flags) -> None:
        """Start one component again, with other flags."""
        process_of(self.layout, name).stop()
        running = Running(self.layout, self.state, flags)
        running.begin(name)
        running.wait(name)


@contextmanager
def control_plane(
    version: str, flags: Flags, progress: Progress, root: Path | None = None
) -> Iterator[ControlPlane]:
    """Bring it up; afterwards nothing of it is left, nor of one whose command was killed."""
    packages.install(node=False, progress=progress)
    programs = assets.find_programs(assets.CONTROL_PLANE, version, progress)
    cluster = default_layout().root
    layout = Layout(root or cluster.with_name(f"{cluster.name}-fleet"))
    with layout.locked():
        _sweep(layout)
        state = State(
            version=version,
            why="no node is wanted",
            boot=boot_id(),
            ports=network.choose_ports(_FIRST_PORT),
            feature_gates={},
            made_directories=[],
            sysctls={},
        )
        try:
            prepare(layout, state, programs)
            _launch(Running(layout, state, flags))
            progress(f"a control plane is up: KUBECONFIG={layout.kubeconfig}")
            yield ControlPlane(layout, state)
        finally:
            _sweep(layout)


def _launch(running: Running) -> None:
    running.begin("etcd")
    running.wait("etcd")
    running.begin("apiserver")
    running.wait("apiserver")
    running.begin(*running.parts)
    running.wait(*running.parts)
    running.wait_settled()


def _sweep(layout: Layout) -> None:
    for name in reversed(CONTROL_PLANE):
        # Nothing of it is kept, so nobody needs the time to end in good order.
        process_of(layout, name).stop(signal.SIGKILL)
    leftovers.empty(layout.root)

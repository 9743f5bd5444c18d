"""The one door to MPS on this machine: its control daemons are started, asked and stopped."""

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals
from typing import Final

from dra_driver.base.deadlines import Deadline, seconds_within_request, within_request
from dra_driver.base.errors import NodeError, TimedOut
from dra_driver.model.driver_files import DriverFiles
from dra_driver.model.mps import PROTOCOL_3_DRIVER_VERSION, MpsNamespace, MpsNamespaceName
from dra_driver.node.driver.commands import Command, run_daemon
from dra_driver.node.driver.config import DriverPrograms
from dra_driver.node.mps import directories
from dra_driver.node.mps.control import PROGRAM, ControlProgram, DaemonTimeouts
from dra_driver.node.mps.daemon import TOKEN_VARIABLE, ControlDaemon, DaemonStatus
from dra_driver.node.mps.daemon_cgroup import DaemonCgroup
from dra_driver.node.mps.directories import SHARED_MEMORY_BYTES, DaemonDirectories
from dra_driver.node.mps.draining import drain_clients
from dra_driver.node.mps.processes import DaemonProcess, DaemonProcesses, describe_unmanaged
from dra_driver.node.mps.protocol2 import Protocol2
from dra_driver.node.mps.protocol3 import Protocol3, speaks_protocol3
from dra_driver.node.nvml.values import driver_version
from dra_driver.node.selinux import SelinuxLabels

log = logging.getLogger(__name__)

_BETWEEN_LOOKS_SECONDS: Final = 0.01
_TIMEOUTS: Final = DaemonTimeouts()


class MpsDaemons:
    """Control daemons of *driver*. Safe to use from several threads, as long as no
    two of them change one daemon."""

    def __init__(
        self,
        driver: DriverPrograms,
        cgroup: DaemonCgroup | None = None,
        timeouts: DaemonTimeouts = _TIMEOUTS,
        shared_memory_bytes: int = SHARED_MEMORY_BYTES,
    ) -> None:
        """*shared_memory_bytes*: what all clients of a server of protocol 2 have together."""
        self._control = ControlProgram(driver.root, driver.run, driver.placed)
        self._processes = DaemonProcesses()
        self._timeouts = timeouts
        self._cgroup = cgroup or DaemonCgroup(Path("/sys/fs/cgroup"))
        labels = SelinuxLabels(Path(driver.root.local_path("/sys/fs/selinux/enforce")))
        self._directories = DaemonDirectories(
            self._control, labels, self._cgroup.in_container, shared_memory_bytes
        )
        self._protocols: Mapping[int, Protocol2 | Protocol3] = {
            2: Protocol2(self._control),
            3: Protocol3(self._control),
        }
        self._newest: tuple[DriverFiles, int] | None = None
        self._known: dict[str, DaemonProcess] = {}  # the control daemon, by token
        self._exposed: set[str] = set()  # tokens of those that end with this container

    def protocol(self) -> int:
        """The newest that this driver has, whose program is there. NodeError: it has no MPS."""
        self._control.available()
        driver = self._control.driver
        if self._newest is None or self._newest[0] is not driver:
            self._newest = driver, self._look_for_protocol(driver)
        return self._newest[1]

    def start(
        self, daemon: ControlDaemon, namespaces: Sequence[MpsNamespace]
    ) -> Mapping[MpsNamespaceName, str]:
        """Start it with these namespaces, and return the pipe directory of each.

        If it ran before, its processes are killed first. The directories that it made are kept,
        since containers have them mounted.

        NodeError: it does not come up; with the last lines of its log. TimedOut: nor does it fail.
        Then nothing of it runs, and nothing is there that was not there before.
        """
        restarted = Path(daemon.directory).exists()
        self.kill(daemon)
        try:
            return self._bring_up(daemon, namespaces)
        except (NodeError, OSError) as e:
            kind = TimedOut if isinstance(e, TimedOut) else NodeError
            details = f"{e}{_log_of(daemon, restarted)}{self._undo(daemon, restarted)}"
            raise kind(f"MPS server {daemon.name} does not start: {details}") from e
        except BaseException:
            self._undo(daemon, restarted)
            raise

    def is_running(self, daemon: ControlDaemon) -> bool:
        """Whether its control daemon is there. No program is run."""
        known = self._known.get(daemon.token)
        if known is not None and self._processes.is_alive(known):
            return True
        return self._find(daemon) is not None

    def check(self, daemon: ControlDaemon) -> DaemonStatus:
        """NodeError: it answers with an error, or is not there. MpsStateUnknown: it was not asked.
        TimedOut: it does not answer."""
        return self._protocol(daemon).check(daemon, _within(daemon, self._timeouts.ask))

    def add_namespace(self, daemon: ControlDaemon, namespace: MpsNamespace) -> str:
        """The pipe directory of *namespace*, which is created unless it exists with these limits.

        NodeError: it exists with other limits, or the daemon refuses. TimedOut: no answer.
        """
        pipe_directory = self._protocol(daemon).add_namespace(
            daemon, namespace, _within(daemon, self._timeouts.ask)
        )
        self._directories.label(daemon, pipe_directory)
        return pipe_directory

    def is_there(self, directory: str) -> bool:
        """Whether a pipe directory leads anywhere. No program is run."""
        return os.path.exists(f"{directory}/control")

    def limit_namespace(self, daemon: ControlDaemon, namespace: MpsNamespace) -> None:
        """Set the limits of a namespace that exists. Without a memory limit in *namespace*, the one
        that is set stays: no command is known that removes it.

        NodeError: clients are in it, or it is not there. TimedOut: no answer.
        """
        self._protocol(daemon).limit_namespace(
            daemon, namespace, _within(daemon, self._timeouts.ask)
        )

    def remove_namespace(self, daemon: ControlDaemon, namespace: MpsNamespaceName) -> None:
        """Remove it, and disconnect its clients. It may be gone."""
        if self.is_running(daemon):
            self._protocol(daemon).remove_namespace(
                daemon, namespace, _within(daemon, self._timeouts.ask)
            )

    def terminate(self, daemon: ControlDaemon, pids: Collection[int]) -> None:
        """End these clients once their work in flight is done. Those that are gone are ignored.

        MpsClientStuck: one does not end. TimedOut: the daemon does not answer. NodeError: some have
        not ended yet; ask again.
        """
        until = _within(daemon, self._timeouts.drain_all)
        running = [pid for pid in pids if self._processes.exists(pid)]
        if running and self.is_running(daemon):
            asking = _within(daemon, self._timeouts.ask)
            drain_clients(
                self._protocol(daemon).terminators(daemon, running, asking),
                self._timeouts.drain,
                until,
            )

    def kill(self, daemon: ControlDaemon) -> None:
        """Kill its processes, and keep its directory, which containers have mounted: a daemon that
        quits by itself would remove what it made in there."""
        find = partial(self._processes.of, daemon.token)
        self._forget(daemon, self._signal(find, SIGKILL, self._timeouts.kill))

    def stop_and_remove(self, daemon: ControlDaemon) -> None:
        """End its processes, and remove its mounts and its directory. They may be gone."""
        processes = self._processes.of(daemon.token)
        if self._processes.control(processes) is not None:
            self._quit(daemon, processes)
        self._take_down(daemon, partial(self._processes.of, daemon.token))

    def remove_orphan(self, daemon: ControlDaemon) -> None:
        """As ``stop_and_remove``, where only the directory is known: whatever lives in there."""
        self._take_down(daemon, partial(self._processes.living_in, daemon.directory))

    def detach(self, daemon: ControlDaemon) -> bool:
        """Move it out of this container. False: it will end with it, which is logged."""
        if not self._cgroup.in_container:
            return True
        outside = self._cgroup.take_in(
            [process.pid for process in self._processes.of(daemon.token)]
        )
        (self._exposed.discard if outside else self._exposed.add)(daemon.token)
        return outside

    def is_detached(self, daemon: ControlDaemon) -> bool:
        """Whether the last ``detach`` succeeded. No program is run."""
        return daemon.token not in self._exposed

    def unmanaged(self, tokens: Collection[str]) -> tuple[str, ...]:
        """Control daemons with none of *tokens*, described."""
        return describe_unmanaged(self._processes.unmanaged(frozenset(tokens)))

    def trim_logs(self, daemon: ControlDaemon) -> None:
        """Keep its logs small: they are in the host's memory. A failure is logged."""
        directories.trim_logs(daemon.log)

    def _look_for_protocol(self, driver: DriverFiles) -> int:
        if driver_version(driver.version).major < PROTOCOL_3_DRIVER_VERSION:
            return 2
        return (
            3 if speaks_protocol3(self._control, within_request(self._timeouts.ask, PROGRAM)) else 2
        )

    def _bring_up(
        self, daemon: ControlDaemon, namespaces: Sequence[MpsNamespace]
    ) -> Mapping[MpsNamespaceName, str]:
        deadline = within_request(self._timeouts.start, f"starting MPS server {daemon.name}")
        protocol = self._protocol(daemon)
        self._directories.make(daemon, [namespace.name for namespace in namespaces])
        command = self._control.prepare_for(daemon, protocol.command(daemon, namespaces))
        variables = (*command.variables, (TOKEN_VARIABLE, daemon.token))
        self._launch(daemon, replace(command, variables=variables).with_neighbours(), deadline)
        if self._find(daemon) is None:
            raise NodeError("its control daemon ended at once")
        self.detach(daemon)
        ready = self._wait(daemon, namespaces, deadline)
        self.detach(daemon)  # its server is there by now
        self._directories.label(daemon, daemon.pipe)
        time.sleep(self._timeouts.settle)
        if not self.is_running(daemon):
            raise NodeError("its control daemon ended as soon as it was up")
        return ready

    def _undo(self, daemon: ControlDaemon, restarted: bool) -> str:
        """Returns why it could not be undone."""
        try:
            self.kill(daemon)
            if not restarted:
                self._directories.remove(daemon)
        except NodeError as e:
            return f"\n{e}"
        return ""

    def _take_down(
        self, daemon: ControlDaemon, find: Callable[[], tuple[DaemonProcess, ...]]
    ) -> None:
        """End what *find* finds, and remove everything else of the daemon."""
        remaining = self._signal(find, SIGTERM, self._timeouts.term)
        if remaining:
            remaining = self._signal(find, SIGKILL, self._timeouts.kill)
        self._forget(daemon, remaining)
        self._directories.remove(daemon)
        self._cgroup.close()

    def _signal(
        self, find: Callable[[], tuple[DaemonProcess, ...]], number: Signals, seconds: float
    ) -> tuple[DaemonProcess, ...]:
        """Returns the processes that are still there."""
        return self._processes.end_all(find, number, seconds_within_request(seconds, undoing=True))

    def _forget(self, daemon: ControlDaemon, remaining: tuple[DaemonProcess, ...]) -> None:
        """TimedOut: there is something of it still."""
        self._known.pop(daemon.token, None)
        self._exposed.discard(daemon.token)
        self._protocol(daemon).forget(daemon)
        if remaining:
            pids = ", ".join(str(process.pid) for process in remaining)
            raise TimedOut(
                f"processes of MPS server {daemon.name} do not end, although they were killed "
                f"({pids}): the GPU's driver holds them; see dmesg, and restart the node if it "
                "stays so"
            )

    def _launch(self, daemon: ControlDaemon, command: Command, deadline: Deadline) -> None:
        output = Path(daemon.log) / "start.log"

        def launch() -> None:
            run_daemon(command, output, deadline.check())

        if daemon.protocol == 2:
            directories.with_own_shared_memory(daemon.shm, command.root, launch)
        else:
            launch()

    def _wait(
        self, daemon: ControlDaemon, namespaces: Sequence[MpsNamespace], deadline: Deadline
    ) -> Mapping[MpsNamespaceName, str]:
        protocol = self._protocol(daemon)
        appearance = within_request(self._timeouts.appearance)
        while True:
            try:
                ready = protocol.configure_when_ready(daemon, namespaces, deadline)
            except TimedOut:
                raise
            except NodeError:
                if appearance.expired or not self.is_running(daemon):
                    raise
                ready = None  # it is not yet there to be asked
            if ready is not None:
                return ready
            if not self.is_running(daemon):
                raise NodeError("its control daemon has ended")
            deadline.check()
            time.sleep(_BETWEEN_LOOKS_SECONDS)

    def _protocol(self, daemon: ControlDaemon) -> Protocol2 | Protocol3:
        return self._protocols[daemon.protocol]

    def _find(self, daemon: ControlDaemon) -> DaemonProcess | None:
        process = self._processes.control(self._processes.of(daemon.token))
        if process is None:
            self._known.pop(daemon.token, None)
        else:
            self._known[daemon.token] = process
        return process

    def _quit(self, daemon: ControlDaemon, processes: tuple[DaemonProcess, ...]) -> None:
        """Ask it to. A daemon may end before it has confirmed that."""
        try:
            deadline = within_request(self._timeouts.quit, f"ending {daemon.name}", undoing=True)
            self._protocol(daemon).quit(daemon, deadline)
        except NodeError as e:
            seconds = seconds_within_request(self._timeouts.going, undoing=True)
            if isinstance(e, TimedOut) or not self._processes.wait(processes, seconds):
                extra = {"server": daemon.name, "error": str(e)}
                log.info("an MPS daemon does not quit", extra=extra)
        else:
            seconds = seconds_within_request(self._timeouts.term, undoing=True)
            self._processes.wait(processes, seconds)


def _log_of(daemon: ControlDaemon, restarted: bool) -> str:
    """The last lines of its log. A daemon that ran before may have logged clients of others: its
    lines are for the administrator, and not for the tenant who reads the error."""
    lines = directories.last_log_lines(daemon.log)
    if not restarted or not lines:
        return lines
    extra = {"server": daemon.name, "lines": lines.split("\n")[1:]}
    log.warning("the last lines of an MPS daemon that does not start again", extra=extra)
    return "; the log of the MPS agent has its last lines"


def _within(daemon: ControlDaemon, seconds: float) -> Deadline:
    return within_request(seconds, f"an answer of MPS server {daemon.name}")

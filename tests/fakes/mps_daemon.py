"""A daemon of the simulated MPS without a process, over a host of its own."""

from typing import Any

from dra_driver.sim.mps.admission import attach_client
from dra_driver.sim.mps.control_daemon import DaemonOptions, SimulatedControlDaemon
from dra_driver.sim.mps.host_snapshot import read_host
from dra_driver.sim.mps.paths import DaemonPaths
from dra_driver.sim.mps.protocol2 import SimulatedProtocol2
from dra_driver.sim.mps.protocol3 import SimulatedProtocol3
from tests.fakes.simulated import Node, h100

ROOT, SOMEBODY = 0, 1000


class Processes:
    """Server processes that are numbers."""

    def __init__(self):
        self.started = []
        self.ended = []

    def start(self, works, gpus):
        self.started.append((works, tuple(gpus)))
        return 90000 + len(self.started), -1

    def end(self, pid):
        self.ended.append(pid)

    def are_on(self, gpu):
        return len(self.started) > len(self.ended)


class Wakes:
    """A loop that wakes nobody: every server that works is ready at once."""

    control: SimulatedControlDaemon

    def __init__(self, processes):
        self.open = set()
        self.processes = processes

    def listen(self, directory, place):
        self.open.add(str(directory))

    def close(self, directory):
        self.open.remove(str(directory))

    def watch_server(self, server, reading):
        if self.processes.started[-1][0]:
            self.control.started(server)

    def watch_client(self, pid):
        pass


def new_node(directory, **fields):
    """A host with two GPUs."""
    gpus = [h100("1b"), h100("43")]
    made = Node(directory, {"driver_version": "615.71.09", "gpus": gpus, **fields})
    assert made.host
    return made


class Daemon:
    """One daemon without a process, over a host of its own unless it is given one."""

    def __init__(self, directory, protocol, multiuser=True, devices=None, node=None, **fields):
        self.node = node or new_node(directory, **fields)
        self.processes = Processes()
        self.wakes = Wakes(self.processes)
        processes: Any = self.processes
        options = DaemonOptions(self.node.root, protocol, multiuser, ROOT, devices)
        places = DaemonPaths(directory / "p", directory / "l")
        self.control = SimulatedControlDaemon(options, places, self.wakes, processes)
        self.wakes.control = self.control
        self.finished = []
        speaks = SimulatedProtocol3 if protocol == 3 else SimulatedProtocol2
        self.words = speaks(self.control, lambda: self.finished.append(True))
        self.gpus = [gpu.uuid for gpu in read_host(self.node.root).gpus]

    def say(self, line, uid=ROOT):
        with self.control.changed:
            return self.words.answer(["arguments", *line.split()], uid)

    def pipe_in(self, *lines, uid=ROOT):
        with self.control.changed:
            return self.words.answer(["stdin", *lines], uid)

    def gone(self, pid):
        with self.control.changed:
            self.control.gone(pid)

    def attach(self, place, pid=100, uid=SOMEBODY, memory=0, minors=None, caps=(), **environ):
        ask = {"pid": pid, "uid": uid, "memory": memory, "minors": minors, "command": "serve"}
        ask["capabilities"] = [*caps]
        with self.control.changed:
            return attach_client(self.control, place, {**ask, "environ": environ})

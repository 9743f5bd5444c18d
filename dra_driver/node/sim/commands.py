"""How programs of a simulated host are run: where they are, on this machine."""

from dataclasses import replace

from dra_driver.node.commands import Command, Run, run
from dra_driver.node.sim.live import LiveNode


def run_simulated(command: Command, timeout_seconds: float) -> str:
    """What stands for ``commands.run``.

    A simulated host is no root that one could change to: it has no shell. Its tools find their own
    root by the path that they are called by. Its libraries hold nothing, and must not be loaded.
    """
    return run(on_this_machine(command), timeout_seconds)


def run_on(live: LiveNode) -> Run:
    """Like :func:`run_simulated`, on a host that is first made what the node file says now."""

    def run_there(command: Command, timeout_seconds: float) -> str:
        live.current()
        return run_simulated(command, timeout_seconds)

    return run_there


def on_this_machine(command: Command) -> Command:
    """*command* by its path on this machine.

    >>> on_this_machine(Command("/usr/bin/nvidia-smi", ("-L",), root="/tmp/h")).argv
    ('/tmp/h/usr/bin/nvidia-smi', '-L')
    """
    program = command.root.rstrip("/") + command.program
    return replace(command, program=program, root="/", library_path="")

"""``dra-driver``: reads the settings, picks the command, ends with its exit code."""

import argparse
import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from dra_driver.base import logs
from dra_driver.base.errors import DriverError, SettingsError
from dra_driver.settings import (
    AgentSettings,
    ClaimsSettings,
    ControllerSettings,
    DevicesSettings,
    DoctorSettings,
    HealthSettings,
    PluginSettings,
    ProfileSettings,
    StartupProbeSettings,
    UninstallSettings,
)

if TYPE_CHECKING:
    from dra_driver.cli.health.run import HealthCommand
    from dra_driver.node.driver.config import DriverPrograms
    from dra_driver.node.machine import OpenNode


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. 0: done; 1: it failed; 2: it was asked wrongly."""
    parser = command_line()
    words = sys.argv[1:] if argv is None else list(argv)
    # Behind "--" is a program with flags of its own.
    end = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:end])
    arguments.program = words[end + 1 :]
    if problem := _problem(arguments, words[end:]):
        parser.error(problem)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        code = command(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # who read our answer has read enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the flush at the end
        return 0
    except SettingsError as e:
        print(f"dra-driver: {e}", file=sys.stderr)
        return 2
    except DriverError as e:
        print(f"dra-driver: {e}", file=sys.stderr)
        return 1


def _problem(arguments: argparse.Namespace, behind: Sequence[str]) -> str:
    """What no single flag is wrong with. *behind*: what stands behind the flags, with its "--"."""
    if arguments.command is not _release and arguments.program:
        return f"nothing can be run here: {' '.join(arguments.program)}"
    if behind and not arguments.program:
        return "no program stands behind --"
    if arguments.command in (_clear, _release) and arguments.output:
        return "health clear and health release take no -o: what they print has one form"
    return ""


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dra-driver",
        description="Dynamic Resource Allocation driver for NVIDIA GPUs.",
        epilog="Every flag can also be given as the environment variable named in its help.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    _add_services(commands)
    devices = commands.add_parser(
        "devices", help="print what this node publishes, or would publish"
    )
    DevicesSettings.add_flags(devices)
    _add_output(devices, "table", "wide", "json", "yaml")
    devices.add_argument(
        "--without",
        action="append",
        default=[],
        choices=("consumable-capacity", "taints", "counters", "dra"),
        help="print what an API server without this feature would get; can be repeated; dra: what "
        "the kubelet is told by the device-plugin API",
    )
    devices.set_defaults(command=_devices)

    claims = commands.add_parser(
        "claims", help="print who holds how much of each GPU of this node, and what is free"
    )
    ClaimsSettings.add_flags(claims)
    _add_output(claims, "bars", "table", "json")
    claims.add_argument(
        "--ledger-only",
        action="store_true",
        help="do not read the GPUs; GPUs that nobody holds are then left out",
    )
    claims.set_defaults(command=_claims)

    doctor = commands.add_parser("doctor", help="check this node and say what to do")
    DoctorSettings.add_flags(doctor)
    doctor.set_defaults(command=_doctor)
    _add_profile_commands(commands)
    _add_health_commands(commands)
    _add_chart_commands(commands)
    return parser


def _add_services(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    plugin = commands.add_parser(
        "kubelet-plugin", help="serve this node: publish its GPUs, prepare claims"
    )
    PluginSettings.add_flags(plugin)
    plugin.set_defaults(command=_kubelet_plugin)

    agent = commands.add_parser("mps-agent", help="run the MPS servers of this node")
    AgentSettings.add_flags(agent)
    agent.set_defaults(command=_mps_agent)

    controller = commands.add_parser(
        "controller", help="roll out the NodeProfiles of the cluster, a few nodes at a time"
    )
    ControllerSettings.add_flags(controller)
    controller.set_defaults(command=_controller)


def _add_profile_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    profile = commands.add_parser(
        "profile", help="say how far the rollout of a NodeProfile is; pause, resume or undo it"
    )
    actions = profile.add_subparsers(metavar="ACTION", dest="action", required=True)
    helps = {
        "status": "print how many nodes have the last change, which do not, and why",
        "pause": "give no further node a change",
        "resume": "go on with the rollout",
        "undo": "go back to an earlier revision, and roll it out",
    }
    parsers = {action: actions.add_parser(action, help=text) for action, text in helps.items()}
    for parser in parsers.values():
        parser.add_argument("name", metavar="NAME", help="the name of the NodeProfile")
        ProfileSettings.add_flags(parser)
    _add_output(parsers["status"], "table", "json")
    parsers["undo"].add_argument(
        "--to-revision",
        type=int,
        metavar="N",
        help="the number of the revision, as status prints it; default: the newest but that of "
        "the spec",
    )
    profile.set_defaults(command=_profile)


def _add_health_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    health = commands.add_parser(
        "health", help="list the sick GPUs; say that some are well; let go of some for a reset"
    )
    health.set_defaults(command=_list_health)
    actions = health.add_subparsers(metavar="ACTION")
    listing = actions.add_parser(
        "list", help="print the GPUs that have a taint, since when, and what to do; the default"
    )
    _add_output(health, "table", "json", default="")
    _add_output(listing, "table", "json", default=argparse.SUPPRESS)  # what stands before it holds
    clear = actions.add_parser("clear", help="say that GPUs of a node are well")
    clear.set_defaults(command=_clear)
    clear.add_argument("gpus", nargs="+", metavar="GPU…", help="gpu-0, a UUID, or all")
    release = actions.add_parser(
        "release",
        help="have a node let go of GPUs for a while, and run the program that is given behind --",
        usage="%(prog)s [options] [GPU ...] [-- PROGRAM ...]",
    )
    release.set_defaults(command=_release)
    release.add_argument("gpus", nargs="*", metavar="[GPU…]", help="gpu-0, or a UUID; default: all")
    release.add_argument(
        "--for",
        dest="duration",
        type=_seconds,
        default=600.0,
        metavar="TIME",
        help="for how long, as 90s, 10m or 2h (default 10m); a program may take longer",
    )
    release.add_argument(
        "--force",
        action="store_true",
        help="also if claims hold the GPUs, or somebody else had some released",
    )
    release.add_argument("--end", action="store_true", help="end it")
    for parser in (health, listing, clear, release):
        HealthSettings.add_flags(parser)


def _seconds(text: str) -> float:
    """
    >>> _seconds("10m")
    600.0
    """
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = text[:-1], units.get(text[-1:])
    if unit is None or not number.isdecimal() or not 1 <= int(number) * unit <= 7 * 86400:
        raise argparse.ArgumentTypeError(f"{text!r}: write 90s, 10m or 2h, from 1s to a week")
    return int(number) * unit


def _add_chart_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """What the chart has Kubernetes ask."""
    probe = commands.add_parser(
        "startup-probe", help="fail until the plugin of this pod has started"
    )
    StartupProbeSettings.add_flags(probe)
    probe.set_defaults(command=_startup_probe)

    uninstall = commands.add_parser(
        "uninstall-check",
        help="fail while claims or pods have devices of this driver, and name them",
    )
    UninstallSettings.add_flags(uninstall)
    uninstall.set_defaults(command=_uninstall_check)


def _add_output(parser: argparse.ArgumentParser, *forms: str, default: str | None = None) -> None:
    """*default*: what is taken where it is not given; None: the first of *forms*."""
    parser.add_argument(
        "-o",
        "--output",
        choices=forms,
        default=forms[0] if default is None else default,
        help=f"how to print it (default {forms[0]})",
    )


# Each command imports what it needs when it is called: `dra-driver claims` answers at once.


@contextlib.contextmanager
def _importing_for_good() -> Iterator[None]:
    """What is imported stays until the process ends: the garbage collector looks through it neither
    now (a sixth of the time that imports take) nor later, when it would hold up claims (35 ms)."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _kubelet_plugin(arguments: argparse.Namespace) -> int:
    with _importing_for_good():
        from dra_driver.plugin.run import run

    settings = PluginSettings.read(arguments)
    logs.set_up_logging(settings.log_level, settings.log_format)
    return run(settings, node_opener(settings))


def _mps_agent(arguments: argparse.Namespace) -> int:
    with _importing_for_good():
        from dra_driver.agent.run import run

    settings = AgentSettings.read(arguments)
    logs.set_up_logging(settings.log_level, settings.log_format)
    return run(settings, driver_finder(settings))


def _controller(arguments: argparse.Namespace) -> int:
    with _importing_for_good():
        from dra_driver.controller.run import run

    settings = ControllerSettings.read(arguments)
    logs.set_up_logging(settings.log_level, settings.log_format)
    return run(settings)


def _devices(arguments: argparse.Namespace) -> int:
    from dra_driver.cli.devices.run import devices
    from dra_driver.cli.terminal import terminal

    settings = DevicesSettings.read(arguments)
    logs.set_up_logging("warning", settings.log_format)
    shown = terminal(sys.stdout, os.environ)
    print(
        devices(
            settings, node_opener(settings, copy=True), arguments.output, arguments.without, shown
        )
    )
    return 0


def _claims(arguments: argparse.Namespace) -> int:
    from dra_driver.cli.claims.run import claims
    from dra_driver.cli.terminal import terminal

    settings = ClaimsSettings.read(arguments)
    logs.set_up_logging("warning", settings.log_format)
    shown = terminal(sys.stdout, os.environ)
    open_node = None if arguments.ledger_only else node_opener(settings, copy=True)
    print(claims(settings, open_node, arguments.output, shown))
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from dra_driver.cli.doctor.run import doctor

    settings = DoctorSettings.read(arguments)
    logs.set_up_logging("error", settings.log_format)
    return doctor(settings, node_opener(settings, copy=True))


def _profile(arguments: argparse.Namespace) -> int:
    from dra_driver.cli.profile.run import ProfileCommand
    from dra_driver.k8s.access import load_access
    from dra_driver.k8s.client import ApiClient

    settings = ProfileSettings.read(arguments)
    access = load_access(settings.kubeconfig, may_run_programs=True)
    with contextlib.closing(ApiClient(access, user_agent="dra-driver-profile")) as api:
        command = ProfileCommand(api, arguments.name, settings.revision_namespace)
        match arguments.action:
            case "status":
                print(command.status(arguments.output))
            case "undo":
                print(command.undo(arguments.to_revision))
            case action:
                print(command.set_paused(action == "pause"))
    return 0


@contextlib.contextmanager
def _health(settings: HealthSettings) -> "Iterator[HealthCommand]":
    from dra_driver.cli.health.run import HealthCommand
    from dra_driver.k8s.access import load_access
    from dra_driver.k8s.client import ApiClient

    access = load_access(settings.kubeconfig, may_run_programs=True)
    with contextlib.closing(ApiClient(access, user_agent="dra-driver-health")) as api:
        yield HealthCommand(api, settings.driver_name)


def _list_health(arguments: argparse.Namespace) -> int:
    settings = HealthSettings.read(arguments)
    with _health(settings) as health:
        print(health.sick_gpus(settings.node_name, arguments.output or "table"))
    return 0


def _clear(arguments: argparse.Namespace) -> int:
    settings = HealthSettings.read(arguments)
    with _health(settings) as health:
        print(health.clear(settings.node, arguments.gpus))
    return 0


def _release(arguments: argparse.Namespace) -> int:
    from dra_driver.cli.health.program import run_while_released

    settings = HealthSettings.read(arguments)
    node, gpus, seconds = settings.node, arguments.gpus, arguments.duration
    if arguments.end and (gpus or arguments.program):
        raise SettingsError("--end ends the release of the node, and takes no GPU and no program")
    with _health(settings) as health:
        if arguments.end:
            print(health.end(node))
        elif not arguments.program:
            print(health.release(node, gpus, seconds, arguments.force))
        else:
            with health.released(node, gpus, seconds, arguments.force) as go_on:
                return run_while_released(arguments.program, go_on, seconds / 2)
    return 0


def _startup_probe(arguments: argparse.Namespace) -> int:
    from dra_driver.cli.startup_probe import startup_problem

    return _print_problem(startup_problem(StartupProbeSettings.read(arguments)))


def _uninstall_check(arguments: argparse.Namespace) -> int:
    from dra_driver.cli.uninstall_check import uninstall_problem
    from dra_driver.k8s.access import load_access
    from dra_driver.k8s.client import ApiClient

    settings = UninstallSettings.read(arguments)
    with contextlib.closing(ApiClient(load_access(settings.kubeconfig))) as api:
        return _print_problem(uninstall_problem(api, settings))


def _print_problem(problem: str) -> int:
    if problem:
        print(problem)
    return 1 if problem else 0


# This machine, or a simulated one: nothing else chooses.


def node_opener(settings: ClaimsSettings, copy: bool = False) -> "OpenNode":
    """*copy*: of a simulated node a copy, for a command that only looks at it."""
    if not settings.sim:
        from dra_driver.node.machine import open_node

        return partial(open_node, settings.node_config, settings.state)
    from dra_driver.sim.parts import open_copied_node, open_simulated_node

    opened = open_copied_node if copy else open_simulated_node
    return partial(opened, settings.sim, settings.node_config, settings.state)


def driver_finder(settings: AgentSettings) -> Callable[[], "DriverPrograms"]:
    if not settings.sim:
        from dra_driver.node.driver.config import find_driver

        return partial(find_driver, settings.node_config)
    from dra_driver.sim.parts import simulated_driver

    host = settings.mps_dir / "sim"
    return partial(simulated_driver, settings.sim, settings.node_config, host)


if __name__ == "__main__":
    sys.exit(main())

"""The command hack/cluster."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence

from hack.testbed.assets import DEFAULT_VERSION, VERSIONS
from hack.testbed.cluster import Cluster
from hack.testbed.errors import ClusterError
from hack.testbed.layout import default_layout
from hack.testbed.state import load_state
from hack.testbed.waits import tail

LOG_LINES = 50

Command = Callable[[Cluster, argparse.Namespace], int]


def main() -> int:
    """Do what the command line says; errors end as one message on standard error."""
    options = _parser().parse_args()
    try:
        cluster = Cluster(_version(options), options.feature_gates)
        command: Command = options.command
        return command(cluster, options)
    except ClusterError as e:
        print(f"hack/cluster: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("hack/cluster: interrupted; the same command goes on from here", file=sys.stderr)
        return 130


def _version(options: argparse.Namespace) -> str:
    """The version asked for; else the one that is up, except for `up` itself; else the default."""
    if options.version:
        return str(options.version)
    state = load_state(default_layout().state) if options.command is not _up else None
    return state.version if state else DEFAULT_VERSION


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hack/cluster",
        description="A real single-node "
        "Kubernetes on loopback. DRA_CACHE: where built programs are "
        "kept. KUBE_ASSETS: a directory of ready programs to use.",
    )
    parser.set_defaults(version=None, feature_gates={})
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add(commands, "up", _up, "build what is missing, start what does not run", version=True)
    _add(commands, "down", _down, "end everything and remove it; the cache stays")
    _add(commands, "status", _status, "what runs; exit status 0 when all is well")
    _add(commands, "kubeconfig", _kubeconfig, "print the path of the administrator's kubeconfig")
    _add(commands, "kubectl", _kubectl, "kubectl on this cluster").add_argument(
        "arguments", nargs=argparse.REMAINDER
    )
    _add(commands, "start", _start, "start one component").add_argument("component")
    stop = _add(commands, "stop", _stop, "stop one component")
    stop.add_argument("component")
    stop.add_argument("--kill", action="store_true", help="with SIGKILL, as a crash would")
    _add(commands, "logs", _logs, "the paths of the logs, or the end of one").add_argument(
        "component", nargs="?"
    )
    _add(
        commands,
        "asset",
        _asset,
        "print the path of a program: helm, kubectl, ctr, ...",
        version=True,
    ).add_argument("program")
    return parser


def _add(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    command: Command,
    text: str,
    version: bool = False,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(command=command)
    if version:
        parser.add_argument("--version", choices=VERSIONS, help=f"default: {DEFAULT_VERSION}")
        parser.add_argument("--feature-gates", type=_gates, default={}, metavar="A=true,B=false")
    return parser


def _gates(text: str) -> dict[str, bool]:
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    if any(value not in ("true", "false") for _, _, value in pairs):
        raise argparse.ArgumentTypeError("write Name=true or Name=false, separated by commas")
    return {name: value == "true" for name, _, value in pairs}


def _progress() -> Callable[[str], None]:
    start = time.monotonic()
    return lambda line: print(
        f"{time.monotonic() - start:6.1f} s  {line}", file=sys.stderr, flush=True
    )


def _up(cluster: Cluster, _options: argparse.Namespace) -> int:
    cluster.up(_progress())
    return 0


def _down(cluster: Cluster, _options: argparse.Namespace) -> int:
    cluster.down(_progress())
    return 0


def _status(cluster: Cluster, _options: argparse.Namespace) -> int:
    if not cluster.kubeconfig.exists():
        print("no cluster is up: `hack/cluster up` brings one up")
        return 1
    status = cluster.status()
    print(
        f"Kubernetes {status.version}, {status.mode}{f' ({status.why})' if status.why else ''}: "
        f"{'ready' if status.ready else 'not ready'}"
    )
    for name, pid in status.components.items():
        print(f"  {name:20} {f'running, process {pid}' if pid else 'not running'}")
    return 0 if status.ready else 1


def _kubeconfig(cluster: Cluster, _options: argparse.Namespace) -> int:
    if not cluster.kubeconfig.exists():
        raise ClusterError("no cluster is up: `hack/cluster up` brings one up")
    print(cluster.kubeconfig)
    return 0


def _kubectl(cluster: Cluster, options: argparse.Namespace) -> int:
    _kubeconfig_environment(cluster)
    os.execv(cluster.kubectl, ["kubectl", *_without_separator(options.arguments)])


def _kubeconfig_environment(cluster: Cluster) -> None:
    if not cluster.kubectl.exists():
        raise ClusterError("no cluster is up: `hack/cluster up` brings one up")
    os.environ["KUBECONFIG"] = str(cluster.kubeconfig)
    os.environ["KUBECACHEDIR"] = str(cluster.layout.root / "kubectl")


def _without_separator(arguments: Sequence[str]) -> Sequence[str]:
    return arguments[1:] if arguments[:1] == ["--"] else arguments


def _start(cluster: Cluster, options: argparse.Namespace) -> int:
    cluster.start(options.component)
    return 0


def _stop(cluster: Cluster, options: argparse.Namespace) -> int:
    cluster.stop(options.component, signal.SIGKILL if options.kill else signal.SIGTERM)
    return 0


def _logs(cluster: Cluster, options: argparse.Namespace) -> int:
    if options.component:
        print(tail(cluster.log(options.component), LOG_LINES))
    else:
        print("\n".join(str(path) for path in sorted(cluster.logs.glob("*.log"))))
    return 0


def _asset(cluster: Cluster, options: argparse.Namespace) -> int:
    print(cluster.program(options.program, _progress()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

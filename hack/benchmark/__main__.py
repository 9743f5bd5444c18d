"""The command hack/bench."""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dra_driver.base.errors import DriverError
from hack.benchmark import (
    configs,
    containerd,
    controller,
    device_plugin,
    fleet,
    idles,
    machine,
    mps,
    partitions,
    pods,
    prepares,
    publishing,
    starts,
    syscalls,
)
from hack.benchmark.errors import BenchError
from hack.benchmark.figures import (
    CONTROLLER_FIGURES,
    DEVICE_PLUGIN_FIGURES,
    FIGURES,
    FLEET_FIGURES,
    Figure,
    Measured,
    Results,
    document,
    table,
)
from hack.benchmark.sizes import (
    FULL,
    FULL_CONTROLLER,
    FULL_DEVICE_PLUGIN_PODS,
    FULL_FLEET,
    QUICK,
    QUICK_CONTROLLER,
    QUICK_DEVICE_PLUGIN_PODS,
    QUICK_FLEET,
    Sizes,
)
from hack.benchmark.stage import Stage, stage
from hack.testbed.assets import DEFAULT_VERSION, VERSIONS
from hack.testbed.errors import ClusterError

# What a measurement may run into; an AssertionError is a wait of the end-to-end tests' words.
_FAILURES = (BenchError, ClusterError, DriverError, AssertionError, OSError)

Part = tuple[str, Callable[[Stage], Results]]


def main() -> int:
    """0: everything was measured; 1: something was not, and standard error says why."""
    options = _parser().parse_args()
    figures = _figures(options)
    facts = {"kubernetes": options.version, "quick": options.quick, "machine": machine.facts()}
    results: dict[str, Measured] = {}
    errors: list[str] = []
    try:
        if options.fleet or options.controller:
            results.update(_measure_apart(options))
        else:
            with stage(options.version, _progress) as benched:
                facts["mode"] = benched.cluster.mode
                _measure(benched, _parts_of(options), results, errors)
    except _FAILURES as e:
        errors.append(str(e))
    except KeyboardInterrupt:
        errors.append("interrupted")
    errors += [f"{f.name} was not measured" for f in figures if f.name not in results]
    if options.json:
        print(json.dumps(document(results, {**facts, "errors": errors}, figures), indent=2))
    else:
        print(table(results, figures))
    for error in errors:
        print(f"hack/bench: {error}", file=sys.stderr)
    return 1 if errors else 0


def _figures(options: argparse.Namespace) -> Sequence[Figure]:
    if options.device_plugin:
        return DEVICE_PLUGIN_FIGURES
    if options.fleet:
        return FLEET_FIGURES
    return CONTROLLER_FIGURES if options.controller else FIGURES


def _measure_apart(options: argparse.Namespace) -> Results:
    """What needs a control plane without a node."""
    if options.fleet:
        fleet_sizes = QUICK_FLEET if options.quick else FULL_FLEET
        return fleet.measure(options.version, fleet_sizes, _progress)
    sizes = QUICK_CONTROLLER if options.quick else FULL_CONTROLLER
    return controller.measure(options.version, sizes, _progress)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hack/bench",
        description="Measure the driver on a real Kubernetes (hack/cluster), which is brought up "
        "for that, and taken down again, where none is up.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    other = parser.add_mutually_exclusive_group()
    other.add_argument(
        "--device-plugin",
        action="store_true",
        help="instead: what a pod waits for that gets its GPU by the device-plugin API",
    )
    other.add_argument(
        "--controller",
        action="store_true",
        help="instead: what the controller takes with 5,000 nodes, 20,000 claims and 20 profiles, "
        "on a control plane of its own",
    )
    other.add_argument(
        "--fleet",
        action="store_true",
        help="instead: what the published shape costs the scheduler, on a control plane of its "
        "own with 200 nodes of eight GPUs that nobody runs",
    )
    parser.add_argument("--quick", action="store_true", help="fewer samples, some minutes")
    parser.add_argument("--version", choices=VERSIONS, default=DEFAULT_VERSION)
    return parser


def _parts_of(options: argparse.Namespace) -> Sequence[Part]:
    if not options.device_plugin:
        return _parts(QUICK if options.quick else FULL)
    pods = QUICK_DEVICE_PLUGIN_PODS if options.quick else FULL_DEVICE_PLUGIN_PODS
    return (("pods with a GPU by name", lambda benched: device_plugin.measure(benched, pods)),)


def _parts(sizes: Sizes) -> Sequence[Part]:
    return (
        ("starts of the plugin", lambda benched: starts.measure(benched, sizes.starts)),
        ("prepare and unprepare", lambda benched: prepares.measure(benched, sizes)),
        (
            f"prepare with {sizes.held} claims held",
            _in_directory(lambda benched, place: prepares.measure_held(benched, sizes, place)),
        ),
        (
            f"containerd with {sizes.held} claims held",
            lambda benched: containerd.measure(benched, sizes),
        ),
        (
            "system calls of prepare and unprepare",
            lambda benched: syscalls.measure(benched, sizes.singles),
        ),
        ("the costliest configurations", lambda benched: configs.measure(sizes.configs)),
        (
            "prepare under MPS",
            _in_directory(lambda benched, place: mps.measure(benched, sizes, place)),
        ),
        (
            "prepare partitions",
            _in_directory(lambda benched, place: partitions.measure(benched, sizes, place)),
        ),
        (
            f"publish {publishing.GPUS} MIG GPUs",
            _in_directory(lambda benched, place: publishing.measure(benched, sizes.starts, place)),
        ),
        ("an idle plugin", lambda benched: idles.measure(benched, sizes.idle_seconds)),
        ("starts of pods", lambda benched: pods.measure(benched, sizes.pods)),
    )


def _in_directory(measure: Callable[[Stage, Path], Results]) -> Callable[[Stage], Results]:
    """*measure* with a directory of its own, which goes afterwards."""

    def measure_there(benched: Stage) -> Results:
        with tempfile.TemporaryDirectory(prefix="dra-bench-") as directory:
            return measure(benched, Path(directory))

    return measure_there


def _measure(
    benched: Stage, parts: Sequence[Part], results: dict[str, Measured], errors: list[str]
) -> None:
    """A part that fails does not keep the others from being measured."""
    for name, measure in parts:
        _progress(name)
        try:
            results.update(measure(benched))
        except _FAILURES as e:
            errors.append(f"{name}: {e}")
            benched.stop()


def _progress(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

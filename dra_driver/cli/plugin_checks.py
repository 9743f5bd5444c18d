"""Does a plugin of ours serve this node, and does nobody else under the same name?"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from api.names import CDI_CLASS
from dra_driver.cli.findings import Finding, fail, ok, some, warn
from dra_driver.errors import NodeError, SettingsError
from dra_driver.kubeletplugin import liveness
from dra_driver.kubeletplugin.neighbours import Neighbour, Process, neighbours, processes
from dra_driver.kubeletplugin.sockets import SocketPaths, socket_paths

PLUGIN, OTHERS = "plugin", "other drivers"
_ASK_SECONDS = 2.0


def plugin(kubelet: Path, driver: str) -> Iterator[Finding]:
    """Every process of ours, asked over its two sockets as the kubelet would ask."""
    alive = processes(_home(kubelet, driver) / "instances")
    yield from of_processes({one: _ask(_paths(kubelet, driver, one)) for one in alive})


def other_drivers(kubelet: Path, driver: str, cdi_dir: Path) -> Iterator[Finding]:
    """Whoever else speaks for *driver* here: a driver of NVIDIA's that was not removed, say."""
    alive = processes(_home(kubelet, driver) / "instances")
    ours = {paths.registration for one in alive if (paths := _paths(kubelet, driver, one))}
    registry = kubelet / "plugins_registry"
    found = neighbours(registry, _ASK_SECONDS) if registry.is_dir() else ()
    yield from of_neighbours([one for one in found if one.socket not in ours], driver)
    # Ours end in .json, theirs in .yaml.
    foreign = sorted(path.name for path in cdi_dir.glob(f"k8s.{driver}-{CDI_CLASS}_*.yaml"))
    yield from of_foreign_files(foreign, cdi_dir)


def of_processes(answers: Mapping[Process, str]) -> Iterator[Finding]:
    """*answers*: of each process what is wrong with it, empty where it answers as it should."""
    if not answers:
        yield warn(
            PLUGIN,
            "none of ours runs on this node",
            "kubectl get pods -A -o wide: is the DaemonSet's pod on this node, what does it log?",
        )
    for process, problem in answers.items():
        name = f"{'pod' if process.pod_uid else 'process'} {process.owner}"
        if problem:
            yield fail(PLUGIN, f"{name}: {problem}", "look at its log; delete its pod")
        else:
            yield ok(PLUGIN, f"{name} answers over both its sockets")
    if len(answers) > 1:
        yield warn(
            PLUGIN,
            f"{len(answers)} processes serve this node",
            "nothing during a rolling update; else end the older ones",
        )


def of_neighbours(others: Sequence[Neighbour], driver: str) -> Iterator[Finding]:
    """*others*: what is in the registry and belongs to no live process of ours."""
    rivals = [one for one in others if one.name == driver]
    for one in rivals:
        yield fail(
            OTHERS,
            f"{one.socket} speaks for {driver} too, at {one.endpoint}, and is no process of ours",
            "remove the other driver from this node (NVIDIA's: its DaemonSet), or give one of the "
            "two another --driver-name",
        )
    silent = [one for one in others if one.error]
    for one in silent:
        yield warn(
            OTHERS,
            f"{one.socket} does not answer: {one.error}",
            "its process is gone or hangs; where it is gone, remove the socket",
        )
    if not rivals:
        names = some(sorted(one.name for one in others if one.name)) or "none"
        yield ok(OTHERS, f"nobody else speaks for {driver}; other plugins here: {names}")


def of_foreign_files(names: Sequence[str], directory: Path) -> Iterator[Finding]:
    if names:
        yield warn(
            OTHERS,
            f"{directory} has CDI files of NVIDIA's driver: {some(names)}",
            "the claims that it prepared keep running; once its pods have ended, remove the files",
        )


def _home(kubelet: Path, driver: str) -> Path:
    return kubelet / "plugins" / driver


def _paths(kubelet: Path, driver: str, process: Process) -> SocketPaths | None:
    registry = kubelet / "plugins_registry"
    try:
        return socket_paths(driver, _home(kubelet, driver), registry, process.pod_uid)
    except SettingsError:
        return None  # then it has no sockets: the check of the kubelet's directory says why


def _ask(paths: SocketPaths | None) -> str:
    if paths is None:
        return "no socket of it fits into the kubelet's directory"
    try:
        asyncio.run(liveness.check(paths, _ASK_SECONDS))
    except NodeError as e:
        return str(e)
    return ""

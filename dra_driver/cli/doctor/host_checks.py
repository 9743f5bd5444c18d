"""``doctor``'s checks of the host: directories, the ledger, CDI files, and which plugins serve."""

import asyncio
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from api.names import CDI_CLASS
from cdi.registry import load_registry
from dra_driver.base.errors import NodeError, SettingsError
from dra_driver.cli.findings import Finding, Level, abbreviated, fail, ok, warn
from dra_driver.k8s.claims import ClaimUid
from dra_driver.kubeletplugin.serve import probes
from dra_driver.kubeletplugin.serve.probes import (
    PluginProcess,
    RegisteredPlugin,
    plugin_processes,
    registered_plugins,
)
from dra_driver.kubeletplugin.serve.sockets import SocketPaths, socket_paths
from dra_driver.model.records import ClaimRecord
from dra_driver.node.state.claim_files import CdiSpecFiles
from dra_driver.node.state.ledger_files import DamagedRecord, read_ledger_directory

CDI_DIRECTORY, CDI_FILES, KUBELET_DIRECTORY, STATE_DIRECTORY, LEDGER = (
    "CDI directory",
    "CDI files",
    "kubelet directory",
    "state directory",
    "ledger",
)


@dataclass(frozen=True, slots=True)
class DirectoryState:
    """What is at a path, for this process."""

    path: Path
    is_there: bool
    is_directory: bool
    is_writable: bool  # or could be made, where it is not there


def inspect_directory(path: Path) -> DirectoryState:
    """*path*, or the nearest directory above it, which is where it would be made. NodeError: this
    process may not look."""
    try:
        nearest = next(
            directory for directory in (path, *path.absolute().parents) if directory.exists()
        )
    except OSError as e:
        raise NodeError(f"{path}: {e.strerror}; ask as root") from e
    return DirectoryState(
        path,
        is_there=nearest == path,
        is_directory=nearest.is_dir(),
        is_writable=nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK),
    )


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """The ledger, as far as it can be read."""

    records: Mapping[ClaimUid, ClaimRecord]
    unreadable: Mapping[ClaimUid, DamagedRecord]


def check_cdi_directory(path: Path) -> Iterator[Finding]:
    yield cdi_directory_finding(inspect_directory(path))


def check_cdi_files(directory: Path, vendor: str, ledger: Path) -> Iterator[Finding]:
    """*ledger*: the directory of this boot's records."""
    kind = f"{vendor}/{CDI_CLASS}"
    files = CdiSpecFiles(directory, vendor).claims()
    yield cdi_file_finding(set(files), LedgerSnapshot(*read_ledger_directory(ledger)))
    yield from cdi_problem_findings(load_registry([directory]).problems, kind)


def check_kubelet_directory(kubelet: Path, driver: str, pod_uid: str) -> Iterator[Finding]:
    registry = kubelet / "plugins_registry"
    state = inspect_directory(registry)
    if state.is_there:
        yield directory_finding(KUBELET_DIRECTORY, state, "--kubelet-dir")
    else:
        yield fail(
            KUBELET_DIRECTORY,
            f"{registry} does not exist",
            "say where the kubelet's --root-dir is: --kubelet-dir, under the same path in this pod",
        )
    try:
        paths = socket_paths(driver, kubelet / "plugins" / driver, registry, pod_uid or None)
    except SettingsError as e:
        yield fail(KUBELET_DIRECTORY, str(e), "a socket's path has 107 bytes at most")
    else:
        longest = max(len(os.fsencode(path)) for path in (paths.service, paths.registration))
        yield ok(KUBELET_DIRECTORY, f"our sockets fit: the longest path has {longest} of 107 bytes")


def check_state_directory(path: Path) -> Iterator[Finding]:
    yield directory_finding(STATE_DIRECTORY, inspect_directory(path), "--state-dir")


def check_ledger(directory: Path) -> Iterator[Finding]:
    place = directory_finding(LEDGER, inspect_directory(directory), "--state-dir")
    if place.level is Level.OK:
        yield from ledger_findings(directory, LedgerSnapshot(*read_ledger_directory(directory)))
    else:
        yield place


def directory_finding(subject: str, state: DirectoryState, flag: str) -> Finding:
    if state.is_there and not state.is_directory:
        return fail(subject, f"{state.path} is no directory", f"remove it, or give another {flag}")
    if not state.is_writable:
        return fail(
            subject,
            f"{state.path} cannot be {'written' if state.is_there else 'made'}",
            f"let this process write there (mount it, and not read-only), or give another {flag}",
        )
    if state.is_there:
        return ok(subject, f"{state.path} can be written")
    return ok(subject, f"{state.path} does not exist; it is made when it is needed")


def cdi_directory_finding(state: DirectoryState) -> Finding:
    """A container runtime that uses CDI makes it, so that it is not there tells something."""
    finding = directory_finding(CDI_DIRECTORY, state, "--cdi-dir")
    if state.is_there or finding.level is not Level.OK:
        return finding
    return warn(
        CDI_DIRECTORY,
        finding.message,
        "does the container runtime use CDI (containerd 2.0; 1.7 with enable_cdi = true; CRI-O), "
        "and does it look there?",
    )


def cdi_file_finding(files: Collection[ClaimUid], ledger: LedgerSnapshot) -> Finding:
    """Whether every prepared claim has its file, and every file its claim."""
    prepared = {uid: record for uid, record in ledger.records.items() if record.completed}
    lost = sorted(str(record.claim) for uid, record in prepared.items() if uid not in files)
    if lost:
        return fail(
            CDI_FILES,
            f"{len(lost)} prepared claims have none: {abbreviated(lost)}",
            "start the plugin anew, which writes them again; until then their containers "
            "cannot be started",
        )
    orphans = sorted(set(files) - ledger.records.keys() - ledger.unreadable.keys())
    if orphans:
        return warn(
            CDI_FILES,
            f"{len(orphans)} are of claims that nothing is known of: {abbreviated(orphans)}",
            "start the plugin anew, which removes them",
        )
    return ok(CDI_FILES, f"{len(prepared)} claims are prepared, each has its file")


def cdi_problem_findings(problems: Sequence[str], kind: str) -> Iterator[Finding]:
    """What a container runtime cannot use in the directory; ours are those of *kind*."""
    our_problems = [problem for problem in problems if problem.startswith(f"{kind}=")]
    other_problems = [problem for problem in problems if problem not in our_problems]
    for problem in our_problems:
        yield fail(CDI_FILES, problem, "remove the file that is not ours: no runtime uses either")
    if other_problems:
        yield warn(
            CDI_FILES,
            abbreviated(other_problems),
            "whoever wrote them has to mend them; ours still work",
        )


def ledger_findings(directory: Path, ledger: LedgerSnapshot) -> Iterator[Finding]:
    for damaged in ledger.unreadable.values():
        held = abbreviated(sorted((damaged.gpus or {}).values())) or "every GPU"
        yield fail(
            LEDGER,
            f"{damaged.path} cannot be read: {damaged.reason}",
            f"{held} takes no new claim until the plugin has settled it with the API server; if "
            "it stays, and no pod uses that claim, remove the file",
        )
    unfinished = sorted(
        str(record.claim) for record in ledger.records.values() if not record.completed
    )
    if unfinished:
        yield warn(
            LEDGER,
            f"{len(unfinished)} claims are begun, or half given back: {abbreviated(unfinished)}",
            "nothing while the kubelet tries again; where that does not end, an event of the pod "
            "and the plugin's log say what is in the way",
        )
    if not ledger.unreadable:
        yield ok(LEDGER, f"{len(ledger.records)} claims in {directory}")


PLUGIN, OTHER_DRIVERS = "plugin", "other drivers"
_ASK_SECONDS = 2.0


def check_plugin(kubelet: Path, driver: str) -> Iterator[Finding]:
    """Every process of ours, asked over its two sockets as the kubelet would ask."""
    processes = plugin_processes(_home(kubelet, driver) / "instances")
    yield from plugin_process_findings(
        {process: _ask(_paths(kubelet, driver, process)) for process in processes}
    )


def check_other_drivers(kubelet: Path, driver: str, cdi_dir: Path) -> Iterator[Finding]:
    """Whoever else speaks for *driver* here: a driver of NVIDIA's that was not removed, say."""
    processes = plugin_processes(_home(kubelet, driver) / "instances")
    our_sockets = {
        paths.registration for one in processes if (paths := _paths(kubelet, driver, one))
    }
    registry = kubelet / "plugins_registry"
    plugins = registered_plugins(registry, _ASK_SECONDS) if registry.is_dir() else ()
    yield from other_plugin_findings(
        [one for one in plugins if one.socket not in our_sockets], driver
    )
    # Ours end in .json, theirs in .yaml.
    foreign = sorted(path.name for path in cdi_dir.glob(f"k8s.{driver}-{CDI_CLASS}_*.yaml"))
    yield from unmanaged_cdi_file_findings(foreign, cdi_dir)


def plugin_process_findings(answers: Mapping[PluginProcess, str]) -> Iterator[Finding]:
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


def other_plugin_findings(plugins: Sequence[RegisteredPlugin], driver: str) -> Iterator[Finding]:
    """*plugins*: what is in the registry and belongs to no live process of ours."""
    rivals = [plugin for plugin in plugins if plugin.name == driver]
    for plugin in rivals:
        yield fail(
            OTHER_DRIVERS,
            f"{plugin.socket} speaks for {driver} too, at {plugin.endpoint}, "
            "and is no process of ours",
            "remove the other driver from this node (NVIDIA's: its DaemonSet), or give one of the "
            "two another --driver-name",
        )
    silent = [plugin for plugin in plugins if plugin.error]
    for plugin in silent:
        yield warn(
            OTHER_DRIVERS,
            f"{plugin.socket} does not answer: {plugin.error}",
            "its process is gone or hangs; where it is gone, remove the socket",
        )
    if not rivals:
        names = abbreviated(sorted(plugin.name for plugin in plugins if plugin.name)) or "none"
        yield ok(OTHER_DRIVERS, f"nobody else speaks for {driver}; other plugins here: {names}")


def unmanaged_cdi_file_findings(names: Sequence[str], directory: Path) -> Iterator[Finding]:
    if names:
        yield warn(
            OTHER_DRIVERS,
            f"{directory} has CDI files of NVIDIA's driver: {abbreviated(names)}",
            "the claims that it prepared keep running; once its pods have ended, remove the files",
        )


def _home(kubelet: Path, driver: str) -> Path:
    return kubelet / "plugins" / driver


def _paths(kubelet: Path, driver: str, process: PluginProcess) -> SocketPaths | None:
    registry = kubelet / "plugins_registry"
    try:
        return socket_paths(driver, _home(kubelet, driver), registry, process.pod_uid)
    except SettingsError:
        return None  # then it has no sockets: the check of the kubelet's directory says why


def _ask(paths: SocketPaths | None) -> str:
    if paths is None:
        return "no socket of it fits into the kubelet's directory"
    try:
        asyncio.run(probes.check_plugin_sockets(paths, _ASK_SECONDS))
    except NodeError as e:
        return str(e)
    return ""

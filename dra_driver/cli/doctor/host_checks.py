"""``doctor``'s checks of the host: directories, the ledger, CDI files, and which plugins serve."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from api.names import CDI_CLASS
from cdi.registry import load_registry
from dra_driver.base.errors import NodeError, SettingsError
from dra_driver.base.frozen import frozen
from dra_driver.cli.findings import Check, Finding, Level, abbreviated, fail, ok, warn
from dra_driver.k8s.claims import ClaimUid
from dra_driver.kubeletplugin.serve import probes
from dra_driver.kubeletplugin.serve.probes import RegisteredPlugin, other_plugins, own_sockets
from dra_driver.kubeletplugin.serve.rolling_update import PluginProcess
from dra_driver.kubeletplugin.serve.sockets import SocketPaths, socket_paths
from dra_driver.model.profiles import AllocationApi
from dra_driver.model.records import ClaimRecord
from dra_driver.node.cgroups.procfs import boot_id
from dra_driver.node.state.claim_files import CdiSpecFiles
from dra_driver.node.state.ledger_files import DamagedRecord, read_ledger_directory
from dra_driver.node.state.node_api_file import ServedApiFile
from dra_driver.plan.prepare.cdi_spec import cdi_vendor
from dra_driver.settings import DoctorSettings

CDI_DIRECTORY, CDI_FILES, KUBELET_DIRECTORY, STATE_DIRECTORY, LEDGER, PLUGIN, OTHER_DRIVERS = (
    "CDI directory",
    "CDI files",
    "kubelet directory",
    "state directory",
    "ledger",
    "plugin",
    "other drivers",
)
_ASK_SECONDS = 2.0


@frozen
class DirectoryState:
    """What is at a path, for this process."""

    path: Path
    is_there: bool = True
    is_directory: bool = True
    is_writable: bool = True  # or could be made, where it is not there
    is_removed: bool = False  # from the node; what is mounted here is what it was


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
        is_removed=nearest.stat().st_nlink == 0,
    )


@frozen
class LedgerSnapshot:
    """The ledger, as far as it can be read."""

    records: Mapping[ClaimUid, ClaimRecord]
    unreadable: Mapping[ClaimUid, DamagedRecord]


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
        paths = _socket_paths(kubelet, driver, pod_uid or None)
    except SettingsError as e:
        yield fail(KUBELET_DIRECTORY, str(e), "a socket's path has 107 bytes at most")
    else:
        longest = max(len(os.fsencode(path)) for path in (paths.service, paths.registration))
        yield ok(KUBELET_DIRECTORY, f"our sockets fit: the longest path has {longest} of 107 bytes")


def check_ledger(directory: Path, read: Callable[[], LedgerSnapshot]) -> Iterator[Finding]:
    finding = directory_finding(LEDGER, inspect_directory(directory), "--state-dir")
    if finding.level is Level.OK:
        yield from ledger_findings(directory, read())
    else:
        yield finding


def directory_finding(subject: str, state: DirectoryState, flag: str) -> Finding:
    if state.is_there and not state.is_directory:
        return fail(subject, f"{state.path} is no directory", f"remove it, or give another {flag}")
    if state.is_removed:
        return fail(
            subject,
            f"{state.path} was removed from the node while this pod had it",
            "delete the pod: the next one makes the directory anew, and finds what is prepared",
        )
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


def read_ledger_of_boot(settings: DoctorSettings) -> LedgerSnapshot:
    """NodeError: it cannot be read now."""
    return LedgerSnapshot(*read_ledger_directory(_ledger_directory(settings)))


def records_of_boot(settings: DoctorSettings) -> Sequence[ClaimRecord]:
    """Those that can be read. NodeError: as ``read_ledger_of_boot``."""
    return tuple(read_ledger_of_boot(settings).records.values())


def _ledger_directory(settings: DoctorSettings) -> Path:
    return settings.ledger_dir / boot_id(settings.host_root)


def checks(settings: DoctorSettings) -> list[Check]:
    kubelet, driver, cdi_dir = settings.kubelet_dir, settings.driver_name, settings.cdi_dir
    ledger = partial(read_ledger_of_boot, settings)

    def state_directory() -> Finding:
        return directory_finding(STATE_DIRECTORY, inspect_directory(settings.state), "--state-dir")

    return [
        (CDI_DIRECTORY, lambda: [cdi_directory_finding(inspect_directory(cdi_dir))]),
        (CDI_FILES, lambda: check_cdi_files(cdi_dir, cdi_vendor(driver), ledger())),
        (KUBELET_DIRECTORY, lambda: check_kubelet_directory(kubelet, driver, settings.pod_uid)),
        (STATE_DIRECTORY, lambda: [state_directory()]),
        (LEDGER, lambda: check_ledger(_ledger_directory(settings), ledger)),
        (PLUGIN, lambda: check_plugin(kubelet, driver, ServedApiFile(settings.served_api))),
        (OTHER_DRIVERS, lambda: check_other_drivers(kubelet, driver, cdi_dir)),
    ]


def check_cdi_files(directory: Path, vendor: str, ledger: LedgerSnapshot) -> Iterator[Finding]:
    yield cdi_file_finding(set(CdiSpecFiles(directory, vendor).claims()), ledger)
    registry = load_registry([directory])
    yield from driver_spec_findings(registry.devices.keys(), ledger)
    yield from cdi_problem_findings(registry.problems, vendor)


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


def driver_spec_findings(devices: Collection[str], ledger: LedgerSnapshot) -> Iterator[Finding]:
    """Whether *devices*, all that a container runtime finds, have what prepared claims rely on
    besides their own."""
    relied_on = {
        cdi_id
        for record in ledger.records.values()
        for device in record.prepared or ()
        for cdi_id in device.cdi_ids[1:]
    }
    for cdi_id in sorted(relied_on - set(devices)):
        yield fail(
            CDI_FILES,
            f"{cdi_id}, which every container with a GPU needs, is in no file that can be read",
            "wait some seconds: the plugin writes it where a whole driver is installed; where it "
            "does not come, the plugin does not run, or its log says why; no container with a GPU "
            "can start without it",
        )


def cdi_problem_findings(problems: Sequence[str], vendor: str) -> Iterator[Finding]:
    """What a container runtime cannot use in the directory; ours are those of *vendor*."""
    our_problems = [problem for problem in problems if problem.startswith(f"{vendor}/")]
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
        held = abbreviated(sorted(damaged.names)) or "every GPU"
        until = (
            "the plugin has settled it with the API server; if it stays, and no pod uses that "
            "claim, remove the file"
        )
        if damaged.release:
            until = f"release {damaged.release} is installed again, or the node reboots"
        yield fail(
            LEDGER,
            f"{damaged.path} cannot be read: {damaged.reason}",
            f"{held} takes no new claim until {until}",
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


def check_plugin(kubelet: Path, driver: str, file: ServedApiFile) -> Iterator[Finding]:
    """Every process of ours, asked over its two sockets as the kubelet would ask. While the node
    gives its GPUs out by the device-plugin API there are none."""
    sockets = own_sockets(kubelet / "plugins_registry", kubelet / "plugins" / driver, driver)
    served = file.inspect()
    if served is not None and served.api is AllocationApi.DEVICE_PLUGIN:
        runs = "runs, and serves the device-plugin API"
        yield from plugin_process_findings(dict.fromkeys(sockets, ""), runs)
        return
    yield from plugin_process_findings(
        {process: _plugin_problem(paths) for process, paths in sockets.items()}
    )


def check_other_drivers(kubelet: Path, driver: str, cdi_dir: Path) -> Iterator[Finding]:
    """Whoever else speaks for *driver* here: a driver of NVIDIA's that was not removed, say."""
    registry = kubelet / "plugins_registry"
    plugins = other_plugins(registry, kubelet / "plugins" / driver, driver, _ASK_SECONDS)
    yield from other_plugin_findings(plugins, driver)
    # Ours end in .json, theirs in .yaml.
    names = sorted(path.name for path in cdi_dir.glob(f"k8s.{driver}-{CDI_CLASS}_*.yaml"))
    if names:
        yield warn(
            OTHER_DRIVERS,
            f"{cdi_dir} has CDI files of NVIDIA's driver: {abbreviated(names)}",
            "the claims that it prepared keep running; once its pods have ended, remove the files",
        )


def plugin_process_findings(
    answers: Mapping[PluginProcess, str], well: str = "answers over both its sockets"
) -> Iterator[Finding]:
    """*answers*: of each process what is wrong with it, empty where it is *well*."""
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
            yield ok(PLUGIN, f"{name} {well}")
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
            "two another name: driverName (chart), --driver-name",
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
        yield ok(
            OTHER_DRIVERS, f"nobody else speaks for {driver}; others in plugins_registry: {names}"
        )


def _socket_paths(kubelet: Path, driver: str, pod_uid: str | None) -> SocketPaths:
    home = kubelet / "plugins" / driver
    return socket_paths(driver, home, kubelet / "plugins_registry", pod_uid)


def _plugin_problem(paths: SocketPaths | None) -> str:
    if paths is None:
        return "no socket of it fits into the kubelet's directory"
    try:
        probes.check_plugin_sockets(paths, _ASK_SECONDS)
    except NodeError as e:
        return str(e)
    return ""

"""``dra-driver doctor``: looks at everything that a pod with a claim needs on this node.

Nothing is changed, but for device files of GPUs that are missing, which are made as they would be
for a claim, and an empty cgroup in which a memory limit is tried for a moment.

One line for each finding (``[ok]``, ``[warn]``, ``[FAIL]``, ``[skip]``, what was looked at, what
was found), with a second one that says what to do, where something is to do; the last line counts
them. It ends with 1 where something failed, else with 0: warnings, such as claims and pods that can
never be placed, are for who wrote those.
"""

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path

from dra_driver.cli import (
    claim_checks,
    cluster_checks,
    disk_checks,
    gpu_checks,
    mig_checks,
    mig_layouts,
    mode_checks,
    mps_checks,
    plugin_checks,
    pod_checks,
    sharing_checks,
    use_checks,
)
from dra_driver.cli.findings import Finding, Level, fail, skip, summary, warn
from dra_driver.cli.market import market_of
from dra_driver.cli.sight import Ask, ask_agent
from dra_driver.cli.simulated_host import host_directory
from dra_driver.cluster.access import Access, in_cluster, kubeconfig
from dra_driver.cluster.client import ApiServer, Timeouts
from dra_driver.errors import DriverError, SettingsError
from dra_driver.kubeletplugin.claims import ClaimUid
from dra_driver.kubeletplugin.resource_api import ResourceApi
from dra_driver.model.holdings import Record
from dra_driver.node.boot import boot_id
from dra_driver.node.driver_root import DriverRoot
from dra_driver.node.ledger_files import read_directory
from dra_driver.node.machine import open_node
from dra_driver.node.mig_book import MigBook
from dra_driver.node.node import GpuNode
from dra_driver.node.place import open_driver
from dra_driver.node.pod_processes import open_pod_processes
from dra_driver.node.worker import Worker
from dra_driver.plan.edits import vendor
from dra_driver.plugin.claim_users import ClaimUsers
from dra_driver.settings import DoctorSettings

log = logging.getLogger(__name__)

Check = tuple[str, Callable[[], Iterable[Finding]]]
"""What is looked at, and how."""

ClusterCheck = Callable[[cluster_checks.Cluster], Iterable[Finding]]

_NEED_THE_DRIVER = (
    gpu_checks.GPUS,
    gpu_checks.NODES,
    mig_checks.MODES,
    mig_checks.INSTANCES,
    mig_checks.FILES,
    mig_layouts.LAYOUTS,
    sharing_checks.LIMITS,
    mps_checks.PROGRAM,
    mode_checks.MODES,
)
_NO_OTHERS: Mapping[str, ClusterCheck] = {}
_SECONDS = 30.0  # for one check: what it waits for has shorter limits of its own
_TIMEOUTS = Timeouts(read=5.0, write=5.0)


def doctor(settings: DoctorSettings, ask: Ask = ask_agent) -> int:
    """Print each finding as soon as it is made. 0: nothing failed; 1: something did. *ask*: how the
    MPS agent is asked."""
    findings: list[Finding] = []
    with ExitStack() as stack:
        for finding in _examine(settings, ask, stack):
            print(finding, flush=True)
            findings.append(finding)
    print(summary(findings))
    return int(any(finding.level is Level.FAIL for finding in findings))


def run_checks(checks: Iterable[Check], deadline_seconds: float = _SECONDS) -> Iterator[Finding]:
    """All of them, whatever one of them runs into; each ends in time. What several run into is told
    once."""
    told: dict[str, str] = {}
    for what, check in checks:
        worker = Worker(f"doctor: {what}")
        try:
            yield from worker.submit(what, partial(_made, check), deadline_seconds).result()
        except (DriverError, OSError) as e:  # a file that this user may not read, for instance
            first = told.setdefault(str(e), what)
            if first != what:
                yield skip(what, f"cannot be looked at, for the same reason as {first}")
                continue
            yield fail(what, f"cannot be looked at: {e}", "mend this first, then ask again")
        except Exception as e:
            log.exception("a check broke", extra={"check": what})
            yield fail(what, f"the check itself broke: {e!r}", "report this: it is a fault of ours")
        finally:
            worker.stop()


def _made(check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    return list(check())


def _examine(settings: DoctorSettings, ask: Ask, stack: ExitStack) -> Iterator[Finding]:
    sim_dir = stack.enter_context(host_directory(settings))
    node = stack.enter_context(open_node(settings.place, sim_dir, state=settings.state))
    driver = stack.enter_context(open_driver(settings.place, sim_dir)).root
    machine = gpu_checks.Machine(node, sim_dir if settings.sim else settings.host_root)
    cluster = _cluster(settings, stack)
    yield from _user(os.geteuid())
    of_driver = list(run_checks(_driver_checks(machine)))
    yield from of_driver
    rest = [
        *_gpu_checks(settings, machine),
        *_disk_checks(settings),
        *_mig_checks(settings, machine),
        *_sharing_checks(settings, machine, cluster),
        *_mps_checks(settings, machine, driver, ask),
    ]
    if any(finding.level is Level.FAIL for finding in of_driver):
        yield from _without_driver(machine)
        rest = [(what, check) for what, check in rest if what not in _NEED_THE_DRIVER]
    yield from run_checks(rest)
    if isinstance(cluster, Finding):
        yield cluster
    else:
        yield from examine_cluster(cluster, {use_checks.IN_USE: _claims_in_use(settings, node)})


def _user(uid: int) -> Iterator[Finding]:
    """Who asks: the cause of much that others than root are told."""
    if uid != 0:
        yield warn(
            "user",
            f"user {uid} asks, and the plugin is root: what root alone may read or write counts as "
            "wrong below",
            "ask as root",
        )


def _without_driver(machine: gpu_checks.Machine) -> Iterator[Finding]:
    """What is not looked at, since all that it would say is that the driver is missing."""
    found = list(run_checks([(gpu_checks.GPUS, partial(gpu_checks.none_there, machine))]))
    yield from found
    told = {finding.what for finding in found}
    names = [what for what in _NEED_THE_DRIVER if what not in told]
    yield skip(", ".join(names), gpu_checks.NEEDS_DRIVER)


def _driver_checks(machine: gpu_checks.Machine) -> list[Check]:
    modules = DriverRoot(None, machine.host_root)
    return [
        (gpu_checks.ROOT, partial(gpu_checks.driver_root, machine)),
        (
            gpu_checks.MODULE,
            lambda: gpu_checks.kernel_module(machine, modules.loaded_version()),
        ),
    ]


def _gpu_checks(settings: DoctorSettings, machine: gpu_checks.Machine) -> list[Check]:
    return [
        (gpu_checks.GPUS, partial(gpu_checks.gpus, machine)),
        (gpu_checks.NODES, partial(gpu_checks.device_files, machine)),
        (gpu_checks.HOOK, partial(gpu_checks.hook, machine, settings.nvidia_cdi_hook)),
    ]


def _mig_checks(settings: DoctorSettings, machine: gpu_checks.Machine) -> list[Check]:
    node = machine.node
    return [
        (mig_checks.MODES, lambda: mig_checks.modes(node.inventory().gpus)),
        (
            mig_checks.INSTANCES,
            lambda: mig_checks.instances(node.refresh, partial(_book, settings)),
        ),
        (
            mig_checks.FILES,
            lambda: mig_checks.device_files(node.refresh, node.capability_files),
        ),
        (mig_layouts.LAYOUTS, partial(_layouts, settings, node)),
    ]


def _layouts(settings: DoctorSettings, node: GpuNode) -> Iterator[Finding]:
    gpus = [gpu for gpu in node.inventory().gpus if gpu.mig is not None]
    if gpus:
        book = MigBook(settings.mig_book, boot_id(settings.host_root)).read()
        yield from mig_layouts.layouts(book, gpus)


def _book(settings: DoctorSettings) -> disk_checks.Book:
    return disk_checks.Book(*read_directory(_of_boot(settings)))


def _sharing_checks(
    settings: DoctorSettings,
    machine: gpu_checks.Machine,
    cluster: cluster_checks.Cluster | Finding,
) -> list[Check]:
    reached = None if isinstance(cluster, Finding) else cluster
    node = machine.node
    scene = sharing_checks.Scene(settings, node.inventory, reached)
    return [
        (sharing_checks.PROFILE, partial(sharing_checks.profile, scene)),
        (
            sharing_checks.LIMITS,
            lambda: sharing_checks.memory_limits(scene, node.limits.status),
        ),
        (sharing_checks.CGROUPS, partial(sharing_checks.cgroups, machine.host_root)),
        (
            sharing_checks.RUNTIME,
            partial(sharing_checks.containers, settings.host_root, settings.runtime_dir),
        ),
        (sharing_checks.PODS, partial(sharing_checks.pod_resources, settings.kubelet_dir)),
        (
            sharing_checks.PROCESSES,
            partial(sharing_checks.pid_namespace, bool(settings.sim)),
        ),
    ]


def _mps_checks(
    settings: DoctorSettings, machine: gpu_checks.Machine, driver: DriverRoot, ask: Ask
) -> list[Check]:
    node = machine.node
    scene = mps_checks.Scene(settings.mps_socket, partial(_of_boot, settings), ask)
    return [
        (mps_checks.PROGRAM, partial(mps_checks.programs, scene, driver)),
        (mps_checks.AGENT, partial(mps_checks.agent, scene)),
        (mps_checks.SERVERS, partial(mps_checks.servers, scene)),
        (mps_checks.FOREIGN, partial(mps_checks.foreign, scene)),
        (mps_checks.SPACES, partial(mps_checks.claims, scene)),
        (
            mode_checks.MODES,
            lambda: mode_checks.compute_modes(scene.book, node.inventory().gpus, node.compute_mode),
        ),
    ]


def _of_boot(settings: DoctorSettings) -> Path:
    """Where the ledger of this boot is."""
    return settings.ledger_dir / boot_id(settings.host_root)


def _disk_checks(settings: DoctorSettings) -> list[Check]:
    kubelet, driver, cdi_dir = settings.kubelet_dir, settings.driver_name, settings.cdi_dir
    of_boot = partial(_of_boot, settings)
    return [
        (disk_checks.CDI, partial(disk_checks.cdi_directory, cdi_dir)),
        (
            disk_checks.FILES,
            lambda: disk_checks.cdi_files(cdi_dir, vendor(driver), of_boot()),
        ),
        (
            disk_checks.KUBELET,
            partial(disk_checks.kubelet_directory, kubelet, driver, settings.pod_uid),
        ),
        (disk_checks.STATE, partial(disk_checks.state_directory, settings.state)),
        (disk_checks.LEDGER, lambda: disk_checks.ledger(of_boot())),
        (plugin_checks.PLUGIN, partial(plugin_checks.plugin, kubelet, driver)),
        (
            plugin_checks.OTHERS,
            partial(plugin_checks.other_drivers, kubelet, driver, cdi_dir),
        ),
    ]


def _claims_in_use(settings: DoctorSettings, node: GpuNode) -> ClusterCheck:
    def records() -> Sequence[Record]:
        return tuple(_book(settings).records.values())

    def neighbours(uid: ClaimUid, gpus: Collection[str]) -> list[Record]:
        return [one for one in records() if one.claim.uid != uid and one.gpus & set(gpus)]

    processes = open_pod_processes(settings.host_root, settings.runtime_dir)
    users = ClaimUsers(processes, node.processes, neighbours)
    return partial(use_checks.claims_in_use, records=records, users=users)


def _cluster(settings: DoctorSettings, stack: ExitStack) -> cluster_checks.Cluster | Finding:
    """The API server, of which nothing is asked yet; or why there is none to ask."""
    access = _access(settings)
    if isinstance(access, Finding):
        return access
    server = ApiServer(access, _TIMEOUTS, user_agent="dra-driver-doctor")
    stack.callback(server.close)
    return cluster_checks.Cluster(
        server,
        ResourceApi(server),
        settings.driver_name,
        settings.node_name,
        bool(settings.mps_socket),
    )


def examine_cluster(
    cluster: cluster_checks.Cluster, others: Mapping[str, ClusterCheck] = _NO_OTHERS
) -> Iterator[Finding]:
    """Every question to the API server, and *others*; after the first one fails, none."""
    first = list(run_checks([(cluster_checks.SERVER, partial(cluster_checks.api_server, cluster))]))
    yield from first
    market = cache(partial(market_of, cluster))  # every slice there is: listed once for both
    rest: dict[str, ClusterCheck] = {
        cluster_checks.NODE: cluster_checks.node_object,
        cluster_checks.RIGHTS: cluster_checks.rights,
        cluster_checks.CLASS: cluster_checks.device_class,
        cluster_checks.FEATURES: cluster_checks.features,
        claim_checks.CLAIMS: partial(claim_checks.pending_claims, market=market),
        pod_checks.PODS: partial(pod_checks.pending_pods, market=market),
        **others,
    }
    if any(finding.level is Level.FAIL for finding in first):
        yield skip(", ".join(rest), "the API server has to answer first")
    else:
        yield from run_checks([(what, partial(check, cluster)) for what, check in rest.items()])


def _access(settings: DoctorSettings) -> Access | Finding:
    """How to reach the API server; outside a pod, and told nothing, that is not looked at."""
    if settings.kubeconfig is None:
        try:
            return in_cluster()
        except SettingsError as e:
            return skip(cluster_checks.SERVER, f"{e} (--kubeconfig)")
    try:
        return kubeconfig(settings.kubeconfig)
    except SettingsError as e:
        return fail(cluster_checks.SERVER, str(e), "mend the file, or give another --kubeconfig")

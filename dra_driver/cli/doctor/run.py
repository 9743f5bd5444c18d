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

from dra_driver.base.errors import DriverError, SettingsError
from dra_driver.cli import mig_status
from dra_driver.cli.doctor import (
    cluster_checks,
    gpu_checks,
    host_checks,
    mps_checks,
    sharing_checks,
)
from dra_driver.cli.doctor.scheduling import pending_claims, pending_pods
from dra_driver.cli.doctor.scheduling.published_devices import read_published_devices
from dra_driver.cli.findings import Finding, Level, fail, skip, summary, warn
from dra_driver.cli.mps_usage import AskAgent, ask_agent
from dra_driver.k8s.access import ApiServerAccess, load_in_cluster, load_kubeconfig
from dra_driver.k8s.claims import ClaimUid
from dra_driver.k8s.client import ApiClient, ApiTimeouts
from dra_driver.k8s.resource_api import ResourceApi
from dra_driver.model.records import ClaimRecord
from dra_driver.node.cgroups.containers import ContainerBundles
from dra_driver.node.cgroups.processes import open_pod_processes
from dra_driver.node.cgroups.procfs import boot_id
from dra_driver.node.driver.root import DriverRoot
from dra_driver.node.gpu_node import GpuNode
from dra_driver.node.machine import OpenNode
from dra_driver.node.nvml.threads import CallThread
from dra_driver.node.state.ledger_files import read_ledger_directory
from dra_driver.node.state.mig_state import MigStateFile
from dra_driver.plan.prepare.cdi_spec import cdi_vendor
from dra_driver.plugin.claims.in_use import InUseCheck
from dra_driver.settings import DoctorSettings

log = logging.getLogger(__name__)

Check = tuple[str, Callable[[], Iterable[Finding]]]
"""The subject of a check, and the check itself."""

ClusterCheck = Callable[[cluster_checks.CheckedCluster], Iterable[Finding]]

_NEED_THE_DRIVER = (
    gpu_checks.GPUS,
    gpu_checks.DEVICE_FILES,
    gpu_checks.MIG_MODES,
    gpu_checks.MIG_INSTANCES,
    gpu_checks.MIG_DEVICE_FILES,
    mig_status.LAYOUTS,
    sharing_checks.LIMITS,
    mps_checks.PROGRAM,
    gpu_checks.COMPUTE_MODES,
)
_NO_MORE_CHECKS: Mapping[str, ClusterCheck] = {}
_SECONDS = 30.0  # for one check: what it waits for has shorter limits of its own
_TIMEOUTS = ApiTimeouts(read=5.0, write=5.0)


def doctor(settings: DoctorSettings, open_node: OpenNode, ask: AskAgent = ask_agent) -> int:
    """Print each finding as soon as there is one. 0: nothing failed; 1: something did. *ask*: how
    the MPS agent is asked."""
    findings: list[Finding] = []
    with ExitStack() as stack:
        for finding in _examine(settings, open_node, ask, stack):
            print(finding, flush=True)
            findings.append(finding)
    print(summary(findings))
    return int(any(finding.level is Level.FAIL for finding in findings))


def run_checks(checks: Iterable[Check], deadline_seconds: float = _SECONDS) -> Iterator[Finding]:
    """All of them, whatever errors there are; each ends in time. An error that several checks run
    into is reported once."""
    first_subjects: dict[str, str] = {}
    for subject, check in checks:
        worker = CallThread(f"doctor: {subject}")
        try:
            yield from worker.submit(subject, partial(_run_check, check), deadline_seconds).result()
        except (DriverError, OSError) as e:  # a file that this user may not read, for instance
            first = first_subjects.setdefault(str(e), subject)
            if first != subject:
                yield skip(subject, f"cannot be looked at, for the same reason as {first}")
                continue
            yield fail(subject, f"cannot be looked at: {e}", "mend this first, then ask again")
        except Exception as e:
            log.exception("a check broke", extra={"check": subject})
            yield fail(
                subject, f"the check itself broke: {e!r}", "report this: it is a fault of ours"
            )
        finally:
            worker.stop()


def _run_check(check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    return list(check())


def _examine(
    settings: DoctorSettings, open_node: OpenNode, ask: AskAgent, stack: ExitStack
) -> Iterator[Finding]:
    node = stack.enter_context(open_node())
    machine = gpu_checks.CheckedNode(node, node.root)
    cluster = _cluster(settings, stack)
    yield from _user(os.geteuid())
    driver_findings = list(run_checks(_driver_checks(machine)))
    yield from driver_findings
    other_checks = [
        *_gpu_checks(settings, machine),
        *_disk_checks(settings),
        *_mig_checks(settings, machine),
        *_sharing_checks(settings, machine, cluster),
        *_mps_checks(settings, machine, node.driver, ask),
    ]
    if any(finding.level is Level.FAIL for finding in driver_findings):
        yield from _without_driver(machine)
        other_checks = [
            (subject, check) for subject, check in other_checks if subject not in _NEED_THE_DRIVER
        ]
    yield from run_checks(other_checks)
    if isinstance(cluster, Finding):
        yield cluster
    else:
        yield from examine_cluster(cluster, {cluster_checks.IN_USE: _claims_in_use(settings, node)})


def _user(uid: int) -> Iterator[Finding]:
    """Without root much of what follows cannot be read or written."""
    if uid != 0:
        yield warn(
            "user",
            f"user {uid} asks, and the plugin is root: what root alone may read or write counts as "
            "wrong below",
            "ask as root",
        )


def _without_driver(machine: gpu_checks.CheckedNode) -> Iterator[Finding]:
    """The checks that are left out, since all of them would report the missing driver."""
    findings = list(
        run_checks([(gpu_checks.GPUS, partial(gpu_checks.check_gpus_without_driver, machine))])
    )
    yield from findings
    checked = {finding.subject for finding in findings}
    names = [subject for subject in _NEED_THE_DRIVER if subject not in checked]
    yield skip(", ".join(names), gpu_checks.NEEDS_DRIVER)


def _driver_checks(machine: gpu_checks.CheckedNode) -> list[Check]:
    modules = DriverRoot(None, machine.host_root)
    return [
        (gpu_checks.DRIVER_ROOT, partial(gpu_checks.check_driver_root, machine)),
        (
            gpu_checks.KERNEL_MODULE,
            lambda: gpu_checks.check_kernel_module(machine, modules.loaded_version()),
        ),
    ]


def _gpu_checks(settings: DoctorSettings, machine: gpu_checks.CheckedNode) -> list[Check]:
    return [
        (gpu_checks.GPUS, partial(gpu_checks.check_gpus, machine)),
        (gpu_checks.DEVICE_FILES, partial(gpu_checks.check_device_files, machine)),
        (
            gpu_checks.CDI_HOOK,
            partial(gpu_checks.check_cdi_hook, machine, settings.nvidia_cdi_hook),
        ),
    ]


def _mig_checks(settings: DoctorSettings, machine: gpu_checks.CheckedNode) -> list[Check]:
    node = machine.node
    return [
        (gpu_checks.MIG_MODES, lambda: gpu_checks.check_mig_modes(node.inventory().gpus)),
        (
            gpu_checks.MIG_INSTANCES,
            lambda: gpu_checks.check_mig_instances(node.refresh, partial(_read_ledger, settings)),
        ),
        (
            gpu_checks.MIG_DEVICE_FILES,
            lambda: gpu_checks.check_mig_device_files(node.refresh, node.capability_files),
        ),
        (mig_status.LAYOUTS, partial(_layouts, settings, node)),
    ]


def _layouts(settings: DoctorSettings, node: GpuNode) -> Iterator[Finding]:
    gpus = [gpu for gpu in node.inventory().gpus if gpu.mig is not None]
    if gpus:
        mig_state = MigStateFile(settings.mig_state, boot_id(settings.host_root)).read()
        yield from mig_status.layout_findings(mig_state, gpus)


def _read_ledger(settings: DoctorSettings) -> host_checks.LedgerSnapshot:
    return host_checks.LedgerSnapshot(*read_ledger_directory(_ledger_of_boot(settings)))


def _sharing_checks(
    settings: DoctorSettings,
    machine: gpu_checks.CheckedNode,
    cluster: cluster_checks.CheckedCluster | Finding,
) -> list[Check]:
    checked_cluster = None if isinstance(cluster, Finding) else cluster
    node = machine.node
    profile = sharing_checks.CheckedProfile(settings, node.inventory, checked_cluster)
    return [
        (sharing_checks.PROFILE, partial(sharing_checks.check_profile, profile)),
        (
            sharing_checks.LIMITS,
            lambda: sharing_checks.check_memory_limits(profile, node.limits.status),
        ),
        (sharing_checks.CGROUPS, partial(sharing_checks.check_cgroups, machine.host_root)),
        (
            sharing_checks.RUNTIME,
            partial(
                sharing_checks.check_container_runtime, settings.host_root, settings.runtime_dir
            ),
        ),
        (
            sharing_checks.POD_RESOURCES,
            partial(sharing_checks.check_pod_resources, settings.kubelet_dir),
        ),
        (
            sharing_checks.PID_NAMESPACE,
            partial(sharing_checks.check_pid_namespace, bool(settings.sim)),
        ),
    ]


def _mps_checks(
    settings: DoctorSettings, machine: gpu_checks.CheckedNode, driver: DriverRoot, ask: AskAgent
) -> list[Check]:
    node = machine.node
    agent = mps_checks.CheckedMpsAgent(settings.mps_socket, partial(_ledger_of_boot, settings), ask)
    return [
        (mps_checks.PROGRAM, partial(mps_checks.check_mps_programs, agent, driver)),
        (mps_checks.AGENT, partial(mps_checks.check_mps_agent, agent)),
        (mps_checks.SERVERS, partial(mps_checks.check_mps_servers, agent)),
        (mps_checks.UNMANAGED_DAEMONS, partial(mps_checks.check_unmanaged_daemons, agent)),
        (mps_checks.NAMESPACES, partial(mps_checks.check_mps_claims, agent)),
        (
            gpu_checks.COMPUTE_MODES,
            lambda: gpu_checks.check_compute_modes(
                agent.ledger_snapshot, node.inventory().gpus, node.compute_mode
            ),
        ),
    ]


def _ledger_of_boot(settings: DoctorSettings) -> Path:
    return settings.ledger_dir / boot_id(settings.host_root)


def _disk_checks(settings: DoctorSettings) -> list[Check]:
    kubelet, driver, cdi_dir = settings.kubelet_dir, settings.driver_name, settings.cdi_dir
    of_boot = partial(_ledger_of_boot, settings)
    return [
        (host_checks.CDI_DIRECTORY, partial(host_checks.check_cdi_directory, cdi_dir)),
        (
            host_checks.CDI_FILES,
            lambda: host_checks.check_cdi_files(cdi_dir, cdi_vendor(driver), of_boot()),
        ),
        (
            host_checks.KUBELET_DIRECTORY,
            partial(host_checks.check_kubelet_directory, kubelet, driver, settings.pod_uid),
        ),
        (host_checks.STATE_DIRECTORY, partial(host_checks.check_state_directory, settings.state)),
        (host_checks.LEDGER, lambda: host_checks.check_ledger(of_boot())),
        (host_checks.PLUGIN, partial(host_checks.check_plugin, kubelet, driver)),
        (
            host_checks.OTHER_DRIVERS,
            partial(host_checks.check_other_drivers, kubelet, driver, cdi_dir),
        ),
    ]


def _claims_in_use(settings: DoctorSettings, node: GpuNode) -> ClusterCheck:
    def records() -> Sequence[ClaimRecord]:
        return tuple(_read_ledger(settings).records.values())

    def neighbours(uid: ClaimUid, gpus: Collection[str]) -> list[ClaimRecord]:
        return [
            record for record in records() if record.claim.uid != uid and record.gpus & set(gpus)
        ]

    containers = ContainerBundles(settings.host_root, settings.runtime_dir)
    processes = open_pod_processes(settings.host_root, containers)
    in_use = InUseCheck(processes, node.processes, neighbours)
    return partial(cluster_checks.check_claims_in_use, records=records, in_use=in_use)


def _cluster(settings: DoctorSettings, stack: ExitStack) -> cluster_checks.CheckedCluster | Finding:
    """The API server, of which nothing is asked yet; or why there is none to ask."""
    access = _access(settings)
    if isinstance(access, Finding):
        return access
    server = ApiClient(access, _TIMEOUTS, user_agent="dra-driver-doctor")
    stack.callback(server.close)
    return cluster_checks.CheckedCluster(
        server,
        ResourceApi(server),
        settings.driver_name,
        settings.node_name,
        bool(settings.mps_socket),
    )


def examine_cluster(
    cluster: cluster_checks.CheckedCluster,
    more_checks: Mapping[str, ClusterCheck] = _NO_MORE_CHECKS,
) -> Iterator[Finding]:
    """Every check against the API server, and *more_checks*; none, where it does not answer."""
    server_findings = list(
        run_checks([(cluster_checks.SERVER, partial(cluster_checks.check_api_server, cluster))])
    )
    yield from server_findings
    # every slice there is: listed once for both
    published = cache(partial(read_published_devices, cluster))
    checks: dict[str, ClusterCheck] = {
        cluster_checks.NODE: cluster_checks.check_node_object,
        cluster_checks.RIGHTS: cluster_checks.check_permissions,
        cluster_checks.CLASS: cluster_checks.check_device_class,
        cluster_checks.FEATURES: cluster_checks.check_api_features,
        pending_claims.CLAIMS: partial(pending_claims.pending_claims, market=published),
        pending_pods.PODS: partial(pending_pods.pending_pods, market=published),
        **more_checks,
    }
    if any(finding.level is Level.FAIL for finding in server_findings):
        yield skip(", ".join(checks), "the API server has to answer first")
    else:
        yield from run_checks(
            [(subject, partial(check, cluster)) for subject, check in checks.items()]
        )


def _access(settings: DoctorSettings) -> ApiServerAccess | Finding:
    """How to reach the API server; skipped outside a pod without --kubeconfig."""
    if settings.kubeconfig is None:
        try:
            return load_in_cluster()
        except SettingsError as e:
            return skip(cluster_checks.SERVER, f"{e} (--kubeconfig)")
    try:
        return load_kubeconfig(settings.kubeconfig)
    except SettingsError as e:
        return fail(cluster_checks.SERVER, str(e), "mend the file, or give another --kubeconfig")

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
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack
from functools import cache, partial

from dra_driver.base.errors import DriverError, SettingsError
from dra_driver.cli import mig_status
from dra_driver.cli.devices.recorded import recorded_gpus
from dra_driver.cli.doctor import (
    api_checks,
    cluster_checks,
    gpu_checks,
    health_checks,
    host_checks,
    mig_checks,
    mps_checks,
    node_profile_checks,
    sharing_checks,
)
from dra_driver.cli.doctor.host_checks import records_of_boot
from dra_driver.cli.doctor.scheduling import pending_claims, pending_pods
from dra_driver.cli.doctor.scheduling.published_devices import read_published_devices
from dra_driver.cli.findings import Check, Finding, Level, fail, ok, skip, summary, warn
from dra_driver.cli.mps_usage import AskAgent, ask_agent
from dra_driver.k8s.access import ApiServerAccess, load_in_cluster, load_kubeconfig
from dra_driver.k8s.claims import ClaimUid
from dra_driver.k8s.client import ApiClient, ApiTimeouts
from dra_driver.k8s.resource_api import ResourceApi
from dra_driver.k8s.resource_versions import RESOURCE_GROUP
from dra_driver.model.records import ClaimRecord
from dra_driver.node.cgroups.containers import ContainerBundles
from dra_driver.node.cgroups.processes import open_pod_processes
from dra_driver.node.gpu_node import GpuNode
from dra_driver.node.machine import OpenNode
from dra_driver.node.nvml.threads import CallThread
from dra_driver.node.state.node_api_file import ServedApi, ServedApiFile
from dra_driver.plugin.claims.in_use import InUseCheck
from dra_driver.settings import DoctorSettings

log = logging.getLogger(__name__)

_NEED_THE_DRIVER = (
    gpu_checks.GPUS,
    gpu_checks.DEVICE_FILES,
    mig_checks.MIG_MODES,
    mig_checks.MIG_INSTANCES,
    mig_checks.MIG_DEVICE_FILES,
    mig_status.LAYOUTS,
    sharing_checks.LIMITS,
    mps_checks.PROGRAM,
    mps_checks.COMPUTE_MODES,
)
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
            yield from worker.submit(subject, partial(_listed, check), deadline_seconds).result()
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


def _listed(check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    return list(check())


def _examine(
    settings: DoctorSettings, open_node: OpenNode, ask: AskAgent, stack: ExitStack
) -> Iterator[Finding]:
    node = stack.enter_context(open_node())
    node.remember(recorded_gpus(settings))
    cluster = _cluster(settings, stack)
    yield from _user(os.geteuid())
    driver_findings = list(run_checks(gpu_checks.driver_checks(node)))
    yield from driver_findings
    checks = [
        *gpu_checks.checks(settings, node),
        *health_checks.checks(settings, node),
        *host_checks.checks(settings),
        *mig_checks.checks(settings, node),
        *sharing_checks.checks(settings, node, None if isinstance(cluster, Finding) else cluster),
        *mps_checks.checks(settings, node, ask),
    ]
    if any(finding.level is Level.FAIL for finding in driver_findings):
        yield from _without_driver(node)
        checks = [(subject, check) for subject, check in checks if subject not in _NEED_THE_DRIVER]
    yield from run_checks(checks)
    if isinstance(cluster, Finding):
        yield cluster
    else:
        more_checks = [
            (api_checks.API, lambda: api_checks.check_api(settings, cluster)),
            (api_checks.PODS, lambda: api_checks.check_pods(settings, cluster)),
            *_node_profile_checks(settings, cluster),
            _check_of_use(settings, node, cluster),
        ]
        served = ServedApiFile(settings.served_api)
        yield from examine_cluster(cluster, more_checks, served.inspect)


def _user(uid: int) -> Iterator[Finding]:
    """Without root much of what follows cannot be read or written."""
    if uid != 0:
        yield warn(
            "user",
            f"user {uid} asks, and the plugin is root: what root alone may read or write counts as "
            "wrong below",
            "ask as root",
        )


def _without_driver(node: GpuNode) -> Iterator[Finding]:
    """That a node without a driver has no GPU either; and which checks are left out, since all of
    them would report the missing driver."""
    check = partial(gpu_checks.check_gpus_without_driver, node.inventory)
    findings = list(run_checks([(gpu_checks.GPUS, check)]))
    yield from findings
    checked = {finding.subject for finding in findings}
    names = [subject for subject in _NEED_THE_DRIVER if subject not in checked]
    yield skip(", ".join(names), gpu_checks.NEEDS_DRIVER)


def _node_profile_checks(
    settings: DoctorSettings, cluster: cluster_checks.CheckedCluster
) -> Iterator[Check]:
    """None, where NodeProfiles are not used."""
    if settings.revision_namespace:
        check = partial(node_profile_checks.check_node_profile, cluster)
        yield node_profile_checks.NODE_PROFILES, check


def _check_of_use(
    settings: DoctorSettings, node: GpuNode, cluster: cluster_checks.CheckedCluster
) -> Check:
    def neighbours(uid: ClaimUid, gpus: Collection[str]) -> list[ClaimRecord]:
        return [
            record
            for record in records_of_boot(settings)
            if record.claim.uid != uid and record.gpus & set(gpus)
        ]

    def claims_of_boot() -> list[ClaimRecord]:
        return [record for record in records_of_boot(settings) if record.allocation is None]

    containers = ContainerBundles(settings.host_root, settings.runtime_dir)
    processes = open_pod_processes(settings.host_root, containers)
    in_use = InUseCheck(processes, node.processes, neighbours)
    return (
        cluster_checks.IN_USE,
        lambda: cluster_checks.check_claims_in_use(cluster, claims_of_boot(), in_use),
    )


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
    )


def examine_cluster(
    cluster: cluster_checks.CheckedCluster,
    more_checks: Iterable[Check] = (),
    read_served: Callable[[], ServedApi | None] = lambda: None,
) -> Iterator[Finding]:
    """Every check against the API server, and *more_checks*; none, where it does not answer."""

    def served() -> list[Finding]:
        if not cluster.resources.is_served():
            return [ok(cluster_checks.SERVER, f"answers, and knows no {RESOURCE_GROUP}")]
        version = cluster.resources.version
        return [ok(cluster_checks.SERVER, f"answers, and serves {RESOURCE_GROUP}/{version}")]

    (server_finding,) = run_checks([(cluster_checks.SERVER, served)])
    yield server_finding
    # every slice there is: listed once for both
    published = cache(partial(read_published_devices, cluster))
    tainted_devices = partial(health_checks.check_tainted_devices, cluster.node, published)
    device_class = partial(cluster_checks.check_device_class, cluster, read_served)
    about_dra: list[Check] = [
        (cluster_checks.CLASS, device_class),
        (cluster_checks.FEATURES, lambda: cluster_checks.check_api_features(cluster)),
        (pending_claims.CLAIMS, lambda: pending_claims.pending_claims(cluster, published)),
        (pending_pods.PODS, lambda: pending_pods.pending_pods(cluster, published)),
        (health_checks.TAINTED_DEVICES, tainted_devices),
    ]
    checks: list[Check] = [
        (cluster_checks.NODE, lambda: cluster_checks.check_node_object(cluster)),
        (cluster_checks.RIGHTS, lambda: cluster_checks.check_permissions(cluster)),
        *(() if cluster.resources.missing else about_dra),
        *more_checks,
    ]
    if server_finding.level is Level.FAIL:
        yield skip(
            ", ".join(subject for subject, _ in checks), "the API server has to answer first"
        )
    else:
        yield from run_checks(checks)


def _access(settings: DoctorSettings) -> ApiServerAccess | Finding:
    """How to reach the API server; skipped outside a pod without --kubeconfig."""
    if settings.kubeconfig is None:
        try:
            return load_in_cluster()
        except SettingsError as e:
            return skip(cluster_checks.SERVER, str(e))
    try:
        return load_kubeconfig(settings.kubeconfig)
    except SettingsError as e:
        return fail(cluster_checks.SERVER, str(e), "mend the file, or give another --kubeconfig")

"""A daemon over a MIG instance: of protocol 2, on a driver that knows a newer one, too."""

import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mps import MpsClient, MpsLimits, mps_server_name
from dra_driver.node.mps.processes import DaemonProcesses
from dra_driver.sim.mig.identifiers import MigUuidParts, mig_uuid, uuid_tag
from tests.fakes.daemon_host import GIB, DaemonHost

pytestmark = pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0,
    reason="mounting is not permitted here",
)


@pytest.fixture(params=[2, 3], ids=["an older driver", "a newer driver"])
def host(request):
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        made = DaemonHost(Path(directory), request.param)
        yield made
        made.close()


def instance(host, gi=1, start=0):
    """A 1g instance of the host's first GPU."""
    parts = MigUuidParts(minor=0, number=0, start=start, gi=gi, ci=0, tag=uuid_tag(host.gpus[0]))
    return GpuUuid(mig_uuid(parts))


def over(host, uuid, most):
    daemon, name = host.daemon(default_limits=most), mps_server_name([uuid])
    directory = f"{host.mps_dir}/{name}"
    return replace(daemon, name=name, gpus=(uuid,), protocol=2, directory=directory)


def test_its_clients_are_served_and_once_it_is_stopped_nothing_holds_the_instance(host):
    daemons, uuid = host.daemons(), instance(host)
    daemon = over(host, uuid, MpsLimits(50, 2 * GIB))
    namespace = replace(host.namespace(memory=GIB), gpus=(uuid,))
    try:
        served = daemons.start(daemon, [namespace])
        pid = host.attach(daemon, served[namespace.name])

        assert daemons.check(daemon).clients == (MpsClient(pid),)
        server = host.ask(daemon, stdin="get_server_list\n").strip()
        limit = host.ask(daemon, stdin=f"get_device_pinned_mem_limit {server} 0\n")
        assert limit.strip() in ("2G", "2048M", "2.00G")
        assert len(DaemonProcesses().of(daemon.token)) > 1  # itself, and its server
    finally:
        daemons.stop_and_remove(daemon)  # while the client is there

    assert DaemonProcesses().of(daemon.token) == ()
    assert host.left() == []


def test_two_instances_of_a_gpu_have_a_daemon_each_that_stay_when_the_other_goes(host):
    daemons, limits = host.daemons(), MpsLimits(50, GIB)
    first, second = (over(host, instance(host, gi, gi), limits) for gi in (1, 2))
    namespaces = [replace(host.namespace(gi, GIB), gpus=first.gpus) for gi in (1, 2)]
    try:
        daemons.start(first, namespaces[:1])
        directory = daemons.start(second, namespaces[1:])[namespaces[1].name]
        pid = host.attach(second, directory)
        daemons.stop_and_remove(first)

        assert not daemons.is_running(first)
        assert daemons.check(second).clients == (MpsClient(pid),)
    finally:
        daemons.stop_and_remove(first)
        daemons.stop_and_remove(second)

    assert host.left() == []

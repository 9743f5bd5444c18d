"""The stand-in of MPS serves a MIG instance as one device with what the instance has."""

import pytest

from dra_driver.plan.offer.shapes import max_mps_clients
from dra_driver.sim.mig.identifiers import MigUuidParts, capability_minors, mig_uuid, uuid_tag
from dra_driver.sim.mps.client import REFUSED
from dra_driver.sim.mps.client import main as mps_client
from dra_driver.sim.mps.command_line import CommandRefused
from dra_driver.sim.mps.host_snapshot import read_host
from tests.fakes.mps import mps_host, shown
from tests.fakes.mps_daemon import Daemon, new_node
from tests.fakes.simulated import Node, h100

GIB = 1 << 30
MIB = 1 << 20
THREE_G = 2  # NVML_GPU_INSTANCE_PROFILE_3_SLICE


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    return new_node(tmp_path_factory.mktemp("host"))


@pytest.fixture
def instance(node):
    """UUID of a 3g.40gb of the second GPU, created on a host that this one knows nothing of."""
    return uuid_of(read_host(node.root).gpus[1].uuid)


def uuid_of(gpu, minor=1, number=THREE_G):
    return mig_uuid(MigUuidParts(minor, number, start=4, gi=1, ci=0, tag=uuid_tag(gpu)))


def starts(daemon):
    """Whether its server works."""
    with daemon.control.changed:
        daemon.control.launch(0)
    [(works, _)] = daemon.processes.started
    return works


def serving(directory, node, instance, protocol=2):
    return Daemon(directory, protocol, devices=(instance,), node=node)


def test_an_instance_is_one_device_with_its_memory_and_multiprocessors(node, instance):
    device = read_host(node.root).find(instance)
    assert device is not None
    assert (device.uuid, device.minor, device.multiprocessors) == (instance, 1, 60)
    assert (device.memory_bytes, device.name) == (40448 * MIB, "NVIDIA H100 80GB HBM3 MIG 3g.40gb")


@pytest.mark.parametrize(
    "unusable", ["another GPU", "another number", "no such profile", "no UUID"]
)
def test_what_no_gpu_of_the_host_can_have_is_not_found(node, unusable):
    gpus = read_host(node.root).gpus
    name = {
        "another GPU": uuid_of("GPU-0"),
        "another number": uuid_of(gpus[0].uuid),
        "no such profile": uuid_of(gpus[1].uuid, number=17),
        "no UUID": "MIG-GPU-0/1/0",
    }[unusable]
    assert read_host(node.root).find(name) is None


def test_a_server_of_protocol_2_serves_it(tmp_path, node, instance):
    daemon = serving(tmp_path, node, instance)
    daemon.pipe_in("start_server -uid 0")
    assert daemon.pipe_in("device_query").endswith(f"(UUID: {instance})")
    daemon.pipe_in("set_default_device_pinned_mem_limit 0 20G")
    server = daemon.pipe_in("get_server_list")
    daemon.pipe_in(f"set_device_pinned_mem_limit {server} 0 20G")
    let_in = daemon.attach(None, CUDA_VISIBLE_DEVICES=instance)
    assert let_in["memory_bytes_by_gpu"] == {instance: 20 * GIB}
    with pytest.raises(CommandRefused, match="OUT_OF_MEMORY"):
        daemon.attach(None, memory=21 * GIB, CUDA_VISIBLE_DEVICES=instance)
    with pytest.raises(CommandRefused, match="NO_DEVICE"):
        daemon.attach(None, CUDA_VISIBLE_DEVICES=daemon.gpus[1])


def test_nobody_gets_more_memory_than_the_instance_has(tmp_path, node, instance):
    daemon = serving(tmp_path, node, instance)
    assert daemon.attach(None, memory=39 * GIB)["memory_bytes"] is None
    with pytest.raises(CommandRefused, match="OUT_OF_MEMORY"):
        daemon.attach(None, pid=101, memory=1 * GIB)


def test_protocol_3_serves_no_instance(tmp_path, node, instance):
    assert not starts(serving(tmp_path, node, instance, protocol=3))


def test_an_instance_is_served_alone(tmp_path, node, instance):
    devices = (instance, read_host(node.root).gpus[0].uuid)
    assert not starts(Daemon(tmp_path, 2, devices=devices, node=node))
    assert starts(serving(tmp_path, node, instance))


def test_an_instance_has_as_many_clients_as_it_has_of_the_slices(tmp_path, node, instance):
    daemon = serving(tmp_path, node, instance)
    most = 48 * 3 // 7
    for pid in range(100, 100 + most):
        daemon.attach(None, pid=pid)
    with pytest.raises(CommandRefused, match="MAX_CLIENTS"):
        daemon.attach(None, pid=99)


def test_a_container_needs_the_device_nodes_of_the_instance(tmp_path, node, instance):
    daemon = serving(tmp_path, node, instance)
    caps = list(capability_minors(1, 1, 0))

    def attach(minors, capabilities):
        return daemon.attach(None, minors=minors, caps=capabilities)

    for minors, capabilities in (([1], []), ([1], caps[:1]), ([0], caps)):
        with pytest.raises(CommandRefused, match="NO_DEVICE"):
            attach(minors, capabilities)
    assert attach([1], caps)["server"] == "uid_0"


def test_a_gpu_in_the_compute_mode_prohibited_serves_no_instance_either(tmp_path):
    node = new_node(tmp_path)
    gpu = read_host(node.root).gpus[1].uuid
    settings = node.root / "run/nvidia-simulated/615.71.09"
    (settings / f"{gpu}.compute-mode").write_text("2\n")
    assert not starts(Daemon(tmp_path, 2, devices=(uuid_of(gpu),), node=node))


def test_a_real_process_gets_what_the_instance_has(capsys):
    document = {"gpus": [{"product": "A100-40-SXM", "bus_id": "0000:00:04.0"}]}
    with mps_host(document) as host:
        instance = uuid_of(host.gpus[0], minor=0)
        assert host.run("-d", CUDA_VISIBLE_DEVICES=instance).returncode == 0
        process = host.client(host.pipe, CUDA_VISIBLE_DEVICES=instance)
        assert mps_client(["attach", str(process), "--memory", "30Gi"]) == REFUSED
        assert "OUT_OF_MEMORY" in capsys.readouterr().err
        let_in = shown(capsys, "attach", str(process), "--memory", "10Gi")
        assert let_in["memory_bytes_by_gpu"] == {instance: None}


@pytest.mark.parametrize("product", ["A30", "A100-40-SXM", "H100-80-SXM", "RTX-PRO-6000"])
def test_as_many_clients_are_taken_in_an_instance_as_a_node_offers_shares_of_it(product, tmp_path):
    node = Node(tmp_path, {"gpus": [h100("1b") | {"product": product}]})
    (gpu,) = node.gpus().scan().gpus
    assert gpu.mig
    for profile in gpu.mig.profiles:
        start = profile.placements[0].start
        uuid = mig_uuid(
            MigUuidParts(gpu.minor, profile.number, start, gi=1, ci=0, tag=uuid_tag(gpu.uuid))
        )

        static = read_host(node.root)
        instance = static.find(uuid)

        assert instance
        assert static.most_clients(instance) == max_mps_clients(gpu, profile)

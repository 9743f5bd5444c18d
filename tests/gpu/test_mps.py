"""MPS of this machine's driver: what a claim's programs get, what ends them, what is left.

The GPU stays in the compute mode DEFAULT, as it was found: what is not limited there would run
without MPS and without a word, so each test first sees that its programs are clients.
"""

import os
import signal
import statistics
import time

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.model.steps import ComputeMode
from dra_driver.node.driver.config import DriverPrograms, NodeConfig, find_driver
from dra_driver.node.mig.geometry import GeometryCache
from dra_driver.node.mps.daemons import MpsDaemons
from dra_driver.node.nvml.client import Nvml
from dra_driver.node.nvml.compute_modes import ComputeModes
from dra_driver.node.nvml.library import load_nvml
from tests.gpu.mps import Host, why_not
from tests.gpu.programs import CONTROL, SERVER, program_of, until, why_no_mounts

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

GIB = 1024**3
OUT_OF_MEMORY = "cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (2)"
PERCENT = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MEMORY = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
FIRST_WITH_LIMITS = 7  # major compute capability: Volta
FURTHER = 10  # namespaces
only_protocol_3 = pytest.mark.parametrize("host", [3], indirect=True, ids=["protocol3"])


@pytest.fixture(scope="module")
def modes(driver):
    nvml = Nvml(lambda: load_nvml(driver.nvml_library()), GeometryCache)
    yield ComputeModes(nvml)
    nvml.stop()


@pytest.fixture(autouse=True)
def modes_stay(modes, node):
    """No test changes who may compute on a GPU."""
    gpus = [gpu.uuid for gpu in node.inventory().gpus]
    before = [modes.read(uuid) for uuid in gpus]
    yield
    assert [modes.read(uuid) for uuid in gpus] == before


@pytest.fixture(scope="module")
def gpu(node, document, modes):
    """One on which MPS can be tried without a change of anything."""
    chosen = node.inventory().gpus[-1]
    mig = next(listed.mig for listed in document.gpus if listed.uuid == chosen.uuid)
    if mig == "Enabled":
        pytest.skip(f"{chosen.uuid} is divided by MIG, and these tests leave that as it is")
    if (mode := modes.read(chosen.uuid)) is not ComputeMode.DEFAULT:
        pytest.skip(f"{chosen.uuid} is in compute mode {mode}, and these tests leave it there")
    if chosen.compute_capability.major < FIRST_WITH_LIMITS:
        pytest.skip(f"{chosen.product_name} is older than Volta: its MPS has no limits")
    return chosen


@pytest.fixture(scope="module")
def program(driver):
    """What every client runs."""
    libraries = {library.soname: library.host_path for library in driver.files().libraries}
    return program_of(libraries["libcuda.so.1"])


@pytest.fixture(scope="module")
def newest(driver, gpu, program):
    """The newest protocol of this machine; tests are skipped where its MPS does not work."""
    if os.geteuid() != 0:
        pytest.skip("daemons that serve several users are started by root, and this is not root")
    try:
        for tool in (CONTROL, SERVER):
            driver.tool(tool)
        protocol = MpsDaemons(DriverPrograms(driver)).protocol()
    except NodeError as e:
        pytest.skip(str(e))
    if others := MpsDaemons(DriverPrograms(driver)).unmanaged(()):
        pytest.skip(f"MPS is in use here: {', '.join(others)}")
    if why := why_not(find_driver(NodeConfig()), gpu.uuid, program):
        pytest.skip(f"MPS does not work on this machine: {why}")
    return protocol


@pytest.fixture(params=[3, 2], ids=["protocol3", "protocol2"])
def host(request, newest, driver, gpu, program, tmp_path):
    if request.param > newest:
        version = driver.files().version
        pytest.skip(f"driver {version} has no MPS protocol {request.param}: 615 and newer do")
    if request.param == 2 and (why := why_no_mounts()):
        pytest.skip(f"protocol 2 needs a /dev/shm for its clients, and nothing is mounted: {why}")
    made = Host(find_driver(NodeConfig()), gpu.uuid, request.param, program)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def all_of_it(host):
    """The multiprocessors that a program without MPS has; also, there is room for these tests."""
    program = host.stranger()
    assert not program.error
    errors = [program.ask(f"allocate {size * GIB}") for size in (2, 4)]
    program.end()
    if OUT_OF_MEMORY in errors:
        pytest.skip(f"these tests take some GiB of {host.gpu}, and others have them")
    assert not any(errors)
    return program.greeting["multiprocessors"]


@pytest.fixture
def quarter(host):
    """A claim with 25 % and 4 GiB."""
    return host.agent.serve(host.namespace(1, 25, 4 * GIB))


@pytest.fixture
def half(host):
    """A claim with 50 % and 2 GiB."""
    return host.agent.serve(host.namespace(2, 50, 2 * GIB))


def client(host, served, **changes):
    """A program that the server serves."""
    started = host.client(served, **changes)
    assert not started.error
    expected = host.as_client(started, served)
    assert expected in until(host.clients, lambda clients: expected in clients)
    return started


def maintained(host):
    """The one server, after the agent has maintained it."""
    host.agent.maintain()
    (server,) = host.agent.status().servers
    return server


def is_about(count, percent, whole):
    """Whether so many multiprocessors are a percentage of all: they come in twos and more."""
    return 0 < count < whole and abs(count - whole * percent / 100) <= max(2, whole * 0.05)


def test_each_client_gets_its_memory_and_no_more(all_of_it, host, quarter, half, report):
    large, small = client(host, quarter), client(host, half)

    report([f"free at the start, of 4 and 2 GiB: {[p.greeting['free'] for p in (large, small)]}"])
    assert large.ask(f"allocate {2 * GIB}") == small.ask(f"allocate {GIB}") == ""
    assert large.ask(f"allocate {4 * GIB}") == OUT_OF_MEMORY
    assert small.ask(f"allocate {2 * GIB}") == OUT_OF_MEMORY
    assert large.ask(f"allocate {GIB}") == ""  # within its limit, and beyond the other's
    assert large.ask("compute") == small.ask("compute") == ""


def test_each_client_sees_its_part_of_the_multiprocessors(all_of_it, host, quarter, half, report):
    multiprocessors = [
        client(host, served).greeting["multiprocessors"] for served in (quarter, half)
    ]

    report([f"of {all_of_it} multiprocessors, 25 and 50 % are {multiprocessors}"])
    assert is_about(multiprocessors[0], 25, all_of_it)
    assert is_about(multiprocessors[1], 50, all_of_it)


@only_protocol_3
def test_who_throws_its_variables_away_has_its_limits_all_the_same(all_of_it, host, quarter):
    bare = client(host, quarter, **{PERCENT: None, MEMORY: None})

    assert is_about(bare.greeting["multiprocessors"], 25, all_of_it)
    assert bare.ask(f"allocate {2 * GIB}") == ""
    assert bare.ask(f"allocate {4 * GIB}") == OUT_OF_MEMORY


@only_protocol_3
def test_who_asks_for_more_does_not_get_it(all_of_it, host, quarter):
    greedy = client(host, quarter, **{PERCENT: "100", MEMORY: "0=16384M"})

    assert is_about(greedy.greeting["multiprocessors"], 25, all_of_it)
    assert greedy.ask(f"allocate {2 * GIB}") == ""
    assert greedy.ask(f"allocate {4 * GIB}") == OUT_OF_MEMORY


@only_protocol_3
def test_a_limit_for_a_gpu_that_is_not_seen_leaves_the_multiprocessors_limited(
    all_of_it, host, quarter, report
):
    strange = host.client(quarter, **{MEMORY: "0=4096M,7=4096M"})
    if strange.error:
        report([f"a program that names a GPU that it does not see is refused: {strange.error}"])
        return
    beyond = strange.ask(f"allocate {6 * GIB}")
    report([f"a program with 4 GiB that names such a GPU, asking for 6: {beyond or 'it has them'}"])
    assert is_about(strange.greeting["multiprocessors"], 25, all_of_it)


def test_two_namespaces_have_a_daemon_each_on_one_gpu(all_of_it, host, report):
    """With protocol 2: whether two daemons serve one GPU side by side is not documented."""
    first_namespace, second_namespace = (
        host.agent.serve(host.namespace(number, 50, 2 * GIB, tenant=f"team-{number}"))
        for number in (1, 2)
    )
    first, second = client(host, first_namespace), client(host, second_namespace)

    servers = host.agent.status().servers
    assert len(servers) == (2 if host.protocol == 2 else 1)
    assert first_namespace.pipe_directory != second_namespace.pipe_directory
    for program in (first, second):
        assert program.ask("compute") == ""
        assert is_about(program.greeting["multiprocessors"], 50, all_of_it)
        assert program.ask(f"allocate {4 * GIB}") == OUT_OF_MEMORY

    host.agent.terminate(first_namespace.namespace.name, [first.pid])
    error = second.ask("compute")
    report([f"after a client of the other server was ended: {error or 'it computes'}"])
    assert error == ""
    assert host.agent.status().incidents == ()


def test_ending_one_client_leaves_the_other(host, quarter, half, report):
    ended, remaining = client(host, quarter), client(host, half)
    both = {host.as_client(ended, quarter), host.as_client(remaining, half)}
    assert until(host.clients, lambda clients: clients == both) == both

    host.agent.terminate(quarter.namespace.name, [ended.pid])

    assert remaining.ask("compute") == ""
    error = ended.ask("compute")
    report([f"a client that was ended computes: {error}"])
    assert error
    ended.end()
    (remaining_client,) = both - {host.as_client(ended, quarter)}
    assert until(host.clients, lambda clients: clients == {remaining_client}) == {remaining_client}
    assert client(host, quarter).ask("compute") == ""  # its claim goes on
    assert host.agent.status().incidents == ()


def test_a_killed_daemon_comes_back_where_it_was(all_of_it, host, quarter, half, report):
    lost = client(host, quarter)
    (daemon,) = [pid for pid, name in host.processes().items() if name == CONTROL]
    mounted = os.open(quarter.pipe_directory, os.O_DIRECTORY)  # as a container has it
    try:
        os.kill(daemon, signal.SIGKILL)
        began = time.monotonic()
        until(lambda: maintained(host), lambda server: server.ready and server.restarts, 30)
        took = time.monotonic() - began
        assert os.path.samestat(os.fstat(mounted), os.stat(quarter.pipe_directory))
    finally:
        os.close(mounted)

    (server,) = host.agent.status().servers
    (incident,) = host.agent.status().incidents
    assert (server.ready, server.restarts, server.namespaces) == (True, 1, (quarter, half))
    assert incident.namespaces == (quarter.namespace.name, half.namespace.name)
    assert (incident.server, incident.clients) == (server.name, 1)
    report([f"it was back in {took:.1f} s; its client: {lost.ask('compute', 20) or 'computes'}"])
    lost.end()
    again = client(host, quarter)
    assert again.ask("compute") == ""
    assert is_about(again.greeting["multiprocessors"], 25, all_of_it)
    assert again.ask(f"allocate {5 * GIB}") == OUT_OF_MEMORY


def test_another_agent_takes_over_what_runs(host, quarter):
    working = client(host, quarter)
    processes = host.processes()
    assert CONTROL in processes.values()

    host.agent = host.another_agent()
    host.agent.maintain()

    assert host.agent.serve(quarter.namespace) == quarter
    assert host.processes() == processes
    assert working.ask("compute") == ""
    expected = {host.as_client(working, quarter)}
    assert until(host.clients, lambda clients: clients == expected) == expected
    (server,) = host.agent.status().servers
    assert (server.ready, server.restarts, host.agent.status().incidents) == (True, 0, ())


def test_nothing_is_left_of_the_last_claim(host, quarter, half):
    working = client(host, half)
    host.agent.release(quarter.namespace.name)
    assert working.ask("compute") == ""
    assert any(entry.startswith("process") for entry in host.remains())
    working.end()

    host.agent.release(half.namespace.name)

    assert host.agent.status().servers == ()
    assert host.remains() == []


def test_a_further_claim_costs_less_than_the_first(host, report):
    def seconds(call, *args):
        began = time.monotonic()
        call(*args)
        return time.monotonic() - began

    namespaces = [host.namespace(number, 5, GIB) for number in range(1 + FURTHER)]
    first, *further = [seconds(host.agent.serve, namespace) for namespace in namespaces]
    *released, last = [seconds(host.agent.release, namespace.name) for namespace in namespaces]

    report(
        [
            f"protocol {host.protocol}: the first claim {first * 1000:.0f} ms, "
            f"a further one {statistics.median(further) * 1000:.1f} ms "
            f"(of {FURTHER}: {max(further) * 1000:.1f} at most)",
            f"release: {statistics.median(released) * 1000:.1f} ms, the last {last * 1000:.0f} ms",
        ]
    )
    assert statistics.median(further) < first

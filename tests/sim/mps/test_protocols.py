"""The stand-in of MPS's daemon refuses what the real one refuses, in either protocol."""

import os

import pytest

from dra_driver.sim.mps.command_line import CommandRefused
from dra_driver.sim.mps.control_daemon import NoAnswer
from dra_driver.sim.mps.host_snapshot import FACTS_FILE, read_host
from dra_driver.sim.mps.limits import format_memory
from dra_driver.sim.mps.loop import apply_config, read_config
from tests.fakes.mps_daemon import ROOT, SOMEBODY, Daemon, new_node
from tests.fakes.simulated import h100

ONE = "--format=csv,noheader"


def with_a_namespace(daemon):
    daemon.say(f"server create gpu --allowed-devices={daemon.gpus[0]}")
    daemon.say("namespace create c_1 --server=gpu")
    return daemon


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """For daemons that leave their host as it is."""
    return new_node(tmp_path_factory.mktemp("host"))


@pytest.fixture
def three(tmp_path, node):
    return with_a_namespace(Daemon(tmp_path, 3, node=node))


@pytest.fixture
def two(tmp_path, node):
    return Daemon(tmp_path, 2, node=node)


REFUSED = [
    ("", "Usage"),
    ("server", "Usage"),
    ("server fly", "Unknown command"),
    ("planet list", "Unknown command"),
    ("get_server_list now", "Unknown command"),
    ("server create UP", "Invalid name"),
    (f"server create {'s' * 65}", "Invalid name"),
    ("server create gpu", "exists already"),
    ("server create", "needs a name or --uid"),
    ("server create other --uid=1000", "UID 0"),
    ("server create other --uid=me", "Invalid uid"),
    ("server create other --colour=red", "Unknown option '--colour'"),
    ("server create other -x", "Unknown option '-x'"),
    ("server create one two", "Unexpected argument 'two'"),
    ("server create other --locality-domains=maybe", "true or false"),
    ("server delete other", "does not exist"),
    ("server delete", "Missing argument: name"),
    ("server delete gpu --force=yes", "takes no value"),
    ("server list other", "does not exist"),
    ("server list --format=json", "Unknown format"),
    ("server set gpu", "Nothing to set"),
    ("server set other --client-priority=1", "does not exist"),
    ("server set gpu --uid=7", "cannot be changed"),
    ("server get gpu colour", "Unknown field 'colour'"),
    ("namespace create c_1 --server=gpu", "exists already"),
    ("namespace create c-2 --server=gpu", "Invalid name"),
    ("namespace create c_2 --server=other", "does not exist"),
    ("namespace create c_2", "Missing option: --server"),
    ("namespace delete c_2 --server=gpu", "does not exist"),
    ("namespace delete default --server=gpu", "cannot be deleted"),
    ("namespace list c_2", "does not exist"),
    ("namespace list --server=other", "does not exist"),
    ("namespace set c_1 --server=gpu", "Nothing to set"),
    ("namespace set c_1 --server=gpu --active-thread-percentage=0", "1 to 100"),
    ("namespace set c_1 --server=gpu --active-thread-percentage=101", "1 to 100"),
    ("namespace set c_1 --server=gpu --active-thread-percentage=x", "1 to 100"),
    ("namespace set c_1 --server=gpu --pinned-memory-limit=5", "Invalid memory limit"),
    ("namespace set c_1 --server=gpu --pinned-memory-limit=0G", "Invalid memory limit"),
    ("namespace set c_1 --server=gpu --client-priority=2", "0 or 1"),
    ("namespace get c_1 gpu colour", "Unknown field"),
    ("namespace get c_2 gpu name", "does not exist"),
    ("client get 77 pid", "Client 77 does not exist"),
    ("client terminate nobody", "Invalid pid"),
    ("client list --server=other", "does not exist"),
    ("device list --server=other", "does not exist"),
    ("feature enable flight", "Unknown feature"),
    ("memacct set colour=red", "Unknown setting"),
    ("sm-partition create p --server=gpu --device=9 --chunks=1", "has no device '9'"),
    ("sm-partition create p --server=gpu --device=0 --chunks=17", "16 are free"),
    ("sm-partition delete p --server=gpu", "does not exist"),
]


@pytest.mark.parametrize(("line", "why"), REFUSED)
def test_protocol_3_refuses_and_nothing_is_changed(three, line, why):
    before = three.say(f"namespace list {ONE}"), three.say(f"server list {ONE}")
    with pytest.raises(CommandRefused, match=why):
        three.say(line)
    assert (three.say(f"namespace list {ONE}"), three.say(f"server list {ONE}")) == before


def test_either_protocol_refuses_the_words_of_the_other(three, tmp_path):
    with pytest.raises(CommandRefused, match="This daemon speaks protocol 3"):
        three.pipe_in("get_server_list")
    (tmp_path / "two").mkdir()
    with pytest.raises(CommandRefused, match="commands come on standard input"):
        Daemon(tmp_path / "two", 2).say("server list")


def test_a_command_follows_the_daemon_whatever_protocol_it_names(three):
    assert three.say(f"-p 2 server list {ONE}") == three.say(f"--protocol=3 server list {ONE}")


def test_a_limit_stays_when_another_is_set(three):
    three.say("namespace set c_1 --server=gpu --pinned-memory-limit=512M")
    three.say("namespace set c_1 --server=gpu --active-thread-percentage=30")
    got = [
        three.say(f"namespace get c_1 gpu {field}")
        for field in ("pinned-memory-limit", "active-thread-percentage", "client-priority")
    ]
    assert got == ["512M", "30.00", "0"]


def test_what_is_set_on_a_server_holds_in_its_default_namespace_alone(three):
    three.say("server set gpu --active-thread-percentage=10 --locality-domains=true")
    assert three.say("namespace get default gpu active-thread-percentage") == "10.00"
    assert three.say("namespace get c_1 gpu active-thread-percentage") == "100.00"
    assert three.say("server get gpu allowed-devices") == three.gpus[0]


def test_tables_cut_what_is_long_and_comma_separated_values_do_not(three):
    three.say(f"namespace create {'n' * 40} --server=gpu")
    assert f"{'n' * 21}..." in three.say("namespace list")
    assert "n" * 40 in three.say(f"namespace list {ONE}")
    assert three.say("client list --format=csv") == "pid,server,device,namespace,command"


def test_devices_can_be_named_by_number_and_are_all_if_none_is(three):
    three.say("server create second --allowed-devices=1")
    assert three.say("server get second allowed-devices") == three.gpus[1]
    three.say("server create both")
    assert three.processes.started[-1] == (True, tuple(three.gpus))
    lines = three.say(f"device list --server=both {ONE}").splitlines()
    assert [line.split(",")[3] for line in lines] == three.gpus


def test_a_client_of_several_gpus_is_listed_on_each(three):
    three.say("server create both")
    three.attach(("both", "default"), pid=os.getpid())
    lines = three.say(f"client list --server=both {ONE}").splitlines()
    assert [line.split(",")[2] for line in lines] == three.gpus
    assert three.say(f"client get {os.getpid()} maws-ns") == "default"


def test_partitions_are_refused_where_clients_or_domains_are(three):
    create = "sm-partition create {} --server=gpu --device=0 --chunks=10"
    answer = three.say(create.format("p_1"))
    assert answer == f"CUDA_MPS_SM_PARTITION={three.gpus[0]}/p_1"
    for name, why in (("p_1", "exists already"), ("p_2", "6 are free")):
        with pytest.raises(CommandRefused, match=why):
            three.say(create.format(name))
    three.attach(("gpu", "c_1"))
    for line in (create.format("p_2"), "sm-partition delete p_1 --server=gpu"):
        with pytest.raises(CommandRefused, match="active clients"):
            three.say(line)
    three.gone(100)
    three.say("sm-partition delete p_1 --server=gpu")
    assert three.say(f"sm-partition list {ONE}") == ""
    three.say("server set gpu --locality-domains=true")
    with pytest.raises(CommandRefused, match="locality domains"):
        three.say(create.format("p_2"))


def test_an_old_board_has_no_partitions(tmp_path):
    daemon = Daemon(tmp_path, 3, gpus=[{"product": "T4", "bus_id": "0000:1b:00.0"}])
    daemon.say("server create gpu")
    with pytest.raises(CommandRefused, match="compute capability below"):
        daemon.say("sm-partition create p --server=gpu --device=0 --chunks=1")


def test_features_are_on_until_they_are_switched_off(three):
    assert three.say("feature describe memacct") == "memacct: enabled"
    three.say("feature disable context-share")
    assert three.say("feature describe context-share") == "context-share: disabled"
    three.say("feature enable context-share")
    assert three.say("feature describe context-share") == "context-share: enabled"
    three.say("memacct set audit_log=true")
    assert three.say("memacct describe") == "memacct: enabled\naudit_log: true"


def test_a_stranger_may_look_and_nothing_else(three):
    assert three.say(f"server list {ONE}", uid=SOMEBODY)
    for line in ("namespace delete c_1 --server=gpu", "-q", "feature disable memacct"):
        with pytest.raises(CommandRefused, match="Insufficient privileges for UID 1000"):
            three.say(line, uid=SOMEBODY)


def test_a_daemon_for_one_user_has_servers_of_that_user_alone(tmp_path):
    daemon = Daemon(tmp_path, 3, multiuser=False)
    with pytest.raises(CommandRefused, match="single-user"):
        daemon.say("server create other --uid=1000")
    daemon.say("server create --uid=0")
    with pytest.raises(CommandRefused, match="CUDA_ERROR_NOT_PERMITTED"):
        daemon.attach(("uid_0", "default"), uid=SOMEBODY)


def test_to_quit_with_a_wedged_client_takes_for_ever(three):
    three.attach(("gpu", "c_1"))
    three.control.find(100)[2].wedged = True
    with pytest.raises(NoAnswer):
        three.say("-q")
    assert not three.finished


ENVIRONMENTS = [
    ({}, 30, 20),
    ({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}, 30, 20),
    ({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "10"}, 10, 20),
    ({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "much"}, 30, 20),
    ({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=5G"}, 30, 5),
    ({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=50G"}, 30, 20),
    ({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=lots"}, 30, 20),
    ({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=5G,1=5G"}, 30, None),  # what drops every limit
    ({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "GPU-other=5G"}, 30, None),
]


@pytest.mark.parametrize(("environ", "percent", "gib"), ENVIRONMENTS)
def test_the_environment_lowers_limits_and_a_wrong_device_drops_them(three, environ, percent, gib):
    limits = "--pinned-memory-limit=20G --active-thread-percentage=30"
    three.say(f"namespace set c_1 --server=gpu {limits}")
    answer = three.attach(("gpu", "c_1"), **environ)
    assert (answer["percent"], answer["memory_bytes"]) == (percent, gib and gib << 30)


def test_devices_are_counted_as_the_process_sees_them(three):
    three.say("server create both")
    by_gpu = three.attach(("both", "default"), CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="1=1G")
    assert by_gpu["memory_bytes_by_gpu"] == {three.gpus[0]: None, three.gpus[1]: 1 << 30}
    second = three.attach(("both", "default"), minors=[1], CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=1G")
    assert second["memory_bytes_by_gpu"] == {three.gpus[1]: 1 << 30}
    turned = three.attach(("both", "default"), CUDA_VISIBLE_DEVICES="1,0")
    assert list(turned["memory_bytes_by_gpu"]) == three.gpus[::-1]
    with pytest.raises(CommandRefused, match="CUDA_ERROR_NO_DEVICE"):
        three.attach(("both", "default"), CUDA_VISIBLE_DEVICES="7,0")


def test_the_priority_of_the_environment_wins(three):
    three.say("namespace set c_1 --server=gpu --client-priority=1")
    assert three.attach(("gpu", "c_1"))["priority"] == 1
    assert three.attach(("gpu", "c_1"), CUDA_MPS_CLIENT_PRIORITY="0")["priority"] == 0


@pytest.mark.parametrize(("cuda", "most"), [("13.0", 48), ("13.1", 60)])
def test_a_gpu_has_that_many_clients_and_no_more(tmp_path, cuda, most):
    daemon = Daemon(tmp_path, 3, cuda_version=cuda)
    daemon.say("server create gpu")
    for pid in range(1000, 1000 + most):
        daemon.attach(("gpu", "default"), pid=pid)
    with pytest.raises(CommandRefused, match="CUDA_ERROR_MPS_MAX_CLIENTS_REACHED"):
        daemon.attach(("gpu", "default"), pid=999)
    daemon.attach(("gpu", "default"), pid=1000)  # it is one of them


def test_clients_together_cannot_have_more_than_the_board(three):
    three.attach(("gpu", "c_1"), pid=1, memory=50 << 30)
    with pytest.raises(CommandRefused, match="CUDA_ERROR_OUT_OF_MEMORY"):
        three.attach(("gpu", "default"), pid=2, memory=50 << 30)


def test_a_client_has_one_place(three):
    three.attach(("gpu", "c_1"))
    three.attach(("gpu", "default"))
    assert three.say(f"client list {ONE}").splitlines() == [
        f"100,gpu,{three.gpus[0]},default,serve"
    ]


def test_a_prohibited_gpu_has_no_server(tmp_path):
    three = with_a_namespace(Daemon(tmp_path, 3))
    settings = three.node.root / "run/nvidia-simulated/615.71.09"
    (settings / f"{three.gpus[1]}.compute-mode").write_text("2\n")
    three.say("server create second --allowed-devices=1")
    assert three.processes.started[-1] == (False, (three.gpus[1],))
    with three.control.changed:
        three.control.ended(three.control.server("second"))
    assert "second" not in three.say(f"server list {ONE}")


CONFIGS = [
    ("", 'schema_version has to be "1.0"'),
    ("[", "Cannot read"),
    ('schema_version = "1.0"\ncolour = 1', "Unknown key colour"),
    ('schema_version = "1.0"\n[servers.a]\ncolour = "red"', "Unknown key servers.a.colour"),
    ('schema_version = "1.0"\n[servers.a]\nuid = "0"', "servers.a.uid has to be a int"),
    ('schema_version = "1.0"\n[servers.a.namespaces.b]\nuid = 0', "Unknown key .*namespaces.b.uid"),
    ('schema_version = "1.0"\n[features.flight]\nenabled = true', "Unknown key features.flight"),
    ('schema_version = "1.0"\n[servers]\na = 1', "servers.a has to be a table"),
    ('schema_version = "1.0"\n[servers.A]\n', "Invalid name"),
    ('schema_version = "1.0"\n[servers.a]\nactive_thread_percentage = "0"', "1 to 100"),
]


@pytest.mark.parametrize(("text", "why"), CONFIGS)
def test_a_file_with_anything_unknown_is_refused(tmp_path, text, why):
    daemon = Daemon(tmp_path, 3)
    file = tmp_path / "c.toml"
    file.write_text(text)
    with daemon.control.changed, pytest.raises(CommandRefused, match=why):
        apply_config(read_config(file), daemon.control, ROOT)


WRONG = [
    ("fly", "Unrecognized command: fly"),
    ("server list", "Unrecognized command: server"),
    ("get_client_list", "Wrong number of arguments"),
    ("get_client_list 5", "Server 5 does not exist"),
    ("start_server 0 0", "Usage: start_server"),
    ("set_default_active_thread_percentage 0", "1 to 100"),
    ("set_default_device_pinned_mem_limit 0 5", "Invalid memory limit"),
    ("set_default_device_pinned_mem_limit 0 5K", "Invalid memory limit"),
    ("set_default_device_pinned_mem_limit 0 1.5G", "Invalid memory limit"),
    ("set_default_client_priority 3", "0 or 1"),
    ("terminate_client 5 6", "Server 5 does not exist"),
    ("quit now", "Usage: quit"),
]


@pytest.mark.parametrize(("line", "why"), WRONG)
def test_protocol_2_refuses(two, line, why):
    with pytest.raises(CommandRefused, match=why):
        two.pipe_in(line)


def test_defaults_hold_for_servers_that_start_later(two):
    two.pipe_in("set_default_active_thread_percentage 40", "set_default_client_priority 1")
    two.pipe_in("set_default_device_pinned_mem_limit 0 10G")
    assert two.pipe_in("get_default_device_pinned_mem_limit 0") == "10G"
    answer = two.attach(None)
    assert (answer["percent"], answer["priority"]) == (40, 1)
    assert answer["memory_bytes_by_gpu"] == {two.gpus[0]: 10 << 30, two.gpus[1]: None}
    two.pipe_in("set_default_active_thread_percentage 20")
    assert two.attach(None, pid=101)["percent"] == 40
    assert two.pipe_in("get_default_active_thread_percentage") == "20.0"
    assert two.pipe_in("get_default_client_priority") == "1"


def test_what_is_set_on_a_server_holds_for_clients_that_come_later(two):
    two.pipe_in("start_server -uid 0")
    server = two.pipe_in("get_server_list")
    two.pipe_in(f"set_active_thread_percentage {server} 25")
    two.pipe_in(f"set_device_pinned_mem_limit {server} 1 2G")
    assert two.pipe_in(f"get_active_thread_percentage {server}") == "25.0"
    assert two.pipe_in(f"get_device_pinned_mem_limit {server} 1") == "2G"
    assert two.attach(None)["memory_bytes_by_gpu"] == {two.gpus[0]: None, two.gpus[1]: 2 << 30}


def test_a_limit_by_uuid_or_for_no_device_is_passed_over_in_silence(two):
    for name in (two.gpus[0], "7"):
        assert two.pipe_in(f"set_default_device_pinned_mem_limit {name} 1G") == ""
    assert two.pipe_in("get_default_device_pinned_mem_limit 0") == "unlimited"


def test_in_protocol_2_a_wrong_device_of_the_environment_is_passed_over(two):
    two.pipe_in("set_default_device_pinned_mem_limit 0 10G")
    by_gpu = two.attach(None, CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="9=1G,1=3G")["memory_bytes_by_gpu"]
    assert list(by_gpu.values()) == [10 << 30, 3 << 30]


def test_protocol_2_lists_what_there_is(two):
    assert two.pipe_in("ps") == "PID\tID\tSERVER\tDEVICE\tNAMESPACE\tCOMMAND"
    two.attach(None)
    server = two.pipe_in("get_server_list")
    assert two.pipe_in("ps").splitlines()[1].split("\t")[:3] == ["100", "0", server]
    assert two.pipe_in("get_device_client_list") == f"{two.gpus[0]}: 100\n{two.gpus[1]}: 100"
    assert two.gpus[1] in two.pipe_in(f"device_query {server}")
    with pytest.raises(CommandRefused, match="Client 7 does not exist"):
        two.pipe_in(f"terminate_client {server} 7")
    with pytest.raises(CommandRefused, match="active clients"):
        two.pipe_in(f"shutdown_server {server}")
    two.pipe_in(f"shutdown_server {server} -f")
    assert two.pipe_in("", "get_server_list") == ""


def test_the_daemon_of_protocol_2_has_the_devices_of_its_environment_in_that_order(tmp_path):
    daemon = Daemon(tmp_path, 2, devices=("1", "0"))
    daemon.pipe_in("set_default_device_pinned_mem_limit 0 1G")
    by_gpu = daemon.attach(None)["memory_bytes_by_gpu"]
    assert list(by_gpu) == daemon.gpus[::-1]


def test_without_several_users_they_take_turns(tmp_path):
    daemon = Daemon(tmp_path, 2, multiuser=False)
    daemon.attach(None, pid=1, uid=1000)
    with pytest.raises(CommandRefused, match="the server of another user is busy"):
        daemon.attach(None, pid=2, uid=2000)
    daemon.gone(1)
    assert daemon.attach(None, pid=2, uid=2000)["server"] == "uid_2000"
    with pytest.raises(CommandRefused, match="running already"):
        daemon.pipe_in("start_server -uid 2000")
    with pytest.raises(CommandRefused, match="Insufficient privileges"):
        daemon.pipe_in("get_server_list", uid=2000)


@pytest.mark.parametrize(
    ("size", "text"),
    [(None, "unlimited"), (5 << 30, "5G"), (1536 << 20, "1536M"), (1024, "1K"), (7, "7")],
)
def test_sizes_are_printed_in_the_largest_unit(size, text):
    assert format_memory(size) == text


def test_the_facts_of_a_host_are_those_of_its_working_gpus(tmp_path):
    gpus = [h100("1b", fails="GPU_IS_LOST"), h100("43")]
    daemon = Daemon(tmp_path, 3, gpus=gpus)
    assert len(daemon.gpus) == 1
    daemon.node.change(driver="not-loaded")
    daemon.node.live.current()
    assert (daemon.node.root / FACTS_FILE).exists()
    assert read_host(daemon.node.root).gpus == ()

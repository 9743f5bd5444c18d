"""What the driver's MPS program is told, and what its answers mean, in both protocols."""

import doctest
import tomllib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.base.errors import CommandFailed, NodeError, SettingsError
from dra_driver.k8s.claims import ClaimUid
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mps import (
    MpsClient,
    MpsLimits,
    MpsNamespace,
    MpsNamespaceName,
    MpsPriority,
    MpsServerName,
    mps_server_name,
)
from dra_driver.node.mps import formats, protocol2
from dra_driver.node.mps.daemon import ControlDaemon, check_directory
from dra_driver.node.mps.formats import daemon_config
from dra_driver.node.mps.protocol2 import limits_text
from dra_driver.node.mps.protocol3 import (
    NamespaceRow,
    limits_match,
    parse_clients,
    parse_namespaces,
    says_unknown,
)

GIB = 1 << 30
GPUS = (GpuUuid("GPU-0"), GpuUuid("GPU-1"))


def namespace(name="c_1", memory=None, **more) -> MpsNamespace:
    sizes = (memory,) * len(GPUS)
    return MpsNamespace(MpsNamespaceName(name), ClaimUid("u"), GPUS, memory_bytes=sizes, **more)


NO_LIMIT = MpsLimits()


def daemon(default_limits=NO_LIMIT, protocol=3) -> ControlDaemon:
    return ControlDaemon(MpsServerName("s1"), GPUS, protocol, "/m/s1", "t" * 32, default_limits)


def test_the_configuration_names_the_gpus_and_each_namespace_with_its_limits():
    namespaces = [
        namespace("c_2", 5 * GIB, percent=30, priority=MpsPriority.BELOW_NORMAL),
        namespace("c_1", percent=70),
    ]

    assert tomllib.loads(daemon_config(daemon(), namespaces)) == {
        "schema_version": "1.0",
        "servers": {
            "gpu": {
                "allowed_devices": "GPU-0,GPU-1",
                "namespaces": {
                    "default": {"active_thread_percentage": "1", "client_priority": "0"},
                    "c_1": {"active_thread_percentage": "70", "client_priority": "0"},
                    "c_2": {
                        "active_thread_percentage": "30",
                        "pinned_memory_limit": "5120M",
                        "client_priority": "1",
                    },
                },
            }
        },
        "features": {"context-share": {"enabled": False}},
    }


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_whatever_a_name_holds_the_configuration_says_that_and_nothing_else(name):
    config = tomllib.loads(daemon_config(daemon(), [namespace(name)]))

    assert config["servers"]["gpu"]["namespaces"].keys() == {"default", name}
    assert config.keys() == {"schema_version", "servers", "features"}


def test_the_same_namespaces_make_the_same_configuration_in_any_order():
    first, second = namespace("c_1"), namespace("c_2")

    assert daemon_config(daemon(), [first, second]) == daemon_config(daemon(), [second, first])


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(
            "default,gpu,Ready,unlimited,1.00,0,/m/default\nc_1,gpu,Ready,4G,30.00,1,/m/c_1\n",
            id="as it is asked for",
        ),
        pytest.param(
            "default, gpu, Ready, -, 1, 0, /m/default\nc_1, gpu, Ready, 4096M, 30%, 1, /m/c_1\n",
            id="with blanks and other units",
        ),
        pytest.param(
            "name,server,server-status,pinned-memory-limit,active-thread-percentage,"
            "client-priority,pipe_directory\n"
            "default,gpu,Ready,unlimited,1.00,0,/m/default\n"
            "c_1,gpu,Ready,4.00G,30.00,1,/m/c_1\n",
            id="with a head, and an underscore in it",
        ),
        pytest.param(
            "| Pipe Directory | Name | Server | Server Status | Pinned Memory Limit "
            "| Active Thread Percentage | Client Priority |\n"
            "|----------------|------|--------|---|---|---|---|\n"
            "| /m/default | default | gpu | Ready | unlimited | 1.00 | 0 |\n"
            "| /m/c_1 | c_1 | gpu | Ready | 4G | 30.00 | 1 |\n",
            id="as a table, in another order",
        ),
    ],
)
def test_a_list_of_namespaces_is_understood(text):
    assert parse_namespaces(text) == [
        NamespaceRow("default", "Ready", MpsLimits(1), "/m/default"),
        NamespaceRow("c_1", "Ready", MpsLimits(30, 4 * GIB), "/m/c_1"),
    ]


@pytest.mark.parametrize("text", ["what is that?", "c_1,gpu,Ready,much,30,0,/m", "c_1,gpu,Ready"])
def test_what_is_no_list_of_namespaces_is_an_error_that_shows_it(text):
    with pytest.raises(NodeError, match=f"no list of MPS namespaces.*{text[:8]}"):
        parse_namespaces(text)


def test_a_client_on_two_gpus_is_one_and_a_command_may_hold_commas():
    text = "4711,gpu,0,c_1,python -c a,b\n4711,gpu,1,c_1,python -c a,b\n12,gpu,0,default,x\n"

    assert parse_clients(text) == (
        MpsClient(12, MpsNamespaceName("default")),
        MpsClient(4711, MpsNamespaceName("c_1")),
    )


def test_nobody_is_no_client():
    assert parse_clients("") == ()


@pytest.mark.parametrize("name", ["a\nb", "a\n\n9", 'a\n"b\rc', "a\x0b7,x", "a\n12,b,c"])
def test_a_program_that_calls_itself_by_several_lines_spoils_no_list_of_clients(name):
    text = f"12,gpu,0,c_1,{name}\n4711,gpu,0,c_2,python\n"

    assert parse_clients(text) == (
        MpsClient(12, MpsNamespaceName("c_1")),
        MpsClient(4711, MpsNamespaceName("c_2")),
    )


def test_what_is_no_list_of_clients_is_an_error():
    with pytest.raises(NodeError, match="no list of MPS clients"):
        parse_clients("Server is not ready")


FORGED = [
    "hello",
    ",,,,",
    "99999999999999999999x,gpu,0,c_1,x",
    "pid,server,device,namespace,command",
    "command,namespace,device,server,pid",
    "| Server | PID |",
    '"',
    "a\rb\0c\x0b\u2028d",
    "x" * 200_000,
]


@pytest.mark.parametrize("forged", FORGED)
def test_a_process_whose_name_has_line_feeds_forges_no_fault_of_its_server(forged):
    """For which all its clients would be ended."""
    text = f"4711,gpu,0,c_1,a\n{forged}\n4712,gpu,0,c_2,b\n"

    assert parse_clients(text) == (
        MpsClient(4711, MpsNamespaceName("c_1")),
        MpsClient(4712, MpsNamespaceName("c_2")),
    )


@given(st.lists(st.text(max_size=20), min_size=1))
def test_whatever_processes_are_called_a_list_of_clients_is_one(names):
    lines = [f"{pid},gpu,0,c_1,{name}" for pid, name in enumerate(names, 10**9)]
    pids = {client.pid for client in parse_clients("\n".join(lines))}

    assert {10**9 + place for place in range(len(names))} <= pids


def test_what_a_daemon_says_of_others_is_not_told_with_the_error(caplog):
    with pytest.raises(NodeError) as raised:
        parse_clients("who runs train.py of team-b?")

    assert "train.py" not in str(raised.value)
    assert "train.py" in caplog.records[0].said


@pytest.mark.parametrize(
    ("limits", "same"),
    [
        (MpsLimits(30, 5000 << 20), True),
        (MpsLimits(30, formats.parse_size("4.88G")), True),
        (MpsLimits(31, 5000 << 20), False),
        (MpsLimits(30, 5100 << 20), False),
        (MpsLimits(30), False),
    ],
)
def test_limits_are_alike_but_for_rounding(limits, same):
    assert limits_match(limits, MpsLimits(30, 5000 << 20)) is same


@given(st.integers(1, 1 << 24))
def test_a_size_that_is_written_is_read_as_the_same(mib):
    assert formats.parse_size(formats.format_size(mib << 20)) == mib << 20


@given(st.integers(1 << 20, 1 << 44))
def test_a_size_is_never_written_as_more_than_it_is(size):
    assert 0 <= size - formats.parse_size(formats.format_size(size)) < 1 << 20


def test_the_defaults_of_protocol_2_are_set_by_index_and_asked_for():
    assert limits_text(daemon(MpsLimits(50, 2 * GIB), 2)) == (
        "set_default_device_pinned_mem_limit 0 2048M\n"
        "set_default_device_pinned_mem_limit 1 2048M\n"
        "set_default_active_thread_percentage 50\n"
        "get_default_active_thread_percentage\n"
    )


def test_a_mig_instance_is_the_first_device_of_its_server():
    over = replace(daemon(MpsLimits(50, 2 * GIB), 2), gpus=(GpuUuid("MIG-1"),))

    assert limits_text(over).splitlines()[0] == "set_default_device_pinned_mem_limit 0 2048M"


def test_without_a_limit_protocol_2_is_told_the_percentage_alone():
    assert limits_text(daemon(protocol=2)).splitlines()[0] == (
        "set_default_active_thread_percentage 100"
    )


def test_a_directory_that_is_just_short_enough_makes_paths_of_83_characters():
    longest = "/" + "m" * 32
    check_directory(longest)

    assert len(f"{longest}/{mps_server_name(())}/pipe/gpu/c_{'0' * 24}") == 83


@pytest.mark.parametrize(
    ("directory", "message"),
    [
        ("/" + "m" * 33, r"has 34 characters, and at most 33 are possible"),
        ("/" + "ü" * 20, "at most 33"),
        ("run/mps", "no absolute path"),
    ],
)
def test_a_directory_that_sockets_cannot_be_in_is_refused(directory, message):
    with pytest.raises(SettingsError, match=message):
        check_directory(directory)


@pytest.mark.parametrize("module", [formats, protocol2])
def test_the_examples_in_the_docs_hold(module):
    assert doctest.testmod(module).failed == 0


SAID_OF_NO_SERVER = [
    "Server 'gpu' does not exist",
    "Error: no such server",
    "server gpu not found",
    "Unknown server: gpu",
]


@pytest.mark.parametrize("output", SAID_OF_NO_SERVER)
def test_a_server_that_the_program_does_not_know_is_not_there(output):
    assert says_unknown(CommandFailed(f"namespace list --server=gpu failed: {output}", output))


@pytest.mark.parametrize(
    "error",
    [
        CommandFailed(
            "client list --server=gpu failed: Client 12 not found", "Client 12 not found"
        ),
        CommandFailed("list --server=gpu failed: file does not exist", "file does not exist"),
        CommandFailed("list --server=gpu failed: it said nothing", "it said nothing"),
        NodeError("cannot run nvidia-cuda-mps-control namespace list --server=gpu: not found"),
    ],
)
def test_that_something_else_is_not_there_says_nothing_of_a_server(error):
    assert not says_unknown(error)

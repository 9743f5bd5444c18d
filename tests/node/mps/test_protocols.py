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
    assert parse_clients("") == ()


FORGED = [
    "hello",
    ",,,,",
    "99999999999999999999x,gpu,0,c_1,x",
    "pid,server,device,namespace,command",
    "command,namespace,device,server,pid",
    "| Server | PID |",
    '"',
    "a\rb\0c\x0b7,\u2028d",
    "x" * 200_000,
    "b",
    "\n9",
    '"b\rc',
    "12,b,c",
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


def test_what_is_no_list_of_clients_is_an_error_that_says_nothing_of_others(caplog):
    with pytest.raises(NodeError, match="no list of MPS clients") as raised:
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


@given(st.integers(1 << 20, 1 << 44))
def test_a_size_is_written_as_whole_mib_and_never_as_more_than_it_is(size):
    assert formats.parse_size(formats.format_size(size)) == size >> 20 << 20


@pytest.mark.parametrize(
    ("gpus", "limits", "lines"),
    [
        (
            GPUS,
            MpsLimits(50, 2 * GIB),
            (
                "set_default_device_pinned_mem_limit 0 2048M",
                "set_default_device_pinned_mem_limit 1 2048M",
                "set_default_active_thread_percentage 50",
            ),
        ),
        (
            (GpuUuid("MIG-1"),),
            MpsLimits(40, 2 * GIB),
            (
                "set_default_device_pinned_mem_limit 0 2048M",
                "set_default_active_thread_percentage 40",
            ),
        ),
        (GPUS, NO_LIMIT, ("set_default_active_thread_percentage 100",)),
    ],
)
def test_the_defaults_of_protocol_2_are_set_by_index_and_asked_for(gpus, limits, lines):
    text = limits_text(replace(daemon(limits, 2), gpus=gpus))

    assert text.splitlines() == [*lines, "get_default_active_thread_percentage"]


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

    longest = "/" + "m" * 32  # sockets in it have paths of 83 characters
    check_directory(longest)
    assert len(f"{longest}/{mps_server_name(())}/pipe/gpu/c_{'0' * 24}") == 83


@pytest.mark.parametrize("module", [formats, protocol2])
def test_the_examples_in_the_docs_hold(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("error", "is_unknown"),
    [
        *(
            (CommandFailed(f"namespace list --server=gpu failed: {output}", output), True)
            for output in (
                "Server 'gpu' does not exist",
                "Error: no such server",
                "server gpu not found",
                "Unknown server: gpu",
            )
        ),
        *(
            (CommandFailed(f"client list --server=gpu failed: {output}", output), False)
            for output in ("Client 12 not found", "file does not exist", "it said nothing")
        ),
        (NodeError("cannot run nvidia-cuda-mps-control list --server=gpu: not found"), False),
    ],
)
def test_only_what_the_program_says_of_its_server_means_that_there_is_none(error, is_unknown):
    assert says_unknown(error) is is_unknown

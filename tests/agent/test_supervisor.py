"""What is asked of the agent, and how it looks after what it serves."""

import itertools
import json
import threading
from functools import partial

import pytest

from dra_driver.agent.run import run_concurrently
from dra_driver.base.codec import RELEASE
from dra_driver.base.errors import MpsStateUnknown, NodeError, TimedOut
from dra_driver.model.mps import MpsClient, MpsNamespaceName, MpsPriority, mps_server_name
from tests.agent.conftest import (
    INSTANCE,
    ONE,
    OVER_ONE,
    TWO,
    Blocking,
    Host,
    limits_of,
    names,
    namespace,
    raising,
    the_server,
)
from tests.waiting import eventually

NAME = OVER_ONE


@pytest.fixture
def older(mps_dir):
    """A host whose driver has protocol 2 only."""
    return Host(mps_dir, newest=2)


def test_a_namespace_is_served_with_its_limits(host, agent):
    expected = namespace("c_1", percent=30, mib=1024)

    served = agent.serve(expected)

    assert served.namespace == expected
    assert served.protocol == 3
    assert served.pipe_directory == f"{host.directory}/{NAME}/pipe/gpu/c_1"
    assert served.shm_directory == ""
    assert host.granted(agent) == {"c_1": limits_of(30, 1024), "a spare": limits_of(30, 1024)}


def test_namespaces_on_the_same_gpus_share_a_server_that_ends_with_the_last(host, agent):
    agent.serve(namespace("c_1", percent=30))
    agent.serve(namespace("c_2", percent=70))

    assert the_server(agent).ready
    assert names(agent) == ["c_1", "c_2"]
    assert host.granted(agent) == {"c_1": limits_of(30), "c_2": limits_of(70)}
    agent.release("c_1")
    assert host.granted(agent) == {"c_2": limits_of(70)}
    agent.release("c_2")
    assert (host.left(), agent.status().servers) == ([], ())


def test_another_set_of_gpus_has_a_server_of_its_own_in_whatever_order_they_come(host, agent):
    agent.serve(namespace("c_1", ONE))
    agent.serve(namespace("c_2", TWO, ONE))
    agent.serve(namespace("c_3", ONE, TWO))

    assert {server.gpus: len(server.namespaces) for server in agent.status().servers} == {
        (ONE,): 1,
        (TWO, ONE): 2,  # in the order of the first: clients count them by index
    }


def test_the_same_namespace_again_is_the_same_answer_and_nothing_is_done(host, agent):
    first = agent.serve(namespace())
    before = list(host.daemons.calls)

    assert agent.serve(namespace()) == first
    # The rules of the node are not its limits.
    assert agent.serve(namespace(default_limits=limits_of(90))) == first
    assert host.daemons.calls == before


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(namespace(percent=60), id="more multiprocessors"),
        pytest.param(namespace(mib=100), id="a memory limit"),
        pytest.param(namespace("c_1", TWO), id="another GPU"),
        pytest.param(namespace(priority=MpsPriority.BELOW_NORMAL), id="another priority"),
    ],
)
def test_a_namespace_with_other_limits_under_the_same_name_is_refused(host, agent, other):
    agent.serve(namespace())

    with pytest.raises(NodeError, match=r"c_1 of claim uid-c_1 exists already with other limits"):
        agent.serve(other)

    assert [namespace.namespace for namespace in agent.status().namespaces()] == [namespace()]


def test_releasing_what_nobody_knows_is_fine(agent):
    agent.release("c_9")
    agent.terminate("c_9", [1])


@pytest.mark.parametrize(
    ("field", "broken", "message"),
    [("absent", {ONE}, "no such GPU"), ("newest", 0, "has no nvidia-cuda-mps-control")],
)
def test_a_server_that_cannot_be_started_leaves_nothing(host, agent, field, broken, message):
    works = getattr(host.daemons, field)
    setattr(host.daemons, field, broken)

    with pytest.raises(NodeError, match=message):
        agent.serve(namespace())

    assert host.left() == []
    setattr(host.daemons, field, works)
    assert agent.serve(namespace()).namespace == namespace()


def test_a_namespace_that_cannot_be_added_leaves_nothing_at_once(host, agent):
    agent.serve(namespace("c_1"))
    agent.serve(namespace("c_2"))  # which takes the spare
    host.daemons.of(NAME).namespaces["c_3"] = limits_of(99)  # somebody else's, under that name

    with pytest.raises(NodeError, match="has other limits"):
        agent.serve(namespace("c_3"))

    assert host.granted(agent) == {"c_1": limits_of(50), "c_2": limits_of(50)}
    assert names(agent) == ["c_1", "c_2"]


def test_clients_are_reported_with_their_namespace_once_a_second_and_can_be_ended(host, agent):
    agent.serve(namespace())
    clients = [MpsClient(pid, MpsNamespaceName("c_1")) for pid in (71, 72)]
    host.connect(agent, 71, "c_1")
    host.seconds += 1

    assert the_server(agent).clients == (clients[0],)
    host.connect(agent, 72, "c_1")
    assert the_server(agent).clients == (clients[0],)
    host.seconds += 1
    assert the_server(agent).clients == tuple(clients)
    agent.terminate("c_1", [71, 99])
    assert host.daemons.of(NAME).clients == {clients[1]}


def test_a_server_whose_daemon_died_is_started_again_with_everything_in_it(host, agent):
    agent.serve(namespace("c_1", percent=30))
    agent.serve(namespace("c_2", percent=70))
    host.connect(agent, 71, "c_1")
    host.pass_time(agent, 13)
    host.daemons.crash(NAME)

    host.pass_time(agent, 5)

    server = the_server(agent)
    assert (server.ready, server.restarts, server.clients) == (True, 1, ())
    limits = {"c_1": limits_of(30), "c_2": limits_of(70), "a spare": limits_of(70)}
    assert host.granted(agent) == limits
    (incident,) = agent.status().incidents
    assert incident.number == 1
    assert (incident.server, incident.namespaces, incident.clients) == (NAME, ("c_1", "c_2"), 1)
    assert incident.reason == "its daemon was gone"
    assert incident.at == host.seconds + 1e9


def test_a_server_that_is_not_well_twice_in_a_row_is_started_again(host, agent):
    agent.serve(namespace())
    host.daemons.of(NAME).faulty = True

    host.pass_time(agent, 13)
    server = the_server(agent)
    assert (server.ready, server.restarts) == (False, 0)
    assert server.reason
    seconds = agent.maintain()
    assert seconds is not None
    host.pass_time(agent, seconds)

    server = the_server(agent)
    assert (server.ready, server.restarts, server.reason) == (True, 1, "")


def seconds_to_restart(host, agent, seconds):
    """With a check every second; None: it was not started again."""
    for passed in range(seconds):
        if the_server(agent).restarts:
            return passed
        host.pass_time(agent, 1)
    return None


def test_a_server_that_says_nothing_is_started_again_after_a_quarter_of_a_minute(host, agent):
    agent.serve(namespace())
    host.connect(agent, 71, "c_1")
    host.daemons.of(NAME).unanswering = True
    host.pass_time(agent, 13)  # asked for the first time

    assert not the_server(agent).ready
    assert "does not answer" in the_server(agent).reason
    assert seconds_to_restart(host, agent, 60) == 15


def test_a_server_that_answers_in_between_is_not_silent(host, agent):
    """An overloaded node makes every daemon slow."""
    agent.serve(namespace())
    server = host.daemons.of(NAME)
    for _ in range(5):
        server.unanswering = True
        assert seconds_to_restart(host, agent, 14) is None
        server.unanswering = False
        host.pass_time(agent, 13)
        assert the_server(agent).ready

    assert agent.status().incidents == ()


def test_few_questions_are_no_silence_however_long_they_took(host, agent):
    agent.serve(namespace())
    host.daemons.of(NAME).unanswering = True
    host.pass_time(agent, 13)
    host.pass_time(agent, 100)
    assert agent.status().incidents == ()
    host.pass_time(agent, 1)

    assert len(agent.status().incidents) == 1


@pytest.mark.parametrize("also", ["nothing else", "its daemon died"])
def test_a_server_that_cannot_be_asked_is_left_alone(host, agent, also):
    """While the driver's container is replaced there is no program to ask with."""
    agent.serve(namespace())
    host.connect(agent, 71, "c_1")
    host.daemons.unaskable = "the driver is gone"
    before = len(host.daemons.calls)
    if also != "nothing else":
        host.daemons.crash(NAME)
    for _ in range(40):
        host.pass_time(agent, 2)

    server = the_server(agent)
    assert not server.ready
    assert "the driver is gone" in server.reason
    assert not {f"kill {NAME}", f"start {NAME}"} & set(host.daemons.calls[before:])
    host.daemons.unaskable = ""
    host.pass_time(agent, 61)
    server = the_server(agent)
    assert (server.ready, server.restarts) == (True, int(also != "nothing else"))


def test_a_faulty_server_is_not_ended_before_there_is_a_driver_to_start_it_with(host, agent):
    agent.serve(namespace())
    host.daemons.of(NAME).faulty = True
    host.pass_time(agent, 13)
    host.daemons.newest = 0
    for _ in range(5):
        host.pass_time(agent, 61)

    assert f"kill {NAME}" not in host.daemons.calls
    assert host.daemons.of(NAME)
    assert "has no nvidia-cuda-mps-control" in the_server(agent).reason
    host.daemons.newest = 3
    host.pass_time(agent, 61)
    assert the_server(agent).ready


def test_processes_that_cannot_be_looked_at_are_not_taken_for_gone(host, agent):
    agent.serve(namespace())
    is_running = host.daemons.is_running
    host.daemons.is_running = raising(MpsStateUnknown("no file is free"))
    for _ in range(5):
        host.pass_time(agent, 13)
    assert "no file is free" in the_server(agent).reason
    host.daemons.is_running = is_running
    host.pass_time(agent, 13)

    assert the_server(agent).ready
    assert agent.status().incidents == ()


@pytest.mark.parametrize(
    ("error", "ready"),
    [
        pytest.param(TimedOut("no answer"), False, id="the daemon does not answer"),
        pytest.param(NodeError("ask again"), True, id="clients need more time"),
    ],
)
def test_a_client_that_is_not_ended_in_time_restarts_no_server(host, agent, error, ready):
    agent.serve(namespace())
    host.connect(agent, 71, "c_1")
    host.daemons.terminate = raising(error)

    with pytest.raises(type(error), match=str(error)):
        agent.terminate("c_1", [71])
    agent.maintain()

    assert the_server(agent).ready is ready
    assert agent.status().incidents == ()


def test_a_restart_that_hangs_does_not_delay_the_check_of_others(host):
    agent = host.agent(partial(run_concurrently, seconds=0.05))
    agent.serve(namespace("c_1", ONE))
    agent.serve(namespace("c_2", TWO))
    blocking = host.daemons.start = Blocking(host.daemons.start)
    host.daemons.crash(NAME)
    host.pass_time(agent, 5)
    assert blocking.begun.wait(60)
    waiting = threading.active_count()

    for _ in range(3):
        host.pass_time(agent, 13)

    assert threading.active_count() == waiting
    assert host.daemons.calls.count(f"check {mps_server_name([TWO])}") == 3
    assert agent.problem(20) is None
    blocking.go_on.set()
    eventually(lambda: all(server.ready for server in agent.status().servers))


def test_logs_are_kept_short_once_a_minute(host, agent):
    agent.serve(namespace())
    for _ in range(21):
        host.pass_time(agent, 6)

    assert host.daemons.trimmed == [NAME] * 3


def test_a_server_that_is_well_is_not_asked_at_every_look(host, agent):
    agent.serve(namespace())
    before = len(host.daemons.calls)

    host.pass_time(agent, 5)
    host.pass_time(agent, 5)
    assert len(host.daemons.calls) == before
    host.pass_time(agent, 5)

    assert host.daemons.calls[before:] == [f"check {NAME}"]


def test_a_client_that_cannot_be_ended_ends_with_its_server_which_is_reported(host, agent):
    woken = []
    agent.on_problem = lambda: woken.append(True)
    agent.serve(namespace("c_1"))
    agent.serve(namespace("c_2"))
    host.connect(agent, 71, "c_1")
    host.daemons.of(NAME).hanging = True

    agent.terminate("c_1", [71])
    assert woken
    assert not the_server(agent).ready
    (incident,) = agent.status().incidents
    assert incident.reason == "a client could not be ended", "not whose: the others read it too"
    agent.maintain()

    assert the_server(agent).ready
    assert agent.status().incidents == (incident,)
    assert (incident.namespaces, incident.clients) == (("c_1", "c_2"), 1)


def test_a_restart_that_fails_is_tried_again_later_and_later(host, agent):
    agent.serve(namespace())
    host.daemons.crash(NAME)
    host.daemons.absent = {ONE}
    tries = []
    for _ in range(200):
        before = host.daemons.calls.count(f"start {NAME}")
        host.pass_time(agent, 1)
        if host.daemons.calls.count(f"start {NAME}") > before:
            tries.append(host.seconds)

    pauses = [round(after - before) for before, after in itertools.pairwise(tries)]
    assert pauses == [5, 10, 20, 40, 60, 60]
    server = the_server(agent)
    assert not server.ready
    assert "its daemon was gone" in server.reason
    assert "no such GPU" in server.reason
    assert len(agent.status().incidents) == 1  # clients were lost once


def test_a_request_makes_it_try_at_once(host, agent):
    agent.serve(namespace("c_1"))
    host.daemons.crash(NAME)
    host.daemons.absent = {ONE}
    host.pass_time(agent, 5)

    with pytest.raises(NodeError, match=r"over GPU-1 does not come back: .*no such GPU"):
        agent.serve(namespace("c_2"))
    host.daemons.absent = set()
    agent.serve(namespace("c_2"))

    assert the_server(agent).ready
    assert names(agent) == ["c_1", "c_2"]


@pytest.mark.parametrize("wedged", [False, True])
def test_what_is_released_while_its_server_does_not_work_does_not_come_back(host, agent, wedged):
    agent.serve(namespace("c_1"))
    agent.serve(namespace("c_2"))
    if wedged:
        host.daemons.of(NAME).unanswering = True
        with pytest.raises(TimedOut):
            agent.release("c_1")
    else:
        host.daemons.crash(NAME)
        agent.release("c_1")
    assert names(agent) == ["c_2"]
    for _ in range(16):
        host.pass_time(agent, 1)

    agent.release("c_1")
    assert host.granted(agent) == {"c_2": limits_of(50), "a spare": limits_of(50)}


def test_limits_that_a_tenant_raised_are_set_again_and_its_clients_are_ended(host, agent):
    agent.serve(namespace("c_1", percent=30, mib=1024))
    agent.serve(namespace("c_2", percent=40, mib=1024))
    host.connect(agent, 71, "c_1")
    host.connect(agent, 72, "c_2")
    raised = MpsNamespaceName(host.daemon_names(agent)["c_2"])
    host.daemons.of(NAME).namespaces[raised] = limits_of(100, 2048)
    before = len(host.daemons.calls)

    host.pass_time(agent, 13)

    assert host.granted(agent)["c_2"] == limits_of(40, 1024)
    assert the_server(agent).clients == (
        MpsClient(71, MpsNamespaceName("c_1")),
        MpsClient(72, MpsNamespaceName("c_2")),
    )  # as they were seen
    assert {client.pid for client in host.daemons.of(NAME).clients} == {71}
    # Containers have its directory mounted: it stays the same.
    assert f"remove_namespace {NAME}" not in host.daemons.calls[before:]
    (incident,) = agent.status().incidents
    assert (incident.namespaces, incident.clients) == (("c_2",), 1)
    assert incident.reason == (
        "its limits were changed: 100 % and 2048 MiB instead of 40 % and 1024 MiB"
    )


@pytest.mark.parametrize(
    ("pids", "restored"),
    [
        pytest.param([72, 73], True, id="some"),
        pytest.param(range(72, 99), False, id="they never stay away"),
    ],
)
def test_clients_that_come_back_while_limits_are_set_are_ended_but_not_without_end(
    host, agent, pids, restored
):
    agent.serve(namespace("c_1"))
    host.daemons.of(NAME).namespaces["c_1"] = limits_of(100)
    terminate, coming = host.daemons.terminate, list(pids)

    def meanwhile(daemon, pids):
        terminate(daemon, pids)
        if coming:
            host.connect(agent, coming.pop(0), "c_1")

    host.daemons.terminate = meanwhile
    host.pass_time(agent, 13)

    assert host.granted(agent)["c_1"] == limits_of(50 if restored else 100)
    assert len(host.daemons.of(NAME).clients) == (0 if restored else 1)
    assert len(agent.status().incidents) == 1


def test_limits_are_restored_by_a_restart_where_a_client_cannot_be_ended(host, agent):
    agent.serve(namespace("c_1"))
    host.connect(agent, 71, "c_1")
    host.daemons.of(NAME).namespaces["c_1"] = limits_of(100)
    host.daemons.of(NAME).hanging = True

    host.pass_time(agent, 13)
    host.pass_time(agent, 1)

    assert host.granted(agent)["c_1"] == limits_of(50)
    changed, restarted = agent.status().incidents
    assert changed.reason.startswith("its limits were changed")
    assert restarted.reason.startswith("a client could not be ended")
    assert restarted.clients == 1


def test_limits_are_not_set_again_for_ever(host, agent):
    """Should this driver write them in a way that is read wrongly, claims have to go on."""
    agent.serve(namespace("c_1"))
    for _ in range(10):
        host.daemons.of(NAME).namespaces["c_1"] = limits_of(100)
        host.pass_time(agent, 13)

    assert len(agent.status().incidents) == 3


def test_a_removed_namespace_is_created_again_and_an_unknown_one_removed(host, agent):
    agent.serve(namespace("c_1"))
    host.daemons.of(NAME).namespaces = {"unknown": limits_of(100)}

    host.pass_time(agent, 13)

    assert host.granted(agent) == {"c_1": limits_of(50), "a spare": limits_of(50)}
    assert "unknown" not in host.daemons.of(NAME).namespaces
    assert agent.status().incidents[0].reason == "it was removed"


def test_protocol_2_has_one_directory_for_all_and_the_most_that_a_claim_can_have(older):
    most = limits_of(80, 4096)
    served = older.agent().serve(namespace(percent=30, mib=1024, default_limits=most))

    assert (served.protocol, served.pipe_directory) == (2, f"{older.directory}/{NAME}/pipe")
    assert served.shm_directory == f"{older.directory}/{NAME}/shm"
    assert older.daemons.of(NAME).daemon.default_limits == most


@pytest.mark.parametrize("newest", [2, 3])
def test_an_instance_is_served_with_protocol_2_whatever_the_driver_knows(mps_dir, newest):
    host, over_instance = Host(mps_dir, newest), mps_server_name([INSTANCE])
    agent = host.agent()
    assert agent.serve(namespace("c_1", INSTANCE)).protocol == 2
    assert agent.serve(namespace("c_2", ONE)).protocol == newest

    host.daemons.crash(over_instance)
    host.pass_time(agent, 5)

    (server,) = (server for server in agent.status().servers if server.name == over_instance)
    assert (server.ready, server.protocol, server.restarts) == (True, 2, 1)
    daemon = host.daemons.of(over_instance).daemon
    assert (daemon.gpus, daemon.protocol) == ((INSTANCE,), 2)


def test_a_release_says_that_a_server_still_holds_an_instance_and_ends_it_when_repeated(
    host, agent
):
    """Whoever removes the instance after that finds it free."""
    agent.serve(namespace("c_1", INSTANCE))
    host.daemons.stuck = {INSTANCE}

    with pytest.raises(TimedOut, match="do not end"):
        agent.release("c_1")
    assert not the_server(agent).ready

    host.daemons.stuck = set()
    agent.release("c_1")
    assert host.left() == []
    # Created again, the instance has the same UUID.
    assert agent.serve(namespace("c_2", INSTANCE)).protocol == 2
    assert the_server(agent).restarts == 0


def test_a_claim_that_needs_more_restarts_a_server_without_clients(older):
    agent = older.agent()
    agent.serve(namespace("c_1", percent=30, mib=1024, default_limits=limits_of(30, 1024)))

    agent.serve(namespace("c_2", percent=60, mib=2048, default_limits=limits_of(60, 2048)))

    assert older.daemons.of(NAME).daemon.default_limits == limits_of(60, 2048)
    (incident,) = agent.status().incidents
    assert incident.namespaces == ("c_1",)
    assert names(agent) == ["c_1", "c_2"]


def test_a_claim_that_needs_more_is_refused_while_others_compute(older):
    agent = older.agent()
    agent.serve(namespace("c_1", percent=30, default_limits=limits_of(30)))
    older.connect(agent, 71, "c_1")

    with pytest.raises(NodeError, match=r"at most 30 % and all memory.*ended \(1 now\)"):
        agent.serve(namespace("c_2", percent=60, default_limits=limits_of(60)))

    assert names(agent) == ["c_1"]
    assert agent.status().incidents == ()


def test_an_older_driver_keeps_the_tenants_apart_that_a_newer_one_served_together(host, agent):
    tenants = {"c_1": "", "c_2": "a", "c_3": "b"}
    namespaces = [namespace(name, tenant=tenant) for name, tenant in tenants.items()]
    for shared in namespaces:
        agent.serve(shared)
    host.daemons.crash(NAME)
    host.daemons.newest = 2

    host.pass_time(agent, 5)
    (served,) = agent.status().namespaces()
    assert served.namespace == namespaces[0]
    assert (served.protocol, served.pipe_directory) == (2, f"{host.directory}/{NAME}/pipe")
    (incident,) = agent.status().incidents
    assert incident.namespaces == ("c_1", "c_2", "c_3"), "their pods are told"

    assert len({agent.serve(shared).pipe_directory for shared in namespaces}) == 3


def test_a_server_of_tenants_alone_ends_where_an_older_driver_would_join_them(host, agent):
    unserved = namespace("c_1", tenant="a")
    agent.serve(unserved)
    host.daemons.crash(NAME)
    host.daemons.newest = 2

    assert agent.serve(unserved).protocol == 2
    assert [server.name for server in agent.status().servers] == [mps_server_name([ONE], "a")]


def test_a_tenant_does_not_join_a_server_that_comes_back_with_protocol_2_just_then(host, agent):
    agent.serve(namespace("c_1"))
    host.daemons.crash(NAME)
    host.daemons.newest = 2

    served = agent.serve(namespace("c_2", tenant="a"))

    assert served.pipe_directory == f"{host.directory}/{mps_server_name([ONE], 'a')}/pipe"
    host.pass_time(agent, 5)
    protocols = {server.name: server.protocol for server in agent.status().servers}
    assert protocols == {NAME: 2, mps_server_name([ONE], "a"): 2}


def test_with_protocol_3_one_server_has_the_tenants_apart(agent):
    served = [agent.serve(namespace(f"c_{tenant}", tenant=tenant)) for tenant in ("", "a", "b")]

    server = the_server(agent)
    assert (server.name, server.tenant) == (NAME, "")
    assert len({state.pipe_directory for state in served}) == 3


@pytest.mark.parametrize("gpu", [ONE, INSTANCE])
def test_with_protocol_2_and_in_instances_each_tenant_has_a_server_of_its_own(mps_dir, gpu):
    host = Host(mps_dir, newest=2 if gpu == ONE else 3)
    agent = host.agent()
    namespaces = [
        namespace(f"c_{number}", gpu, percent=10, tenant=tenant)
        for number, tenant in enumerate(["", "", "a", "a", "b"])
    ]

    served = [agent.serve(namespace) for namespace in namespaces]

    servers = [mps_server_name([gpu], namespace.tenant) for namespace in namespaces]
    assert [endpoint.pipe_directory for endpoint in served] == [
        f"{mps_dir}/{name}/pipe" for name in servers
    ]
    assert [endpoint.shm_directory for endpoint in served] == [
        f"{mps_dir}/{name}/shm" for name in servers
    ]
    assert {
        server.name: (server.tenant, len(server.namespaces)) for server in agent.status().servers
    } == {servers[0]: ("", 2), servers[2]: ("a", 2), servers[4]: ("b", 1)}

    successor = host.agent()
    successor.maintain()
    assert [successor.serve(namespace) for namespace in namespaces] == served
    successor.release(served[0].namespace.name)
    assert sorted(names(successor)) == ["c_1", "c_2", "c_3", "c_4"]
    for endpoint in served:
        successor.release(endpoint.namespace.name)
    assert host.left() == []


def test_one_tenants_needs_restart_no_other_tenants_server(older):
    agent = older.agent()
    agent.serve(namespace("c_1", percent=30, tenant="a", default_limits=limits_of(30)))
    older.daemons.connect(mps_server_name([ONE], "a"), 71, "c_1")

    agent.serve(namespace("c_2", percent=60, tenant="b", default_limits=limits_of(60)))

    older.seconds += 2
    clients = {server.tenant: len(server.clients) for server in agent.status().servers}
    assert clients == {"a": 1, "b": 0}
    assert agent.status().incidents == ()


def test_after_a_newer_driver_came_a_tenant_does_not_join_what_others_share_by_protocol_2(older):
    agent = older.agent()
    shared = agent.serve(namespace("c_1"))
    older.daemons.newest = 3

    assert agent.serve(namespace("c_2", tenant="a")).protocol == 3
    assert agent.serve(namespace("c_1")) == shared
    assert {server.name for server in agent.status().servers} == {NAME, mps_server_name([ONE], "a")}


def test_a_new_agent_finds_what_runs_and_touches_nothing(host, agent):
    served = agent.serve(namespace())
    host.connect(agent, 71, "c_1")
    running = dict(host.daemons.running)

    successor = host.agent()
    successor.maintain()

    assert host.daemons.running == running
    assert tuple(successor.status().namespaces()) == (served,)
    assert successor.status().servers[0].clients == (MpsClient(71, MpsNamespaceName("c_1")),)
    assert successor.status().incidents == ()


def test_incidents_number_on_after_a_restart_of_the_agent_and_the_last_are_kept(host, agent):
    agent.serve(namespace())
    for _ in range(40):
        host.daemons.crash(NAME)
        agent = host.agent()
        agent.maintain()

    assert [incident.number for incident in agent.status().incidents] == list(range(9, 41))


def test_a_directory_that_nothing_is_written_of_is_removed(host):
    (host.directory / NAME / "pipe").mkdir(parents=True)
    (host.directory / "sim").mkdir()

    host.agent()

    assert host.left() == ["sim"]


@pytest.mark.parametrize("how", ["empty", "damaged"])
def test_a_state_that_cannot_be_read_ends_its_server_and_no_other(host, agent, caplog, how):
    agent.serve(namespace("c_1"))
    agent.serve(namespace("c_2", TWO))
    path = host.directory / "state" / f"{NAME}.json"
    document = path.read_text()
    path.write_text("" if how == "empty" else document.replace('"version":1', '"version":2'))

    agent = host.agent()

    assert names(agent) == ["c_2"]
    assert [daemon.daemon.name for daemon in host.daemons.running.values()] == [
        mps_server_name([TWO])
    ]
    assert not (host.directory / NAME).exists()
    assert path.with_suffix(".unreadable").exists()
    (incident,) = agent.status().incidents
    assert (incident.server, incident.number) == (NAME, 1)
    assert incident.reason.startswith("it was ended: what is written in")
    assert "a file is set aside" in caplog.messages
    assert agent.serve(namespace("c_1")).namespace.name == "c_1"
    assert host.agent().status().incidents == (incident,)


def test_a_server_that_only_another_release_understands_runs_on_and_serves_nobody_anew(host, agent):
    agent.serve(namespace("c_1"))
    path = host.directory / "state" / f"{NAME}.json"
    ours = path.read_text()
    theirs = ours.replace(RELEASE, "0.9.0").replace('"namespaces":[', '"namespaces":[{"Star":{}},')
    path.write_text(theirs)

    older = host.agent()
    older.maintain()
    older.release("c_unknown")

    assert (names(older), len(host.daemons.running)) == ([], 1)
    for ask in (lambda: older.serve(namespace("c_2")), lambda: older.release("c_1")):
        with pytest.raises(NodeError, match=f"{NAME} cannot be changed.*release 0.9.0 wrote it"):
            ask()
    assert path.read_text() == theirs

    path.write_text(ours)
    assert names(host.agent()) == ["c_1"]


def test_what_another_release_wrote_of_a_server_outlives_a_change_by_this_one(host, agent):
    agent.serve(namespace("c_1"))
    path = host.directory / "state" / f"{NAME}.json"
    document = json.loads(path.read_text()) | {"release": "0.9.0"}
    document["ServerState"] |= {"colour": "green"}
    document["ServerState"]["namespaces"][0]["colour"] = "red"
    path.write_text(json.dumps(document))

    older = host.agent()
    older.serve(namespace("c_2"))

    state = json.loads(path.read_text())["ServerState"]
    assert (state["colour"], [each.get("colour") for each in state["namespaces"]]) == (
        "green",
        ["red", None],
    )
    assert names(host.agent()) == ["c_1", "c_2"]


@pytest.mark.parametrize("cut", [0, 200])
def test_incidents_that_cannot_be_read_do_not_keep_the_agent_from_starting(host, agent, cut):
    agent.serve(namespace())
    for _ in range(3):
        host.daemons.crash(NAME)
        host.pass_time(agent, 5)
    path = host.directory / "state" / "incidents.json"
    path.write_text(path.read_text()[:-cut] if cut else "")

    for _ in range(2):
        (lost,) = host.agent().status().incidents

    assert lost.number == (1 if not cut else 3)
    assert lost.reason.startswith("what was written of earlier incidents is lost")


def test_what_cannot_be_removed_keeps_no_agent_from_starting_and_is_tried_again(host, agent):
    agent.serve(namespace())
    (host.directory / "state" / f"{NAME}.json").unlink()
    remove_orphan = host.daemons.remove_orphan
    host.daemons.remove_orphan = raising(TimedOut("processes do not end"))

    agent = host.agent()
    with pytest.raises(TimedOut, match="do not end"):
        agent.serve(namespace())
    agent.maintain()
    assert (host.directory / NAME).exists()
    host.daemons.remove_orphan = remove_orphan
    agent.maintain()

    assert host.left() == []
    assert agent.serve(namespace()).namespace == namespace()


def test_a_daemon_leaves_the_container_when_a_later_agent_can_move_it(host, agent):
    host.daemons.detachable = False
    agent.serve(namespace())
    assert agent.servers_in_container == 1
    assert host.agent().servers_in_container == 1
    host.daemons.detachable = True
    assert host.agent().servers_in_container == 0


def test_a_write_that_a_crash_interrupted_is_cleared_up(host, agent):
    (host.directory / "state" / ".half.tmp").write_text("{")

    host.agent()

    assert list((host.directory / "state").iterdir()) == []


def test_daemons_of_others_are_reported_and_left_alone(host, agent):
    host.daemons.others = ("nvidia-cuda-mps-control (process 4711)",)
    agent.serve(namespace())

    agent.maintain()

    assert agent.status().unmanaged == ("nvidia-cuda-mps-control (process 4711)",)


def test_a_daemon_that_was_started_during_the_search_is_nobody_elses(host, agent):
    search = host.daemons.unmanaged

    def meanwhile(tokens):
        agent.serve(namespace())
        return search(tokens)

    host.daemons.unmanaged = meanwhile
    agent.maintain()

    assert agent.status().unmanaged == ()
    host.daemons.unmanaged = search
    host.daemons.others = ("another",)
    agent.maintain()  # without waiting for a minute
    assert agent.status().unmanaged == ("another",)


def test_it_reports_whether_the_servers_are_maintained(host, agent):
    host.daemons.unmanaged = raising(MpsStateUnknown("no file is free"))  # which harms nobody
    assert "not checked yet" in agent.problem(20)
    assert agent.stuck(300) is None
    host.seconds += 301
    assert agent.stuck(300) == "the last round began 301 s ago"
    agent.maintain()
    assert (agent.problem(20), agent.stuck(300)) == (None, None)
    host.seconds += 21
    assert agent.problem(20) == "the last check of the MPS servers ended 21 s ago"


def test_servers_do_not_wait_for_each_other_but_namespaces_of_one_do(host, agent):
    start = host.daemons.start
    blocking = {gpu: Blocking(start) for gpu in (ONE, TWO)}
    host.daemons.start = lambda daemon, namespaces: blocking[daemon.gpus[0]](daemon, namespaces)
    threads = [
        threading.Thread(target=agent.serve, args=(unserved,))
        for unserved in (namespace("c_1", ONE), namespace("c_2", TWO), namespace("c_3", ONE))
    ]
    for thread in threads:
        thread.start()

    assert all(start.begun.wait(60) for start in blocking.values())
    assert len(agent.status().servers) == 2  # a status does not wait either
    for start in blocking.values():
        start.go_on.set()
    for thread in threads:
        thread.join(60)

    assert sum(call.startswith("start") for call in host.daemons.calls) == 2
    assert sorted(names(agent)) == ["c_1", "c_2", "c_3"]


def test_a_bug_in_looking_after_one_server_does_not_keep_it_from_the_others(host, agent):
    agent.serve(namespace("c_1", ONE))
    agent.serve(namespace("c_2", TWO))
    broken_server, well_server = sorted([mps_server_name([ONE]), mps_server_name([TWO])])
    is_running = host.daemons.is_running

    def broken(daemon):
        if daemon.name == broken_server:
            raise ValueError("a bug")
        return is_running(daemon)

    host.daemons.is_running = broken
    host.daemons.crash(well_server)
    host.pass_time(agent, 5)

    restarts = {server.name: server.restarts for server in agent.status().servers}
    assert restarts == {broken_server: 0, well_server: 1}

"""What is kept ready for the next claim, and that nobody has more of it than was asked."""

import pytest

from dra_driver.base.errors import NodeError, TimedOut
from dra_driver.model.mps import MpsClient, MpsNamespaceName, MpsPriority
from tests.agent.conftest import OVER_ONE, Host, limits_of, namespace, the_server


@pytest.fixture
def agent(host):
    """Which serves one namespace, c_1."""
    agent = host.agent()
    agent.serve(namespace("c_1", percent=30, mib=1024))
    return agent


def runs(host):
    """What the daemon was asked since the last time."""
    done = [call.split()[0] for call in host.daemons.calls]
    host.daemons.calls.clear()
    return done


def spare(host, agent):
    """The namespace that nobody has."""
    (name,) = host.daemons.of(OVER_ONE).namespaces.keys() - host.daemon_names(agent).values()
    return name


@pytest.mark.parametrize(
    ("other", "expected_runs"),
    [
        pytest.param({}, [], id="the same limits"),
        pytest.param({"percent": 40}, ["limit_namespace"], id="multiprocessors"),
        pytest.param({"mib": 2048}, ["limit_namespace"], id="memory"),
        pytest.param({"priority": MpsPriority.BELOW_NORMAL}, ["limit_namespace"], id="priority"),
    ],
)
def test_a_namespace_gets_the_spare_with_one_run_of_the_program_at_most(
    host, agent, other, expected_runs
):
    ready = spare(host, agent)
    runs(host)
    unserved = namespace("c_2", **{"percent": 30, "mib": 1024, **other})

    served = agent.serve(unserved)

    assert runs(host) == expected_runs
    assert served.pipe_directory.endswith(f"/gpu/{ready}")
    assert served.namespace == unserved
    assert host.granted(agent) == {"c_1": limits_of(30, 1024), "c_2": unserved.limits}


def test_the_next_is_made_afterwards_with_the_limits_of_the_last(host, agent):
    agent.serve(namespace("c_2", percent=70, mib=2048))
    runs(host)

    agent.make_spares()
    agent.make_spares()

    assert runs(host) == ["add_namespace"]
    assert host.granted(agent)["a spare"] == limits_of(70, 2048)
    agent.serve(namespace("c_3", percent=70, mib=2048))
    assert runs(host) == []
    assert agent.serve(namespace("c_4", percent=20)).pipe_directory.endswith("/gpu/c_4")
    assert runs(host) == ["add_namespace"]
    assert host.granted(agent)["c_4"] == limits_of(20)


def test_a_limit_of_memory_is_not_taken_away_so_what_has_one_is_no_use_without(host, agent):
    runs(host)

    served = agent.serve(namespace("c_2", percent=30))

    assert runs(host) == ["add_namespace"]
    assert served.pipe_directory.endswith("/gpu/c_2")
    assert host.granted(agent)["c_2"] == limits_of(30)
    agent.make_spares()
    assert runs(host) == ["remove_namespace", "add_namespace"]
    assert host.granted(agent)["a spare"] == limits_of(30)
    agent.serve(namespace("c_3", percent=40, mib=100))
    assert host.granted(agent)["c_3"] == limits_of(40, 100)


def test_namespaces_that_the_daemon_calls_otherwise_are_reported_by_their_own_name(host, agent):
    agent.serve(namespace("c_2", mib=2048))
    host.connect(agent, 71, "c_2")
    host.seconds += 2

    assert the_server(agent).clients == (MpsClient(71, MpsNamespaceName("c_2")),)
    agent.terminate("c_2", [71])
    assert host.daemons.of(OVER_ONE).clients == set()
    agent.release("c_2")
    assert host.granted(agent) == {"c_1": limits_of(30, 1024)}


def test_a_restart_keeps_the_directory_of_every_namespace_and_what_is_ready(host, agent):
    served = agent.serve(namespace("c_2", mib=2048))
    agent.make_spares()
    ready = spare(host, agent)
    host.daemons.crash(OVER_ONE)

    host.pass_time(agent, 5)

    assert served in list(agent.status().namespaces())
    assert spare(host, agent) == ready
    assert host.granted(agent) == {
        "c_1": limits_of(30, 1024),
        "c_2": limits_of(50, 2048),
        "a spare": limits_of(50, 2048),
    }


def test_the_next_agent_sets_the_limits_of_what_it_finds(host, agent):
    """The last one may have been killed after it changed them."""
    spare_name = spare(host, agent)
    successor = host.agent()
    host.daemons.of(OVER_ONE).namespaces[spare_name] = limits_of(100)
    runs(host)

    successor.serve(namespace("c_2", percent=30, mib=1024))

    assert runs(host) == ["limit_namespace"]
    assert host.granted(successor)["c_2"] == limits_of(30, 1024)


def test_what_somebody_removed_is_not_given_out_and_is_made_anew(host, agent):
    del host.daemons.of(OVER_ONE).namespaces[spare(host, agent)]

    served = agent.serve(namespace("c_2", mib=2048))

    assert served.pipe_directory.endswith("/gpu/c_2")
    host.pass_time(agent, 13)
    assert host.granted(agent)["a spare"] == limits_of(50, 2048)


def test_limits_of_it_that_somebody_raised_are_given_to_nobody(host, agent):
    raised = spare(host, agent)
    host.daemons.of(OVER_ONE).namespaces[raised] = limits_of(100)

    host.pass_time(agent, 13)

    assert raised not in host.daemons.of(OVER_ONE).namespaces
    assert host.granted(agent)["a spare"] == limits_of(30, 1024)
    assert agent.status().incidents == ()


def test_one_that_somebody_went_into_is_taken_away_and_the_namespace_is_made(host, agent):
    intruded = spare(host, agent)
    host.daemons.connect(OVER_ONE, 99, intruded)

    agent.serve(namespace("c_2", percent=40, mib=1024))

    assert host.granted(agent) == {"c_1": limits_of(30, 1024), "c_2": limits_of(40, 1024)}
    assert host.daemons.of(OVER_ONE).clients == set()


def test_one_whose_limits_could_not_be_set_in_time_is_given_to_nobody(host, agent):
    doubtful = spare(host, agent)
    host.daemons.of(OVER_ONE).unanswering = True
    with pytest.raises(TimedOut):
        agent.serve(namespace("c_2", percent=40, mib=1024))
    host.daemons.of(OVER_ONE).unanswering = False

    served = agent.serve(namespace("c_2", percent=40, mib=1024))

    assert served.pipe_directory.endswith("/gpu/c_2")
    assert doubtful not in host.daemons.of(OVER_ONE).namespaces


def test_a_daemon_that_takes_no_more_namespaces_serves_on(host, agent):
    agent.serve(namespace("c_2", mib=2048))
    add = host.daemons.add_namespace

    def full(daemon, namespace):
        if namespace.name.startswith("n_"):
            raise NodeError("too many namespaces")
        return add(daemon, namespace)

    host.daemons.add_namespace = full
    for _ in range(3):
        agent.make_spares()
        host.pass_time(agent, 13)

    assert host.granted(agent) == {"c_1": limits_of(30, 1024), "c_2": limits_of(50, 2048)}
    assert the_server(agent).ready
    agent.serve(namespace("c_3"))
    host.daemons.add_namespace = add
    agent.make_spares()
    assert "a spare" in host.granted(agent)


def test_limits_that_the_daemon_refused_are_not_those_of_what_comes_next(host, agent):
    limit, add = host.daemons.limit_namespace, host.daemons.add_namespace

    def refuses(then):
        def carry_out(daemon, limits):
            if limits.percent == 99:
                raise NodeError("99 % is refused")
            return then(daemon, limits)

        return carry_out

    host.daemons.limit_namespace, host.daemons.add_namespace = refuses(limit), refuses(add)
    with pytest.raises(NodeError, match="is refused"):
        agent.serve(namespace("c_2", percent=99, mib=1024))

    agent.make_spares()
    assert host.granted(agent) == {"c_1": limits_of(30, 1024), "a spare": limits_of(30, 1024)}


def test_whoever_waits_for_the_server_goes_first(host, agent):
    """Nothing is made ready while somebody else is at it."""
    agent.serve(namespace("c_2", mib=2048))
    terminate = host.daemons.terminate

    def meanwhile(daemon, pids):
        agent.make_spares()
        return terminate(daemon, pids)

    host.daemons.terminate = meanwhile
    runs(host)
    agent.terminate("c_1", [1])

    assert runs(host) == ["terminate"]


def test_protocol_2_needs_none(mps_dir):
    host = Host(mps_dir, newest=2)
    agent = host.agent()
    agent.serve(namespace("c_1"))
    agent.make_spares()
    runs(host)

    agent.serve(namespace("c_2", mib=2048))

    assert runs(host) == ["add_namespace"]
    assert host.daemons.of(OVER_ONE).namespaces == {}

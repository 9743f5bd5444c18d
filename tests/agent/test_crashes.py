"""Whatever happens in whatever order: nothing is left over, and nobody gets more than was asked."""

import itertools
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dra_driver.base.errors import NodeError
from dra_driver.model.mps import mps_server_name
from tests.agent.conftest import INSTANCE, ONE, TWO, Host, limits_of, namespace
from tests.fakes.mps_daemons import KINDS, Killed

NAMESPACES = [
    namespace("c_0", ONE, percent=30, mib=1024, default_limits=limits_of(80, 8192)),
    namespace("c_1", ONE, percent=70, mib=2048, default_limits=limits_of(80, 8192)),
    namespace("c_2", ONE, percent=20, mib=512, default_limits=limits_of(20, 512)),
    namespace("c_3", TWO, percent=50, mib=4096, default_limits=limits_of(50, 4096)),
    namespace("c_4", ONE, TWO, percent=10, mib=256, default_limits=limits_of(10, 256)),
    namespace("c_5", ONE, percent=10, default_limits=limits_of(80)),
    namespace("c_6", INSTANCE, percent=40, mib=2048, default_limits=limits_of(80, 4096)),
    namespace("c_7", INSTANCE, percent=60, mib=1024, default_limits=limits_of(80, 4096)),
    namespace("c_8", ONE, percent=10, mib=512, default_limits=limits_of(80, 8192), tenant="a"),
    namespace("c_9", ONE, percent=10, mib=512, default_limits=limits_of(80, 8192), tenant="b"),
    namespace(
        "c_10", INSTANCE, percent=10, mib=512, default_limits=limits_of(80, 4096), tenant="a"
    ),
]
ANY = st.sampled_from(NAMESPACES)
SERVERS = sorted(
    {mps_server_name(each.gpus, tenant) for each in NAMESPACES for tenant in ("", each.tenant)}
)
DYING = st.none() | st.integers(0, 25)


class Node(RuleBasedStateMachine):
    """Claims come and go, the agent is killed anywhere, daemons die and hang."""

    newest = 3

    def __init__(self) -> None:
        super().__init__()
        self.home = tempfile.TemporaryDirectory(prefix="mps", dir="/tmp")
        self.host = Host(Path(self.home.name), self.newest)
        self.agent = self.host.agent()
        self.served: set[str] = set()  # and the plugin was told so
        self.unsure: set[str] = set()  # the plugin was not told
        self.numbers: list[int] = []
        self.pid = 100

    def do(self, dies_in, act, *arguments):
        """Whether it succeeded; None: the agent was killed while it did it."""
        self.host.fate.dies_in = dies_in
        try:
            act(*arguments)
        except Killed:
            self.agent = self.host.agent()
            return None
        except NodeError:
            return False
        finally:
            self.host.fate.dies_in = None
        return True

    def daemons(self, name):
        """Those of a server: none, or one."""
        running = self.host.daemons.running.values()
        return [daemon for daemon in running if daemon.daemon.name == name]

    @rule(namespace=ANY, dies_in=DYING)
    def serve(self, namespace, dies_in):
        served = self.do(dies_in, self.agent.serve, namespace)
        if served:
            self.served.add(namespace.name)
            self.unsure.discard(namespace.name)
        elif served is None and namespace.name not in self.served:
            self.unsure.add(namespace.name)

    @rule(ended=ANY, dies_in=DYING)
    def release(self, ended, dies_in):
        released = self.do(dies_in, self.agent.release, ended.name)
        if released:
            self.unsure.discard(ended.name)
        elif ended.name in self.served:
            self.unsure.add(ended.name)
        self.served.discard(ended.name)

    @rule(of=ANY, dies_in=DYING)
    def terminate(self, of, dies_in):
        self.do(dies_in, self.agent.terminate, of.name, range(100, 1000))

    @rule(seconds=st.sampled_from([1, 5, 13, 70]), dies_in=DYING)
    def maintain(self, seconds, dies_in):
        self.do(dies_in, self.host.pass_time, self.agent, seconds)

    def start_agent(self):
        self.agent = self.host.agent()

    @rule(dies_in=DYING)
    def restart_of_the_agent(self, dies_in):
        assert self.do(dies_in, self.start_agent) is not False

    @rule(dies_in=DYING)
    def status(self, dies_in):
        self.do(dies_in, self.agent.status)

    @rule(dies_in=DYING)
    def make_spares(self, dies_in):
        self.do(dies_in, self.agent.make_spares)

    @rule(of=ANY)
    def client(self, of):
        self.pid += 1
        is_apart = self.newest == 2 or of.gpus == (INSTANCE,)
        name = mps_server_name(of.gpus, of.tenant if is_apart else "")
        if self.daemons(name):
            namespace = self.host.daemon_names(self.agent).get(of.name, "default")
            self.host.daemons.connect(name, self.pid, namespace)

    @rule(name=st.sampled_from(SERVERS), how=st.sampled_from(["dead", *KINDS]))
    def problem(self, name, how):
        for daemon in self.daemons(name):
            if how == "dead":
                self.host.daemons.crash(name)
            else:
                setattr(daemon, how, True)

    @rule(name=st.sampled_from(SERVERS), which=st.sampled_from([min, max]), removes=st.booleans())
    def a_tenant_that_is_root(self, name, which, removes):
        """Changes or removes a namespace; the last is a spare, if there is one."""
        for daemon in self.daemons(name):
            if daemon.namespaces and removes:
                del daemon.namespaces[which(daemon.namespaces)]
            elif daemon.namespaces:
                daemon.namespaces[which(daemon.namespaces)] = limits_of(100, None)

    @rule(there=st.booleans())
    def a_gpu_that_goes_and_comes(self, there):
        self.host.daemons.absent = set() if there else {TWO}

    @invariant()
    def incidents_number_upward(self):
        numbers = [incident.number for incident in self.agent.status().incidents]
        assert numbers == sorted(set(numbers))
        assert max(self.numbers, default=0) <= max(numbers, default=0)
        self.numbers = numbers

    @invariant()
    def no_two_daemons_have_one_directory(self):
        names = [daemon.daemon.name for daemon in self.host.daemons.running.values()]
        assert len(names) == len(set(names))

    @invariant()
    def tenants_share_no_server_of_protocol_2(self):
        for server in self.agent.status().servers:
            if server.protocol == 2:
                assert len({namespace.namespace.tenant for namespace in server.namespaces}) <= 1

    @invariant()
    def what_was_promised_is_promised_still(self):
        served = {namespace.namespace.name for namespace in self.agent.status().namespaces()}
        assert self.served <= served

    def teardown(self):
        try:
            self.in_the_end()
        finally:
            self.home.cleanup()

    def in_the_end(self):
        self.host.daemons.absent = set()
        self.host.settle(self.agent)
        status = self.agent.status()
        served = {namespace.namespace.name: namespace for namespace in status.namespaces()}
        assert self.served <= served.keys() <= self.served | self.unsure
        assert all(server.ready for server in status.servers)
        running = {daemon.daemon.name: daemon for daemon in self.host.daemons.running.values()}
        assert sorted(running) == [server.name for server in status.servers]
        for server in status.servers:
            daemon = running[server.name]
            asked = {
                namespace.namespace.name: namespace.namespace.limits
                for namespace in server.namespaces
            }
            assert daemon.daemon.protocol == server.protocol
            if server.protocol > 2:
                granted = self.host.granted(self.agent, server.name)
                spare = granted.pop("a spare", None)
                assert granted == asked
                assert len(daemon.namespaces) == len(asked) + (spare is not None)
            else:
                most = daemon.daemon.default_limits
                assert not any(limits.exceed(most) for limits in asked.values())
        assert status.unmanaged == ()
        for unused in NAMESPACES:
            self.agent.release(unused.name)
        assert self.host.left() == []


class OlderNode(Node):
    newest = 2


QUICK = settings(
    max_examples=25,
    stateful_step_count=16,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestNode = Node.TestCase
TestNode.settings = QUICK
TestOlderNode = OlderNode.TestCase
TestOlderNode.settings = QUICK


def a_claims_life(host, agent):
    """And another's beside it."""
    first, second, third = NAMESPACES[:3]
    agent.serve(first)
    agent.serve(second)
    agent.make_spares()
    agent.serve(third)
    agent.make_spares()
    agent.release(third.name)
    host.daemons.crash(mps_server_name(first.gpus))
    host.pass_time(agent, 5)
    agent.release(first.name)
    agent.release(second.name)


def all_goes_on(host, agent):
    namespaces = NAMESPACES[:3]
    assert [agent.serve(namespace).namespace for namespace in namespaces] == namespaces
    host.settle(agent)
    assert [served.namespace for served in agent.status().namespaces()] == namespaces
    for served in namespaces:
        agent.release(served.name)
    assert host.left() == []


def an_instance_that_is_created_and_removed(host, agent):
    """While claims share it, and another one uses its GPU."""
    first, second = NAMESPACES[6:8]
    agent.serve(first)
    agent.serve(NAMESPACES[0])
    agent.serve(second)
    agent.release(first.name)
    agent.release(second.name)


def the_instance_can_be_freed(host, agent):
    """The next agent is asked again, by a plugin that was not told that it is done."""
    for ended in NAMESPACES[6:8]:
        agent.release(ended.name)
    assert all(daemon.daemon.gpus != (INSTANCE,) for daemon in host.daemons.running.values())


@pytest.mark.parametrize(
    ("story", "newest", "holds", "points"),
    [
        (a_claims_life, 2, all_goes_on, 30),
        (a_claims_life, 3, all_goes_on, 30),
        (an_instance_that_is_created_and_removed, 3, the_instance_can_be_freed, 15),
    ],
)
def test_an_agent_can_be_killed_at_any_point(story, newest, holds, points):
    """At every point there is, one after the other."""
    for dies_in in itertools.count():
        with tempfile.TemporaryDirectory(prefix="mps", dir="/tmp") as directory:
            host = Host(Path(directory), newest)
            agent = host.agent()
            host.fate.dies_in = dies_in
            killed = False
            try:
                story(host, agent)
            except Killed:
                killed, agent = True, host.agent()
            host.fate.dies_in = None
            holds(host, agent)
            if not killed:
                break

    assert dies_in > points

"""One of several processes leads, and no other thinks that it does."""

import logging
import time

import pytest

from dra_driver.base.errors import SettingsError
from dra_driver.k8s.access import load_kubeconfig
from dra_driver.k8s.leader import Leadership, LeaseName, LeaseSeconds
from tests.waiting import eventually

LEASE = LeaseName("ns", "controller")
LEASES = f"{LEASE.path}"
FAST = LeaseSeconds(lease=2, renew=1.5, retry=0.05)


@pytest.fixture
def candidate(server, tmp_path):
    """A candidate of this name, and what it was told."""
    access = load_kubeconfig(server.kubeconfig(tmp_path / "kubeconfig"))
    started = []

    def start(identity, seconds=FAST, clock=time.monotonic):
        leadership, told = Leadership(access, LEASE, identity, seconds, clock), []
        started.append(leadership)
        leadership.start(lambda: told.append("begin"), lambda: told.append("end"))
        return leadership, told

    yield start
    for leadership in started:
        leadership.stop(60)


def holder(server):
    (lease,) = server.objects("leases")
    return lease["spec"]["holderIdentity"]


def leads(leadership):
    return eventually(leadership.leads)


def test_the_only_candidate_leads_and_renews_its_lease(server, candidate):
    leadership, told = candidate("a")
    assert leads(leadership)
    (first,) = server.objects("leases")
    assert eventually(lambda: server.count("PUT") > 2)

    (lease,) = server.objects("leases")
    assert (lease["metadata"]["name"], lease["metadata"]["namespace"]) == ("controller", "ns")
    assert (lease["spec"]["holderIdentity"], lease["spec"]["leaseDurationSeconds"]) == ("a", 2)
    assert lease["spec"]["renewTime"] > first["spec"]["renewTime"]
    assert lease["spec"]["acquireTime"] == first["spec"]["acquireTime"]
    shown = time.strptime(lease["spec"]["renewTime"][:19], "%Y-%m-%dT%H:%M:%S")
    assert abs(time.mktime(shown) - time.mktime(time.gmtime())) < 120
    assert lease["spec"]["renewTime"].endswith("+00:00")
    assert told == ["begin"]


def test_a_leader_that_stops_gives_the_lease_to_the_next_at_once(server, candidate):
    slow = LeaseSeconds(lease=3600, renew=1800, retry=0.05)
    first, told = candidate("a", slow)
    assert leads(first)
    second, _ = candidate("b", slow)
    time.sleep(0.2)
    assert not second.leads()

    began = time.monotonic()
    assert first.stop()

    assert time.monotonic() - began < 1
    assert (told, first.leads()) == (["begin", "end"], False)
    assert leads(second)
    assert holder(server) == "b"


def test_a_candidate_that_stops_leaves_the_lease_to_its_holder(server, candidate):
    first, _ = candidate("a")
    assert leads(first)
    second, told = candidate("b")
    time.sleep(0.2)

    assert second.stop()

    assert (holder(server), told) == ("a", [])
    assert first.leads()


def test_a_leader_without_api_server_leads_no_more_and_then_again(server, candidate, caplog):
    leadership, told = candidate("a")
    assert leads(leadership)

    server.refuse_connections()
    assert eventually(lambda: told == ["begin", "end"])
    assert not leadership.leads()

    server.accept_connections()
    assert eventually(lambda: told == ["begin", "end", "begin"])
    assert leads(leadership)
    said = [each for each in caplog.records if "cannot ask" in each.getMessage()]
    assert 1 <= len(said) <= 3


def test_nobody_leads_before_the_one_before_knows_that_it_does_not(server, candidate):
    first, _ = candidate("a")
    assert leads(first)
    second, _ = candidate("b")
    server.deny("update", "leases")  # nobody can renew
    both = []
    give_up = time.monotonic() + 60
    while first.leads() and time.monotonic() < give_up:
        both.append(second.leads())
    server.heal()

    assert both
    assert not any(both)
    assert eventually(lambda: first.leads() or second.leads())


def test_the_leadership_of_a_stopped_process_is_over_when_it_goes_on(candidate):
    moved = [0.0]
    leadership, told = candidate("a", clock=lambda: time.monotonic() + moved[0])
    assert leads(leadership)

    moved[0] = 60.0

    assert not leadership.leads()
    assert eventually(lambda: told[:3] == ["begin", "end", "begin"])


def test_a_lease_that_nobody_renews_is_taken_by_the_monotonic_clock(server, candidate):
    lease = {"kind": "Lease", "metadata": {"name": "controller", "namespace": "ns"}}
    moment = "2026-01-01T00:00:00.000000Z"
    times = {"acquireTime": moment, "renewTime": moment, "leaseDurationSeconds": 2}
    server.put({**lease, "spec": {"holderIdentity": "gone", **times}})
    now = [100.0]
    leadership, told = candidate("a", clock=lambda: now[0])
    assert server.wait(lambda: server.count("GET", "leases") > 2)

    time.sleep(2.5)  # by the wall clock, its time is over
    assert (leadership.leads(), told) == (False, [])
    now[0] += 2.1

    assert leads(leadership)


def test_a_lease_that_somebody_took_is_lost_at_once(server, candidate):
    leadership, told = candidate("a", LeaseSeconds(lease=3600, renew=1800, retry=0.05))
    assert leads(leadership)
    for _ in range(100):  # until no renewal was in between
        (lease,) = server.objects("leases")
        server.put({**lease, "spec": {**lease["spec"], "holderIdentity": "b"}})
        if holder(server) == "b":
            break

    assert eventually(lambda: told == ["begin", "end"])
    assert not leadership.leads()


def test_a_lease_that_is_deleted_is_made_again(server, candidate):
    leadership, told = candidate("a")
    assert leads(leadership)

    server.remove("leases", "controller", "ns")

    assert eventually(lambda: server.objects("leases"))
    assert leads(leadership)
    assert told == ["begin"]


@pytest.mark.parametrize("status", [403, 409, 410, 422, 429, 500, 503])
def test_no_answer_of_the_api_server_ends_the_election(server, candidate, status):
    server.fail(status, times=5)
    leadership, _ = candidate("a")

    assert leads(leadership)


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
def test_no_broken_connection_ends_the_election(server, candidate, method):
    server.hang_up(method, times=4)
    leadership, _ = candidate("a")
    assert leads(leadership)

    assert eventually(lambda: server.count("PUT") > 6)
    assert leads(leadership)


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({}, id="empty"),
        pytest.param({"holderIdentity": "", "leaseDurationSeconds": 1}, id="released"),
        pytest.param({"holderIdentity": "b"}, id="without times"),
    ],
)
def test_a_lease_that_nobody_holds_is_taken_and_keeps_what_is_not_ours(server, candidate, spec):
    metadata = {"name": "controller", "namespace": "ns", "labels": {"a": "b"}}
    server.put({"kind": "Lease", "metadata": metadata, "spec": {**spec, "leaseTransitions": 7}})

    leadership, _ = candidate("a", LeaseSeconds(lease=3600, renew=1800, retry=0.05))

    assert leads(leadership)
    (lease,) = server.objects("leases")
    assert lease["metadata"]["labels"] == {"a": "b"}
    assert (lease["spec"]["holderIdentity"], lease["spec"]["leaseTransitions"]) == ("a", 7)


def test_a_lease_that_makes_no_sense_ends_nothing(server, candidate):
    lease = {"kind": "Lease", "metadata": {"name": "controller", "namespace": "ns"}}
    server.put({**lease, "spec": {"holderIdentity": "b", "renewTime": "yesterday"}})
    leadership, _ = candidate("a")
    time.sleep(0.2)
    assert not leadership.leads()

    server.put({**lease, "spec": {}})

    assert leads(leadership)


def test_an_api_server_that_hangs_keeps_nobody_from_stopping(server, candidate):
    leadership, told = candidate("a")
    assert leads(leadership)
    server.delay(60, times=10**6)
    assert eventually(lambda: told == ["begin", "end"])
    began = time.monotonic()

    leadership.stop()

    assert time.monotonic() - began < 1.5
    assert not leadership.leads()
    server.heal()


def test_a_leader_that_stops_while_the_api_server_is_away_does_so_at_once(server, candidate):
    leadership, _ = candidate("a")
    assert leads(leadership)
    server.refuse_connections()
    began = time.monotonic()

    leadership.stop()

    assert time.monotonic() - began < 1.5
    assert not leadership.leads()


def test_a_fault_in_what_is_told_ends_nothing(server, tmp_path):
    access = load_kubeconfig(server.kubeconfig(tmp_path / "kubeconfig"))
    leadership = Leadership(access, LEASE, "a", FAST)

    def fails():
        raise RuntimeError("a fault")

    leadership.start(fails, fails)
    assert leads(leadership)
    assert eventually(lambda: server.count("PUT") > 2)
    assert leadership.stop(60)
    assert holder(server) == ""


def test_what_the_library_tells_is_for_debugging(server, candidate, caplog):
    caplog.set_level(logging.INFO)
    leadership, _ = candidate("a")
    assert leads(leadership)
    assert eventually(lambda: server.count("PUT") > 2)

    assert [each for each in caplog.records if each.name == "leaderelection"] == []
    assert [each.getMessage() for each in caplog.records if "leads" in each.getMessage()]


@pytest.mark.parametrize(
    ("lease", "renew", "retry"), [(15, 15, 2), (15, 10, 9), (2, 1.1, 0.1), (15, 0, 0)]
)
def test_times_that_do_not_fit_together_are_refused(lease, renew, retry):
    with pytest.raises(SettingsError, match="renewed within"):
        LeaseSeconds(lease, renew, retry)

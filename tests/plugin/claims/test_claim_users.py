"""A claim is not taken back while a process of its pods uses it; the error names it."""

from typing import Any

import pytest

from dra_driver.base.errors import ClaimInUse, MigInstanceNotFound, NodeError
from dra_driver.k8s.claims import ClaimUid, Pod
from dra_driver.k8s.pods import Container
from dra_driver.model.processes import CgroupProcesses, GpuProcess
from dra_driver.model.records import ClaimRecord
from dra_driver.plugin.claims.in_use import InUseCheck
from tests.builders import gpu, pod, record, ref

A, B = ref("a"), ref("b")
WEB, DB = pod("web"), pod("db")
ZERO = gpu(0).uuid


class World:
    """The cgroups of pods, and who computes on the one GPU."""

    def __init__(self) -> None:
        self.cgroups: list[CgroupProcesses] = []
        self.given: dict[ClaimUid, set[Pod]] = {}
        self.ended: set[int] = set()
        self.computing: list[int] | NodeError = []
        self.records: list[ClaimRecord] = [record(A, pods=(WEB,))]
        self.asked = 0
        self.hidden: NodeError | None = None
        processes: Any = self
        self.users = InUseCheck(processes, self.gpu_processes, self.neighbours)

    def containers(self):
        return tuple(
            Container(f"{pod.name}-main", "main", "default", pod, frozenset({claim}))
            for claim, pods in self.given.items()
            for pod in sorted(pods)
        )

    def of(self, pods, containers=None):
        if self.hidden:
            raise self.hidden
        uids = set(pods)
        return tuple(cgroup for cgroup in self.cgroups if cgroup.pod in uids)

    def lives(self, pid):
        return pid not in self.ended

    def gpu_processes(self, uuid):
        assert uuid == ZERO
        self.asked += 1
        if isinstance(self.computing, NodeError):
            raise self.computing
        return [GpuProcess(pid, None) for pid in self.computing]

    def neighbours(self, uid, gpus):
        return [record for record in self.records if record.claim.uid != uid]

    def put(self, *pids, claims=(), of=WEB):
        given = None if claims is None else frozenset(claim.uid for claim in claims)
        self.cgroups.append(CgroupProcesses(of, given, pids))

    def refused(self):
        try:
            self.users.refuse_while_used(self.records[0])
        except ClaimInUse as error:
            return str(error)
        return ""


@pytest.fixture
def world():
    return World()


def test_a_claim_whose_pods_have_ended_is_free_and_no_gpu_is_asked(world):
    assert world.refused() == ""
    assert world.asked == 0


def test_a_pod_has_processes_while_any_of_them_lives(world):
    assert not world.users.has_processes(WEB)
    world.put(7, 8, of=WEB)
    world.put(9, of=DB)
    assert world.users.has_processes(WEB)
    world.ended = {7, 8}
    assert not world.users.has_processes(WEB)
    world.hidden = NodeError("the cgroups cannot be read")
    with pytest.raises(NodeError):
        world.users.has_processes(WEB)


def test_a_process_in_a_container_that_was_given_the_claim_keeps_it(world):
    world.put(7, 8, claims=(A,))
    assert world.refused() == ("pod default/web: process 7 still runs; the claim waits for its end")
    world.ended = {7}
    assert "process 8" in world.refused()
    world.ended = {7, 8}
    assert world.refused() == ""


def test_a_container_of_which_nothing_is_known_keeps_all_claims_of_its_pod(world):
    world.put(7, claims=None)
    assert "process 7" in world.refused()


def test_other_containers_of_its_pod_keep_it_not(world):
    world.put(7, claims=(B,))
    world.put(8)
    assert world.refused() == ""


def test_a_pod_that_came_later_keeps_it_as_well(world):
    world.put(7, claims=(A,), of=DB)
    assert world.refused() == ""

    world.given[A.uid] = {DB}

    assert world.refused().startswith("pod default/db: process 7")


def test_a_process_of_its_pods_that_computes_on_its_gpu_keeps_it(world):
    world.put(7, 8)
    world.computing = [3, 8]
    assert world.refused() == (
        f"pod default/web: process 8 still computes on {ZERO}; the claim waits for its end"
    )
    world.ended = {8}
    assert world.refused() == ""


def test_who_computes_for_another_claim_and_who_is_of_another_pod_keep_it_not(world):
    world.records.append(record(B, pods=(WEB,)))
    world.put(7, claims=(B,))
    world.put(9, of=DB)
    world.computing = [7, 9, 1000]
    assert world.refused() == ""


def test_a_gpu_that_does_not_say_who_computes_there_keeps_it(world):
    world.put(7)
    world.computing = NodeError("no answer within 5 s")
    with pytest.raises(NodeError, match="no answer"):
        world.refused()


def test_an_instance_that_is_gone_keeps_nothing(world):
    world.put(7)
    world.computing = MigInstanceNotFound("NVML does not list it")
    assert world.refused() == ""


def test_what_cannot_be_looked_at_keeps_it(world):
    world.hidden = NodeError("too many open files")
    with pytest.raises(NodeError, match="too many"):
        world.refused()


def test_a_process_that_is_not_seen_from_here_is_told_as_such(world):
    world.put(0, claims=(A,))
    assert world.refused().startswith("pod default/web: a process that is not seen from here")


def test_those_of_the_pods_that_still_use_it_are_told(world):
    world.put(7, claims=(A,))
    world.put(8, of=DB)
    assert world.users.still_using(A.uid, [WEB, DB]) == (WEB,)
    world.ended = {7}
    assert world.users.still_using(A.uid, [WEB, DB]) == ()

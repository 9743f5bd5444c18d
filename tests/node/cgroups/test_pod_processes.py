"""Who is in the cgroups of pods: nobody where none is left, an error where it cannot be told."""

import os
import platform
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.base.files import hanging_disk_calls
from dra_driver.k8s.claims import ClaimRef, ClaimUid, Pod, PodUid
from dra_driver.model.processes import CgroupProcesses
from dra_driver.node.cgroups.containers import ContainerBundles
from dra_driver.node.cgroups.processes import ContainerProcesses, PodProcesses, pods_given
from dra_driver.node.cgroups.tree import Cgroups
from tests.fakes import bundles
from tests.fakes.open_files import no_more_files
from tests.fakes.processes import Proc
from tests.waiting import eventually

POD = Pod("train", PodUid("11111111-2222-4333-8444-555555555555"))
MAIN, SIDE, SANDBOX = "a" * 64, "b" * 64, "c" * 64
CLAIM = ClaimUid("claim-a")
REF = ClaimRef("ml", "a", CLAIM)


class Machine:
    """A host in a directory: cgroups of one version, and a container runtime's bundles."""

    def __init__(self, root: Path, version: int) -> None:
        self.root = root
        self.cgroup = root / "sys/fs/cgroup"
        self.cgroup.mkdir(parents=True)
        self.kubepods = self.cgroup / "kubepods"
        if version == 1:
            self.kubepods = self.cgroup / "freezer/kubepods"
        else:
            (self.cgroup / "cgroup.controllers").write_text("cpu memory\n")
        self.pod = self.kubepods / f"burstable/pod{POD.uid}"
        bundles.containerd(root, SANDBOX, "", kind="sandbox", pod=("ml", POD.name, POD.uid))
        self.processes = PodProcesses(
            Cgroups(self.cgroup), ContainerBundles(root), ContainerProcesses(root / "proc")
        )

    def put(self, cgroup: str, *pids: int) -> None:
        place = self.pod / cgroup
        place.mkdir(parents=True, exist_ok=True)
        for directory in (place, *place.parents):
            if self.kubepods in directory.parents and not (directory / "cgroup.procs").exists():
                (directory / "cgroup.procs").write_text("")
        (place / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))

    def bundle(self, container: str, *claims: str) -> Path:
        pod = ("ml", POD.name, POD.uid)
        return bundles.containerd(self.root, container, "main", claims, pod=pod)

    def of(self, pod: Pod = POD) -> tuple[CgroupProcesses, ...]:
        return self.processes.of([pod])

    def given(self, claim: ClaimRef = REF) -> frozenset[Pod]:
        return pods_given(claim, self.processes.containers())


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def machine(request, tmp_path):
    return Machine(tmp_path, request.param)


def claims(*claims):
    return frozenset(map(ClaimUid, claims))


def test_each_container_with_processes_is_told_with_the_claims_that_it_was_given(machine):
    machine.bundle(MAIN, CLAIM)
    machine.bundle(SIDE)
    machine.put(MAIN, 12, 11)
    machine.put(SIDE, 21)

    assert machine.of() == (
        CgroupProcesses(POD, claims(CLAIM), (11, 12)),
        CgroupProcesses(POD, claims(), (21,)),
    )


def test_processes_in_cgroups_that_a_container_made_are_its_own(machine):
    machine.bundle(MAIN, CLAIM)
    machine.put(f"{MAIN}/deep/deeper", 13)

    assert machine.of() == (CgroupProcesses(POD, claims(CLAIM), (13,)),)


def test_pods_are_told_in_the_order_of_their_names(machine):
    earlier = Pod("a-pod", PodUid("99999999-2222-4333-8444-555555555555"))
    machine.put(MAIN, 11)
    machine.pod = machine.kubepods / f"pod{earlier.uid}"
    machine.put(SIDE, 21)

    assert [process.pod for process in machine.processes.of([POD, earlier])] == [earlier, POD]


def test_the_sandbox_and_what_is_in_no_container_was_given_no_claim(machine):
    machine.put(SANDBOX, 1)
    machine.put("crio-conmon-x.scope", 5)
    machine.put("", 7)

    assert machine.of() == (
        CgroupProcesses(POD, claims(), (1,)),
        CgroupProcesses(POD, claims(), (5, 7)),
    )


def test_a_container_whose_bundle_is_gone_may_have_been_given_any_claim(machine):
    machine.put(MAIN, 11)
    assert machine.of() == (CgroupProcesses(POD, None, (11,)),)


@pytest.mark.parametrize("below", ["", "/system.slice/containerd.service"])
def test_a_container_whose_cgroup_is_not_in_its_pods_is_told_by_its_first_process(machine, below):
    """containerd on cgroupfs under a kubelet on systemd: the pod's own cgroup has nobody."""
    proc = Proc(machine.root / "proc")
    pod = f"kubepods-burstable-pod{POD.uid.replace('-', '_')}.slice"
    machine.put("")
    (machine.bundle(MAIN, CLAIM).parent / "init.pid").write_text("77")
    assert machine.of() == ()

    proc.write(77, POD.uid, cgroup=f"0::{below}/{pod}:cri-containerd:{MAIN}\n")
    assert machine.of() == (CgroupProcesses(POD, claims(CLAIM), (77,)),)
    assert machine.of(Pod("other", PodUid("99999999-2222-4333-8444-555555555555"))) == ()

    proc.write(77, POD.uid, cgroup=f"0::{below}/{pod}:cri-containerd:{SIDE}\n")
    assert machine.of() == (), "the number is another process's by now"


def test_where_no_cgroup_or_an_empty_one_is_left_nobody_is(machine):
    assert machine.of() == ()
    machine.put(MAIN)
    assert machine.of() == ()
    (machine.pod / MAIN / "cgroup.procs").unlink()  # it is being removed
    assert machine.of() == ()


def test_pods_of_others_are_not_looked_at(machine):
    machine.put(MAIN, 11)
    assert machine.of(Pod("other", PodUid("99999999-2222-4333-8444-555555555555"))) == ()


def test_a_bundle_that_cannot_be_read_is_an_error_and_not_nobody(machine):
    machine.put(MAIN, 11)
    machine.bundle(MAIN, CLAIM).write_text("{")
    with pytest.raises(NodeError, match="cannot be read"):
        machine.of()


def test_a_cgroup_that_cannot_be_read_is_an_error_and_not_nobody(machine):
    machine.put(MAIN, 11)
    (machine.pod / MAIN / "cgroup.procs").unlink()
    (machine.pod / MAIN / "cgroup.procs").mkdir()  # reading it is an error
    with pytest.raises(NodeError, match="cannot be listed now"):
        machine.of()


def test_too_many_open_files_are_an_error_and_not_nobody(machine):
    machine.bundle(MAIN, CLAIM)
    machine.put(MAIN, os.getpid())
    assert machine.of()

    with no_more_files():
        for ask in (
            machine.of,
            lambda: machine.processes.lives(os.getpid()),
            machine.given,
        ):
            with pytest.raises(NodeError):
                ask()


@pytest.mark.parametrize("hanging", ["bundle", "cgroup"])
def test_a_look_that_hangs_is_told_of_as_a_disk_that_hangs_is(machine, hanging):
    """Somebody may hold the turn meanwhile, and no timeout ends it."""
    config = machine.bundle(MAIN, CLAIM)
    machine.put(MAIN, 11)
    if hanging == "bundle":
        pipe, ask, part = config, machine.given, "look for containers"
    else:
        pipe, ask, part = machine.pod / MAIN / "cgroup.procs", machine.of, str(machine.cgroup)
    content = pipe.read_text()
    pipe.unlink()
    os.mkfifo(pipe)
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()

    with pipe.open("w") as writer:  # as soon as somebody reads it
        assert part in str(hanging_disk_calls(-1))
        writer.write(content)

    thread.join(30)
    assert not thread.is_alive()
    assert part not in str(hanging_disk_calls(-1))


def test_more_processes_than_anybody_can_look_at_are_an_error(machine):
    machine.bundle(MAIN, CLAIM)
    machine.put(MAIN, *range(1, 5000))
    with pytest.raises(NodeError, match="more than 4096"):
        machine.of()


def test_pods_are_known_by_what_their_containers_were_given(machine):
    assert machine.given() == frozenset()
    machine.bundle(MAIN, CLAIM)
    machine.bundle(SIDE)

    assert machine.given() == {POD}


def test_what_a_container_of_another_namespace_mounts_is_not_believed(machine):
    machine.bundle(MAIN, CLAIM)
    assert machine.given(ClaimRef("other", "a", CLAIM)) == frozenset()
    assert machine.given(ClaimRef("", "", CLAIM)) == {POD}, "only its UID is known"


def test_of_many_bundles_each_is_read_once(machine):
    config = machine.bundle(MAIN, CLAIM)
    assert machine.given() == {POD}
    config.write_text("{")  # it never changes, so nobody looks

    assert machine.given() == {POD}


def test_a_container_that_is_gone_is_forgotten(machine):
    config = machine.bundle(MAIN, CLAIM)
    machine.given()
    config.unlink()
    config.parent.rmdir()

    assert machine.given() == frozenset()


@pytest.mark.parametrize("text", [None, "", '{"annotations"'], ids=["none", "empty", "half"])
def test_a_container_that_is_being_made_runs_nothing_yet_and_is_looked_at_again(machine, text):
    config = machine.bundle(MAIN, CLAIM)
    whole = config.read_text()
    config.unlink() if text is None else config.write_text(text)
    assert machine.given() == frozenset()

    config.write_text(whole)

    assert machine.given() == {POD}


class TestWhoLives:
    """Real processes of this machine."""

    processes = PodProcesses(
        Cgroups(Path("/nonexistent")), ContainerBundles(Path("/nonexistent")), ContainerProcesses()
    )

    @pytest.fixture
    def child(self):
        started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        yield started
        started.kill()
        started.wait(30)

    def test_a_process_lives_until_it_ended_and_a_zombie_has(self, child):
        assert self.processes.lives(child.pid)
        child.kill()
        eventually(lambda: not self.processes.lives(child.pid))
        child.wait(30)
        assert not self.processes.lives(child.pid)

    def test_one_that_was_stopped_lives(self, child):
        child.send_signal(signal.SIGSTOP)
        assert self.processes.lives(child.pid)

    def test_a_process_of_another_pid_namespace_lives(self):
        assert self.processes.lives(0)

    def test_a_process_whose_first_thread_ended_lives_as_long_as_another_does(self):
        exit_thread = {"x86_64": 60}.get(platform.machine(), 93)
        code = (
            "import ctypes, threading, time\n"
            "threading.Thread(target=time.sleep, args=(600,)).start()\n"
            "print('up', flush=True)\n"
            f"ctypes.CDLL(None).syscall(ctypes.c_long({exit_thread}), 0)\n"  # of this thread alone
        )
        started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        out = started.stdout
        assert out is not None
        try:
            assert out.readline() == b"up\n"
            stat = Path(f"/proc/{started.pid}/stat")
            eventually(lambda: ") Z " in stat.read_text())
            assert self.processes.lives(started.pid)
        finally:
            started.kill()
            started.wait(30)
            out.close()

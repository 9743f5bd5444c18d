"""Where pods and containers are in the cgroup file system, in every spelling of it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.base.errors import NodeError
from dra_driver.k8s.claims import PodUid
from dra_driver.node.cgroups.tree import (
    Cgroups,
    ContainerRef,
    cgroup_root,
    container_cgroups,
    container_of_process,
    pod_uid_of,
)
from tests.fakes.open_files import no_more_files

POD = PodUid("7b0ac5a6-3f0e-4f4e-9c3e-0d8f3f1f2c11")
OTHER = PodUid("11111111-3f0e-4f4e-9c3e-0d8f3f1f2c11")
SLICE = POD.replace("-", "_")
ID = "0123456789abcdef" * 4
HERE = ContainerRef(POD, ID)

PATHS = {
    "cgroupfs, guaranteed": f"/kubepods/pod{POD}/{ID}",
    "cgroupfs, burstable": f"/kubepods/burstable/pod{POD}/{ID}",
    "cgroupfs, best effort, below a root": f"/dra-testbed/kubepods/besteffort/pod{POD}/{ID}",
    "cgroupfs with CRI-O": f"/kubepods/pod{POD}/crio-{ID}",
    "systemd, guaranteed": f"/kubepods.slice/kubepods-pod{SLICE}.slice/cri-containerd-{ID}.scope",
    "systemd, burstable": "/kubepods.slice/kubepods-burstable.slice/"
    f"kubepods-burstable-pod{SLICE}.slice/cri-containerd-{ID}.scope",
    "systemd, best effort, CRI-O with crun": "/kubepods.slice/kubepods-besteffort.slice/"
    f"kubepods-besteffort-pod{SLICE}.slice/crio-{ID}.scope/container",
    "systemd, below a root": "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable"
    f".slice/kubelet-kubepods-burstable-pod{SLICE}.slice/cri-containerd-{ID}.scope",
    "in a node that is a container": f"/docker/{ID}/kubelet.slice/kubelet-kubepods.slice/"
    f"kubelet-kubepods-pod{SLICE}.slice/cri-containerd-{ID}.scope",
    "seen from another container": f"/../../kubepods-pod{SLICE}.slice/cri-containerd-{ID}.scope",
    "seen from a pod of the same class": f"/../../pod{POD}/{ID}",
    "a cgroup that the container made": f"/kubepods/pod{POD}/{ID}/init.scope",
    "one that looks like another pod's": f"/kubepods/pod{POD}/{ID}/kubepods/pod{OTHER}/{ID}",
    "one that looks like another line": f"/kubepods/pod{POD}/{ID}/\r\x0b\u2028"
    f"1:cpu:/kubepods/pod{OTHER}/{ID}",
    "a runtime on cgroupfs under systemd": "/system.slice/containerd.service/"
    f"kubepods-burstable-pod{SLICE}.slice:cri-containerd:{ID}",
}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_a_process_of_a_container_is_found_in_every_spelling(path):
    assert container_of_process(f"0::{path}\n") == HERE


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_on_cgroup_v1_the_controllers_agree(path):
    text = f"12:cpu,cpuacct:{path}\n11:name=systemd:{path}\n1:memory:{path}\n0::/\n"
    assert container_of_process(text) == HERE


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param("0::/\n", id="the root"),
        pytest.param("0::/user.slice/user-0.slice/session-1.scope\n", id="a login"),
        pytest.param(f"0::/kubepods/pod{POD}\n", id="a pod without a container"),
        pytest.param(f"0::/kubepods/pod{POD}/crio-conmon-{ID}.scope\n", id="the runtime's own"),
        pytest.param(f"0::/home/pod{POD}/{ID}\n", id="a pod where no pods are"),
        pytest.param(f"0::/kubepods/pod{POD}/{ID[1:]}\n", id="an id that is none"),
        pytest.param("0:\nnonsense\n", id="nonsense"),
        pytest.param(
            f"2:cpu:/kubepods/pod{POD}/{ID}\n1:memory:/kubepods/pod{OTHER}/{ID}\n",
            id="controllers that do not agree",
        ),
    ],
)
def test_what_is_in_no_container_or_in_two_is_in_none(text):
    assert container_of_process(text) is None


@given(st.text())
def test_whatever_a_process_says_is_read(text):
    assert container_of_process(text) is None


@pytest.fixture
def unified(tmp_path):
    """An empty file system of cgroup v2."""
    (tmp_path / "cgroup.controllers").write_text("cpu misc\n")
    return tmp_path


def directories(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).mkdir(parents=True)


V2 = [path.rsplit("/", 1)[0].lstrip("/") for name, path in PATHS.items() if name.startswith("cgro")]
V2 += [PATHS[name].split("/c")[0].lstrip("/") for name in PATHS if name.startswith("systemd")]


@pytest.mark.parametrize("path", V2)
def test_the_directory_of_a_pod_is_found_in_every_spelling(unified, path):
    directories(unified, path, "system.slice/a.service", "kubepods-of-somebody.slice")
    cgroups = Cgroups(unified)

    assert cgroups.pod(POD) == unified / path
    assert cgroups.pod(OTHER) is None
    assert (unified / path).parent in cgroups.levels()


def test_on_cgroup_v1_it_is_the_one_of_some_controller(tmp_path):
    directories(tmp_path, f"memory/kubepods/pod{POD}", f"pids/kubepods/pod{POD}")
    cgroups = Cgroups(tmp_path)

    assert cgroups.pod(POD) == tmp_path / f"memory/kubepods/pod{POD}"
    assert not cgroups.unified
    assert cgroups.controllers() == frozenset()


def test_on_cgroup_v1_one_tree_tells_where_pods_are(tmp_path):
    """The kubelet does not start without the memory controller."""
    directories(tmp_path, "blkio/kubepods", f"memory/kubepods/pod{POD}", "pids/kubepods/burstable")
    cgroups = Cgroups(tmp_path)

    assert cgroups.levels() == (tmp_path / "memory/kubepods",)

    (tmp_path / "memory/kubepods").rename(tmp_path / "memory/old")
    assert cgroups.levels() == (tmp_path / "blkio/kubepods",)


def test_a_kubelet_that_comes_later_or_moves_is_found(unified):
    cgroups = Cgroups(unified)
    assert cgroups.pod(POD) is None

    directories(unified, f"kubepods/pod{POD}")
    assert cgroups.pod(POD) == unified / f"kubepods/pod{POD}"

    (unified / "kubepods").rename(unified / "old")
    directories(unified, f"a.slice/a-kubepods.slice/a-kubepods-pod{SLICE}.slice")
    assert cgroups.pod(POD) == unified / f"a.slice/a-kubepods.slice/a-kubepods-pod{SLICE}.slice"


@pytest.mark.parametrize("uid", ["../x", "", "a/b", ".", "a b"])
def test_what_is_no_uid_leads_nowhere(unified, uid):
    directories(unified, "kubepods/podx/x", f"kubepods/pod{uid}" if uid != "../x" else "a")
    assert Cgroups(unified).pod(PodUid(uid)) is None


def test_containers_are_told_from_what_else_is_in_a_pod(tmp_path):
    scope = f"cri-containerd-{ID}.scope"
    directories(tmp_path, scope, f"crio-conmon-{ID}.scope", "init")
    assert list(container_cgroups(tmp_path)) == [(ID, tmp_path / scope)]
    assert list(container_cgroups(tmp_path / "gone")) == []


def test_what_cannot_be_listed_now_is_an_error_and_not_nobody(unified):
    directories(unified, f"kubepods/pod{POD}/{ID}")
    with no_more_files():
        with pytest.raises(NodeError, match=f"pod{POD} cannot be looked at now: Too many open"):
            list(container_cgroups(unified / f"kubepods/pod{POD}"))
        with pytest.raises(NodeError, match="Too many open"):
            Cgroups(unified).pod(POD)


def test_a_directory_that_cannot_be_looked_at_is_not_taken_for_one_that_is_gone(unified):
    directories(unified, "kubepods")
    cgroups = Cgroups(unified)
    cgroups.levels()
    link = unified / f"kubepods/pod{POD}"
    link.symlink_to(link)  # ELOOP, whoever looks
    with pytest.raises(NodeError, match="cannot be looked at now"):
        cgroups.pod(POD)


def test_a_new_directory_says_which_pod_it_is_of():
    assert pod_uid_of(f"pod{POD}", "burstable") == POD
    assert pod_uid_of(f"kubepods-burstable-pod{SLICE}.slice", "kubepods-burstable.slice") == POD
    assert pod_uid_of("burstable", "kubepods") is None


def test_where_both_are_one_the_usual_place_is_named(tmp_path):
    assert cgroup_root(Path("/")) == Path("/sys/fs/cgroup")
    assert cgroup_root(tmp_path) == tmp_path / "sys/fs/cgroup"
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    assert cgroup_root(tmp_path) == tmp_path / "sys/fs/cgroup"

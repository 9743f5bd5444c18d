"""What a container is, and which claims it was given, is in its bundle, where its runtime keeps
that."""

import errno
import os

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.k8s.claims import ClaimUid, Pod, PodUid
from dra_driver.k8s.pods import Container
from dra_driver.node.cgroups.containers import ContainerBundles, NoContainer
from tests.fakes import bundles
from tests.fakes.open_files import no_more_files

ID = "0123456789abcdef" * 4
POD = Pod("train", PodUid("pod-1"))


@pytest.mark.parametrize("runtime", [bundles.containerd, bundles.crio])
def test_a_bundle_says_whose_container_it_is_and_which_claims_it_was_given(tmp_path, runtime):
    runtime(tmp_path, ID, "main", ["claim-a", "claim-b", "claim-a"])
    claims = frozenset({ClaimUid("claim-a"), ClaimUid("claim-b")})
    assert ContainerBundles(tmp_path).find(ID) == Container(ID, "main", "ml", POD, claims)


@pytest.mark.parametrize("runtime", [bundles.containerd, bundles.crio])
def test_a_container_that_was_given_nothing_has_no_claims(tmp_path, runtime):
    runtime(tmp_path, ID, "sidecar")
    assert ContainerBundles(tmp_path).find(ID) == Container(ID, "sidecar", "ml", POD)


def test_what_is_mounted_elsewhere_is_no_claim(tmp_path):
    mount = bundles.document_mount("claim-a") | {"destination": "/mnt/claim"}
    annotations = {"io.kubernetes.cri.container-name": "main"}
    bundle = tmp_path / bundles.CONTAINERD / ID
    bundles.write(bundle, {"annotations": annotations, "mounts": [mount]})

    container = ContainerBundles(tmp_path).find(ID)

    assert isinstance(container, Container)
    assert container.claims == frozenset()


@pytest.mark.parametrize("document", [{}, {"annotations": None}, {"annotations": {"a": "b"}}])
def test_what_kubernetes_did_not_name_counts_as_a_sandbox(tmp_path, document):
    bundles.write(tmp_path / bundles.CONTAINERD / ID, document)
    assert ContainerBundles(tmp_path).find(ID) is NoContainer.SANDBOX


def test_a_sandbox_is_told_from_a_container(tmp_path):
    bundles.containerd(tmp_path, ID, "", kind="sandbox")
    bundles.crio(tmp_path, "e" * 64, "POD")
    containers = ContainerBundles(tmp_path)
    assert (containers.find(ID), containers.find("e" * 64)) == (
        NoContainer.SANDBOX,
        NoContainer.SANDBOX,
    )


def test_a_container_without_a_bundle_is_gone(tmp_path, caplog):
    bundles.containerd(tmp_path, ID, "main")
    containers = ContainerBundles(tmp_path)
    assert containers.find("e" * 64) is NoContainer.GONE
    assert not caplog.records


def test_a_runtime_that_is_not_where_it_is_looked_for_is_told_once(tmp_path, caplog):
    containers = ContainerBundles(tmp_path)
    assert [containers.find(ID), containers.find(ID)] == [NoContainer.NOWHERE, NoContainer.NOWHERE]
    assert len([record for record in caplog.records if "--runtime-dir" in record.getMessage()]) == 1


def test_bundles_are_also_where_the_user_says(tmp_path):
    home = tmp_path / "srv/containerd/io.containerd.runtime.v2.task/k8s.io" / ID
    bundles.write(home, {"annotations": {"io.kubernetes.cri.container-name": "main"}})
    assert isinstance(ContainerBundles(tmp_path, "/srv/containerd/").find(ID), Container)


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"annotations": {"io.kubernetes.cri.contai',
        "[]",
        '"a"',
        '{"annotations": [7]}',
        '{"annotations": {"io.kubernetes.cri.container-name": "a"}, "mounts": [7]}',
        '{"annotations": {"io.kubernetes.cri.container-name": "a"}, "mounts": [{}]}',
        "[" * 100_000,
    ],
)
def test_what_is_half_written_is_an_error_and_not_nobody(tmp_path, text):
    bundles.write(tmp_path / bundles.CONTAINERD / ID, text)
    with pytest.raises(NodeError, match=f"{ID}/config.json: it is not a container's"):
        ContainerBundles(tmp_path).find(ID)


def test_what_is_larger_than_any_container_is_not_read(tmp_path):
    bundle = bundles.write(tmp_path / bundles.CONTAINERD / ID, {})
    os.truncate(bundle, 1 << 40)  # it takes no space
    with pytest.raises(NodeError, match="more than 16777216 bytes"):
        ContainerBundles(tmp_path).find(ID)


def test_a_bundle_that_cannot_be_read_is_an_error_and_not_nobody(tmp_path):
    (tmp_path / bundles.CONTAINERD / ID / "config.json").mkdir(parents=True)
    with pytest.raises(NodeError, match=os.strerror(errno.EISDIR)):
        ContainerBundles(tmp_path).find(ID)


def test_too_many_open_files_are_an_error_and_not_nobody(tmp_path):
    bundles.containerd(tmp_path, ID, "main", ["claim-a"])
    containers = ContainerBundles(tmp_path)
    with no_more_files(), pytest.raises(NodeError, match=os.strerror(errno.EMFILE)):
        containers.find(ID)
    assert isinstance(containers.find(ID), Container)


def test_where_runtimes_keep_bundles_may_be_unreadable(tmp_path):
    link = tmp_path / "run"
    link.symlink_to(link)  # ELOOP, whoever looks
    with pytest.raises(NodeError, match=os.strerror(errno.ELOOP)):
        ContainerBundles(tmp_path).runtime_directories()

"""The stand-in kubelet gives every container its own devices, and nobody else's."""

import contextlib
import http.client
import json
import os
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dra_driver.k8s.claims import ClaimUid, PreparedDevice
from hack.testbed.kubelet_standin.claims import (
    NotYet,
    PodClaim,
    cdi_names,
    claim_ref,
    drivers,
    pod_claims,
)
from hack.testbed.kubelet_standin.containers import Ended, Run, configuration
from hack.testbed.kubelet_standin.events import warning
from hack.testbed.kubelet_standin.logs import LogServer
from hack.testbed.kubelet_standin.shared_claims import SharedClaims
from hack.testbed.packages import system_program
from hack.testbed.pki import write_pki
from tests.fakes.claimdriver import DRIVER, Desk, ref, running
from tests.fakes.kubelet import FakeKubelet

UID = ClaimUid("u1")


def pod(**parts: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "p", "namespace": "default", "uid": "pod-1"},
        "spec": {"resourceClaims": parts.get("claims", [])},
        "status": parts.get("status", {}),
    }


def claim(**status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "c", "namespace": "default", "uid": "u1"}, "status": status}


ALLOCATED = {"devices": {"results": [{"driver": "b"}, {"driver": "a"}, {"driver": "b"}]}}


def test_claims_are_found_by_name_by_template_and_by_extended_resource() -> None:
    document = pod(
        claims=[
            {"name": "direct", "resourceClaimName": "mine"},
            {"name": "made", "resourceClaimTemplateName": "t"},
            {"name": "unneeded", "resourceClaimTemplateName": "t"},
        ],
        status={
            "resourceClaimStatuses": [
                {"name": "made", "resourceClaimName": "p-made-x"},
                {"name": "unneeded"},
            ],
            "extendedResourceClaimStatus": {
                "resourceClaimName": "p-ext",
                "requestMappings": [
                    {"containerName": "c", "resourceName": "x/gpu", "requestName": "container-0"}
                ],
            },
        },
    )
    assert pod_claims(document) == (
        PodClaim("direct", "mine"),
        PodClaim("made", "p-made-x"),
        PodClaim("", "p-ext", {"c": ["container-0"]}),
    )


def test_a_template_that_has_not_become_a_claim_is_waited_for() -> None:
    with pytest.raises(NotYet, match="'made' was not created yet"):
        pod_claims(pod(claims=[{"name": "made", "resourceClaimTemplateName": "t"}]))


def test_a_claim_has_to_be_allocated_and_reserved_for_the_pod() -> None:
    with pytest.raises(NotYet, match="not allocated"):
        claim_ref(claim(), pod())
    with pytest.raises(NotYet, match="not reserved for this pod"):
        claim_ref(claim(allocation=ALLOCATED, reservedFor=[{"uid": "another"}]), pod())
    reserved = claim(allocation=ALLOCATED, reservedFor=[{"uid": "pod-1"}])
    assert claim_ref(reserved, pod()) == ref("c", "u1")
    assert drivers(reserved) == ("a", "b")


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        pytest.param([{"name": "gpus"}], ("x/c=1", "x/c=2", "x/c=3"), id="the whole claim"),
        pytest.param([{"name": "gpus", "request": "big"}], ("x/c=1", "x/c=3"), id="one request"),
        pytest.param([{"name": "other"}], (), id="another claim"),
        pytest.param([], (), id="no claim"),
    ],
)
def test_a_container_gets_the_devices_it_asked_for(
    claims: list[dict[str, str]], expected: tuple[str, ...]
) -> None:
    devices = {
        UID: (
            PreparedDevice(("big",), "p", "d1", ("x/c=1",)),
            PreparedDevice(("small",), "p", "d2", ("x/c=2",)),
            PreparedDevice((), "p", "d3", ("x/c=3",)),
        )
    }
    container = {"name": "c", "resources": {"claims": claims}}
    assert cdi_names(container, [(PodClaim("gpus", "c"), UID)], devices) == expected


def test_an_extended_resource_belongs_to_its_container() -> None:
    devices = {UID: (PreparedDevice(("container-0",), "p", "d1", ("x/c=1",)),)}
    claims = [(PodClaim("", "c", {"one": ["container-0"]}), UID)]
    assert cdi_names({"name": "one"}, claims, devices) == ("x/c=1",)
    assert cdi_names({"name": "two"}, claims, devices) == ()


def test_a_command_runs_with_the_edits_of_its_devices(tmp_path: Path) -> None:
    (tmp_path / "cdi").mkdir()
    tool = tmp_path / "tool"
    tool.write_text('#!/bin/sh\necho "$GPU $1 $NAME $PWD"\n')
    tool.chmod(0o755)
    edits = {
        "env": ["GPU=GPU-1"],
        "mounts": [{"hostPath": str(tool), "containerPath": "/usr/bin/nvidia-smi"}],
    }
    device = {"name": "u1", "containerEdits": edits}
    spec = {"cdiVersion": "0.6.0", "kind": "example.com/claim", "devices": [device]}
    (tmp_path / "cdi" / "spec.json").write_text(json.dumps(spec))
    container = {
        "name": "c",
        "command": ["nvidia-smi"],
        "args": ["-L"],
        "env": [{"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
    }
    directory = tmp_path / "run"
    config = configuration(container, pod())
    ended = Run(directory, config, ["example.com/claim=u1"], tmp_path / "cdi").wait()
    assert ended == Ended(0, "Completed", f"GPU-1 -L p {directory}/work\n")
    written = json.loads((directory / "config.json").read_text())
    assert written["mounts"][0]["destination"] == "/usr/bin/nvidia-smi"


def test_a_container_has_a_directory_with_what_is_mounted_and_the_devices(tmp_path: Path) -> None:
    (tmp_path / "cdi").mkdir()
    (tmp_path / "share").mkdir()
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\necho ${0%/usr/bin/*}/dev/* $LD_LIBRARY_PATH\n")
    tool.chmod(0o755)
    (tmp_path / "node").symlink_to("/dev/null")  # as a user simulates one who may not make nodes
    files = {
        "/usr/bin/tool": tool,
        "/usr/lib/libcuda.so.1": tool,
        "/data": tmp_path / "share",
        "/data/inner": tool,
    }
    edits = {
        "deviceNodes": [{"path": "/dev/nvidia3", "hostPath": str(tmp_path / "node")}],
        "mounts": [{"hostPath": str(h), "containerPath": c} for c, h in files.items()],
    }
    device = {"name": "u1", "containerEdits": edits}
    spec = {"cdiVersion": "0.6.0", "kind": "example.com/claim", "devices": [device]}
    (tmp_path / "cdi" / "spec.json").write_text(json.dumps(spec))
    config = configuration({"name": "c", "command": ["tool"]}, pod())

    ended = Run(tmp_path / "run", config, ["example.com/claim=u1"], tmp_path / "cdi").wait()

    root = tmp_path / "run" / "root"
    assert ended.output == f"{root}/dev/nvidia3 {root}/usr/lib\n"
    assert not any((tmp_path / "share").iterdir())  # nothing is written through a mount


def test_an_event_says_why_a_pod_waits() -> None:
    event = warning(pod(), "no such device")
    assert event["involvedObject"]["uid"] == "pod-1"
    assert event["reason"] == "FailedPrepareDynamicResources"
    assert event["message"].endswith("dynamic resources: no such device")


@pytest.mark.skipif(system_program("openssl") is None, reason="needs openssl")
def test_kubectl_logs_is_answered_and_strangers_are_not(tmp_path: Path) -> None:
    pki, output = tmp_path / "pki", tmp_path / "output"
    write_pki(pki, "node-a", "10.254.0.1")
    output.write_text("one\ntwo\nthree\n")
    known = {("default", "p", "main"): output, ("default", "p", "new"): tmp_path / "none yet"}
    with LogServer(pki, lambda *name: known.get(name)) as server:

        def ask(path: str, client: str = "apiserver-kubelet-client") -> tuple[int, str]:
            context = ssl.create_default_context(cafile=pki / "ca.crt")
            if client:
                context.load_cert_chain(pki / f"{client}.crt", pki / f"{client}.key")
            with contextlib.closing(
                http.client.HTTPSConnection("127.0.0.1", server.port, timeout=5, context=context)
            ) as connection:
                connection.request("GET", path)
                answer = connection.getresponse()
                return answer.status, answer.read().decode()

        assert ask("/containerLogs/default/p/main") == (200, "one\ntwo\nthree\n")
        assert ask("/containerLogs/default/p/main?tailLines=1") == (200, "three\n")
        assert ask("/containerLogs/default/p/main?limitBytes=5") == (200, "one\nt")
        assert ask("/containerLogs/default/p/new") == (200, "")
        assert ask("/containerLogs/default/other/main")[0] == 404
        assert ask("/pods")[0] == 404
        with pytest.raises(OSError):
            ask("/containerLogs/default/p/main", client="")


@pytest.mark.parametrize(
    ("command", "names", "code", "reason"),
    [
        pytest.param(["sh", "-c", "exit 3"], [], 3, "Error", id="a failing command"),
        pytest.param(["sh", "-c", "kill -9 $$"], [], 137, "Error", id="a killed command"),
        pytest.param(["no-such-program"], [], 127, "Error", id="a missing command"),
        pytest.param([], [], 128, "StandinNeedsCommand", id="no command"),
        pytest.param(["true"], ["x.y/z=0"], 128, "CDIInjectionFailed", id="an unknown device"),
    ],
)
def test_a_container_ends_as_it_would_elsewhere(
    tmp_path: Path, command: list[str], names: list[str], code: int, reason: str
) -> None:
    config = configuration({"name": "c", "command": command}, pod())
    ended = Run(tmp_path / "run", config, names, tmp_path).wait()
    assert (ended.exit_code, ended.reason) == (code, reason)


def test_a_stopped_container_ends_with_its_children(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = ["sh", "-c", f"(sleep 60 & echo up > {pipe}; wait) ; true"]
    run = Run(tmp_path / "run", configuration({"command": command}, pod()), [], tmp_path)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(run.wait)
        assert pipe.read_text() == "up\n"  # comes when the child runs
        run.stop()
        assert waiting.result(10).exit_code == 143


def test_the_last_pod_of_a_claim_unprepares_it(short: Path) -> None:
    desk = Desk()
    with FakeKubelet(short) as kubelet, running(short, desk):
        kubelet.wait_for_plugin(DRIVER)
        claims = SharedClaims(kubelet)
        refs = [(ref("a"), (DRIVER,))]
        assert claims.prepare("pod-1", refs) == claims.prepare("pod-2", refs)
        claims.unprepare("pod-1", [ref("a")])
        assert desk.calls == [("prepare", "a")]
        claims.unprepare("pod-2", [ref("a")])
        claims.unprepare("pod-2", [ref("a")])
    assert desk.calls == [("prepare", "a"), ("unprepare", "a")]


def test_two_pods_that_share_a_claim_prepare_it_once(short: Path) -> None:
    together = threading.Barrier(2, timeout=5)
    desk = Desk()

    def prepare(pod: str) -> Any:
        together.wait()
        return claims.prepare(pod, [(ref("a"), (DRIVER,))])

    with FakeKubelet(short) as kubelet, running(short, desk), ThreadPoolExecutor(2) as pool:
        kubelet.wait_for_plugin(DRIVER)
        claims = SharedClaims(kubelet)
        first, second = pool.map(prepare, ("pod-1", "pod-2"))
    assert first == second
    assert desk.calls == [("prepare", "a")]

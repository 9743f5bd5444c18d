"""What the chart has Kubernetes ask: of a pod that starts, and before an uninstall."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dra_driver.cli.uninstall_check import PodLine, describe
from dra_driver.k8s.claims import HeldClaim, Pod, PodUid
from dra_driver.kubeletplugin.serve.rolling_update import PluginInstances
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.node_annotation import DEVICE_PLUGIN_USES, DevicePluginHolders, DevicePluginUse
from tests.builders import claim, claim_document
from tests.cli.conftest import Answer, Type
from tests.fakes.api_server import ApiServer

DRIVER = "gpu.nvidia.com"
POD = "00000000-0000-4000-8000-00000000000a"


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[PluginInstances]:
    """The plugin process of a pod."""
    made = PluginInstances(tmp_path / "plugins" / DRIVER / "instances", POD)
    yield made
    made.leave()


def probe(type_in: Type, kubelet_dir: Path, pod: str = POD) -> Answer:
    return type_in("startup-probe", "--kubelet-dir", kubelet_dir, "--pod-uid", pod)


def test_a_pod_has_started_when_its_process_says_so(
    type_in: Type, tmp_path: Path, instance: PluginInstances
) -> None:
    assert probe(type_in, tmp_path) == Answer(1, "it is not ready yet: its log says why\n", "")

    instance.note_started()

    assert probe(type_in, tmp_path) == Answer(0, "", "")


def test_that_another_pods_process_has_started_says_nothing(
    type_in: Type, tmp_path: Path, instance: PluginInstances
) -> None:
    instance.note_started()

    answer = probe(type_in, tmp_path, pod="00000000-0000-4000-8000-00000000000b")

    assert answer == Answer(1, "its process has not come so far yet\n", "")


def test_a_process_that_has_died_has_not_started(type_in: Type, tmp_path: Path) -> None:
    directory = tmp_path / "plugins" / DRIVER / "instances"
    directory.mkdir(parents=True)
    (directory / f"1-{POD}").touch(mode=0o750)

    assert probe(type_in, tmp_path).code == 1


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer() as server:
        yield server


def check(type_in: Type, server: ApiServer, tmp_path: Path, *words: str) -> Answer:
    return type_in("uninstall-check", "--kubeconfig", server.kubeconfig(tmp_path / "k"), *words)


def test_where_no_claim_is_held_nothing_is_in_the_way(
    type_in: Type, server: ApiServer, tmp_path: Path
) -> None:
    pending = claim_document(claim("gpu-0", name="pending"))
    del pending["status"]
    server.put(pending)
    server.put(claim_document(claim("nic-0", name="other"), driver="nic.example.com"))

    assert check(type_in, server, tmp_path) == Answer(0, "", "")


def test_held_claims_are_named_with_their_pods(
    type_in: Type, server: ApiServer, tmp_path: Path
) -> None:
    pods = (Pod("web-0", PodUid("uid-0")), Pod("web-1", PodUid("uid-1")))
    server.put(claim_document(replace(claim("gpu-0", name="web"), pods=pods)))
    server.put(claim_document(claim("gpu-1", name="alone")))

    answer = check(type_in, server, tmp_path)

    assert answer.code == 1
    assert answer.out.splitlines()[1:-1] == [
        "  default/alone  no pod: delete the claim",
        "  default/web  pods: web-0, web-1",
    ]


USE = DevicePluginUse(ResourceNames())
UNNAMED = DevicePluginHolders((), 500)
RENAMED = DevicePluginUse(ResourceNames(gpu="example.com/gpu", mig_prefix=""))


def put_pods(
    server: ApiServer,
    node: str,
    *pods: str,
    api: str = "DevicePlugin",
    said: DevicePluginUse | str = USE,
) -> None:
    """Pods that ask for GPUs, on a node that gives them out by *api*; empty: by none of ours.
    *said*: what the annotation says; empty: there is none."""
    condition = {"type": "GPUsAllocatedBy", "status": "True", "reason": api, "message": "so it is"}
    text = DEVICE_PLUGIN_USES.encode(said).decode() if isinstance(said, DevicePluginUse) else said
    annotations = {"gpu.nvidia.com/device-plugin": text} if text else {}
    status = {"conditions": [condition] if api else []}
    metadata = {"name": node, "annotations": annotations}
    server.put({"kind": "Node", "metadata": metadata, "status": status})
    for name in pods:
        put_pod(server, name, node)


def put_pod(server: ApiServer, name: str, node: str, phase: str = "Running", **limits: str) -> None:
    resources = {"limits": limits or {"nvidia.com/gpu": "1"}}
    metadata = {"name": name, "namespace": "team", "uid": f"uid-{name}"}
    spec = {"nodeName": node, "containers": [{"name": "main", "resources": resources}]}
    server.put({"kind": "Pod", "metadata": metadata, "spec": spec, "status": {"phase": phase}})


@pytest.mark.parametrize("versions", [["v1"], []], ids=["beside DRA", "without DRA"])
def test_pods_with_gpus_by_the_device_plugin_api_are_named_with_their_nodes(
    type_in: Type, server: ApiServer, tmp_path: Path, versions: list[str]
) -> None:
    server.served[:] = versions
    put_pods(server, "node-b", "train")
    put_pods(server, "node-a", "web", "eval")

    answer = check(type_in, server, tmp_path)

    assert answer.code == 1
    first, *pods, last = answer.out.splitlines()
    assert first.startswith(
        "3 pods have GPUs by the device-plugin API. Without the driver no container of these pods"
    )
    assert pods == [
        "  team/eval  on node node-a",
        "  team/web  on node node-a",
        "  team/train  on node node-b",
    ]
    assert last.startswith("Delete these pods first, and wait two minutes until the driver has")


def test_a_node_that_the_plugin_has_left_to_another_device_plugin_is_not_in_the_way(
    type_in: Type, server: ApiServer, tmp_path: Path
) -> None:
    put_pods(server, "left", "theirs")
    put_pods(server, "here", "ours")
    for name, labels in (("plugin", {"c": "plugin", "i": "ours"}), ("waits", {"c": "plugin"})):
        metadata = {"name": name, "namespace": "gpus", "labels": labels}
        spec = {"nodeName": "here"} if name == "plugin" else {}
        server.put({"kind": "Pod", "metadata": metadata, "spec": {"containers": [], **spec}})

    assert check(type_in, server, tmp_path, "--plugin-selector", "c=other") == Answer(0, "", "")
    for selector in ("c=plugin,i=ours", "c=plugin"):
        answer = check(type_in, server, tmp_path, "--plugin-selector", selector)
        assert answer.out.splitlines()[1:-1] == ["  team/ours  on node here"]


def test_pods_that_need_this_driver_no_more_or_never_did_are_not_in_the_way(
    type_in: Type, server: ApiServer, tmp_path: Path
) -> None:
    nobody = replace(USE, holders=DevicePluginHolders())
    put_pods(server, "theirs", "of-another-device-plugin", api="", said="")
    put_pods(server, "shared", "of-either", api="OtherDevicePlugin", said=nobody)
    put_pods(server, "by-claims", "with-a-claim", api="DRA", said="")
    put_pods(server, "ours", said=RENAMED)
    put_pod(server, "ended", "ours", "Succeeded", **{"example.com/gpu": "1"})
    put_pod(server, "without", "ours", cpu="1")
    put_pod(server, "by-another-name", "ours", **{"nvidia.com/gpu": "1"})
    put_pod(server, "of-a-name-that-is-off", "ours", **{"nvidia.com/mig-1g.10gb": "1"})

    assert check(type_in, server, tmp_path) == Answer(0, "", "")

    put_pod(server, "renamed", "ours", **{"nvidia.com/gpu.shared": "1"})
    answer = check(type_in, server, tmp_path)
    assert answer.out.splitlines()[1:-1] == ["  team/renamed  on node ours"]


def test_beside_another_device_plugin_those_pods_count_that_the_node_names_as_its_own(
    type_in: Type, server: ApiServer, tmp_path: Path
) -> None:
    said = replace(USE, holders=DevicePluginHolders(("team/ours",), 2))
    put_pods(server, "node-a", "ours", "theirs", api="OtherDevicePlugin", said=said)

    answer = check(type_in, server, tmp_path)

    assert answer.out.startswith("2 pods have GPUs by the device-plugin API.")
    assert answer.out.splitlines()[1:-1] == [
        "  team/ours  on node node-a",
        "  a pod that the Node does not name  on node node-a",
    ]


def test_beside_another_device_plugin_all_pods_are_counted_whoever_is_named(
    type_in: Type, server: ApiServer, tmp_path: Path
) -> None:
    pods = tuple(f"team/pod-{number:03}" for number in range(20))
    said = replace(USE, holders=DevicePluginHolders(pods, 500))
    put_pods(server, "node-a", api="OtherDevicePlugin", said=said)

    answer = check(type_in, server, tmp_path)

    assert answer.out.startswith("500 pods have GPUs by the device-plugin API.")
    assert answer.out.splitlines()[-2] == "  and 488 more"

    put_pods(server, "node-a", api="OtherDevicePlugin", said=replace(said, holders=UNNAMED))
    first, *lines, _ = check(type_in, server, tmp_path).out.splitlines()
    assert first.startswith("500 pods have GPUs by the device-plugin API.")
    assert lines == ["  500 pods that the Node does not name  on node node-a"]


def test_where_pods_have_gpus_by_their_number_it_does_not_matter_who_is_named(
    type_in: Type, server: ApiServer, tmp_path: Path
) -> None:
    put_pods(server, "node-a", "ours", said=replace(USE, holders=DevicePluginHolders((), -5)))

    answer = check(type_in, server, tmp_path)

    assert answer.out.splitlines()[1:-1] == ["  team/ours  on node node-a"]


@pytest.mark.parametrize(
    ("holders", "why"),
    [
        (DevicePluginHolders((), -5), "`holders.count` is no number of pods"),
        (DevicePluginHolders((), 10**20), "`holders.count` is no number of pods"),
        (DevicePluginHolders(("team/a", "team/b"), 1), "`holders.count` is no number of pods"),
        (DevicePluginHolders(("team/a\n  team/forged",), 1), "is not namespace/name"),
        (DevicePluginHolders(("alone",), 1), "is not namespace/name"),
    ],
)
def test_what_the_driver_has_not_written_on_a_node_stops_the_uninstall(
    type_in: Type, server: ApiServer, tmp_path: Path, holders: DevicePluginHolders, why: str
) -> None:
    put_pods(server, "node-a", api="OtherDevicePlugin", said=replace(USE, holders=holders))

    answer = check(type_in, server, tmp_path)

    assert (answer.code, answer.out) == (1, "")
    assert "node-a (`holders." in answer.err and why in answer.err
    assert "forged" not in answer.err


def test_all_nodes_of_which_something_is_not_known_are_told_at_once_as_far_as_is_kept(
    type_in: Type, server: ApiServer, tmp_path: Path
) -> None:
    field = "\U0001f600\n\x1b" * 100_000
    document = json.loads(DEVICE_PLUGIN_USES.encode(USE))
    document["DevicePluginUse"][field] = 1
    put_pods(server, "a-node", said=json.dumps(document))
    put_pods(server, "b-node", said="")
    put_pods(server, "c-node", api="OtherDevicePlugin")
    for number in range(40):
        put_pods(server, f"d-{number:02}-{'n' * 200}", said="")

    answer = check(type_in, server, tmp_path)

    assert (answer.code, answer.out) == (1, "")
    assert len(answer.err.encode()) < 2048 and len(answer.err.splitlines()) == 1
    assert " of nodes a-node (" in answer.err
    assert "), b-node (it is missing), c-node (`holders` is null: " in answer.err
    assert re.search(r" and \d\d more: wait until", answer.err)


def test_each_node_says_what_its_own_pods_ask_for(
    type_in: Type, server: ApiServer, tmp_path: Path
) -> None:
    put_pods(server, "node-a", "of-another-device-plugin", said=RENAMED)
    put_pods(server, "node-b", "ours")

    answer = check(type_in, server, tmp_path)

    assert answer.out.splitlines()[1:-1] == ["  team/ours  on node node-b"]


@pytest.mark.parametrize(
    ("api", "said", "why"),
    [
        ("DevicePlugin", "", "it is missing"),
        ("DevicePlugin", "none", "it is not JSON"),
        ("DevicePlugin", "{}", "DevicePluginUse is missing"),
        ("OtherDevicePlugin", "", "it is missing"),
        ("OtherDevicePlugin", USE, "(`holders` is null: the plugin does not know"),
    ],
)
def test_where_a_node_does_not_say_who_has_gpus_the_uninstall_is_stopped(
    type_in: Type,
    server: ApiServer,
    tmp_path: Path,
    api: str,
    said: DevicePluginUse | str,
    why: str,
) -> None:
    put_pods(server, "node-a", api=api, said=said)

    answer = check(type_in, server, tmp_path)

    assert (answer.code, answer.out) == (1, "")
    assert "known which pods have GPUs, by the annotation gpu." in answer.err
    assert " of node node-a (" in answer.err
    assert why in answer.err and "): wait until the plugin there has written it" in answer.err


def test_the_pods_of_many_nodes_are_listed_once_page_by_page(
    type_in: Type, server: ApiServer, tmp_path: Path
) -> None:
    for number in range(3):
        put_pods(server, f"node-{number}", *(f"pod-{number}-{each}" for each in range(200)))
    put_pods(server, "theirs", "of-another-device-plugin", api="", said="")

    answer = check(type_in, server, tmp_path)

    assert answer.out.startswith("600 pods have GPUs by the device-plugin API.")
    lists = [each.query for each in server.requests if each.path == "/api/v1/pods"]
    assert ["continue" in query for query in lists] == [False, True]
    assert not any("resourceVersion" in query for query in lists)  # that sends all in one piece


def test_without_a_node_of_the_device_plugin_api_no_pod_is_listed(
    type_in: Type, server: ApiServer, tmp_path: Path
) -> None:
    put_pods(server, "by-claims", "with-a-claim", api="DRA", said="")

    assert check(type_in, server, tmp_path).code == 0
    assert not any(each.path == "/api/v1/pods" for each in server.requests)


def test_claims_and_pods_are_named_together(
    type_in: Type, server: ApiServer, tmp_path: Path
) -> None:
    server.put(claim_document(claim("gpu-0", name="alone")))
    put_pods(server, "node-a", *(f"pod-{number:02}" for number in range(30)))

    lines = check(type_in, server, tmp_path).out.splitlines()

    assert lines[0].startswith("a claim holds devices of gpu.nvidia.com.")
    assert lines[1] == "  default/alone  no pod: delete the claim"
    assert lines[2].startswith("30 pods have GPUs by the device-plugin API.")
    assert lines[3:-1] == [
        *(f"  team/pod-{number:02}  on node node-a" for number in range(11)),
        "  and 19 more",
    ]


NAMESPACE, LONG_NAME = "n" * 63, "p" * 253  # as long as Kubernetes allows


@given(
    claims=st.integers(0, 40),
    pods=st.integers(0, 40),
    pods_of_claim=st.integers(0, 8),
    length=st.integers(1, 253),
)
@example(claims=40, pods=40, pods_of_claim=8, length=253)
def test_however_long_the_names_what_is_wrong_and_what_to_do_is_kept_by_the_kubelet(
    claims: int, pods: int, pods_of_claim: int, length: int
) -> None:
    name = LONG_NAME[:length]
    held = [HeldClaim(NAMESPACE, name, (name,) * pods_of_claim)] * claims

    message = describe(
        LONG_NAME[:63], held, [PodLine(f"{NAMESPACE}/{name}  on node {name}")] * pods
    )

    assert len(message.encode()) < 2048
    lines = message.splitlines()
    names = [line for line in lines if line.startswith(f"  {NAMESPACE}/")]
    heads = [line for line in lines if line.endswith(":") and not line.startswith("  ")]
    assert len(names) == min(claims + pods, 12) and len(heads) == bool(claims) + bool(pods)
    if len(names) == 1 and not claims:  # all of it is there
        assert names == [f"  {NAMESPACE}/{name}  on node {name}"]
    hidden = sum(int(line.split()[1]) for line in lines if line.startswith("  and "))
    assert len(names) + hidden == claims + pods
    assert not lines or lines[-1].startswith("Delete these pods first")


def test_names_that_are_as_long_as_usual_are_whole_as_far_as_there_is_room() -> None:
    pods = [f"team/{'pod-' * 15}{n}  on node gke-{'node-' * 10}{n}" for n in range(8)]

    assert describe(DRIVER, [], list(map(PodLine, pods))).splitlines()[1:-1] == [
        f"  {line}" for line in pods
    ]


def test_many_claims_and_many_pods_share_the_lines() -> None:
    held = [HeldClaim("team", f"claim-{number}", ()) for number in range(30)]

    pods = [PodLine(f"team/pod-{number}") for number in range(30)]
    lines = describe(DRIVER, held, pods).splitlines()

    assert [line for line in lines if line.startswith("  and ")] == ["  and 24 more"] * 2
    assert sum(line.startswith("  team/claim") for line in lines) == 6
    assert sum(line.startswith("  team/pod") for line in lines) == 6


def test_a_list_that_the_api_server_forgets_is_begun_again(
    type_in: Type, server: ApiServer, tmp_path: Path
) -> None:
    server.put(claim_document(claim("gpu-0", name="web")))
    server.fail(410, "GET", "/resourceclaims")

    assert "default/web" in check(type_in, server, tmp_path).out


def test_of_many_claims_some_are_named_and_the_others_counted(
    type_in: Type, server: ApiServer, tmp_path: Path
) -> None:
    for number in range(30):
        server.put(claim_document(claim("gpu-0", name=f"claim-{number:02}")))

    answer = check(type_in, server, tmp_path)

    assert answer.out.startswith("30 claims hold devices of gpu.nvidia.com.")
    assert "default/claim-11" in answer.out and "default/claim-12" not in answer.out
    assert "  and 18 more\n" in answer.out
    assert len(answer.out) < 2048  # what the kubelet keeps of it


@pytest.mark.parametrize("resource", ["resourceclaims", "nodes", "pods"])
def test_where_the_api_server_does_not_say_the_uninstall_is_stopped(
    type_in: Type, server: ApiServer, tmp_path: Path, resource: str
) -> None:
    put_pods(server, "node-a")
    server.deny("list", resource)

    answer = check(type_in, server, tmp_path)

    assert (answer.code, answer.out) == (1, "")
    assert resource in answer.err

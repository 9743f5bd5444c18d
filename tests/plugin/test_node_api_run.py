"""The whole plugin as a process, with DRA and without it, and from one API to the other."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from dra_driver.k8s.claims import ClaimRef
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.node_annotation import DEVICE_PLUGIN_USES, DevicePluginUse
from tests.driver_process import Process
from tests.fakes.api_server import ApiServer
from tests.fakes.kubelet import FakeKubelet, KubeletError
from tests.fakes.pod_resources import FakePodResources
from tests.plugin.conftest import free_port, put, put_node, readiness
from tests.waiting import eventually

DRIVER = "gpu.nvidia.com"
SECONDS = 60.0
CHANGE = "API by which GPUs are given out"
LABEL = "gpu.nvidia.com/profile"
PROFILE = """
apiVersion: resource.nvidia.com/v1beta1
kind: NodeProfile
metadata: {{name: {name}}}
spec: {{api: {api}, gpus: [{{}}]}}
"""


@pytest.fixture(autouse=True)
def pod_resources(home: Path) -> Iterator[FakePodResources]:
    """The kubelet lists no pod with devices."""
    with FakePodResources(home / "kubelet") as listed:
        yield listed


@pytest.fixture
def profiles(home: Path) -> Path:
    """Two profiles, one for each API, that the label of the Node can name."""
    directory = home / "profiles"
    directory.mkdir()
    for name, api in (("dra", "DRA"), ("plugin", "DevicePlugin")):
        (directory / f"{name}.yaml").write_text(PROFILE.format(name=name, api=api))
    return directory


def choose(server: ApiServer, profile: str) -> None:
    put_node(server, labels={LABEL: profile})


def ended(process: Process) -> list[dict[str, Any]]:
    """What the plugin has logged, once it was asked to end."""
    process.send_signal(signal.SIGTERM)
    _, text = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    return [json.loads(line) for line in text.splitlines()]


def served_api(home: Path) -> str:
    path = home / f"kubelet/plugins/{DRIVER}/state/api.json"
    return path.read_text() if path.exists() else ""


def offered(server: ApiServer) -> bool:
    return bool(server.objects("resourceslices"))


def told(server: ApiServer) -> str:
    """What the Node says of the API."""
    (node,) = server.objects("nodes")
    conditions = node["status"].get("conditions") or ()
    said = (each for each in conditions if each["type"] == "GPUsAllocatedBy")
    return next((f"{each['reason']}: {each['message']}" for each in said), "")


def use(server: ApiServer) -> DevicePluginUse | None:
    """What the Node says of it for commands; None: nothing."""
    (node,) = server.objects("nodes")
    text = (node["metadata"].get("annotations") or {}).get("gpu.nvidia.com/device-plugin")
    return DEVICE_PLUGIN_USES.decode(text.encode()) if text else None


def make_old(server: ApiServer) -> None:
    """A cluster before DRA."""
    server.served = []
    (node,) = server.objects("nodes")
    node["status"]["nodeInfo"]["kubeletVersion"] = "v1.28.15"
    server.put(node)


def test_on_a_cluster_without_dra_the_plugin_rests_where_it_would_need_it(
    server: ApiServer, kubelet: FakeKubelet, start: Callable[..., Process], home: Path
) -> None:
    make_old(server)
    port = free_port()
    process = start(
        look_interval="0.1",
        reconcile_interval="0.1",
        http_address=f"127.0.0.1:{port}",
        log_format="json",
    )
    eventually(lambda: '"DevicePlugin"' in served_api(home), "the choice")
    for check in ("api", "gpus", "slices", "registration", "sockets"):
        eventually(lambda check=check: f"[+] {check}" in readiness(port)[1], check)  # type: ignore[misc]
    time.sleep(1.0)  # ten rounds of all that goes around
    asked = [request.path for request in server.requests if "resource.k8s.io" in request.path]
    assert set(asked) == {"/apis/resource.k8s.io"}
    assert len(asked) <= 4
    assert kubelet.instances(DRIVER) == ()
    lines = [line for line in ended(process) if line["level"] != "info"]
    assert [line["message"] for line in lines] == ["GPUs are simulated"]


@pytest.mark.parametrize("is_away", [False, True])
def test_the_next_process_serves_what_the_last_one_served(
    server: ApiServer,
    kubelet: FakeKubelet,
    start: Callable[..., Process],
    home: Path,
    is_away: bool,
) -> None:
    """Also while the API server is away, of whom claims are then asked in vain."""
    process = start()
    kubelet.wait_for_plugin(DRIVER)
    assert server.wait(lambda: offered(server))
    mine = put(server, "gpu-0")
    before = kubelet.prepare([mine])
    process.kill()
    process.wait()
    (home / f"kubelet/plugins_registry/{DRIVER}-reg.sock").unlink()
    kubelet.wait_until_gone(DRIVER)
    kubelet.forget()
    if is_away:
        server.refuse_connections()

    start(pod_uid="00000000-0000-4000-8000-00000000000b")

    kubelet.wait_for_plugin(DRIVER)
    assert kubelet.prepare([mine]) == before


class Node:
    """A plugin that serves DRA, as the profile says."""

    def __init__(
        self, server: ApiServer, kubelet: FakeKubelet, start: Callable[..., Process], profiles: Path
    ) -> None:
        self.server, self.kubelet = server, kubelet
        choose(server, "dra")
        self.process = start(profiles=str(profiles), look_interval="0.2", log_format="json")
        self.wait_for_dra()

    def wait_for_dra(self) -> None:
        self.kubelet.wait_for_plugin(DRIVER)
        assert self.server.wait(lambda: offered(self.server))

    def give_back(self, claim: ClaimRef) -> None:
        self.kubelet.unprepare([claim])
        self.server.remove("resourceclaims", claim.name, claim.namespace)


@pytest.fixture
def node(
    server: ApiServer, kubelet: FakeKubelet, start: Callable[..., Process], profiles: Path
) -> Node:
    return Node(server, kubelet, start, profiles)


def test_a_node_goes_to_the_device_plugin_api_once_its_claims_have_ended_and_back(
    server: ApiServer, kubelet: FakeKubelet, node: Node, home: Path
) -> None:
    train = put(server, "gpu-0", name="train")
    kubelet.prepare([train])
    assert server.wait(lambda: told(server) == "DRA: the profile says api: DRA")
    choose(server, "plugin")
    waits = "DRA: DevicePlugin is to come: the profile says api: DevicePlugin; waits for claim "
    assert server.wait(lambda: told(server) == f"{waits}default/train")
    assert offered(server)
    node.give_back(train)
    kubelet.wait_until_gone(DRIVER)
    assert not offered(server)
    assert '"DevicePlugin"' in served_api(home)
    because = "DevicePlugin: the profile says api: DevicePlugin"
    assert server.wait(lambda: told(server) == because)
    assert server.wait(lambda: use(server) == DevicePluginUse(ResourceNames()))

    choose(server, "dra")
    node.wait_for_dra()
    assert server.wait(lambda: use(server) is None)
    kubelet.prepare([put(server, "gpu-2", name="next")])
    lines = [line for line in ended(node.process) if line["message"] == CHANGE]
    states = [(line["api"], line.get("draining", False)) for line in lines]
    # Some twice, as what the node waits for is known: a claim, or a first look at its pods.
    assert [state for state, _ in groupby(states)] == [
        ("DRA", False),
        ("DRA", True),
        ("DevicePlugin", False),
        ("DevicePlugin", True),
        ("DRA", False),
    ]


def test_no_slice_brings_pods_before_the_kubelet_has_accepted_the_plugin_of_a_node_that_goes_to_dra(
    server: ApiServer, kubelet: FakeKubelet, node: Node
) -> None:
    choose(server, "plugin")
    kubelet.wait_until_gone(DRIVER)
    assert not offered(server)
    kubelet.look_seldom(1.0)

    choose(server, "dra")
    assert server.wait(lambda: offered(server))
    assert kubelet.instances(DRIVER)


def test_a_claim_that_was_allocated_just_before_the_node_changes_takes_it_back(
    server: ApiServer, kubelet: FakeKubelet, node: Node
) -> None:
    choose(server, "plugin")
    assert server.wait(lambda: not offered(server))
    late = put(server, "gpu-1", name="late")
    with pytest.raises(KubeletError, match="about to give its GPUs out by DevicePlugin"):
        kubelet.prepare([late])
    node.wait_for_dra()
    kubelet.prepare([late])
    node.give_back(late)
    kubelet.wait_until_gone(DRIVER)
    assert not offered(server)

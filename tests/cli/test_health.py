"""Sick GPUs of a cluster, as a person sees them, clears them and has them released."""

import json
import sys
import threading

import pytest

from api.names import (
    CLEAR_FAULTS_ANNOTATION,
    DEVICE_PLUGIN_ANNOTATION,
    RELEASE_ANNOTATION,
    RELEASED_ANNOTATION,
)
from dra_driver.base.errors import Unreachable
from dra_driver.cli.health import run
from dra_driver.cli.health.program import run_while_released
from dra_driver.plan.device_plugin.resources import ResourceNames
from dra_driver.plan.node_annotation import DEVICE_PLUGIN_USES, DevicePluginUse
from hack.container_image.environment import TUNING
from tests.fakes.api_server import ApiServer

DRIVER = "gpu.nvidia.com"
RELEASED = {"key": "gpu.nvidia.com/released", "effect": "NoSchedule"}
XID = {
    "key": "gpu.nvidia.com/xid",
    "value": "79",
    "effect": "NoSchedule",
    "timeAdded": "2026-11-24T03:00:00Z",
}


@pytest.fixture
def server():
    with ApiServer() as running:
        yield running


@pytest.fixture
def ask(server, type_in, tmp_path):
    """``dra-driver health``, with a kubeconfig."""
    kubeconfig = server.kubeconfig(tmp_path / "kubeconfig")

    def ask(action, *words):
        options = ["--kubeconfig", str(kubeconfig)]
        return type_in("health", action, *options, *words)

    return ask


def put_node(server, name="node-a", **annotations):
    metadata = {"name": name, "annotations": annotations}
    server.put({"apiVersion": "v1", "kind": "Node", "metadata": metadata})


def put_device_plugin_node(server, gpu="nvidia.com/gpu", reason="DevicePlugin", text=None):
    """One that gives its GPUs out by the device-plugin API. *text*: of the annotation, instead."""
    condition = {"type": "GPUsAllocatedBy", "status": "True", "reason": reason, "message": "so"}
    use = DEVICE_PLUGIN_USES.encode(DevicePluginUse(ResourceNames(gpu))).decode()
    annotations = {DEVICE_PLUGIN_ANNOTATION: use if text is None else text}
    metadata, status = {"name": "node-a", "annotations": annotations}, {"conditions": [condition]}
    server.put({"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status})


def put_pod(server, name="works", phase="Running", **limits):
    metadata = {"name": name, "namespace": "team", "uid": name}
    container = {"name": "main", "resources": {"limits": limits}}
    spec = {"nodeName": "node-a", "containers": [container]}
    server.put(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": metadata,
            "spec": spec,
            "status": {"phase": phase},
        }
    )


def put_slice(server, node="node-a", **taints):
    devices = [
        {
            "name": name.replace("_", "-"),
            "attributes": {
                "uuid": {"string": f"GPU-{name[-1]}"},
                "type": {"string": "gpu-monitor" if name.endswith("mon") else "gpu"},
            },
            "taints": each,
        }
        for name, each in taints.items()
    ]
    server.put(
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": f"slice-{node}"},
            "spec": {
                "driver": DRIVER,
                "nodeName": node,
                "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
                "devices": devices,
            },
        }
    )


def put_claim(server, device="gpu-0", node="node-a"):
    result = {"driver": DRIVER, "pool": node, "device": device, "request": "gpu"}
    server.put(
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": "claim", "namespace": "team"},
            "spec": {},
            "status": {
                "allocation": {"devices": {"results": [result]}},
                "reservedFor": [{"resource": "pods", "name": "pod", "uid": "u"}],
            },
        }
    )


def annotations(server):
    (node,) = server.objects("nodes")
    return node["metadata"].get("annotations") or {}


@pytest.fixture
def plugin(server, client_of):
    """The plugin of node-a, which does what the annotations say; and what it saw of them."""
    seen, stop, client = [], threading.Event(), client_of(server)

    def serve():
        while not stop.wait(0.02):
            act(server, client, seen)

    put_node(server)
    put_slice(server, gpu_0=[], gpu_1=[], gpu_0_mon=[])
    thread = threading.Thread(target=serve)
    thread.start()
    yield seen
    stop.set()
    thread.join(10)


def act(server, client, seen):
    there = annotations(server)
    request = there.get(RELEASE_ANNOTATION)
    if request and there.get(RELEASED_ANNOTATION) != request:
        seen.append(request)
        others = [RELEASED] if request.startswith("all") else []
        put_slice(server, gpu_0=[RELEASED], gpu_1=others, gpu_0_mon=[])
        stays = "; gpu-1 stays released until 2126-01-01T00:00:00Z"
        answer = f"{request} no such GPU: gpu-9{stays}" if "gpu-9" in request else request
        change = {RELEASED_ANNOTATION: answer}
    elif not request and RELEASED_ANNOTATION in there:
        seen.append("back")
        change = {RELEASED_ANNOTATION: None}
    elif CLEAR_FAULTS_ANNOTATION in there:
        seen.append(there[CLEAR_FAULTS_ANNOTATION])
        change = {CLEAR_FAULTS_ANNOTATION: None}
    else:
        return
    client.patch("/api/v1/nodes/node-a", {"metadata": {"annotations": change}})


def test_sick_gpus_of_all_nodes_are_listed_with_what_to_do(server, ask):
    put_slice(
        server, gpu_0=[XID], gpu_1=[{"key": "gpu.nvidia.com/monitor", "effect": "NoSchedule"}]
    )
    put_slice(server, "node-b", gpu_3=[RELEASED | {"timeAdded": XID["timeAdded"]}])

    lines = ask("list").out.splitlines()
    assert lines[0].split() == [
        *("NODE", "GPU", "DEVICES", "PROBLEM", "SINCE", "EFFECT"),
        *("WHAT", "TO", "DO"),
    ]
    assert "node-a   gpu-0   gpu-0     Xid 79: " in lines[1]
    assert "2026-11-24T03:00:00Z   NoSchedule" in lines[1]
    assert lines[2].startswith("node-b   gpu-3") and len(lines) == 3
    (found,) = json.loads(ask("list", "-o", "json", "--node", "node-b").out)
    assert found == {
        "node": "node-b",
        "gpu": "gpu-3",
        "problem": "released",
        "value": "",
        "effect": "NoSchedule",
        "since": XID["timeAdded"],
        "devices": ["gpu-3"],
    }


@pytest.mark.parametrize("action", [[], ["list"]])
def test_flags_may_stand_before_the_action(server, type_in, tmp_path, action):
    put_slice(server, gpu_0=[XID])
    put_slice(server, "node-b", gpu_3=[XID])
    kubeconfig = str(server.kubeconfig(tmp_path / "kubeconfig"))

    flags = ("--kubeconfig", kubeconfig, "--node-name", "node-b", "-o", "json")
    answer = type_in("health", *flags, *action)

    [listed] = json.loads(answer.out)
    assert (listed["node"], listed["gpu"]) == ("node-b", "gpu-3")


def test_where_nothing_is_wrong_it_says_so(server, ask, type_in, tmp_path, monkeypatch):
    put_slice(server, gpu_0=[])
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "config")))

    for answer in (ask("list"), type_in("health")):
        assert answer.out == "no GPU has a taint for its health\n"


def test_gpus_are_cleared_by_the_plugin_of_their_node(ask, plugin):
    answer = ask("clear", "gpu-0", "gpu-3", "--node", "node-a")

    assert (answer.code, plugin) == (0, ["gpu-0,gpu-3"])
    assert "node-a: gpu-0,gpu-3: cleared" in answer.out
    assert answer.out.endswith("; node-a publishes no gpu-3\n")
    assert "publishes no" not in ask("clear", "gpu-0", "GPU-1", "--node", "node-a").out
    assert "publishes no" not in ask("clear", "all", "--node", "node-a").out


def test_what_somebody_else_said_to_be_well_a_moment_before_is_cleared_too(server, client_of):
    put_node(server, **{CLEAR_FAULTS_ANNOTATION: "gpu-3,gpu-0"})
    command = run.HealthCommand(client_of(server), DRIVER, wait_seconds=0)

    with pytest.raises(run.HealthError, match="has not taken note yet"):
        command.clear("node-a", ["gpu-0", "gpu-1"])

    assert annotations(server) == {CLEAR_FAULTS_ANNOTATION: "gpu-3,gpu-0,gpu-1"}


def test_a_node_lets_go_of_gpus_until_it_is_told_otherwise(server, ask, plugin):
    answer = ask("release", "GPU-0", "--node", "node-a", "--for", "2h")

    (request,) = plugin
    assert answer.out.startswith(f"node-a has let go of GPU-0 until {request.split()[1]}")
    assert ask("release", "--end", "--node", "node-a").out == "node-a has its GPUs back\n"
    assert annotations(server) == {}


def test_a_program_runs_while_the_gpus_are_released(server, ask, plugin):
    program = [sys.executable, "-c", "import sys, time; time.sleep(1.5); sys.exit(3)"]

    answer = ask("release", "gpu-0", "--node", "node-a", "--for", "2s", "--", *program)

    assert answer.code == 3
    assert len(plugin) == 3 and plugin[-1] == "back"  # it was prolonged once
    assert annotations(server) == {}


def test_a_release_is_not_taken_from_who_has_it(server, ask, plugin):
    theirs = "gpu-1 2126-01-01T00:00:00Z"
    put_node(server, **{RELEASE_ANNOTATION: theirs, RELEASED_ANNOTATION: theirs})

    answer = ask("release", "gpu-0", "--node", "node-a", "--", sys.executable, "-c", "")

    assert f"has let go of GPUs already ({theirs})" in answer.err
    assert annotations(server)[RELEASE_ANNOTATION] == theirs
    assert ask("release", "gpu-0", "--node", "node-a", "--force").code == 0
    assert annotations(server)[RELEASE_ANNOTATION].startswith("gpu-0 ")


def test_what_was_released_before_is_so_again_after_a_program_in_its_place(server, ask, plugin):
    theirs = "gpu-1 2126-01-01T00:00:00Z"
    put_node(server, **{RELEASE_ANNOTATION: theirs, RELEASED_ANNOTATION: theirs})
    program = [sys.executable, "-c", "print('reset')"]

    answer = ask("release", "gpu-0", "--node", "node-a", "--force", "--", *program)

    assert answer.code == 0
    assert annotations(server)[RELEASE_ANNOTATION] == theirs


def test_a_release_that_is_over_is_nobodys(server, ask, plugin):
    put_node(server, **{RELEASE_ANNOTATION: "gpu-1 2026-01-01T00:00:00Z"})

    assert "has let go of gpu-0" in ask("release", "gpu-0", "--node", "node-a").out


def test_who_ends_leaves_a_release_that_took_the_place_of_his(server, ask, plugin):
    other = "gpu-1 2126-01-01T00:00:00Z"
    swap = threading.Timer(1.0, lambda: put_node(server, **{RELEASE_ANNOTATION: other}))
    swap.start()
    program = [sys.executable, "-c", "import time; time.sleep(2)"]

    ask("release", "gpu-0", "--node", "node-a", "--", *program)

    assert annotations(server)[RELEASE_ANNOTATION] == other


@pytest.mark.parametrize("program", [[], ["--", sys.executable, "-c", "print('reset')"]])
def test_a_name_that_is_wrong_leaves_nothing_released(server, ask, plugin, program):
    answer = ask("release", "gpu-0,gpu-9", "--node", "node-a", *program)

    assert answer.code == 1
    assert "node-a: no such GPU: gpu-9: write gpu-0, a UUID or all" in answer.err
    assert "reset" not in answer.out
    assert annotations(server) == {}


@pytest.mark.parametrize("program", [[], ["--", sys.executable, "-c", "print('reset')"]])
def test_what_somebody_else_released_stays_so_where_a_name_is_wrong(server, ask, plugin, program):
    theirs = "gpu-1 2126-01-01T00:00:00Z"
    put_node(server, **{RELEASE_ANNOTATION: theirs, RELEASED_ANNOTATION: theirs})

    answer = ask("release", "gpu-9", "--node", "node-a", "--force", *program)

    assert answer.code == 1
    assert "no such GPU: gpu-9: write" in answer.err
    assert annotations(server)[RELEASE_ANNOTATION] == theirs


def test_a_release_that_cannot_be_ended_says_for_how_long_it_goes_on(server, client_of, plugin):
    command = run.HealthCommand(client_of(server), DRIVER)

    with (
        pytest.raises(
            run.HealthError, match=r"gpu-0 of node-a may stay released until 20\S+Z: end"
        ),
        command.released("node-a", ["gpu-0"], 60),
    ):
        server.fail(500, "GET", "nodes", times=100)
    server.heal()


def test_a_program_that_cannot_be_started_leaves_nothing_released(server, ask, plugin):
    answer = ask("release", "gpu-0", "--node", "node-a", "--", "/no/such/program")

    assert "/no/such/program cannot be started: No such file" in answer.err
    assert annotations(server) == {}


def test_a_program_is_not_left_alone_while_its_release_cannot_be_prolonged(caplog):
    tries = []

    def go_on():
        tries.append(1)
        if len(tries) < 3:
            raise Unreachable("the API server is away")

    program = [sys.executable, "-c", "import sys, time; time.sleep(1); sys.exit(3)"]

    assert run_while_released(program, go_on, 0.1) == 3
    assert len(tries) > 3
    assert caplog.text.count("not prolonged yet: the API server is away") == 2


def test_a_program_that_a_signal_ends_has_the_exit_code_of_shells():
    assert run_while_released(["sh", "-c", "kill -KILL $$"], lambda: None, 60) == 128 + 9


def test_two_dashes_without_a_program_release_nothing(type_in):
    assert "no program stands behind --" in type_in("health", "release", "gpu-0", "--").err


@pytest.mark.parametrize("variable", TUNING)
def test_a_program_does_not_get_what_the_image_tunes_for_the_driver(monkeypatch, variable):
    name, value = variable.split("=")
    monkeypatch.setenv(name, value)
    program = ["sh", "-c", f'exit "${{{name}:-0}}"']
    assert run_while_released(program, lambda: None, 60) == 0


@pytest.mark.parametrize("action", [["clear", "gpu-0"], ["release"]])
def test_what_is_printed_in_one_form_only_takes_no_form(type_in, action):
    for form in ("json", "table"):
        assert "health release take no -o" in type_in("health", "-o", form, *action).err


@pytest.fixture(params=["a cluster without DRA", "DRA beside it"])
def by_device_plugin(request, server, plugin):
    """Node-a gives its GPUs out by the device-plugin API; what its plugin saw of annotations."""
    server.remove("resourceslices", "slice-node-a")
    if request.param == "a cluster without DRA":
        server.served[:] = []
    put_device_plugin_node(server)
    return plugin


def test_gpus_that_a_device_plugin_gives_out_are_cleared_and_released(ask, by_device_plugin):
    answer = ask("clear", "gpu-3", "--node", "node-a")
    assert answer.code == 0
    assert "only the log of its plugin says whether it has such a GPU" in answer.out
    assert "publishes no" not in ask("clear", "all", "--node", "node-a").out

    assert "has let go of gpu-3" in ask("release", "gpu-3", "--node", "node-a").out
    assert ask("release", "--end", "--node", "node-a").out == "node-a has its GPUs back\n"


def test_gpus_that_pods_have_by_the_device_plugin_api_are_not_released(
    server, ask, by_device_plugin
):
    put_pod(server, **{"nvidia.com/gpu": "1"})
    put_pod(server, "other", cpu="1")
    put_pod(server, "ended", "Succeeded", **{"nvidia.com/gpu": "1"})

    answer = ask("release", "gpu-3", "--node", "node-a")

    assert answer.code == 1
    assert (
        "pods have GPUs of node-a by the device-plugin API, which does not say which: team/works: "
        "delete them first, or use --force"
    ) in answer.err
    assert by_device_plugin == []
    assert ask("release", "gpu-3", "--node", "node-a", "--force").code == 0


def test_it_is_the_node_that_says_what_pods_ask_for(server, ask, by_device_plugin):
    put_device_plugin_node(server, "example.com/gpu")
    put_pod(server, "of-another-driver", **{"nvidia.com/gpu": "1"})
    put_pod(server, "renamed", **{"example.com/gpu": "1"})

    answer = ask("release", "gpu-3", "--node", "node-a")

    assert answer.code == 1
    assert "by the device-plugin API, which does not say which: team/renamed: " in answer.err
    assert by_device_plugin == []


def test_where_the_node_does_not_say_what_pods_ask_for_nothing_is_released(server, ask, plugin):
    server.served[:] = []

    answer = ask("release", "gpu-3", "--node", "node-a")

    assert answer.code == 1
    why = "(the Node has no condition GPUsAllocatedBy of that API)"
    assert f"node-a does not say what pods ask for to get its GPUs {why}" in answer.err
    assert plugin == []


@pytest.mark.parametrize("reason", ["DevicePlugin", "OtherDevicePlugin"])
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("none", "it is not JSON"),
        ('{"version": 9, "release": "9.0", "DevicePluginUse": {}}', "release 9.0 wrote it"),
    ],
)
def test_nothing_is_released_while_it_is_not_known_which_pods_have_gpus(
    server, ask, by_device_plugin, reason, text, problem
):
    put_device_plugin_node(server, reason=reason, text=text)
    put_pod(server, **{"nvidia.com/gpu": "1"})

    answer = ask("release", "gpu-3", "--node", "node-a")

    assert answer.code == 1
    assert f"node-a does not say what pods ask for to get its GPUs ({problem}" in answer.err
    assert by_device_plugin == []
    assert ask("release", "gpu-3", "--node", "node-a", "--force").code == 0


def test_nodes_whose_gpus_a_device_plugin_gives_out_are_named_beside_the_others(server, ask):
    put_slice(server, "node-b", gpu_0=[])
    put_device_plugin_node(server)

    assert ask("list").out == (
        "no GPU has a taint for its health\n"
        "by the device-plugin API, which has no taints: node-a "
        "(kubectl get events -n default --field-selector reason=GPUUnhealthy)\n"
    )


def test_where_a_device_plugin_gives_gpus_out_it_is_said_what_tells_of_sick_ones(
    ask, by_device_plugin
):
    answer = ask("list", "--node", "node-a")

    assert answer.code == 1
    assert "node-a gives GPUs out by the device-plugin API" in answer.err
    assert "kubectl get events -n default --field-selector reason=GPUUnhealthy" in answer.err


@pytest.mark.parametrize("gpus", [[], ["gpu-0"], ["GPU-0"]])
def test_gpus_that_claims_hold_are_not_released(server, ask, plugin, gpus):
    put_claim(server)

    answer = ask("release", *gpus, "--node", "node-a")
    assert answer.code == 1
    assert "claims hold these GPUs of node-a: team/claim (pods: pod)" in answer.err
    assert plugin == []
    assert ask("release", *gpus, "--node", "node-a", "--force").code == 0


def test_claims_on_other_gpus_and_nodes_do_not_matter(server, ask, plugin):
    put_claim(server, "gpu-1")
    assert ask("release", "gpu-0", "--node", "node-a").code == 0
    assert ask("release", "--end", "--node", "node-a").code == 0
    put_claim(server, "gpu-0", "node-b")
    assert ask("release", "gpu-0", "--node", "node-a").code == 0


def test_a_plugin_that_does_not_let_go_says_what_it_waits_for(server, client_of):
    put_node(server, **{RELEASED_ANNOTATION: "gpu-0 2026-11-24T03:00:00Z a call is under way"})
    command = run.HealthCommand(client_of(server), DRIVER, wait_seconds=0.1)

    with pytest.raises(run.HealthError, match=r"has not let go yet \(a call is under way\)"):
        command.release("node-a", ["gpu-0"], 60)
    put_node(server)
    with pytest.raises(run.HealthError, match="not let go yet: is its plugin running"):
        command.release("node-a", ["gpu-0"], 60)
    with pytest.raises(run.HealthError, match="has not taken note yet: is it running"):
        command.clear("node-a", ["all"])


@pytest.fixture
def client_of(tmp_path):
    from dra_driver.k8s.access import load_kubeconfig
    from dra_driver.k8s.client import ApiClient

    clients = []

    def make(server):
        clients.append(ApiClient(load_kubeconfig(server.kubeconfig(tmp_path / "config"))))
        return clients[-1]

    yield make
    for each in clients:
        each.close()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["clear", "gpu 0", "--node", "node-a"], "'gpu 0' names no GPU: write gpu-0, a UUID"),
        (["clear", "all", "--node", "node-z"], "there is no node node-z: name one with"),
        (["release", "--for", "10", "--node", "a"], "'10': write 90s, 10m or 2h"),
        (["release", "--for", "800h", "--node", "a"], "'800h': write 90s, 10m or 2h"),
        (["clear", "all", "--", "ls"], "nothing can be run here: ls"),
        (["clear", "", "--node", "node-a"], "'' names no GPU: write gpu-0, a UUID or all"),
        (["release", "", "--node", "node-a"], "'' names no GPU: write gpu-0, a UUID or all"),
        (["release", "gpu-0,", "--node", "node-a"], "'' names no GPU"),
        (["clear", "gpu-7-mig-1g10gb-19-0", "--node", "node-a"], "is a part of a GPU: write the"),
        (["clear", "MIG-31b339c7-0007", "--node", "node-a"], "is a part of a GPU: write the"),
        (["release", "gpu-0-mon", "--node", "node-a"], "is a part of a GPU: write the name of"),
        (["release", "--end", "gpu-0", "--node", "node-a"], "--end ends the release of the node"),
        (["release", "--end", "--node", "node-a", "--", "ls"], "takes no GPU and no program"),
        (["list", "--node", "node-z"], "there is no node node-z: name one with"),
        (["list", "--node", "node-a"], "node-a publishes no devices of gpu.nvidia.com"),
    ],
)
def test_what_cannot_be_meant_is_refused(server, ask, words, problem):
    put_node(server)

    answer = ask(*words)

    assert answer.code in (1, 2)
    assert problem in answer.err
    assert annotations(server) == {}

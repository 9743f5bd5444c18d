"""NodeProfiles in the real API server: refused, taken by the plugin, rolled out with care."""

import json
import re
import subprocess
import tempfile
from pathlib import Path

import pytest

from api.names import GPUS_CONFIGURED, PROFILE_LABEL, PROFILE_REVISION_ANNOTATION
from dra_driver.__main__ import main
from tests.e2e.controllers import Controllers
from tests.e2e.driver import NAMESPACE
from tests.e2e.kube import wait
from tests.e2e.profile_nodes import profile_nodes
from tests.e2e.release import CRD

WHOLE = [{"fractions": "Never"}]
HALVES = [{"replicas": 2}]
QUARTERS = [{"replicas": 4}]
EIGHTHS = [{"replicas": 8}]
FLEET, SMALL, OWN = "fleet", "small", "own"


@pytest.fixture(scope="module")
def nodes(kube, chart):
    with profile_nodes(kube.api, {FLEET: 50, SMALL: 4}) as made:
        wait("all nodes", lambda: len(made.nodes) == 54, 20)
        yield made


@pytest.fixture(scope="module")
def both(kube, chart):
    with tempfile.TemporaryDirectory(prefix="dra-e2e-") as directory:
        made = Controllers(kube, Path(directory))
        yield made
        made.close()


@pytest.fixture
def controllers(kube, both, nodes):
    """Two controllers, of which one leads; no NodeProfile is there."""
    nodes.refusals, nodes.seconds = {}, 0.0
    nodes.beat()
    both.start()
    yield both
    remove_profiles(kube)


def remove_profiles(kube):
    for document in kube.all("NodeProfile"):
        kube.delete("NodeProfile", document["metadata"]["name"])


def profile(name, gpus, pool, **spec):
    return {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": "NodeProfile",
        "metadata": {"name": name},
        "spec": {"gpus": gpus, "nodeSelector": {"pool": pool}, **spec},
    }


def change(kube, name, **spec):
    kube.api.patch(f"{kube.path('NodeProfile')}/{name}", {"spec": spec})


def status(kube, name):
    document = kube.get("NodeProfile", name)
    found = document.get("status") or {}
    is_seen = found.get("observedGeneration") == document["metadata"]["generation"]
    return found if is_seen else {}


def reason(kube, name, type_="Progressing"):
    conditions = status(kube, name).get("conditions", ())
    return next((each["reason"] for each in conditions if each["type"] == type_), "")


def wait_for(kube, controllers, name, expected, seconds=40):
    try:
        wait(f"{name} to be {expected}", lambda: reason(kube, name) == expected, seconds)
    except AssertionError as e:
        raise AssertionError(f"{e}: {status(kube, name)}\n{controllers.logs()}") from e
    return status(kube, name)


def command(kube, capsys, *words):
    """What `dra-driver profile` says to the administrator."""
    capsys.readouterr()
    assert main(["profile", *words, f"--kubeconfig={kube.config}"]) == 0
    return capsys.readouterr().out


def test_a_wrong_profile_is_refused_when_it_is_applied(kube, chart, tmp_path):
    wrong = profile("wrong", [{"replicas": "four"}], FLEET)
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps(wrong))

    with pytest.raises(subprocess.CalledProcessError) as refused:
        kube.kubectl("apply", "--filename", str(file))

    assert "spec.gpus[0].replicas: Invalid value" in refused.value.stderr


@pytest.mark.core
def test_a_change_reaches_fifty_nodes_five_at_a_time(kube, nodes, controllers, capsys):
    nodes.begin(FLEET)
    kube.apply(profile("inference", QUARTERS, FLEET))

    reached = wait_for(kube, controllers, "inference", "Complete")

    assert (reached["nodes"], reached["updated"], reached["failed"]) == (50, 50, 0)
    assert nodes.having(reached["currentRevision"]) == {n for n in nodes.nodes if FLEET in n}
    assert nodes.given == 50
    assert 1 < nodes.most_in_progress <= 5
    [head, line] = kube.kubectl("get", "nodeprofiles").splitlines()
    assert head.split() == ["NAME", "NODES", "UPDATED", "PENDING", "FAILED", "STATUS", "AGE"]
    assert line.split()[:6] == ["inference", "50", "50", "0", "0", "Complete"]

    stops_at_the_third_failure_and_is_undone(kube, nodes, controllers, capsys)
    is_paused_and_resumed(kube, nodes, controllers, capsys)


def stops_at_the_third_failure_and_is_undone(kube, nodes, controllers, capsys):
    """Of the rollout above, which takes most of the time."""
    nodes.refusals = {f"fleet-{n:04}": "no GPU is an H100" for n in (1, 2, 7, 30)}
    nodes.beat()
    first = status(kube, "inference")["currentRevision"]
    change(kube, "inference", gpus=WHOLE)

    stopped = wait_for(kube, controllers, "inference", "TooManyFailures")

    assert stopped["failed"] == 3
    assert stopped["updated"] <= 10
    assert [each["node"] for each in stopped["failures"]] == [
        "fleet-0001",
        "fleet-0002",
        "fleet-0007",
    ]
    assert len(nodes.having(first)) >= 37
    text = command(kube, capsys, "status", "inference")
    assert text.count("no GPU is an H100") == 3

    nodes.refusals = {}
    assert f"is back at revision 1 ({first})" in command(kube, capsys, "undo", "inference")

    wait_for(kube, controllers, "inference", "Complete")
    assert len(nodes.having(first)) == 50
    assert nodes.most_in_progress <= 5


def is_paused_and_resumed(kube, nodes, controllers, capsys):
    nodes.beat()
    nodes.begin(FLEET)
    change(kube, "inference", gpus=HALVES)
    wait("the first nodes to be given it", lambda: nodes.given)
    command(kube, capsys, "pause", "inference")

    wait_for(kube, controllers, "inference", "Paused")
    given = nodes.given
    change(kube, "inference", rollout={"maxUnavailable": "50%"})
    wait("the controller to see that", lambda: status(kube, "inference"))
    assert nodes.given == given < 50

    command(kube, capsys, "resume", "inference")
    wait_for(kube, controllers, "inference", "Complete")
    assert len(nodes.having(status(kube, "inference")["currentRevision"])) == 50


def test_the_leader_is_killed_at_every_write_of_a_rollout(kube, nodes, controllers):
    """Each leader lives for one write: the API server has done it, and nobody was told."""
    nodes.begin(SMALL)
    nodes.seconds = 0.7  # the next leader finds nodes in progress
    with controllers.killed_at_writes(f"/{SMALL}", "/controllerrevisions") as writes:
        kube.apply(profile("small", QUARTERS, SMALL, rollout={"maxUnavailable": 2}))
        wait_for(kube, controllers, "small", "Complete", 90)

    assert len(nodes.having(status(kube, "small")["currentRevision"])) == 4
    assert (nodes.given, nodes.most_in_progress) == (4, 2)
    # A revision, four nodes in two turns, and the status before and after each turn.
    assert len(writes) >= 8, writes
    assert {write.split()[0] for write in writes} == {"POST", "PATCH"}


def test_profiles_go_with_their_resource_and_come_again(kube, nodes, controllers):
    definition = kube.get("CustomResourceDefinition", CRD)
    kube.apply(profile("small", HALVES, SMALL))
    wait_for(kube, controllers, "small", "Complete")

    kube.delete("CustomResourceDefinition", CRD)
    kube.wait_gone("CustomResourceDefinition", CRD)
    wait("the nodes to leave it", lambda: all(n.given == "" for n in small(nodes)), 30)
    metadata = {key: definition["metadata"][key] for key in ("name", "labels", "annotations")}
    kube.apply({**definition, "metadata": metadata, "status": None})

    wait("the resource", lambda: kube.apply(profile("small", EIGHTHS, SMALL)), 20)
    wait_for(kube, controllers, "small", "Complete", 70)
    assert all(replica.process.poll() is None for replica in controllers.replicas)


def small(nodes):
    return [node for name, node in nodes.nodes.items() if name.startswith(SMALL)]


# From here on the plugin itself, on the node that there is.


def message(driver):
    """What the plugin reports."""
    node = driver.kube.api.get(f"/api/v1/nodes/{driver.cluster.node_name}")
    conditions = node["status"]["conditions"]
    return next((each["message"] for each in conditions if each["type"] == GPUS_CONFIGURED), "")


def given(driver):
    node = driver.kube.api.get(f"/api/v1/nodes/{driver.cluster.node_name}")
    return node["metadata"]["annotations"].get(PROFILE_REVISION_ANNOTATION)


def divided(kube):
    """In how many parts the first GPU is offered; 0: to one claim as a whole."""
    devices = kube.published()
    if "gpu-0" not in devices:  # this Kubernetes knows no parts: each replica is a device
        return sum(re.fullmatch("gpu-0-[0-9]+", name) is not None for name in devices)
    if not devices["gpu-0"].get("allowMultipleAllocations"):
        return 0
    return int(devices["gpu-0"]["capacity"]["shares"]["value"])


@pytest.fixture
def own_pool(kube, driver):
    """The node of the cluster is in a pool. In the end it has no profile."""
    node = driver.cluster.node_name
    usual = divided(kube)
    kube.label_node(node, pool=OWN)
    yield node
    kube.label_node(node, pool=None, **{PROFILE_LABEL: None})
    remove_profiles(kube)
    wait("the usual GPUs", lambda: divided(kube) == usual, 30)


@pytest.mark.core
def test_the_plugin_takes_what_the_controller_gives_it(kube, driver, own_pool, controllers):
    kube.apply(profile("own", WHOLE, OWN, revisionHistoryLimit=0))
    wait_for(kube, controllers, "own", "Complete")
    wait("whole GPUs", lambda: divided(kube) == 0)
    first = given(driver)
    assert message(driver) == f"NodeProfile own, revision {given(driver)}: in force"

    change(kube, "own", gpus=EIGHTHS)
    wait_for(kube, controllers, "own", "Complete")
    wait("eighths", lambda: divided(kube) > 0)
    kube.wait_gone("ControllerRevision", first, NAMESPACE, 10)

    kube.delete("NodeProfile", "own")
    wait("the files to hold again", lambda: "of the files: in force" in message(driver), 20)


@pytest.mark.core
def test_a_node_that_joins_while_no_controller_runs_takes_its_profile(
    kube, driver, own_pool, both, nodes
):
    """And a person's label acts at once; the controller then finds all as it should be."""
    both.stop()
    driver.stop()
    kept = driver.plugin_dir / "state/profile.json"
    kept.unlink(missing_ok=True)
    forget = {"metadata": {"annotations": {PROFILE_REVISION_ANNOTATION: None}}}
    kube.api.patch(f"/api/v1/nodes/{own_pool}", forget)
    kube.apply(profile("own", WHOLE, OWN))
    kube.apply(profile("by-label", EIGHTHS, "nobody"))

    driver.start()

    wait("whole GPUs", lambda: divided(kube) == 0, 20)
    assert given(driver) is None
    wait("its report", lambda: message(driver).startswith("NodeProfile own, revision own-"))
    taken = message(driver).split()[3].rstrip(":")

    kube.label_node(own_pool, **{PROFILE_LABEL: "by-label"})
    wait("the profile of the label", lambda: "NodeProfile by-label" in message(driver), 10)
    wait("GPUs in parts", lambda: divided(kube) > 0, 10)
    kube.label_node(own_pool, **{PROFILE_LABEL: None})

    both.start()
    wait_for(kube, both, "own", "Complete")
    wait("its own profile", lambda: divided(kube) == 0, 10)
    assert given(driver) == taken

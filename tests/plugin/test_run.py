"""The whole plugin as a process, between a fake kubelet and a fake API server."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dra_driver.model.node_profiles import Revision
from dra_driver.plan.profiles.revisions import canonical_rules, revision_document, revision_name
from tests.builders import POOL, config
from tests.driver_process import Process
from tests.fakes.api_server import ApiServer
from tests.fakes.kubelet import FakeKubelet
from tests.plugin.conftest import put, put_node
from tests.waiting import eventually

DRIVER = "gpu.nvidia.com"
SECONDS = 60.0


@pytest.mark.point(18, 28, 57, 105)
def test_from_start_to_sigterm(
    server: ApiServer, kubelet: FakeKubelet, start: Callable[..., Process], home: Path
) -> None:
    process = start()
    kubelet.wait_for_plugin(DRIVER)
    assert server.wait(lambda: len(server.objects("resourceslices")) == 1)
    (published,) = server.objects("resourceslices")
    gpus = [f"gpu-{n}" for n in range(8)]
    names = [d["name"] for d in published["spec"]["devices"]]
    assert names == [*gpus, *(f"{gpu}-mon" for gpu in gpus)]

    first, second = put(server, "gpu-0"), put(server, "gpu-5", "gpu-6", name="two")
    answers = kubelet.prepare([first, second])
    assert [d.device for d in answers[second.uid]] == ["gpu-5", "gpu-6"]
    kubelet.unprepare([second])
    specs = [f"k8s.gpu.nvidia.com-claim_{first.uid}.json", "k8s.gpu.nvidia.com-driver_files.json"]
    assert sorted(os.listdir(home / "cdi")) == specs

    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == 0  # in how many, test_hangs sees
    assert len(server.objects("resourceslices")) == 1
    assert sorted(os.listdir(home / "cdi")) == specs
    assert not [p for p in (home / "kubelet").rglob("*") if p.is_socket()]


def test_the_drivers_cdi_file_goes_with_the_last_plugin_once_no_claim_needs_it(
    server: ApiServer, kubelet: FakeKubelet, start: Callable[..., Process], home: Path
) -> None:
    def files() -> list[str]:
        return os.listdir(home / "cdi") if (home / "cdi").exists() else []

    process = start()
    kubelet.wait_for_plugin(DRIVER)
    eventually(files, "the CDI file of the driver")
    claim = put(server, "gpu-0")
    kubelet.prepare([claim])
    kubelet.unprepare([claim])
    assert files() == ["k8s.gpu.nvidia.com-driver_files.json"]

    process.send_signal(signal.SIGTERM)

    assert process.wait(SECONDS) == 0
    assert files() == []


def test_a_label_of_the_node_has_its_gpus_partitioned_and_another_one_tells_how_far_that_is(
    server: ApiServer, kubelet: FakeKubelet, start: Callable[..., Process]
) -> None:
    def label(layout: str) -> None:
        labels = {"nvidia.com/mig.config": layout}
        put_node(server, labels=labels)

    def state() -> str | None:
        (node,) = server.objects("nodes")
        progress: str | None = node["metadata"]["labels"].get("nvidia.com/mig.config.state")
        return progress

    def partitions() -> list[str]:
        devices = [
            d for s in server.objects("resourceslices") for d in s["spec"].get("devices", ())
        ]
        return sorted(d["name"] for d in devices if "-mig-" in d["name"])

    label("all-3g.20gb")
    start(sim="a100-40x1", profile="default")
    kubelet.wait_for_plugin(DRIVER)
    halves = ["gpu-0-mig-3g20gb-9-0", "gpu-0-mig-3g20gb-9-4"]
    assert server.wait(lambda: (state(), partitions()) == ("success", halves))

    holder = put(server, halves[0])
    kubelet.prepare([holder])
    label("all-7g.40gb")
    assert server.wait(lambda: (state(), partitions()) == ("pending", halves))
    kubelet.unprepare([holder])
    assert (state(), partitions()) == ("pending", halves)  # as long as the claim is allocated
    server.remove("resourceclaims", holder.name, holder.namespace)
    assert server.wait(lambda: (state(), partitions()) == ("success", ["gpu-0-mig-7g40gb-0-0"]))

    label("all-sevens")
    assert server.wait(lambda: state() == "failed")
    assert server.wait(lambda: len(node_events(server)) == 3)
    assert [event.partition(": there is no")[0] for event in node_events(server)] == [
        "MIGLayoutApplied: partitioned as layout 'all-3g.20gb' says: gpu-0",
        "MIGLayoutApplied: partitioned as layout 'all-7g.40gb' says: gpu-0",
        "MIGLayoutFailed: the layout of this node cannot be used",
    ]


def test_a_revision_is_reported_once_it_is_offered_and_gpus_in_use_until_they_follow(
    server: ApiServer, kubelet: FakeKubelet, start: Callable[..., Process]
) -> None:
    def is_said(text: str) -> bool:
        return server.wait(lambda: message_of_node(server).startswith(f"{inference} {text}"))

    inference = "NodeProfile inference, revision"
    without_seven = keep_revision(server, {"select": {"index": [7]}, "include": False})
    whole = keep_revision(server, {"fractions": "Never"})
    give_revision(server, without_seven)
    start(revision_namespace="gpus")
    kubelet.wait_for_plugin(DRIVER)
    assert is_said(f"{without_seven}: in force")
    assert server.wait(lambda: "gpu-0" in offered(server) and "gpu-7" not in offered(server))

    part = put(server, "gpu-0")
    kubelet.prepare([part])
    give_revision(server, whole)
    assert is_said(f"{whole}: 1 GPU changes when no claim holds it: gpu-0")
    assert server.wait(lambda: "gpu-7" in offered(server))

    give_revision(server, "inference-gone")
    assert is_said("inference-gone: refused: ")
    give_revision(server, whole)
    assert is_said(f"{whole}: 1 GPU changes when no claim holds it: gpu-0")
    kubelet.unprepare([part])
    assert is_said(f"{whole}: in force")


def keep_revision(server: ApiServer, *gpus: dict[str, object]) -> str:
    """A revision of the profile inference, as the controller keeps it; its name."""
    text = canonical_rules({"gpus": list(gpus)})
    revision = Revision(revision_name("inference", text), "inference", 1, text, owner_uid="1")
    server.put(revision_document(revision, "gpus"))
    return revision.name


def give_revision(server: ApiServer, revision: str) -> None:
    put_node(server, annotations={"gpu.nvidia.com/profile-revision": revision})


def status_of_node(server: ApiServer) -> dict[str, Any]:
    nodes = server.objects("nodes")
    return (nodes[0].get("status") or {}) if nodes else {}


def message_of_node(server: ApiServer) -> str:
    conditions = status_of_node(server).get("conditions") or ()
    return next((str(c["message"]) for c in conditions if c["type"] == "GPUsConfigured"), "")


def offered(server: ApiServer) -> list[str]:
    slices = server.objects("resourceslices")
    return [device["name"] for each in slices for device in each["spec"].get("devices", ())]


def node_events(server: ApiServer) -> list[str]:
    """What the Node was told, good news first; each once."""
    (node,) = server.objects("nodes")
    events = server.objects("events")
    assert {event["involvedObject"]["uid"] for event in events} <= {node["metadata"]["uid"]}
    return sorted(f"{event['reason']}: {event['message']}" for event in events)


def test_the_label_that_tells_of_a_failure_is_no_reason_to_try_again(
    server: ApiServer, kubelet: FakeKubelet, start: Callable[..., Process], home: Path
) -> None:
    def state() -> object:
        (node,) = server.objects("nodes")
        return node["metadata"]["labels"].get("nvidia.com/mig.config.state")

    fails = "fails: {nvmlDeviceSetMigMode: NO_PERMISSION}"
    board = f"gpus: [{{product: H100-80-SXM, bus_id: '0000:10:00.0', {fails}}}]"
    (home / "node.yaml").write_text(board)
    labels = {"nvidia.com/mig.config": "all-1g.10gb"}
    put_node(server, labels=labels)

    start(sim=str(home / "node.yaml"), profile="default")

    assert server.wait(lambda: state() == "failed")
    time.sleep(0.5)
    of_node = [each for each in server.requests if each.path.endswith(f"/nodes/{POOL}")]
    assert (
        sum(each.method == "PATCH" for each in of_node) <= 2
    )  # that it begins, and what came of it
    (event,) = node_events(server)
    assert event.startswith(
        "MIGLayoutFailed: gpu-0 is not partitioned as layout 'all-1g.10gb' says: "
    )


def test_boards_that_somebody_holds_keep_nobody_waiting(
    server: ApiServer, kubelet: FakeKubelet, start: Callable[..., Process], home: Path
) -> None:
    boards = [
        f"  - {{product: A100-40-SXM, bus_id: '0000:1{minor}:00.0', "
        "fails: {nvmlDeviceSetMigMode: IN_USE}}\n"
        for minor in range(8)
    ]
    (home / "node.yaml").write_text("gpus:\n" + "".join(boards))
    begun = time.monotonic()

    start(sim=str(home / "node.yaml"), profile="mig")
    kubelet.wait_for_plugin(DRIVER)

    assert server.wait(lambda: bool(server.objects("resourceslices")))
    assert time.monotonic() - begun < 60  # one after the other and patiently it would take 80 s
    assert server.wait(lambda: len(node_events(server)) == 8)
    first, *_ = node_events(server)
    assert first.startswith("MIGModeNotSet: MIG mode of gpu-0 could not be turned on: ")


@pytest.mark.point(34, 46)
def test_a_bad_claim_is_told_why_and_its_neighbour_served(
    server: ApiServer, kubelet: FakeKubelet, start: Callable[..., Process]
) -> None:
    start()
    kubelet.wait_for_plugin(DRIVER)
    bad = put(server, "gpu-1", name="bad", configs=(config(colour="green"),))
    good = put(server, "gpu-2", name="good")

    answers = kubelet.ask("prepare", [bad, good])

    assert "colour: unknown field" in answers[bad.uid].error
    assert not answers[good.uid].error


@pytest.mark.point(23, 24)
def test_killed_and_started_again_it_knows_its_claims(
    server: ApiServer, start: Callable[..., Process], home: Path
) -> None:
    with FakeKubelet(home / "kubelet") as kubelet:
        process = start()
        kubelet.wait_for_plugin(DRIVER)
        mine = put(server, "gpu-3")
        before = kubelet.prepare([mine])
        process.kill()
        process.wait()
    (home / "kubelet/plugins_registry/gpu.nvidia.com-reg.sock").unlink()

    start()
    with FakeKubelet(home / "kubelet") as kubelet:
        kubelet.wait_for_plugin(DRIVER)
        assert kubelet.prepare([mine]) == before


TURNS = {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Short"}}


def test_a_gpu_whose_nvidia_smi_hangs_is_unavailable_until_its_interval_was_put_back(
    server: ApiServer, start: Callable[..., Process], home: Path
) -> None:
    """The claim is given back all the same, and a restart forgets nothing."""
    process = start(look_interval="0.2")
    with FakeKubelet(home / "kubelet") as kubelet:
        kubelet.wait_for_plugin(DRIVER)
        mine = put(server, "gpu-3", configs=(config(sharing=TURNS),))
        kubelet.prepare([mine])
        assert server.wait(lambda: "gpu-3" in _offered(server), SECONDS)
        _hang(home / "kubelet/plugins/gpu.nvidia.com/state/sim/usr/bin/nvidia-smi", home)

        kubelet.unprepare([mine])
        assert server.wait(lambda: "gpu-3" not in _offered(server), SECONDS)
    process.kill()
    process.wait()
    (home / "kubelet/plugins_registry/gpu.nvidia.com-reg.sock").unlink()
    _goes_on(server, start, home)


def _goes_on(server: ApiServer, start: Callable[..., Process], home: Path) -> None:
    """What the next process does, while what holds nvidia-smi lives and when it has ended."""
    holder = int((home / "holder").read_text())
    try:
        start(look_interval="0.2")
        with FakeKubelet(home / "kubelet") as kubelet:
            kubelet.wait_for_plugin(DRIVER)
            kubelet.prepare([put(server, "gpu-4", name="other")])
            assert "gpu-3" not in _offered(server)
            os.kill(holder, signal.SIGKILL)
            assert server.wait(lambda: "gpu-3" in _offered(server), SECONDS)
            kubelet.prepare([put(server, "gpu-3", name="next", configs=(config(sharing=TURNS),))])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(holder, signal.SIGKILL)


def _offered(server: ApiServer) -> list[str]:
    slices = server.objects("resourceslices")
    return [device["name"] for slice_ in slices for device in slice_["spec"].get("devices", ())]


def _hang(smi: Path, home: Path) -> None:
    """It outlives being killed, as one that is stuck in the kernel does: what it has started has
    left its group, and holds what it was given."""
    first, _, program = smi.read_text().partition("\n")
    stuck = f"setsid sh -c 'echo $$ > {home}/new; mv {home}/new {home}/holder; exec sleep 600'"
    smi.write_text(f"{first}\n{stuck} > /dev/null 2>&1 &\nexec sleep 600\n{program}")


@pytest.mark.point(62)
@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1"])
def test_whichever_version_of_the_api_is_served(
    server: ApiServer, kubelet: FakeKubelet, start: Callable[..., Process], version: str
) -> None:
    server.served[:] = [version]
    start()
    kubelet.wait_for_plugin(DRIVER)
    assert server.wait(lambda: len(server.objects("resourceslices")) == 1)

    assert kubelet.prepare([put(server, "gpu-4")])


@pytest.mark.point(106)
def test_a_process_that_cannot_serve_ends_with_a_failure_and_says_why(
    start: Callable[..., Process], home: Path
) -> None:
    (home / "kubelet").mkdir()
    (home / "kubelet" / "plugins_registry").write_text("a file where a directory has to be")

    process = start()

    assert process.wait(SECONDS) == 1
    assert process.stderr is not None
    assert b"plugins_registry" in process.stderr.read()


def test_a_setting_that_is_wrong_is_one_line_and_exit_code_2(
    start: Callable[..., Process],
) -> None:
    process = start(sim="h100x9")

    assert process.wait(SECONDS) == 2
    assert process.stderr is not None
    output = process.stderr.read().decode().strip()
    assert output.startswith("dra-driver: no simulated node 'h100x9' (did you mean h100x8?)")

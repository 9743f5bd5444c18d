"""The whole plugin as a process lets go of its GPUs, and serves the kubelet meanwhile."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from api.names import RELEASE_ANNOTATION, RELEASED_ANNOTATION
from tests.driver_process import Process
from tests.fakes.api_server import ApiServer
from tests.fakes.kubelet import FakeKubelet
from tests.plugin.conftest import put, put_node
from tests.plugin.test_health_run import DRIVER, Scene

UNTIL = "2999-01-01T00:00:00Z"
RELEASED = {"gpu-0": [("gpu.nvidia.com/released", "", "NoSchedule")]}


@pytest.fixture
def scene(server: ApiServer, start: Callable[..., Process], home: Path) -> Scene:
    def start_without_mps(**flags: str) -> Process:
        return start(mps_socket="", **flags)

    return Scene(server, start_without_mps, home)


def annotate(scene: Scene, annotations: Mapping[str, str]) -> None:
    put_node(scene.server, annotations=dict(annotations))


def test_a_gpu_is_released_and_taken_back_and_claims_end_meanwhile(
    scene: Scene, kubelet: FakeKubelet
) -> None:
    scene.start()
    kubelet.wait_for_plugin(DRIVER)
    mine, other = put(scene.server, "gpu-0"), put(scene.server, "gpu-1", name="other")
    kubelet.prepare([mine, other])

    annotate(scene, {RELEASE_ANNOTATION: f"gpu-0 {UNTIL}"})
    answer = {RELEASED_ANNOTATION: f"gpu-0 {UNTIL}"}
    assert scene.server.wait(lambda: answer.items() <= scene.annotations().items())
    assert scene.server.wait(lambda: scene.taints() == RELEASED)
    kubelet.unprepare([mine])

    annotate(scene, answer)
    assert scene.server.wait(lambda: scene.annotations() == {})
    assert scene.server.wait(lambda: scene.taints() == {})
    kubelet.prepare([put(scene.server, "gpu-0", name="next")])


def test_a_plugin_that_starts_meanwhile_goes_on_with_it(scene: Scene, kubelet: FakeKubelet) -> None:
    annotate(scene, {RELEASE_ANNOTATION: f"all {UNTIL}"})
    scene.start()
    kubelet.wait_for_plugin(DRIVER)
    assert scene.server.wait(lambda: RELEASED_ANNOTATION in scene.annotations())
    assert scene.taints() == {}  # nothing is offered of GPUs that nobody has looked at

    annotate(scene, {RELEASED_ANNOTATION: scene.annotations()[RELEASED_ANNOTATION]})

    assert scene.server.wait(lambda: scene.annotations() == {})
    assert scene.server.wait(
        lambda: any(
            device["name"] == "gpu-0"
            for each in scene.server.objects("resourceslices")
            for device in each["spec"].get("devices", ())
        )
    )

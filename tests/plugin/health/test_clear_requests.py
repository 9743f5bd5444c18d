"""An administrator says by an annotation that GPUs are well: once, and it is removed then."""

import pytest

from api.names import CLEAR_FAULTS_ANNOTATION
from dra_driver.base.errors import ApiServerError
from dra_driver.model.health import Fault, HealthState, Problem
from dra_driver.plugin.health.clear_requests import ClearAnnotation, named_gpus
from tests.builders import POOL, gpu, gpu_uuid

GPUS = tuple(gpu(minor) for minor in range(3))
SICK = HealthState(tuple(Fault(gpu.uuid, Problem.XID, "79") for gpu in GPUS))
NODE = f"/api/v1/nodes/{POOL}"


class Scene:
    def __init__(self, server, client):
        self.server = server
        self.client = client
        self.now = 0.0
        self.known = True
        self.annotate()
        self.start()

    def start(self):
        self.requests = ClearAnnotation(self.client, POOL, self.annotations, lambda: self.now)

    def annotate(self, value=None, **others):
        annotations = {CLEAR_FAULTS_ANNOTATION: value} if value is not None else {}
        metadata = {"name": POOL, "annotations": annotations | others}
        self.server.put({"apiVersion": "v1", "kind": "Node", "metadata": metadata})

    def annotations(self):
        if not self.known:
            raise ApiServerError("it is away")
        (node,) = self.server.objects("nodes")
        return node["metadata"].get("annotations") or {}

    def sick_after(self, state=SICK):
        """The GPUs that are sick after what is asked for, by minor."""
        return [int(fault.gpu[-1]) for fault in self.requests.apply(state, GPUS).faults]


@pytest.fixture
def scene(server, client):
    return Scene(server, client)


@pytest.mark.parametrize(
    ("request_text", "sick"),
    [
        ("gpu-1", [0, 2]),
        (f"gpu-0, {gpu_uuid(2)}", [1]),
        ("all", []),
        ("gpu-7", [0, 1, 2]),
        ("gpu-7,gpu-0", [1, 2]),
    ],
)
def test_the_named_gpus_are_well_and_the_annotation_goes(scene, request_text, sick):
    scene.annotate(request_text, kept="x")

    assert scene.sick_after() == sick
    assert scene.requests.done() is None

    assert scene.annotations() == {"kept": "x"}


def test_a_word_that_names_no_gpu_is_logged(scene, caplog):
    scene.annotate("gpu-7")
    scene.sick_after()

    assert "names GPUs that this node does not have" in caplog.text


def test_it_is_acted_on_once_though_it_cannot_be_removed(scene, caplog):
    scene.annotate("all")
    scene.server.deny("patch", "nodes")
    assert scene.sick_after() == []
    assert scene.requests.done() > 0
    assert scene.sick_after() == [0, 1, 2]
    assert caplog.text.count("cannot be removed") == 1


def test_the_same_request_counts_again_once_it_was_gone(scene):
    scene.annotate("all")
    scene.sick_after()
    scene.requests.done()
    scene.requests.seen()
    scene.annotate("all")
    scene.requests.seen()

    assert scene.sick_after() == []


def test_another_request_that_came_meanwhile_is_not_removed(scene):
    scene.annotate("gpu-0")
    scene.sick_after()
    scene.annotate("gpu-1")

    scene.requests.done()

    assert scene.annotations() == {CLEAR_FAULTS_ANNOTATION: "gpu-1"}
    assert scene.sick_after() == [0, 2]


def test_while_the_annotations_are_not_known_nothing_is_cleared(scene):
    scene.annotate("all")
    scene.known = False

    assert scene.sick_after() == [0, 1, 2]
    assert scene.requests.done() is None


def test_a_process_that_died_before_it_was_removed_leaves_it_to_the_next(scene):
    scene.annotate("all")
    scene.sick_after()
    scene.start()

    assert scene.sick_after() == []
    scene.requests.done()
    assert scene.annotations() == {}


def test_gpus_are_named_by_name_or_uuid():
    assert named_gpus(f"gpu-0,{gpu_uuid(0)} , ,GPU-x", GPUS) == ([gpu_uuid(0)], ["GPU-x"])

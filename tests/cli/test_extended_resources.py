"""What is claimed for pods that name resources, as the scheduler does it."""

import pytest

from dra_driver.cli.doctor.scheduling.pending_pods import (
    ExtendedResourceRequest,
    amounts_of,
    classes_of,
)

GPU, MIG = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb"


def container(name, sidecar=False, **resources):
    document = {"name": name, "resources": resources}
    return document | ({"restartPolicy": "Always"} if sidecar else {})


def gpus(name, number, sidecar=False):
    return container(name, sidecar, limits={GPU: str(number)}, requests={GPU: str(number)})


def pod(*containers, init=()):
    return {"spec": {"containers": list(containers), "initContainers": list(init)}}


def counts(*containers, init=()):
    return {request.container: request.count for request in amounts_of(pod(*containers, init=init))}


def test_every_container_has_devices_of_its_own():
    assert counts(gpus("a", 1), gpus("b", 2)) == {"a": 1, "b": 2}


def test_what_is_asked_for_by_a_limit_alone_counts_and_cpu_does_not():
    requests = amounts_of(pod(container("a", limits={MIG: "2", "cpu": "4", "memory": "1Gi"})))

    assert requests == [ExtendedResourceRequest("a", MIG, 2)]


@pytest.mark.parametrize("resources", [{}, {"limits": {GPU: "0"}}, {"limits": None}])
def test_who_asks_for_nothing_gets_nothing(resources):
    assert amounts_of(pod(container("a", **resources))) == []
    assert amounts_of({"spec": {}}) == []


@pytest.mark.parametrize(
    ("init", "expected"),
    [
        pytest.param([gpus("i", 2)], {"a": 1, "b": 1}, id="it has what comes after it"),
        pytest.param([gpus("i", 5)], {"i": 3, "a": 1, "b": 1}, id="and what it needs besides"),
        pytest.param(
            [gpus("i", 3), gpus("j", 5)], {"j": 3, "a": 1, "b": 1}, id="the next has the same"
        ),
        pytest.param(
            [gpus("s", 2, sidecar=True), gpus("i", 3)],
            {"s": 2, "i": 1, "a": 1, "b": 1},
            id="a sidecar that runs already keeps its own",
        ),
        pytest.param(
            [gpus("i", 4), gpus("s", 2, sidecar=True)],
            {"s": 2, "a": 1, "b": 1},
            id="a sidecar that comes later has the same",
        ),
    ],
)
def test_an_init_container_uses_the_devices_of_those_that_start_after_it(init, expected):
    assert counts(gpus("a", 1), gpus("b", 1), init=init) == expected


def named(name, resource=None, made="2026-01-01T00:00:00Z"):
    spec = {"extendedResourceName": resource} if resource else {}
    return {"metadata": {"name": name, "creationTimestamp": made}, "spec": spec}


def by_name(*classes):
    return classes_of({device_class["metadata"]["name"]: device_class for device_class in classes})


def test_a_class_serves_the_resource_that_it_names_and_one_called_as_itself():
    assert by_name(named("gpu", GPU), named("mig")) == {
        GPU: "gpu",
        "deviceclass.resource.kubernetes.io/gpu": "gpu",
        "deviceclass.resource.kubernetes.io/mig": "mig",
    }


@pytest.mark.parametrize("turn", [1, -1])
def test_of_two_classes_with_one_name_the_newer_one_counts_else_the_first(turn):
    older, newer = named("a", GPU), named("b", GPU, "2026-01-02T00:00:00Z")

    assert by_name(*[older, newer][::turn])[GPU] == "b"
    assert by_name(*[older, named("b", GPU)][::turn])[GPU] == "a"

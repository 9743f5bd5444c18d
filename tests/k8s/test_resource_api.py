"""Whether the API server serves resource.k8s.io, and which DeviceClass has which resource."""

import pytest

from dra_driver.base.errors import ApiServerError, NotServed, Unreachable
from dra_driver.k8s.claims import ClaimReader
from dra_driver.k8s.resource_api import ResourceApi

GPU = "nvidia.com/gpu"


@pytest.fixture
def resources(client):
    return ResourceApi(client)


def put_class(server, name, resource=""):
    spec = {"extendedResourceName": resource} if resource else {}
    server.put({"kind": "DeviceClass", "metadata": {"name": name}, "spec": spec})


def test_an_api_server_before_dra_does_not_serve_the_group(server, resources):
    server.served = []
    assert not resources.is_served()
    assert resources.missing
    with pytest.raises(NotServed, match="serves nothing"):
        resources.slices("gpu.nvidia.com", "n1")


def test_a_version_that_no_driver_of_today_knows_is_as_good_as_none(server, resources):
    server.served = ["v1alpha2"]
    assert not resources.is_served()


def test_a_group_that_comes_and_goes_while_the_plugin_runs_is_noticed(server, resources):
    assert resources.is_served()
    assert not resources.missing
    server.served = []
    assert not resources.is_served()
    assert resources.missing
    server.served = ["v1"]
    assert resources.is_served()
    assert resources.version == "v1"
    assert not resources.missing


def test_an_outage_is_no_answer(server, resources):
    assert resources.is_served()
    server.fail(503, times=100)
    with pytest.raises(ApiServerError):
        resources.is_served()
    assert not resources.missing


def test_what_answers_404_to_everything_is_no_api_server_without_the_group(server, resources):
    """As a load balancer without API servers does. No claim is taken for deleted there."""
    server.fail(404, times=100)
    with pytest.raises(Unreachable, match="no API server answers"):
        resources.is_served()
    with pytest.raises(Unreachable):
        resources.claim("ns", "c")


def test_the_resource_of_a_class_is_read_by_its_name(server, resources):
    put_class(server, "gpu.nvidia.com", GPU)
    put_class(server, "plain")
    assert resources.extended_resource("gpu.nvidia.com") == GPU
    assert resources.extended_resource("plain") == ""
    assert resources.extended_resource("none") is None


@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1"])
def test_every_class_with_a_resource_is_found(server, resources, version):
    server.served = [version]
    put_class(server, "gpu.nvidia.com", GPU)
    put_class(server, "shared.gpu.nvidia.com", "nvidia.com/gpu.shared")
    put_class(server, "plain")
    assert resources.extended_resources() == {
        GPU: "gpu.nvidia.com",
        "nvidia.com/gpu.shared": "shared.gpu.nvidia.com",
    }


def test_without_the_group_no_claim_has_a_device(server, resources):
    server.served = []
    claims = ClaimReader(resources, "gpu.nvidia.com", "n1")
    assert claims.allocated() == frozenset()
    assert claims.on_this_node() == ()

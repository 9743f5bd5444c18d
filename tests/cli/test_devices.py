"""What a node would publish, as people and as programs read it."""

import json
from importlib import resources

import pytest
import yaml

from dra_driver.kubeletplugin.slice_limits import check
from dra_driver.kubeletplugin.slices import Pool, SliceContent
from tests.fakes.simulated import h100

BUNDLED = sorted(
    path.name.removesuffix(".yaml")
    for path in resources.files("dra_driver.node.sim").joinpath("nodes").iterdir()
)


def test_there_are_bundled_nodes():
    assert {"h100x8", "none", "mixed"} <= set(BUNDLED)


@pytest.mark.parametrize("name", BUNDLED)
def test_every_bundled_node_prints_slices_that_an_api_server_takes(type_in, name):
    answer = type_in("devices", "--sim", name, "--node-name", "n1", "-o", "json")

    document = json.loads(answer.out)
    assert (answer.code, document["apiVersion"], document["kind"]) == (0, "v1", "List")
    specs = [item["spec"] for item in document["items"]]
    assert all(item["kind"] == "ResourceSlice" for item in document["items"])
    assert {(s["driver"], s["nodeName"], s["pool"]["name"]) for s in specs} == {
        ("gpu.nvidia.com", "n1", "n1")
    }
    pool = Pool("n1", tuple(SliceContent(tuple(s.get("devices", ()))) for s in specs))
    assert check(pool, "gpu.nvidia.com") == ()


def test_a_node_of_eight_gpus_prints_eight_devices(type_in):
    answer = type_in("devices", "--sim", "h100x8", "--node-name", "n1", "-o", "json")

    (slice_,) = json.loads(answer.out)["items"]
    assert [device["name"] for device in slice_["spec"]["devices"]] == [
        f"gpu-{minor}" for minor in range(8)
    ]


def test_yaml_says_the_same_as_json(type_in):
    words = ("devices", "--sim", "mixed", "--node-name", "n1", "-o")

    assert yaml.safe_load(type_in(*words, "yaml").out) == json.loads(type_in(*words, "json").out)


def test_the_same_node_is_printed_alike_byte_for_byte(type_in):
    words = ("devices", "--sim", "h200x8", "--node-name", "n1", "-o", "json")

    assert type_in(*words).out == type_in(*words).out


def test_the_table_has_a_line_for_each_gpu(type_in):
    head, *rows = type_in("devices", "--sim", "h100x8").out.splitlines()

    assert head.split()[:4] == ["DEVICE", "PRODUCT", "MEMORY", "UUID"]
    assert [row.split()[0] for row in rows] == [f"gpu-{minor}" for minor in range(8)]
    assert all("NVIDIA H100 80GB HBM3" in row and "GPU-" in row for row in rows)


def test_the_table_names_every_gpu_that_is_not_offered_and_why(type_in, tmp_path):
    gpus = [h100("1b"), h100("43", driver="vfio-pci"), h100("52", fails="GPU_IS_LOST")]
    file = tmp_path / "node.yaml"
    file.write_text(yaml.safe_dump({"gpus": gpus}))

    _, offered, *withheld = type_in("devices", "--sim", file).out.splitlines()

    assert offered.startswith("gpu-0")
    assert [line.partition(": ")[0] for line in withheld] == ["not offered"] * 2
    assert "0000:43:00.0: it is bound to vfio-pci" in withheld[0]
    assert "0000:52:00.0: " in withheld[1]
    assert "lost" in withheld[1]


def test_a_node_without_gpus_says_so(type_in):
    answer = type_in("devices", "--sim", "none")

    assert (answer.code, answer.out) == (0, "this node has no GPU to offer\n")


def test_another_drivers_name_is_published_under_that_name(type_in):
    words = ("--driver-name", "gpu.example.com", "--node-name", "n1", "-o", "json")
    answer = type_in("devices", "--sim", "t4x1", *words)

    (slice_,) = json.loads(answer.out)["items"]
    assert slice_["spec"]["driver"] == "gpu.example.com"

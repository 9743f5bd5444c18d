"""Which devices a runtime finds in its directories."""

import os

import pytest
import yaml

from cdi.encoding import to_json
from cdi.errors import CdiDeviceError
from cdi.registry import load_registry
from cdi.spec import CdiDevice, ContainerEdits, Spec


def spec(*names: str, value: str = "1", kind: str = "vendor.example/gpu", shared: str = "") -> Spec:
    return Spec(
        kind,
        devices=tuple(
            CdiDevice(name, container_edits=ContainerEdits(env=(f"{name}={value}",)))
            for name in names
        ),
        container_edits=ContainerEdits(env=(shared,) if shared else ()),
    )


def as_yaml(spec: Spec) -> str:
    return yaml.safe_dump(yaml.safe_load(to_json(spec)))


@pytest.fixture
def low(tmp_path):
    (tmp_path / "low").mkdir()
    return tmp_path / "low"


@pytest.fixture
def high(tmp_path):
    (tmp_path / "high").mkdir()
    return tmp_path / "high"


def test_devices_of_json_and_yaml_files_are_found(low):
    (low / "a.json").write_text(to_json(spec("x")))
    (low / "b.yaml").write_text(as_yaml(spec("y", kind="other.example/nic")))

    registry = load_registry([low, low / "missing"])

    assert list(registry.devices) == ["other.example/nic=y", "vendor.example/gpu=x"]
    assert registry.devices["vendor.example/gpu=x"].path == low / "a.json"
    assert registry.problems == ()


def test_other_names_and_directories_inside_do_not_count(low):
    (low / "a.json.tmp").write_text(to_json(spec("x")))
    (low / "b.yml").write_text(to_json(spec("y")))
    (low / "c.json").mkdir()
    (low / "c.json" / "d.json").write_text(to_json(spec("z")))

    assert load_registry([low]).devices == {}
    assert load_registry([low]).problems == ()


def test_a_later_directory_wins(low, high):
    (low / "a.json").write_text(to_json(spec("x", "y", value="low")))
    (high / "a.json").write_text(to_json(spec("x", value="high")))

    registry = load_registry([low, high])

    edits = registry.edits(["vendor.example/gpu=x", "vendor.example/gpu=y"])
    assert edits.env == ("x=high", "y=low")


@pytest.mark.parametrize("also_above", [False, True], ids=["", "even if a later directory has it"])
def test_a_device_in_conflict_belongs_to_nobody(low, high, also_above):
    (low / "a.json").write_text(to_json(spec("x", "y")))
    (low / "b.json").write_text(to_json(spec("x", "z")))
    if also_above:
        (high / "c.json").write_text(to_json(spec("x")))

    registry = load_registry([low, high])

    assert list(registry.devices) == ["vendor.example/gpu=y", "vendor.example/gpu=z"]
    assert registry.problems == (
        f"vendor.example/gpu=x is in conflict: {low / 'a.json'} and {low / 'b.json'}",
    )


def test_a_file_that_is_not_legal_is_ignored_as_a_whole_and_reported(low):
    (low / "a.json").write_text(to_json(spec("x")))
    (low / "b.json").write_text("{}")
    (low / "c.json").write_bytes(b"\xff")
    (low / "d.json").symlink_to("nowhere")

    registry = load_registry([low])

    assert list(registry.devices) == ["vendor.example/gpu=x"]
    assert [problem.partition(": ")[0] for problem in registry.problems] == [
        f"{low / name}.json is ignored" for name in "bcd"
    ]


def test_a_directory_that_is_a_file_is_reported(low):
    (low / "file").write_text("")

    assert load_registry([low / "file"]).problems == (
        f"{low / 'file'} is ignored: [Errno 20] {os.strerror(20)}: '{low / 'file'}'",
    )


def test_edits_come_in_the_order_asked_and_those_of_a_spec_once_before_its_first_device(low):
    (low / "a.json").write_text(to_json(spec("x", "y", shared="A=1")))
    (low / "b.json").write_text(to_json(spec("z", kind="other.example/nic", shared="B=1")))

    edits = load_registry([low]).edits(
        ["vendor.example/gpu=y", "other.example/nic=z", "vendor.example/gpu=x"]
    )

    assert edits.env == ("A=1", "y=1", "B=1", "z=1", "x=1")


def test_an_unknown_device_is_refused_with_what_is_known_and_what_was_wrong(low):
    with pytest.raises(CdiDeviceError, match=r"^unresolvable CDI devices a, b; known are: none$"):
        load_registry([low]).edits(["a", "b"])

    (low / "a.json").write_text(to_json(spec("x")))
    (low / "b.json").write_text("[]")
    with pytest.raises(CdiDeviceError) as refused:
        load_registry([low]).edits(["vendor.example/gpu=x", "b"])
    assert str(refused.value) == (
        "unresolvable CDI devices b; known are: vendor.example/gpu=x;"
        f" problems: {low / 'b.json'} is ignored: a spec must be an object"
    )

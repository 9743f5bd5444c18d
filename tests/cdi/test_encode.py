"""Text and back: identity one way, strictness the other."""

import pytest
import yaml
from hypothesis import given

from cdi.encoding import from_document, from_text, to_json
from cdi.errors import CdiError, CdiSpecError
from cdi.spec import CdiDevice, ContainerEdits, DeviceNode, Hook, IntelRdt, Mount, NetDevice, Spec
from tests.cdi.strategies import one_device, specs, texts

WHOLE = Spec(
    kind="vendor.example/gpu",
    annotations=(("made-by", "a test"),),
    devices=(
        CdiDevice(
            "gpu-0",
            (("serial", "1"),),
            ContainerEdits(
                env=("A=1",),
                device_nodes=(
                    DeviceNode("/dev/a", "/dev/b", "c", 195, 1, 0o666, "rw", 0, 1000),
                    DeviceNode("/dev/c"),
                ),
                mounts=(Mount("/a", "/b", "none", ("ro", "rbind")),),
                hooks=(Hook("prestart", "/bin/hook", ("hook", "run"), ("B=2",), 5),),
                additional_gids=(44,),
                intel_rdt=IntelRdt("gold", "L3:0=f", "MB:0=10", ("L2:0=f",), True),
                net_devices=(NetDevice("eth1", "eth0"),),
            ),
        ),
    ),
    container_edits=ContainerEdits(env=("ALL=1",)),
)

SMALL = {
    "cdiVersion": "0.3.0",
    "kind": "vendor.example/gpu",
    "devices": [{"name": "gpu-0", "containerEdits": {"env": ["A=1"]}}],
}


def problems(document: object) -> list[str]:
    with pytest.raises(CdiSpecError) as refused:
        from_document(document)
    return list(refused.value.problems)


def small_with(**edits: object) -> dict:
    return SMALL | {"devices": [{"name": "d", "containerEdits": edits}]}


@given(specs)
def test_what_is_written_is_one_line_and_read_back(spec):
    text = to_json(spec)

    assert from_text(text) == from_document(yaml.safe_load(text)) == spec
    assert text.endswith("}\n")
    assert text.count("\n") == 1


def test_a_whole_spec_is_written_with_every_field_in_the_order_of_the_cdi_spec(golden):
    golden("cdi/whole.json", to_json(WHOLE))


def test_an_illegal_spec_is_not_written():
    with pytest.raises(CdiSpecError):
        to_json(Spec("vendor/gpu"))


@pytest.mark.parametrize(
    ("value", "written"),
    [
        pytest.param("\x00\n", "\\u0000\\n", id="what JSON itself escapes"),
        pytest.param("\x7f\x85", "\\u007f\\u0085", id="control characters"),
        pytest.param("\u2028\ufeff", "\\u2028\\ufeff", id="a line separator, a byte order mark"),
        pytest.param("é€😀", "é€😀", id="everything else as it is"),
    ],
)
def test_json_is_written_so_that_a_yaml_parser_reads_it(value, written):
    spec = one_device(ContainerEdits(env=(f"A={value}",)))

    assert f'"A={written}"' in to_json(spec)
    assert from_document(yaml.safe_load(to_json(spec))) == spec


def test_unknown_fields_and_wrong_types_are_all_reported_with_their_paths():
    document = {
        "kind": 1,
        "annotations": {"a": 1, "b": "c"},
        "device": [],
        "devices": [
            {"containerEdits": {"additionalGIDs": [1], "env": "A=1", "mounts": ["/a"]}},
            {"name": "b", "containerEdits": {"deviceNodes": [{"path": "/a", "major": True}]}},
            7,
        ],
        "containerEdits": {"intelRdt": {"enableMonitoring": 1}, "additionalGids": [1.5]},
    }

    assert problems(document) == [
        "cdiVersion: must be a string",
        "device: unknown field",
        "kind: must be a string",
        "annotations.a: must be a string",
        "devices[0].name: is required",
        "devices[0].containerEdits.additionalGIDs: unknown field, write 'additionalGids'",
        "devices[0].containerEdits.env: must be a list",
        "devices[0].containerEdits.mounts[0]: must be an object",
        "devices[1].containerEdits.deviceNodes[0].major: must be a whole number",
        "devices[2]: must be an object",
        "containerEdits.additionalGids[0]: must be a whole number",
        "containerEdits.intelRdt.enableMonitoring: must be true or false",
    ]


def test_null_is_as_good_as_nothing():
    assert from_document(SMALL | {"annotations": None}) == from_document(SMALL)
    assert problems(SMALL | {"devices": None}) == ["devices: is required"]


@pytest.mark.parametrize("document", [None, [], "text", 1])
def test_a_document_that_is_no_object_is_refused(document):
    assert problems(document) == ["a spec must be an object"]


def test_annotations_that_are_no_object_are_refused():
    assert problems(SMALL | {"annotations": ["a"]}) == ["annotations: must be an object"]


def test_content_is_checked_when_the_shape_is_right():
    assert problems(small_with(env=["A"])) == [
        "devices[0].containerEdits.env[0]: must be NAME=VALUE, not 'A'"
    ]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param('{"kind": "a/b", "kind": "c/d"}', id="JSON"),
        pytest.param("kind: a/b\nkind: c/d\n", id="YAML"),
    ],
)
def test_a_key_given_twice_is_refused(text):
    with pytest.raises(CdiSpecError, match=r"^kind: is there twice in one object$"):
        from_text(text)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param("{", id="cut short"),
        pytest.param("a: b: c", id="no YAML"),
        pytest.param("a: 1\n---\nb: 2\n", id="two documents"),
        pytest.param("a: 2001-13-45\n", id="a date that is none"),
        pytest.param("? [a, b]\n: c\n", id="a key that is a list"),
        pytest.param("[" * 100_000, id="nested without end"),
        pytest.param("a: !!python/object:os.system b\n", id="a tag that makes objects"),
        pytest.param("\x00", id="a NUL"),
    ],
)
def test_a_text_that_is_no_spec_is_refused(text):
    with pytest.raises(CdiSpecError):
        from_text(text)


@given(texts)
def test_any_text_is_a_spec_or_refused(text):
    with pytest.raises(CdiError):
        from_text(text)

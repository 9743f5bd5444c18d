"""Configuration files of mig-parted are read as they are, strictly, and one layout at a time."""

import pytest
import yaml

from api.mig_parted import MigConfig, is_mig_parted, layouts
from api.strict import ConfigError

FILE = """
version: v1
mig-configs:
  all-off:
    - devices: all
      mig-enabled: false
  all-on:
    - devices: all
      mig-enabled: true
      mig-devices: {}
  mixed-boards:
    - device-filter: ["0x20B010DE", "0x20b110de"]
      devices: all
      mig-enabled: true
      mig-devices:
        "1g.5gb": 2
        "2g.10gb": 1
        "3g.20gb": 1
    - device-filter: "0x20B710DE"
      devices: all
      mig-enabled: true
      mig-devices: {"1g.6gb+me": 1, "1g.6gb": 2}
  halves:
    - devices: [0, 1, 2, 3]
      mig-enabled: false
    - device-filter: ""
      devices: [4, 5, 6, 7]
      mig-enabled: true
      mig-devices: {"1c.1g.10gb": 7, "1g.24gb-me": 1, "1g.24gb+me.all": 1, "7g.80gb": 0}
"""


def entry(**fields):
    """The only entry of a layout with these fields."""
    (config,) = entries({"version": "v1", "mig-configs": {"x": [dashed(fields)]}}, "x")
    return config


def entries(document, name):
    layout = layouts(document)[name]
    assert isinstance(layout, list), layout
    assert all(isinstance(each, MigConfig) for each in layout)
    return layout


def problems(**fields):
    """What is wrong with a layout that has this entry."""
    messages = layouts({"version": "v1", "mig-configs": {"x": [dashed(fields)]}})["x"]
    assert isinstance(messages, tuple)
    return messages


def dashed(fields):
    return {key.replace("_", "-"): value for key, value in fields.items()}


def refused(**document):
    with pytest.raises(ConfigError) as error:
        layouts(dashed(document))
    return error.value.problems


def test_every_shape_of_a_file_is_read():
    parsed = layouts(yaml.safe_load(FILE))

    assert {name: len(entries) for name, entries in parsed.items()} == {
        "all-off": 1,
        "all-on": 1,
        "halves": 2,
        "mixed-boards": 2,
    }
    first, second = entries(yaml.safe_load(FILE), "mixed-boards")
    assert first.device_filter == ["0x20B010DE", "0x20b110de"]
    assert first.mig_devices == {"1g.5gb": 2, "2g.10gb": 1, "3g.20gb": 1}
    assert second.device_filter == ["0x20B710DE"]
    assert second.devices == "all"


def test_an_empty_filter_filters_nothing_and_full_compute_instances_need_no_saying():
    _, entry = entries(yaml.safe_load(FILE), "halves")

    assert entry.device_filter == []
    assert entry.devices == [4, 5, 6, 7]
    assert entry.mig_devices == {
        "1g.10gb": 7,
        "1g.24gb-me": 1,
        "1g.24gb+me.all": 1,
        "7g.80gb": 0,
    }


def test_two_ways_to_write_one_kind_are_counted_together():
    config = entry(devices="all", mig_enabled=True, mig_devices={"1c.1g.5gb": 2, "1g.5gb": 3})

    assert config.mig_devices == {"1g.5gb": 5}


def test_mig_mode_that_is_off_needs_no_devices():
    assert entry(devices="all", mig_enabled=False).mig_devices is None
    assert entry(devices="all", mig_enabled=False, mig_devices={}).mig_devices == {}


@pytest.mark.parametrize(
    ("document", "is_one"),
    [
        (yaml.safe_load(FILE), True),
        ({"mig-configs": None}, True),
        ({"version": "v1", "sharing": {}}, False),
        (None, False),
        ("mig-configs", False),
    ],
)
def test_such_a_file_is_known_by_what_it_has(document, is_one):
    assert is_mig_parted(document) is is_one


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"devices": None}, ".devices: missing"),
        ({"mig_enabled": None}, ".mig-enabled: missing"),
        *(
            (
                {"devices": devices},
                f".devices: {devices!r} should be all, or a list of the numbers of GPUs",
            )
            for devices in ("some", [True], [-1])
        ),
        ({"mig_enabled": "yes"}, ".mig-enabled: 'yes' should be a valid boolean"),
        (
            {"device_filter": 0x20B010DE},
            '.device-filter: 548409566 is a number to YAML; write it in quotes: "0x20B010DE"',
        ),
        (
            {"device_filter": ["0x233010DE", 0x20B010DE]},
            ".device-filter: ['0x233010DE', 548409566] has 548409566, which is a number to YAML; "
            'write it in quotes: "0x20B010DE"',
        ),
        (
            {"device_filter": ["A100"]},
            ".device-filter: ['A100'] has what is no PCI ID of device and vendor; write for "
            "example 0x20B010DE",
        ),
        ({"device_filter": True}, ".device-filter: True should be a valid list"),
        (
            {"mig_devices": {"1g": 2}},
            ".mig-devices: {'1g': 2} has '1g', which is no profile; write for example 1g.10gb",
        ),
        (
            {"mig_devices": {"1c.3g.20gb": 2}},
            ".mig-devices: {'1c.3g.20gb': 2} has '1c.3g.20gb': compute instances that do not fill "
            "their GPU instance are nothing that claims can have; write 3g.20gb",
        ),
        (
            {"mig_devices": {"1g.5gb": -1}},
            ".mig-devices.1g.5gb: -1 should be greater than or equal to 0",
        ),
        ({"mig-devise": {}}, ".mig-devise: unknown field; did you mean mig-devices?"),
        (
            {"mig_enabled": True},
            ": {'devices': 'all', 'mig-enabled': True} has mig-enabled: true and no mig-devices; "
            "write {} for none",
        ),
        (
            {"mig_devices": {"1g.5gb": 1}},
            ": {'devices': 'all', 'mig-enabled': False, 'mig-devices': {'1g.5gb': 1}} has "
            "mig-devices and mig-enabled: false; remove one of them",
        ),
    ],
)
def test_what_is_wrong_with_a_layout_is_said_with_its_path(fields, problem):
    entry = {"devices": "all", "mig_enabled": False, **fields}

    assert problems(**entry) == (f"mig-configs.x[0]{problem}",)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("7", 'the key 7 is a number to YAML; write it in quotes: "7"'),
        ("1.5", 'the key 1.5 is a number to YAML; write it in quotes: "1.5"'),
        ("2020-01-01", 'the key 2020-01-01 is no text to YAML; write it in quotes: "2020-01-01"'),
        ("on", "a key is true, as YAML reads on and yes, too; write it in quotes"),
        ("no", "a key is false, as YAML reads off and no, too; write it in quotes"),
        ("~", "a key is null, as YAML reads ~ and nothing at all; write it in quotes"),
    ],
)
def test_what_yaml_takes_for_no_text_is_to_be_quoted_wherever_it_is_a_key(key, message):
    entry = "{devices: all, mig-enabled: false}"
    of_devices = f"{{devices: all, mig-enabled: true, mig-devices: {{{key}: 1, 1g.5gb: 2}}}}"
    of_entry = f"{{devices: all, mig-enabled: false, {key}: 1}}"
    file = "{{version: v1, mig-configs: {{x: [{}], good: [{}]}}}}"

    for broken, where in ((of_devices, "[0].mig-devices"), (of_entry, "[0]")):
        parsed = layouts(yaml.safe_load(file.format(broken, entry)))
        assert parsed["x"] == (f"mig-configs.x{where}: {message}",)
        assert isinstance(parsed["good"], list)
    if key == "7":  # a name of a layout may be a number
        return
    names = f"{{version: v1, mig-configs: {{{key}: [{entry}], good: [{entry}]}}}}"
    assert refused(**yaml.safe_load(names)) == (f"mig-configs: {message}",)


@pytest.mark.parametrize(("written", "name"), [("7", "7"), ("0x10", "16"), ("-1", "-1")])
def test_a_layout_may_be_called_by_a_whole_number_as_in_mig_parted(written, name):
    entry = "{devices: all, mig-enabled: false}"
    file = f"{{version: v1, mig-configs: {{{written}: [{entry}], good: [{entry}]}}}}"

    parsed = layouts(yaml.safe_load(file))

    assert set(parsed) == {name, "good"}
    assert parsed[name] == parsed["good"]


def test_a_number_and_the_same_number_in_quotes_are_one_name():
    (problem,) = refused(**{"version": "v1", "mig-configs": {7: [], "7": []}})

    assert problem.startswith("mig-configs: ")
    assert problem.endswith(" has a name twice, as a number and as text; remove one of them")


def test_a_key_beside_the_fields_of_a_file_is_told_without_a_path():
    file = yaml.safe_load("{version: v1, mig-configs: {x: []}, 7: 1}")

    with pytest.raises(ConfigError, match=r"^the key 7 is a number to YAML; write it in quotes"):
        layouts(file)


def test_a_layout_is_a_list_with_something_in_it():
    file = {"version": "v1", "mig-configs": {"a": [], "b": {}, "c": "all"}}

    assert layouts(file) == {
        "a": ("mig-configs.a: is empty; say what is meant, or leave it out",),
        "b": ("mig-configs.b: {} should be a valid list",),
        "c": ("mig-configs.c: 'all' should be a valid list",),
    }


def test_one_broken_layout_spoils_no_other():
    file = {
        "version": "v1",
        "mig-configs": {
            "good": [{"devices": "all", "mig-enabled": False}],
            "bad": [{"devices": "all"}],
        },
    }

    parsed = layouts(file)

    assert parsed["bad"] == ("mig-configs.bad[0].mig-enabled: missing",)
    assert isinstance(parsed["good"], list)


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"mig_configs": {"x": []}}, "version: missing"),
        ({"version": "v2", "mig_configs": {"x": []}}, "version: 'v2' should be 'v1'"),
        ({"version": "v1"}, "mig-configs: missing"),
        (
            {"version": "v1", "mig_configs": {}},
            "mig-configs: is empty; say what is meant, or leave it out",
        ),
        (
            {"version": "v1", "mig_configs": ["x"]},
            "mig-configs: ['x'] should be a valid dictionary",
        ),
        (
            {"version": "v1", "mig_configs": {"x": []}, "flags": {}},
            "flags: unknown field; remove it",
        ),
    ],
)
def test_what_is_wrong_with_the_file_is_wrong_with_all_of_it(document, problem):
    assert refused(**document) == (problem,)

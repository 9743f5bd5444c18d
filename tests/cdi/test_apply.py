"""A container's configuration is edited as runtimes edit it."""

import copy
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdi.encoding import to_json
from cdi.errors import CdiDeviceError
from cdi.spec import ContainerEdits, DeviceNode, Hook, IntelRdt, Mount, NetDevice
from hack.cdi_apply import apply_edits, inject
from tests.cdi.strategies import edits, one_device


def node(*nodes: DeviceNode) -> ContainerEdits:
    return ContainerEdits(device_nodes=nodes)


def test_a_device_is_found_and_given(tmp_path):
    (tmp_path / "a.json").write_text(to_json(one_device(ContainerEdits(env=("A=1",)))))

    config = inject({}, ["vendor.example/gpu=gpu-0"], [tmp_path])

    assert config == {"process": {"env": ["A=1"]}}


def test_no_edits_leave_a_configuration_as_it_is():
    config = {"process": {"env": ["A=1"]}, "mounts": [{"destination": "/a/b"}]}

    assert apply_edits(config, ContainerEdits()) == config


@given(edits.map(lambda e: ContainerEdits(env=e.env, mounts=e.mounts, hooks=e.hooks)))
def test_the_given_configuration_is_not_changed(some):
    config = {"process": {"env": ["A=1"]}, "mounts": [{"destination": "/"}], "hooks": {}}
    before = copy.deepcopy(config)

    apply_edits(config, some)

    assert config == before


def test_a_variable_is_replaced_where_it_stands_or_put_at_the_end():
    config = {"process": {"env": ["A=1", "B=1"]}}

    edited = apply_edits(config, ContainerEdits(env=("C=1", "A=2", "C=2")))

    assert edited["process"]["env"] == ["A=2", "B=1", "C=2"]


def test_a_node_takes_type_number_and_mode_from_the_host():
    edited = apply_edits({}, node(DeviceNode("/dev/gpu0", "/dev/null", permissions="rw")))

    assert edited["linux"] == {
        "devices": [
            {"path": "/dev/gpu0", "type": "c", "major": 1, "minor": 3, "fileMode": 0o666},
        ],
        "resources": {
            "devices": [{"allow": True, "type": "c", "major": 1, "minor": 3, "access": "rw"}]
        },
    }


def test_a_node_described_wholly_needs_no_host_and_may_do_anything_in_its_cgroup():
    edited = apply_edits({}, node(DeviceNode("/dev/nowhere", type="b", major=8, minor=1)))

    assert edited["linux"] == {
        "devices": [{"path": "/dev/nowhere", "type": "b", "major": 8, "minor": 1}],
        "resources": {
            "devices": [{"allow": True, "type": "b", "major": 8, "minor": 1, "access": "rwm"}]
        },
    }


def test_a_number_that_is_said_is_not_taken_from_the_host():
    partial = apply_edits({}, node(DeviceNode("/dev/null", major=9, minor=9)))
    full = apply_edits({}, node(DeviceNode("/dev/null", type="c", major=9, minor=9)))

    assert partial == full
    assert partial["linux"]["devices"][0]["major"] == 9


def test_a_mode_that_is_said_is_not_taken_from_the_host():
    edited = apply_edits({}, node(DeviceNode("/dev/null", file_mode=0)))

    assert edited["linux"]["devices"][0]["fileMode"] == 0


def test_a_node_replaces_one_at_the_same_path_and_keeps_the_rules():
    rule = {"allow": False, "access": "rwm"}
    old = {"path": "/dev/null", "type": "c", "major": 9, "minor": 9}
    config = {"linux": {"devices": [old], "resources": {"devices": [rule]}}}

    edited = apply_edits(config, node(DeviceNode("/dev/null")))

    assert [device["major"] for device in edited["linux"]["devices"]] == [1]
    assert [rule["allow"] for rule in edited["linux"]["resources"]["devices"]] == [False, True]


@pytest.mark.parametrize(
    ("user", "owner", "expected"),
    [
        pytest.param({}, {}, {}, id="nobody said anything"),
        pytest.param({"uid": 0, "gid": 0}, {}, {}, id="root is what a node has anyway"),
        pytest.param({"uid": 7, "gid": 8}, {}, {"uid": 7, "gid": 8}, id="the container's user"),
        pytest.param({"uid": 7}, {"uid": 0, "gid": 9}, {"uid": 0, "gid": 9}, id="the spec wins"),
    ],
)
def test_a_node_belongs_to_the_user_of_the_container_unless_the_spec_names_an_owner(
    user, owner, expected
):
    device_node = DeviceNode("/dev/x", type="c", major=1, minor=3, **owner)

    [device] = apply_edits({"process": {"user": user}}, node(device_node))["linux"]["devices"]

    assert {name: device[name] for name in ("uid", "gid") if name in device} == expected


def test_a_fifo_has_no_number_and_no_rule(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    path = str(tmp_path / "fifo")

    untyped = apply_edits({}, node(DeviceNode(path)))
    typed = apply_edits({}, node(DeviceNode(path, type="p")))

    assert untyped == typed
    assert untyped["linux"]["devices"][0]["type"] == "p"
    assert "resources" not in untyped["linux"]


@pytest.mark.parametrize(
    ("device_node", "message"),
    [
        (DeviceNode("/dev/x", "/nowhere"), "device /dev/x: cannot look at /nowhere: No such file"),
        (DeviceNode("/dev/null", type="b"), "device /dev/null: /dev/null has type 'c', not 'b'"),
        (DeviceNode("/dev/x", "/"), "device /dev/x: / is not a device node"),
    ],
)
def test_a_node_the_host_does_not_have_is_refused(device_node, message):
    with pytest.raises(CdiDeviceError, match=f"^{message}"):
        apply_edits({}, node(device_node))


def test_a_mount_replaces_one_at_the_same_place_and_deeper_ones_come_later():
    config = {"mounts": [{"destination": f"/{name}"} for name in ("a/b/c", "x", "a/b")]}
    mounts = (Mount("/1", "/a/b", "none", ("rbind",)), Mount("/2", "/y"), Mount("/3", "/x/"))

    edited = apply_edits(config, ContainerEdits(mounts=mounts))

    assert edited["mounts"] == [
        {"destination": "/x"},
        {"destination": "/y", "source": "/2"},
        {"destination": "/x/", "source": "/3"},
        {"destination": "/a/b", "type": "none", "source": "/1", "options": ["rbind"]},
        {"destination": "/a/b/c"},
    ]


def test_hooks_are_added_behind_those_of_their_moment():
    config = {"hooks": {"prestart": [{"path": "/old"}]}}
    hooks = (Hook("prestart", "/new", ("new", "x"), ("A=1",), 3), Hook("createRuntime", "/other"))

    assert apply_edits(config, ContainerEdits(hooks=hooks))["hooks"] == {
        "prestart": [
            {"path": "/old"},
            {"path": "/new", "args": ["new", "x"], "env": ["A=1"], "timeout": 3},
        ],
        "createRuntime": [{"path": "/other"}],
    }


def test_the_cache_class_is_replaced_as_a_whole():
    config = {"linux": {"intelRdt": {"memBwSchema": "MB:0=10"}}}

    edited = apply_edits(config, ContainerEdits(intel_rdt=IntelRdt("gold", schemata=("L3:0=f",))))

    assert edited["linux"]["intelRdt"] == {"closID": "gold", "schemata": ["L3:0=f"]}


def test_network_interfaces_are_moved():
    edited = apply_edits({}, ContainerEdits(net_devices=(NetDevice("eth1", "eth0"),)))

    assert edited == {"linux": {"netDevices": {"eth1": {"name": "eth0"}}}}


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(1, 3), unique=True))
def test_groups_are_added_once_and_root_never(gids, before):
    config = {"process": {"user": {"additionalGids": before}}}

    edited = apply_edits(config, ContainerEdits(additional_gids=tuple(gids)))

    after = edited["process"]["user"]["additionalGids"]
    assert after[: len(before)] == before
    assert sorted(after) == sorted({*before, *gids} - {0})

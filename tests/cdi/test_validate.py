"""What is wrong with a spec is said at once, each with its path."""

from typing import Any

import pytest
from hypothesis import given, settings

from cdi.errors import CdiSpecError
from cdi.spec import (
    CdiDevice,
    ContainerEdits,
    DeviceNode,
    Hook,
    IntelRdt,
    Mount,
    NetDevice,
    Spec,
    kind_problem,
)
from cdi.validate import check
from tests.cdi.strategies import one_device, specs

AT = "devices[0].containerEdits"
ENV = ContainerEdits(env=("A=1",))


def problems(spec: Spec) -> list[str]:
    with pytest.raises(CdiSpecError) as refused:
        check(spec)
    assert str(refused.value) == "; ".join(refused.value.problems)
    return list(refused.value.problems)


@settings(max_examples=30)
@given(specs)
def test_a_legal_spec_is_legal(spec):
    check(spec)


def test_everything_wrong_is_said_at_once_in_the_order_of_the_file():
    spec = Spec(
        "vendor",
        devices=(
            CdiDevice("gpu 0"),
            CdiDevice(
                "a", container_edits=ContainerEdits(mounts=(Mount("/a", "/a"), Mount("b", "")))
            ),
            CdiDevice("a", container_edits=ENV),
        ),
        container_edits=ContainerEdits(env=("=1", "A")),
    )

    assert problems(spec) == [
        "kind: must be 'vendor/class'",
        "devices[0].name: must begin and end with a letter or digit,"
        " with only letters, digits, '_', '-', '.', ':' between",
        "devices[0].containerEdits: must not be empty",
        "devices[1].containerEdits.mounts[1].hostPath: must be absolute, not 'b'",
        "devices[1].containerEdits.mounts[1].containerPath: must not be empty",
        "devices[2].name: 'a' is there twice",
        "containerEdits.env[0]: must be NAME=VALUE, not '=1'",
        "containerEdits.env[1]: must be NAME=VALUE, not 'A'",
    ]


def test_a_spec_without_devices_is_refused():
    assert problems(Spec("vendor/gpu")) == ["devices: at least one is required"]


@pytest.mark.parametrize("kind", ["vv/", "/cc", "v/cc", "vv/c", "1v/cc", "vv/c-", "vv/cc/d"])
def test_an_illegal_kind_is_refused(kind):
    assert problems(one_device(ENV, kind=kind)) == [f"kind: {kind_problem(kind)}"]


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (DeviceNode(""), "deviceNodes[0].path: must not be empty"),
        (DeviceNode("dev/a"), "deviceNodes[0].path: must be absolute, not 'dev/a'"),
        (DeviceNode("/a", "b"), "deviceNodes[0].hostPath: must be absolute, not 'b'"),
        (DeviceNode("/a", type="x"), "deviceNodes[0].type: must be b, c, u, p or empty, not 'x'"),
        (DeviceNode("/a", major=-1), f"deviceNodes[0].major: must be 0 to {2**63 - 1}, not -1"),
        (DeviceNode("/a", minor=2**63), f"deviceNodes[0].minor: must be 0 to {2**63 - 1}, not "),
        (DeviceNode("/a", file_mode=-1), f"deviceNodes[0].fileMode: must be 0 to {2**32 - 1}, not"),
        (
            DeviceNode("/a", permissions="rx"),
            "deviceNodes[0].permissions: must be made of r, w and",
        ),
        (DeviceNode("/a", uid=2**32), f"deviceNodes[0].uid: must be 0 to {2**32 - 1}, not {2**32}"),
        (DeviceNode("/a", gid=-1), f"deviceNodes[0].gid: must be 0 to {2**32 - 1}, not -1"),
        (Mount("", "/a"), "mounts[0].hostPath: must not be empty"),
        (Mount("a", "/a", "tmpfs", ("rbind",)), "mounts[0].hostPath: must be absolute, not 'a'"),
        (Mount("", "/a", "tmpfs"), "mounts[0].hostPath: must not be empty"),
        (Mount("/a", "a"), "mounts[0].containerPath: must be absolute, not 'a'"),
        (Hook("start", "/a"), "hooks[0].hookName: must be one of prestart, createRuntime, create"),
        (Hook("prestart", "a"), "hooks[0].path: must be absolute, not 'a'"),
        (Hook("prestart", "/a", env=("A",)), "hooks[0].env[0]: must be NAME=VALUE, not 'A'"),
        (
            Hook("prestart", "/a", timeout=0),
            "hooks[0].timeout: must be a number of seconds above 0",
        ),
        (IntelRdt(".."), "intelRdt.closID: must be a file name or '/', not '..'"),
        (IntelRdt("a/b"), "intelRdt.closID: must be a file name or '/', not 'a/b'"),
        (IntelRdt("a" * 4096), "intelRdt.closID: must be a file name or '/'"),
        (NetDevice("", "a"), "netDevices[0].hostInterfaceName: must not be empty"),
        (NetDevice("a", ""), "netDevices[0].name: must not be empty"),
        (-1, f"additionalGids[0]: must be 0 to {2**32 - 1}, not -1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_illegal_edit_is_refused_with_its_path(edit, problem):
    fields = {DeviceNode: "device_nodes", Mount: "mounts", Hook: "hooks", NetDevice: "net_devices"}
    values: dict[str, Any] = {fields.get(type(edit), "additional_gids"): (edit,)}
    if isinstance(edit, IntelRdt):
        values = {"intel_rdt": edit}
    [message] = problems(one_device(ContainerEdits(**values)))
    assert message.startswith(f"{AT}.{problem}")


def test_the_source_of_a_file_system_that_is_no_bind_mount_is_a_word():
    check(one_device(ContainerEdits(mounts=(Mount("tmpfs", "/run/x", "tmpfs"),))))


def test_the_root_class_of_a_cache_is_a_slash():
    check(one_device(ContainerEdits(intel_rdt=IntelRdt("/"))))


def test_one_interface_cannot_be_moved_twice():
    twice = ContainerEdits(net_devices=(NetDevice("a", "x"), NetDevice("a", "x")))

    assert problems(one_device(twice)) == [
        f"{AT}.netDevices: hostInterfaceName 'a' is there twice",
        f"{AT}.netDevices: name 'x' is there twice",
    ]


@pytest.mark.parametrize("key", ["a", "A.b_c-d", "vendor.example/a", "A" * 63, "V.Example/a"])
def test_a_legal_annotation_is_taken(key):
    check(Spec("vendor/gpu", ((key, "anything"),), (CdiDevice("d", (), ENV),)))


@pytest.mark.parametrize("key", ["", "a b", "-a", "a/b/c", "/a", "v_v/a", "a" * 64, "a.-b/c"])
def test_an_illegal_annotation_is_refused(key):
    [problem] = problems(Spec("vendor/gpu", ((key, ""),), (CdiDevice("d", (), ENV),)))
    assert problem.startswith(f"annotations: {key!r} must be a name")


def test_annotations_are_unique_and_not_endless():
    pairs = (("a", "x" * 200_000), ("a", "x" * 200_000))

    assert problems(Spec("vendor/gpu", devices=(CdiDevice("d", pairs, ENV),))) == [
        "devices[0].annotations: 'a' is there twice",
        "devices[0].annotations: must be no longer than 262144 bytes together",
    ]

"""Nouns for the tests of the CDI package: one whole spec, and strategies that make any other."""

import string

from hypothesis import strategies as st

from cdi.spec import CdiDevice, ContainerEdits, DeviceNode, Hook, IntelRdt, Mount, NetDevice, Spec
from cdi.validate import HOOK_NAMES

_ALNUM = string.ascii_letters + string.digits


def _names(first: str, between: str, longest: int) -> st.SearchStrategy[str]:
    tail = st.text(between, max_size=longest - 2)
    return st.tuples(st.sampled_from(first), tail, st.sampled_from(_ALNUM)).map("".join)


kind_parts = _names(string.ascii_letters, _ALNUM + "_-.", 20)
device_names = st.sampled_from(_ALNUM) | _names(_ALNUM, _ALNUM + "_-.:", 20)
texts = st.text(max_size=8)
paths = texts.map("/".__add__)
numbers = st.integers(0, 2**32 - 1)
envs = st.lists(
    st.builds("{}={}".format, st.text(string.ascii_letters, min_size=1, max_size=3), texts),
    max_size=3,
).map(tuple)
annotations = st.dictionaries(_names(_ALNUM, _ALNUM + "_-.", 10), texts, max_size=2).map(
    lambda pairs: tuple(pairs.items())
)


def _some(item: st.SearchStrategy) -> st.SearchStrategy[tuple]:
    return st.lists(item, max_size=2).map(tuple)


nodes = st.builds(
    DeviceNode,
    path=paths,
    host_path=st.just("") | paths,
    type=st.sampled_from(["", "b", "c", "u", "p"]),
    major=numbers,
    minor=numbers,
    file_mode=st.none() | numbers,
    permissions=st.sampled_from(["", "r", "rw", "rwm"]),
    uid=st.none() | numbers,
    gid=st.none() | numbers,
)
mounts = st.builds(Mount, paths, paths, st.sampled_from(["", "none", "tmpfs"]), _some(texts))
hooks = st.builds(
    Hook,
    st.sampled_from(HOOK_NAMES),
    paths,
    _some(texts),
    envs,
    st.none() | st.integers(1, 60),
)
rdts = st.builds(
    IntelRdt, st.sampled_from(["", "/", "gold"]), texts, texts, _some(texts), st.booleans()
)
net_devices = st.integers(0, 2).map(
    lambda count: tuple(NetDevice(f"eth{i}", f"net{i}") for i in range(count))
)
edits = st.builds(
    ContainerEdits,
    env=envs,
    device_nodes=_some(nodes),
    mounts=_some(mounts),
    hooks=_some(hooks),
    additional_gids=_some(numbers),
    intel_rdt=st.none() | rdts,
    net_devices=net_devices,
)
devices = st.builds(CdiDevice, device_names, annotations, edits.filter(lambda e: not e.is_empty))
specs = st.builds(
    Spec,
    kind=st.builds("{}/{}".format, kind_parts, kind_parts),
    annotations=annotations,
    devices=st.lists(devices, min_size=1, max_size=2, unique_by=lambda d: d.name).map(tuple),
    container_edits=edits,
)


def one_device(
    edits: ContainerEdits, name: str = "gpu-0", kind: str = "vendor.example/gpu"
) -> Spec:
    """The smallest spec around these edits."""
    return Spec(kind, devices=(CdiDevice(name, container_edits=edits),))

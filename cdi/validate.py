"""What is wrong with a spec, all at once and each with its path, and which version it needs.

The rules are those of the Go library (``pkg/cdi``, ``Validate``).
Where the CDI SPEC or the OCI runtime specification asks for more, so do we: a file that the library
lets pass and the runtime then stumbles over at container start helps nobody.
This concerns lengths of names, absolute paths, timeouts, and the ranges of numbers.

The version is the oldest that can say the spec, so that the oldest runtimes load it. A runtime
refuses a whole file whose version it does not know, and a file that declares less than it uses (CDI
SPEC, "Released versions").

A new CDI version is one line at the top of ``_NEEDS`` and one predicate that says what a spec must
use to need it; a version that adds nothing is named in ``VERSIONS`` only.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from cdi.errors import CdiSpecError
from cdi.spec import (
    Annotations,
    ContainerEdits,
    DeviceNode,
    Hook,
    IntelRdt,
    Mount,
    NetDevice,
    Spec,
    device_problem,
    kind_problem,
)

VERSIONS: Final = (
    "0.1.0",
    "0.2.0",
    "0.3.0",
    "0.4.0",
    "0.5.0",
    "0.6.0",
    "0.7.0",
    "0.8.0",
    "1.0.0",
    "1.1.0",
)
"""Every version a file may declare, oldest first; the first two can say nothing."""

_EARLIEST: Final = "0.3.0"


def oldest_version(spec: Spec) -> str:
    """Give the oldest version that can say this spec.

    >>> from cdi.spec import ContainerEdits, CdiDevice
    >>> edits = ContainerEdits(env=("A=1",))
    >>> oldest_version(Spec("vendor.example/gpu", devices=(CdiDevice("gpu-0", (), edits),)))
    '0.3.0'
    >>> oldest_version(Spec("vendor.example/gpu", devices=(CdiDevice("0", (), edits),)))
    '0.5.0'
    """
    return next((version for version, needs in _NEEDS if needs(spec)), _EARLIEST)


def version_problem(declared: str, spec: Spec) -> str | None:
    """Say why a file that declares this version would not be loaded, or ``None``."""
    if declared not in VERSIONS:
        return f"unknown version {declared!r}, known are {VERSIONS[0]} to {VERSIONS[-1]}"
    needed = oldest_version(spec)
    if VERSIONS.index(declared) < VERSIONS.index(needed):
        return f"must be at least {needed} for what the spec uses, not {declared}"
    return None


def _needs_1_1(spec: Spec) -> bool:
    return any(edits.net_devices or _is_new(edits.intel_rdt) for edits in spec.all_edits)


def _is_new(rdt: IntelRdt | None) -> bool:
    return rdt is not None and bool(rdt.schemata or rdt.enable_monitoring)


def _needs_0_7(spec: Spec) -> bool:
    return any(edits.intel_rdt is not None or edits.additional_gids for edits in spec.all_edits)


def _needs_0_6(spec: Spec) -> bool:
    annotated = spec.annotations or any(device.annotations for device in spec.devices)
    return bool(annotated) or "." in spec.device_class


def _needs_0_5(spec: Spec) -> bool:
    return any(device.name[:1] in tuple("0123456789") for device in spec.devices) or any(
        node.host_path for edits in spec.all_edits for node in edits.device_nodes
    )


def _needs_0_4(spec: Spec) -> bool:
    return any(mount.type for edits in spec.all_edits for mount in edits.mounts)


# Newest first: the first predicate that holds decides. The rules are those of the Go library's
# specs-go/version.go at 1.1.0.
_NEEDS: Final[tuple[tuple[str, Callable[[Spec], bool]], ...]] = (
    ("1.1.0", _needs_1_1),
    ("0.7.0", _needs_0_7),
    ("0.6.0", _needs_0_6),
    ("0.5.0", _needs_0_5),
    ("0.4.0", _needs_0_4),
)


HOOK_NAMES: Final = (
    "prestart",
    "createRuntime",
    "createContainer",
    "startContainer",
    "poststart",
    "poststop",
)
"""The moments of a container's life, in their order (OCI, "Lifecycle")."""

_NODE_TYPES: Final = ("", "b", "c", "u", "p")
_UINT32_MAX: Final = 2**32 - 1
_INT64_MAX: Final = 2**63 - 1
_ANNOTATIONS_MAX_BYTES: Final = 256 * 1024
_ANNOTATION_KEY: Final = re.compile(
    r"(?=.{1,253}/|[^/]*$)"
    r"([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
    r"(?=.{1,63}$)[a-z0-9]([-a-z0-9_.]*[a-z0-9])?"
)


def check(spec: Spec) -> None:
    """Raise ``CdiSpecError`` with everything that is wrong.

    >>> from cdi.spec import CdiDevice
    >>> check(Spec("vendor.example/gpu", devices=(CdiDevice("gpu-0"),)))
    Traceback (most recent call last):
    cdi.errors.CdiSpecError: devices[0].containerEdits: must not be empty
    """
    if problems := tuple(_spec_problems(spec)):
        raise CdiSpecError(problems)


def _spec_problems(spec: Spec) -> Iterator[str]:
    if problem := kind_problem(spec.kind):
        yield f"kind: {problem}"
    yield from _annotation_problems("annotations", spec.annotations)
    if not spec.devices:
        yield "devices: at least one is required"
    names = [device.name for device in spec.devices]
    for i, device in enumerate(spec.devices):
        at = f"devices[{i}]"
        if problem := device_problem(device.name):
            yield f"{at}.name: {problem}"
        if device.name in names[:i]:
            yield f"{at}.name: {device.name!r} is there twice"
        yield from _annotation_problems(f"{at}.annotations", device.annotations)
        if device.container_edits.is_empty:
            yield f"{at}.containerEdits: must not be empty"
        yield from _edits_problems(f"{at}.containerEdits", device.container_edits)
    yield from _edits_problems("containerEdits", spec.container_edits)


def _annotation_problems(at: str, annotations: Annotations) -> Iterator[str]:
    for key in _duplicate_problems(key for key, _ in annotations):
        yield f"{at}: {key!r} is there twice"
    for key, _ in annotations:
        if not _ANNOTATION_KEY.fullmatch(key.lower()):
            yield f"{at}: {key!r} must be a name, optionally behind a DNS name and '/'"
    if sum(len(text.encode()) for pair in annotations for text in pair) > _ANNOTATIONS_MAX_BYTES:
        yield f"{at}: must be no longer than {_ANNOTATIONS_MAX_BYTES} bytes together"


def _edits_problems(at: str, edits: ContainerEdits) -> Iterator[str]:
    yield from _env_problems(f"{at}.env", edits.env)
    for i, node in enumerate(edits.device_nodes):
        yield from (f"{at}.deviceNodes[{i}].{problem}" for problem in _node_problems(node))
    for i, mount in enumerate(edits.mounts):
        yield from _mount_problems(f"{at}.mounts[{i}]", mount)
    for i, hook in enumerate(edits.hooks):
        yield from _hook_problems(f"{at}.hooks[{i}]", hook)
    for i, gid in enumerate(edits.additional_gids):
        yield from _range_problems(f"{at}.additionalGids[{i}]", gid, _UINT32_MAX)
    if edits.intel_rdt is not None:
        yield from _rdt_problems(f"{at}.intelRdt", edits.intel_rdt)
    if edits.net_devices:
        yield from _net_problems(f"{at}.netDevices", edits.net_devices)


def _env_problems(at: str, env: Iterable[str]) -> Iterator[str]:
    for i, entry in enumerate(env):
        if entry.find("=") <= 0:
            yield f"{at}[{i}]: must be NAME=VALUE, not {entry!r}"


@functools.lru_cache(maxsize=256)  # a machine has few, which are in every spec again
def _node_problems(node: DeviceNode) -> tuple[str, ...]:
    problems = [
        *_path_problems("path", node.path),
        *(_path_problems("hostPath", node.host_path) if node.host_path else ()),
        *_range_problems("major", node.major, _INT64_MAX),
        *_range_problems("minor", node.minor, _INT64_MAX),
        *_range_problems("fileMode", node.file_mode, _UINT32_MAX),
        *_range_problems("uid", node.uid, _UINT32_MAX),
        *_range_problems("gid", node.gid, _UINT32_MAX),
    ]
    if node.type not in _NODE_TYPES:
        problems.append(f"type: must be b, c, u, p or empty, not {node.type!r}")
    if not set(node.permissions) <= set("rwm"):
        problems.append(f"permissions: must be made of r, w and m, not {node.permissions!r}")
    return tuple(problems)


def _mount_problems(at: str, mount: Mount) -> Iterator[str]:
    if _is_bind(mount):
        yield from _path_problems(f"{at}.hostPath", mount.host_path)
    elif not mount.host_path:
        yield f"{at}.hostPath: must not be empty"
    yield from _path_problems(f"{at}.containerPath", mount.container_path)


def _is_bind(mount: Mount) -> bool:
    # The source of another file system, say tmpfs, is a word and not a path (OCI, "Mounts").
    return mount.type in ("", "none", "bind") or not {"bind", "rbind"}.isdisjoint(mount.options)


def _hook_problems(at: str, hook: Hook) -> Iterator[str]:
    if hook.hook_name not in HOOK_NAMES:
        yield f"{at}.hookName: must be one of {', '.join(HOOK_NAMES)}, not {hook.hook_name!r}"
    yield from _path_problems(f"{at}.path", hook.path)
    yield from _env_problems(f"{at}.env", hook.env)
    if hook.timeout is not None and not 0 < hook.timeout <= _INT64_MAX:
        yield f"{at}.timeout: must be a number of seconds above 0, not {hook.timeout}"


def _rdt_problems(at: str, rdt: IntelRdt) -> Iterator[str]:
    # A class is a directory below /sys/fs/resctrl; "/" is the root class.
    name = rdt.clos_id
    if name == "/":
        return
    if len(name.encode()) >= 4096 or name in (".", "..") or not set(name).isdisjoint("/\n"):
        yield f"{at}.closID: must be a file name or '/', not {name!r}"


def _net_problems(at: str, net_devices: tuple[NetDevice, ...]) -> Iterator[str]:
    for i, device in enumerate(net_devices):
        if not device.host_interface_name:
            yield f"{at}[{i}].hostInterfaceName: must not be empty"
        if not device.name:
            yield f"{at}[{i}].name: must not be empty"
    for name in _duplicate_problems(device.host_interface_name for device in net_devices):
        yield f"{at}: hostInterfaceName {name!r} is there twice"
    for name in _duplicate_problems(device.name for device in net_devices):
        yield f"{at}: name {name!r} is there twice"


def _path_problems(at: str, path: str) -> Iterator[str]:
    if not path:
        yield f"{at}: must not be empty"
    elif not path.startswith("/"):
        yield f"{at}: must be absolute, not {path!r}"


def _range_problems(at: str, number: int | None, highest: int) -> Iterator[str]:
    if number is not None and not 0 <= number <= highest:
        yield f"{at}: must be 0 to {highest}, not {number}"


def _duplicate_problems(names: Iterable[str]) -> list[str]:
    listed = list(names)
    if len(set(listed)) == len(listed):
        return []
    return [name for name, times in Counter(listed).items() if times > 1]

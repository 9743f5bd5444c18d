"""Which CDI version a spec needs: the oldest that can say it, so that the oldest runtimes load it.

A runtime refuses a whole file whose version it does not know, and a file that declares less than
it uses (CDI SPEC, "Released versions").

A new CDI version is one line at the top of ``_NEEDS`` and one predicate that says what a spec must
use to need it; a version that adds nothing is named in ``VERSIONS`` only.
"""

from collections.abc import Callable
from typing import Final

from cdi.spec import IntelRdt, Spec

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

    >>> from cdi import ContainerEdits, Device
    >>> edits = ContainerEdits(env=("A=1",))
    >>> oldest_version(Spec("vendor.example/gpu", devices=(Device("gpu-0", (), edits),)))
    '0.3.0'
    >>> oldest_version(Spec("vendor.example/gpu", devices=(Device("0", (), edits),)))
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

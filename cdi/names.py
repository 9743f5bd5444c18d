"""Names: ``vendor/class=device``, which of them are legal, and what a spec's file is called.

The characters are those of the CDI SPEC ("Kind", "CDI Devices") as the Go library's ``pkg/parser``
checks them: a vendor and a class begin with a letter, a device name may begin with a digit too,
and all end with a letter or a digit. One rule is ours: a vendor and a class have two characters.

>>> print(qualify("vendor.example", "gpu", "gpu-0"))
vendor.example/gpu=gpu-0
>>> parse_name("vendor.example/gpu=gpu-0").device
'gpu-0'
>>> qualify("vendor.example", "gpu", "gpu 0")
Traceback (most recent call last):
cdi.errors.CdiNameError: device name 'gpu 0': must begin and end with a letter or digit, with only \
letters, digits, '_', '-', '.', ':' between
"""

import re
from dataclasses import dataclass
from typing import Final

from cdi.errors import CdiNameError

# A temporary file is called ".<name>.<8 characters>.tmp", and Linux allows 255 bytes (NAME_MAX).
LONGEST_FILE_NAME: Final = 240


@dataclass(frozen=True, slots=True)
class QualifiedName:
    """One device of one vendor, as a runtime is asked for it."""

    vendor: str
    device_class: str
    device: str

    @property
    def kind(self) -> str:
        """What a spec file calls ``kind``."""
        return f"{self.vendor}/{self.device_class}"

    def __str__(self) -> str:
        return f"{self.kind}={self.device}"


@dataclass(frozen=True, slots=True)
class _Rule:
    what: str
    legal: re.Pattern[str]
    longest: int
    says: str

    def problem(self, name: str) -> str | None:
        if not name:
            return "must not be empty"
        if len(name) > self.longest:
            return f"must be no longer than {self.longest} characters"
        return None if self.legal.fullmatch(name) else self.says


_KIND_SAYS: Final = (
    "must have two characters or more,"
    " begin with a letter and end with a letter or digit,"
    " with only letters, digits, '_', '-', '.' between"
)
_DEVICE_SAYS: Final = (
    "must begin and end with a letter or digit,"
    " with only letters, digits, '_', '-', '.', ':' between"
)
# One letter would be legal, but the Go library up to 1.1.0 panics on it, and the runtime with it.
_KIND_PART: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*[A-Za-z0-9]")
_DEVICE: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")

# 253 and 63 are the CDI SPEC's ("Kind"); it sets no limit for devices, where 255 is ours.
_VENDOR_RULE: Final = _Rule("vendor", _KIND_PART, 253, _KIND_SAYS)
_CLASS_RULE: Final = _Rule("class", _KIND_PART, 63, _KIND_SAYS)
_DEVICE_RULE: Final = _Rule("device name", _DEVICE, 255, _DEVICE_SAYS)
_ID_RULE: Final = _Rule("transient id", _DEVICE, 255, _DEVICE_SAYS)


def device_problem(name: str) -> str | None:
    """Say what is wrong with an unqualified device name, or ``None``."""
    return _DEVICE_RULE.problem(name)


def kind_problem(kind: str) -> str | None:
    """Say what is wrong with ``vendor/class``, or ``None``.

    >>> kind_problem("vendor.example/gpu")
    >>> kind_problem("vendor.example")
    "must be 'vendor/class'"
    """
    vendor, slash, device_class = kind.partition("/")
    if not slash:
        return "must be 'vendor/class'"
    for rule, part in ((_VENDOR_RULE, vendor), (_CLASS_RULE, device_class)):
        if problem := rule.problem(part):
            return f"{rule.what} {part!r}: {problem}"
    return None


def qualify(vendor: str, device_class: str, device: str) -> QualifiedName:
    """Join three names that were checked, or raise ``CdiNameError``."""
    _check(_VENDOR_RULE, vendor)
    _check(_CLASS_RULE, device_class)
    _check(_DEVICE_RULE, device)
    return QualifiedName(vendor, device_class, device)


def parse_name(text: str) -> QualifiedName:
    """Split ``vendor/class=device``; the inverse of ``str``.

    >>> parse_name("gpu-0")
    Traceback (most recent call last):
    cdi.errors.CdiNameError: 'gpu-0': must be 'vendor/class=device'
    """
    kind, equals, device = text.partition("=")
    vendor, slash, device_class = kind.partition("/")
    if not (equals and slash):
        raise CdiNameError(f"{text!r}: must be 'vendor/class=device'")
    return qualify(vendor, device_class, device)


def is_qualified(text: str) -> bool:
    """Tell a name that a runtime looks up in CDI from a plain device path.

    >>> is_qualified("/dev/null")
    False
    """
    try:
        parse_name(text)
    except CdiNameError:
        return False
    return True


def spec_file_name(vendor: str, device_class: str, transient_id: str) -> str:
    """Name the file of a spec that lives as long as something else does.

    The pattern is the Go library's (``GenerateTransientSpecName``).
    Where that replaces a ``/`` in the id, this refuses it: two ids never share a file.

    >>> spec_file_name("vendor.example", "gpu", "5b0f")
    'vendor.example-gpu_5b0f.json'
    """
    _check(_ID_RULE, transient_id)
    name = f"{spec_file_prefix(vendor, device_class)}{transient_id}.json"
    if len(name) > LONGEST_FILE_NAME:
        raise CdiNameError(f"file name {name!r}: must be no longer than {LONGEST_FILE_NAME}")
    return name


def spec_file_prefix(vendor: str, device_class: str) -> str:
    """Give what the files of all transient specs of one vendor and class begin with."""
    _check(_VENDOR_RULE, vendor)
    _check(_CLASS_RULE, device_class)
    return f"{vendor}-{device_class}_"


def _check(rule: _Rule, name: str) -> None:
    if problem := rule.problem(name):
        raise CdiNameError(f"{rule.what} {name!r}: {problem}")

"""Versions as NVML gives them, in the form in which they are published."""

import re

from dra_driver.errors import NodeError
from dra_driver.model.devices import Version

_DRIVER = re.compile(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?(?!\d)")


def driver_version(text: str) -> Version:
    """``580.95.05`` is 580.95.5 and ``565.77`` is 565.77.0: semver knows neither leading zeros nor
    two parts.

    What follows a third number (``-beta``) is left out: NVIDIA's releases never differ in it alone.
    """
    match = _DRIVER.match(text)
    if match is None:
        raise NodeError(f"NVML calls the driver's version {text!r}, which is none")
    return Version(*(int(part or 0) for part in match.groups()))


def cuda_version(number: int) -> Version:
    """``13000`` is 13.0 and ``12080`` is 12.8 (nvml.h, NVML_CUDA_DRIVER_VERSION_MAJOR)."""
    return Version(number // 1000, number % 1000 // 10)

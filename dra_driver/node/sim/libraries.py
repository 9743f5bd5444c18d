"""The driver's libraries and firmware of a simulated host."""

import platform
from typing import Final

from dra_driver.node.sim.elf import shared_object
from dra_driver.node.sim.files import File, Link, Tree

# Each library of the 580 driver that computes, encodes or renders without a display, with the
# number in its soname (None: the driver's version) and whether there is a plain ".so" for linking:
# the driver's own .manifest.
_LIBRARIES: Final = (
    ("libcuda", "1", True),
    ("libcudadebugger", "1", False),
    ("libnvcuvid", "1", True),
    ("libnvidia-allocator", "1", True),
    ("libnvidia-cfg", "1", True),
    ("libnvidia-encode", "1", True),
    ("libnvidia-fbc", "1", True),
    ("libnvidia-gpucomp", None, False),
    ("libnvidia-ml", "1", True),
    ("libnvidia-ngx", "1", False),
    ("libnvidia-nvvm", "4", True),
    ("libnvidia-opencl", "1", False),
    ("libnvidia-opticalflow", "1", True),
    ("libnvidia-pkcs11-openssl3", None, False),
    ("libnvidia-ptxjitcompiler", "1", True),
    ("libnvidia-rtcore", None, False),
    ("libnvidia-sandboxutils", "1", True),
    ("libnvoptix", "1", False),
)
_FIRMWARE: Final = ("gsp_ga10x.bin", "gsp_tu10x.bin")


def directory() -> str:
    """Where Debian and Ubuntu keep libraries of this machine."""
    return f"usr/lib/{platform.machine()}-linux-gnu"


def libraries(version: str) -> Tree:
    """The libraries of driver *version* with their links, and its firmware."""
    tree: Tree = {}
    for name, number, development in _LIBRARIES:
        file = f"{name}.so.{version}"
        soname = f"{name}.so.{number}" if number else file
        tree[f"{directory()}/{file}"] = File(shared_object(soname), 0o755)
        if number:
            tree[f"{directory()}/{soname}"] = Link(file)
        if development:
            tree[f"{directory()}/{name}.so"] = Link(soname)
    for name in _FIRMWARE:
        tree[f"lib/firmware/nvidia/{version}/{name}"] = File(b"simulated firmware\n")
    return tree

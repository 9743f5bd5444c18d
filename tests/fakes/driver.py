"""Miniature driver installations, as installers and distributions lay them out."""

import os
import socket
from collections.abc import Iterable
from pathlib import Path

from tests.fakes.elf import elf_library

VERSION = "580.95.05"

# File name (without the version) and DT_SONAME of what a driver for servers ships; "" for the name
# of the file itself.
LIBRARIES = (
    ("libcuda", "libcuda.so.1"),
    ("libcudadebugger", "libcudadebugger.so.1"),
    ("libnvcuvid", "libnvcuvid.so.1"),
    ("libnvidia-allocator", "libnvidia-allocator.so.1"),
    ("libnvidia-cfg", "libnvidia-cfg.so.1"),
    ("libnvidia-encode", "libnvidia-encode.so.1"),
    ("libnvidia-gpucomp", ""),
    ("libnvidia-ml", "libnvidia-ml.so.1"),
    ("libnvidia-nvvm", "libnvidia-nvvm.so.4"),
    ("libnvidia-opencl", "libnvidia-opencl.so.1"),
    ("libnvidia-opticalflow", "libnvidia-opticalflow.so.1"),
    ("libnvidia-ptxjitcompiler", "libnvidia-ptxjitcompiler.so.1"),
    ("libGLX_nvidia", "libGLX_nvidia.so.0"),
)
TOOLS = (
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-debugdump",
    "nvidia-modprobe",
    "nvidia-persistenced",
    "nvidia-smi",
)
_DEBIAN = "usr/lib/x86_64-linux-gnu"


def install(
    root: Path,
    version: str = VERSION,
    directory: str = _DEBIAN,
    machine: str = "x86_64",
    tools: str = "usr/bin",
    names: Iterable[tuple[str, str]] = LIBRARIES,
) -> Path:
    """A driver below *root*: libraries and links in *directory*, programs in *tools*."""
    libraries = root / directory
    libraries.mkdir(parents=True, exist_ok=True)
    for stem, soname in names:
        file = f"{stem}.so.{version}"
        (libraries / file).write_bytes(elf_library(soname or file, machine))
        if soname:
            relink(libraries / soname, file)
    if ("libGLX_nvidia", "libGLX_nvidia.so.0") in names:
        relink(libraries / "libGLX_indirect.so.0", f"libGLX_nvidia.so.{version}")
    relink(libraries / "libcuda.so", "libcuda.so.1")
    (root / tools).mkdir(parents=True, exist_ok=True)
    for tool in TOOLS:
        program(root / tools / tool, "echo ready")
    return root


def make_system(root: Path, loader: str = "lib64/ld-linux-x86-64.so.2") -> None:
    """What a driver container has besides its driver: ``/dev``, and the loader of its programs."""
    (root / "dev").mkdir(exist_ok=True)
    (root / loader).parent.mkdir(exist_ok=True)
    (root / loader).touch()


def program(path: Path, script: str) -> None:
    """A shell script, put in place at once: a program that is written to cannot be started."""
    written = path.with_name(f".{path.name}")
    written.write_text(f"#!/bin/sh\n{script}\n")
    written.chmod(0o755)
    written.replace(path)


def relink(link: Path, target: str) -> None:
    link.unlink(missing_ok=True)
    link.symlink_to(target)


def install_own_versions(root: Path, directory: str = _DEBIAN) -> None:
    """Libraries that the driver ships under other versions than its own."""
    libraries = root / directory
    (libraries / "libnvidia-nvvm70.so.4").write_bytes(elf_library("libnvidia-nvvm70.so.4"))
    (libraries / "libnvidia-egl-gbm.so.1.1.2").write_bytes(elf_library("libnvidia-egl-gbm.so.1"))
    relink(libraries / "libnvidia-egl-gbm.so.1", "libnvidia-egl-gbm.so.1.1.2")


def install_extras(root: Path, version: str = VERSION) -> None:
    """GSP firmware, and what EGL and Vulkan look for."""
    firmware = root / f"usr/lib/firmware/nvidia/{version}"
    firmware.mkdir(parents=True)
    relink(root / "lib", "usr/lib")
    for name in ("gsp_ga10x.bin", "gsp_tu10x.bin"):
        (firmware / name).write_bytes(b"firmware")
    for file in (
        "usr/share/glvnd/egl_vendor.d/10_nvidia.json",
        "usr/share/vulkan/icd.d/nvidia_icd.json",
    ):
        (root / file).parent.mkdir(parents=True)
        (root / file).write_text("{}")


def listen(path: Path) -> socket.socket:
    """A socket file of a daemon; bound by a relative name, since such names must be short."""
    path.parent.mkdir(parents=True, exist_ok=True)
    server = socket.socket(socket.AF_UNIX)
    directory = os.open(path.parent, os.O_PATH)
    try:
        server.bind(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)
    return server


def load_module(host: Path, version: str, flavour: str = "Open Kernel Module for x86_64") -> None:
    """The kernel module of *version* is loaded on the host."""
    file = host / "proc/driver/nvidia/version"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        f"NVRM version: NVIDIA UNIX {flavour}  {version}  Release Build  (builder@host)\n"
        "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
    )

"""How driver installations are laid out: which files of one root a container needs, found by table.

The tables list the places where installers and distributions put things, first come first taken.
A library belongs to a driver if its file name ends in the driver's version, or if it is one of the
few that the driver ships under a version of their own. Of an ELF file only the few bytes that say
machine and DT_SONAME are read, with ``pread``: a driver is 600 MB of libraries. (System V ABI, "ELF
Header", "Program Header", "Dynamic Section".)
"""

import os
import re
import stat
import struct
from collections.abc import Iterable, Iterator
from os import lstat
from typing import Final

from dra_driver.base.errors import NodeError
from dra_driver.base.frozen import frozen
from dra_driver.model.driver_files import DriverFiles, DriverLibrary, HostFile
from dra_driver.node.driver.rootfs import RootFs

_EHDR: Final = struct.Struct("<4sBBB9xHHIQQQIHHH")  # up to e_phnum
_PHDR: Final = struct.Struct("<IIQQQQQQ")
_DYN: Final = struct.Struct("<qQ")
_ELFCLASS64, _LITTLE_ENDIAN = 2, 1
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_STRTAB, _DT_SONAME = 0, 5, 14
_MACHINES: Final = {62: "x86_64", 183: "aarch64"}  # EM_X86_64, EM_AARCH64
_MAX_NAME_BYTES: Final = 256
_MAX_BYTES: Final = 1 << 20  # of program headers or of a dynamic section: real ones have some KiB


@frozen
class ElfLibrary:
    """A 64-bit library. *soname* is None where it was linked without one."""

    machine: str  # "x86_64", "aarch64"
    soname: str | None


@frozen
class _ElfSegment:
    type: int
    offset: int
    address: int
    size: int  # in the file


def read_elf(path: str) -> ElfLibrary | None:
    """Look into the library at *path*; None where it is for a machine that is not served here
    (32-bit compatibility libraries, say).

    NodeError: it cannot be read, is no ELF file, or ends too early.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _read(fd)
        finally:
            os.close(fd)
    except OSError as e:
        raise NodeError(f"cannot read the library {path}: {e.strerror}") from e
    except (struct.error, ValueError, OverflowError) as e:
        raise NodeError(
            f"{path} is not a whole ELF library ({e}): is the driver being installed right now?"
        ) from e


def _read(fd: int) -> ElfLibrary | None:
    magic, bits, order, _, _, machine, _, _, phoff, _, _, _, phentsize, phnum = _EHDR.unpack(
        _bytes(fd, 0, _EHDR.size)
    )
    if magic != b"\x7fELF":
        raise ValueError("no ELF header")
    if bits != _ELFCLASS64 or order != _LITTLE_ENDIAN or machine not in _MACHINES:
        return None
    if phentsize != _PHDR.size:
        raise ValueError(f"program headers of {phentsize} bytes")
    table = _bytes(fd, phoff, phentsize * phnum)
    segments = [_ElfSegment(h[0], h[2], h[3], h[5]) for h in _PHDR.iter_unpack(table)]
    return ElfLibrary(_MACHINES[machine], _soname(fd, segments))


def _soname(fd: int, segments: list[_ElfSegment]) -> str | None:
    dynamic = next((s for s in segments if s.type == _PT_DYNAMIC), None)
    if dynamic is None:
        raise ValueError("no dynamic section")
    entries: dict[int, int] = {}
    for tag, value in _DYN.iter_unpack(_bytes(fd, dynamic.offset, dynamic.size)):
        if tag == _DT_NULL:
            break
        entries[tag] = value
    if _DT_SONAME not in entries:
        return None
    strings = _file_offset(entries.get(_DT_STRTAB, 0), segments)
    raw = os.pread(fd, _MAX_NAME_BYTES, strings + entries[_DT_SONAME])
    name, end, _ = raw.partition(b"\0")
    if not end or not name or b"/" in name:
        raise ValueError("no legal DT_SONAME")
    return name.decode("ascii")


def _file_offset(address: int, segments: list[_ElfSegment]) -> int:
    """Dynamic entries name memory addresses; the file holds them where a segment says."""
    for segment in segments:
        if segment.type == _PT_LOAD and 0 <= address - segment.address < segment.size:
            return segment.offset + address - segment.address
    raise ValueError(f"address {address:#x} is in no segment")


def _bytes(fd: int, offset: int, size: int) -> bytes:
    if size > _MAX_BYTES:
        raise ValueError(f"a table of {size} bytes")
    data = os.pread(fd, size, offset)
    if len(data) != size:
        raise ValueError(f"{size} bytes expected at {offset:#x}, {len(data)} found")
    return data


LIBRARY_DIRECTORIES: Final = (
    "/usr/lib/x86_64-linux-gnu",  # Debian, Ubuntu
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",  # Debian's own packages
    "/usr/lib/aarch64-linux-gnu/nvidia/current",
    "/usr/lib64",  # RHEL, SUSE, Amazon Linux
    "/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/lib64",  # GKE, prefixes
    "/usr/lib",  # Arch; on RHEL the 32-bit libraries, which are passed over
    "/lib",
    "/run/opengl-driver/lib",  # NixOS
    "/usr/local/glibc/usr/lib",  # Talos before 1.13
    "/usr/lib/nvidia/tesla",  # Bottlerocket
)
TOOL_DIRECTORIES: Final = (
    "/usr/bin",
    "/bin",
    "/usr/sbin",
    "/sbin",
    "/usr/local/bin",
    "/run/current-system/sw/bin",  # NixOS
    "/usr/libexec/nvidia/tesla/bin",  # Bottlerocket, where /usr/bin has none yet
)
# Not nvidia-modprobe: it makes device files, and a container has those that it may have.
TOOLS: Final = (
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-smi",
)
REQUIRED_LIBRARIES: Final = ("libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler")
REQUIRED_TOOL: Final = "nvidia-smi"

_FIRMWARE: Final = ("/lib/firmware/nvidia", "/usr/lib/firmware/nvidia", "/firmware/nvidia")
_SOCKETS: Final = ("/nvidia-fabricmanager/socket", "/nvidia-persistenced/socket")
_GRAPHICS: Final = (
    ("/etc/vulkan/icd.d/nvidia_icd.json", ("/vulkan/icd.d",)),
    ("/etc/vulkan/implicit_layer.d/nvidia_layers.json", ("/vulkan/implicit_layer.d",)),
    ("/usr/share/egl/egl_external_platform.d/10_nvidia_wayland.json", ()),
    ("/usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json", ()),
    ("/usr/share/glvnd/egl_vendor.d/10_nvidia.json", ()),
    ("/usr/share/nvidia/nvoptix.bin", ()),
)
"""Where a container finds each, and the directories of a root that may hold it beside that and its
twin below /etc or /usr/share."""

_CUDA: Final = re.compile(r"libcuda\.so\.(\d+(?:\.\d+){1,2})")
_OWN_VERSION: Final = re.compile(
    r"libnvidia-(api|egl-gbm|egl-wayland2?|egl-xcb|egl-xlib|nvvm70)\.so\.[\d.]+"
)
# They serve nvidia-settings, a desktop program.
_DESKTOP: Final = ("libnvidia-gtk2", "libnvidia-gtk3", "libnvidia-wayland-client")
_IGNORED_LINKS: Final = ("libGLX_indirect.so.0",)  # to libGLX_nvidia: GLVND looks for it


def find_driver_files(fs: RootFs, loaded: str | None) -> DriverFiles:
    """The driver in *fs*; *loaded* is the version of the kernel module, where that is known.

    NodeError: there is none, a part of it is missing, or which one counts cannot be told.
    """
    if not fs.exists:
        raise NodeError(f"{fs.root} does not exist")
    directories = _library_directories(fs)
    version = _version(fs, directories, loaded)
    libraries_and_machines = [
        pair for directory in directories for pair in _libraries(fs, directory, version)
    ]
    machine = next((m for lib, m in libraries_and_machines if _stem(lib.soname) == "libcuda"), "")
    libraries = _first_of_each([lib for lib, m in libraries_and_machines if m == machine])
    missing = [s for s in REQUIRED_LIBRARIES if s not in {_stem(lib.soname) for lib in libraries}]
    if missing or find_tool(fs, REQUIRED_TOOL) is None:
        missing = [f"{stem}.so.{version}" for stem in missing]
        missing += [] if find_tool(fs, REQUIRED_TOOL) else [REQUIRED_TOOL]
        raise NodeError(f"driver {version} in {fs.root} is incomplete: no {', '.join(missing)}")
    cuda = next(lib for lib in libraries if _stem(lib.soname) == "libcuda")
    return DriverFiles(
        version=version,
        root=fs.root,
        machine=machine,
        lib_dir=cuda.host_path.rpartition("/")[0],
        libraries=tuple(libraries),
        tools=tuple(_tools(fs)),
        firmware=tuple(_firmware(fs, version)),
        graphics=tuple(_graphics(fs)),
        sockets=tuple(_sockets(fs)),
    )


def find_tool(fs: RootFs, name: str) -> str | None:
    """A program of the driver, as *fs* calls it."""
    return _first(fs, (f"{directory}/{name}" for directory in TOOL_DIRECTORIES))


def _first(fs: RootFs, paths: Iterable[str]) -> str | None:
    return next((real_path for path in paths if (real_path := fs.find(path))), None)


def _stem(name: str) -> str:
    return name.partition(".so")[0]


def _library_directories(fs: RootFs) -> list[str]:
    # Merged into /usr, several of them are one: it is looked into once.
    resolved = [fs.resolve(directory) for directory in LIBRARY_DIRECTORIES]
    return list(dict.fromkeys(directory for directory in resolved if directory))


def _version(fs: RootFs, directories: list[str], loaded: str | None) -> str:
    versions = {
        match[1]
        for directory in directories
        for name in fs.names(directory)
        if (match := _CUDA.fullmatch(name)) and fs.find(f"{directory}/{name}")
    }
    if not versions:
        raise NodeError(f"{fs.root} has no libcuda.so.<version> in its library directories")
    available = ", ".join(sorted(versions))
    if loaded is not None:
        if loaded in versions:
            return loaded
        raise NodeError(
            f"{fs.root} has driver {available}, but the loaded kernel module is {loaded}: finish "
            "the driver upgrade (restart the node, or reload the module)"
        )
    if len(versions) > 1:
        raise NodeError(
            f"{fs.root} has drivers {available} side by side, and no kernel module is loaded "
            "that would tell which one counts: remove the other"
        )
    return versions.pop()


def _libraries(fs: RootFs, directory: str, version: str) -> Iterator[tuple[DriverLibrary, str]]:
    """The driver's libraries in one directory, each with the machine it is for."""
    for path, names in sorted(_names_by_file(fs, directory, version).items()):
        elf = read_elf(fs.local_path(path))
        if elf is not None:
            file_name = path.rpartition("/")[2]
            soname = elf.soname or file_name
            links = tuple(sorted(names - {soname, file_name}))
            yield DriverLibrary(fs.on_host(path), soname, links), elf.machine


def _names_by_file(fs: RootFs, directory: str, version: str) -> dict[str, set[str]]:
    suffix = f".so.{version}"

    def is_ours(name: str) -> bool:
        return name.endswith(suffix) or bool(_OWN_VERSION.fullmatch(name))

    names = fs.names(directory)
    stems = {_stem(name) for name in names if is_ours(name)}.difference(_DESKTOP)
    names_by_file: dict[str, set[str]] = {}
    for name in names:
        if _stem(name) in stems or name in _IGNORED_LINKS:
            path = fs.find(f"{directory}/{name}")
            if path is not None and is_ours(path.rpartition("/")[2]):
                names_by_file.setdefault(path, set()).add(name)
    return names_by_file


def _first_of_each(libraries: list[DriverLibrary]) -> list[DriverLibrary]:
    by_soname: dict[str, DriverLibrary] = {}
    for library in libraries:
        by_soname.setdefault(library.soname, library)
    return sorted(by_soname.values())


def _tools(fs: RootFs) -> Iterator[HostFile]:
    for name in TOOLS:
        if path := find_tool(fs, name):
            yield HostFile(fs.on_host(path), f"/usr/bin/{name}")


def _firmware(fs: RootFs, version: str) -> Iterator[HostFile]:
    for place in _FIRMWARE:
        directory = fs.resolve(f"{place}/{version}")
        names = fs.names(directory) if directory else []
        files = [f"{directory}/{n}" for n in names if n.startswith("gsp") and n.endswith(".bin")]
        for path in (real_path for file in files if (real_path := fs.find(file))):
            name = path.rpartition("/")[2]
            yield HostFile(fs.on_host(path), f"/lib/firmware/nvidia/{version}/{name}")
        if files:
            return


def _graphics(fs: RootFs) -> Iterator[HostFile]:
    for container_path, directories in _GRAPHICS:
        name = container_path.rpartition("/")[2]
        paths = [
            container_path,
            _graphics_file(container_path),
            *(f"{directory}/{name}" for directory in directories),
        ]
        if path := _first(fs, paths):
            yield HostFile(fs.on_host(path), container_path)


def _graphics_file(path: str) -> str:
    if path.startswith("/etc/"):
        return "/usr/share/" + path.removeprefix("/etc/")
    return "/etc/" + path.removeprefix("/usr/share/")


def _sockets(fs: RootFs) -> Iterator[HostFile]:
    for socket in _SOCKETS:
        path = _first(fs, (f"/run{socket}", f"/var/run{socket}"))
        if path and stat.S_ISSOCK(lstat(fs.local_path(path)).st_mode):
            yield HostFile(fs.on_host(path), f"/run{socket}")

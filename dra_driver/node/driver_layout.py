"""How driver installations are laid out: which files of one root a container needs, found by table.

The tables list the places where installers and distributions put things, first come first taken.
A library belongs to a driver if its file name ends in the driver's version, or if it is one of the
few that the driver ships under a version of their own.
"""

import re
import stat
from collections.abc import Iterable, Iterator
from os import lstat
from typing import Final

from dra_driver.errors import NodeError
from dra_driver.model.driver_files import DriverFiles, HostFile, Library
from dra_driver.node.elf import read_elf
from dra_driver.node.rootfs import RootFs

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
)
TOOL_DIRECTORIES: Final = (
    "/usr/bin",
    "/bin",
    "/usr/sbin",
    "/sbin",
    "/usr/local/bin",
    "/run/current-system/sw/bin",  # NixOS
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
_FOREIGN_LINKS: Final = ("libGLX_indirect.so.0",)  # to libGLX_nvidia: GLVND looks for it


def scan(fs: RootFs, loaded: str | None) -> DriverFiles:
    """The driver in *fs*; *loaded* is the version of the kernel module, where that is known.

    NodeError: there is none, a part of it is missing, or which one counts cannot be told.
    """
    if not fs.exists:
        raise NodeError(f"{fs.root} does not exist")
    directories = _library_directories(fs)
    version = _version(fs, directories, loaded)
    found = [pair for directory in directories for pair in _libraries(fs, directory, version)]
    machine = next((m for lib, m in found if _stem(lib.soname) == "libcuda"), "")
    libraries = _first_of_each([lib for lib, m in found if m == machine])
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
    return next((found for path in paths if (found := fs.find(path))), None)


def _stem(name: str) -> str:
    return name.partition(".so")[0]


def _library_directories(fs: RootFs) -> list[str]:
    # Merged into /usr, several of them are one: it is looked into once.
    found = [fs.resolve(directory) for directory in LIBRARY_DIRECTORIES]
    return list(dict.fromkeys(directory for directory in found if directory))


def _version(fs: RootFs, directories: list[str], loaded: str | None) -> str:
    versions = {
        match[1]
        for directory in directories
        for name in fs.names(directory)
        if (match := _CUDA.fullmatch(name)) and fs.find(f"{directory}/{name}")
    }
    if not versions:
        raise NodeError(f"{fs.root} has no libcuda.so.<version> in its library directories")
    there = ", ".join(sorted(versions))
    if loaded is not None:
        if loaded in versions:
            return loaded
        raise NodeError(
            f"{fs.root} has driver {there}, but the loaded kernel module is {loaded}: finish the "
            "driver upgrade (restart the node, or reload the module)"
        )
    if len(versions) > 1:
        raise NodeError(
            f"{fs.root} has drivers {there} side by side, and no kernel module is loaded that "
            "would tell which one counts: remove the other"
        )
    return versions.pop()


def _libraries(fs: RootFs, directory: str, version: str) -> Iterator[tuple[Library, str]]:
    """The driver's libraries in one directory, each with the machine it is for."""
    for path, names in sorted(_names_by_file(fs, directory, version).items()):
        elf = read_elf(fs.here(path))
        if elf is not None:
            file_name = path.rpartition("/")[2]
            soname = elf.soname or file_name
            links = tuple(sorted(names - {soname, file_name}))
            yield Library(fs.on_host(path), soname, links), elf.machine


def _names_by_file(fs: RootFs, directory: str, version: str) -> dict[str, set[str]]:
    suffix = f".so.{version}"

    def is_ours(name: str) -> bool:
        return name.endswith(suffix) or bool(_OWN_VERSION.fullmatch(name))

    names = fs.names(directory)
    stems = {_stem(name) for name in names if is_ours(name)}.difference(_DESKTOP)
    found: dict[str, set[str]] = {}
    for name in names:
        if _stem(name) in stems or name in _FOREIGN_LINKS:
            path = fs.find(f"{directory}/{name}")
            if path is not None and is_ours(path.rpartition("/")[2]):
                found.setdefault(path, set()).add(name)
    return found


def _first_of_each(libraries: list[Library]) -> list[Library]:
    by_soname: dict[str, Library] = {}
    for library in libraries:
        by_soname.setdefault(library.soname, library)
    return sorted(by_soname.values())


def _tools(fs: RootFs) -> Iterator[HostFile]:
    for name in TOOLS:
        if found := find_tool(fs, name):
            yield HostFile(fs.on_host(found), f"/usr/bin/{name}")


def _firmware(fs: RootFs, version: str) -> Iterator[HostFile]:
    for place in _FIRMWARE:
        directory = fs.resolve(f"{place}/{version}")
        names = fs.names(directory) if directory else []
        files = [f"{directory}/{n}" for n in names if n.startswith("gsp") and n.endswith(".bin")]
        for path in (found for file in files if (found := fs.find(file))):
            name = path.rpartition("/")[2]
            yield HostFile(fs.on_host(path), f"/lib/firmware/nvidia/{version}/{name}")
        if files:
            return


def _graphics(fs: RootFs) -> Iterator[HostFile]:
    for container_path, others in _GRAPHICS:
        name = container_path.rpartition("/")[2]
        places = [container_path, _twin(container_path), *(f"{other}/{name}" for other in others)]
        if found := _first(fs, places):
            yield HostFile(fs.on_host(found), container_path)


def _twin(path: str) -> str:
    if path.startswith("/etc/"):
        return "/usr/share/" + path.removeprefix("/etc/")
    return "/etc/" + path.removeprefix("/usr/share/")


def _sockets(fs: RootFs) -> Iterator[HostFile]:
    for socket in _SOCKETS:
        found = _first(fs, (f"/run{socket}", f"/var/run{socket}"))
        if found and stat.S_ISSOCK(lstat(fs.here(found)).st_mode):
            yield HostFile(fs.on_host(found), f"/run{socket}")

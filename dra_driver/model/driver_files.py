"""The files of an installed driver and its device files, as the host names them.

Every ``host_path`` is a path of the host, whatever this process sees it as: the container runtime,
which mounts these files, runs on the host.
"""

from collections.abc import Mapping
from dataclasses import field

from dra_driver.base.frozen import frozen, ordered


@ordered
class DriverLibrary:
    """A shared library of the driver.

    The dynamic loader asks for *soname* (DT_SONAME, what other programs were linked against) or,
    with dlopen, for one of *links*, the further names that the host gives the file in the same
    directory.
    """

    host_path: str  # "/usr/lib64/libcuda.so.580.95.05"
    soname: str  # "libcuda.so.1"
    links: tuple[str, ...] = ()  # ("libcuda.so",)

    @property
    def file_name(self) -> str:
        return self.host_path.rpartition("/")[2]


@ordered
class HostFile:
    """A file, socket or program that a container gets at *container_path*."""

    host_path: str
    container_path: str


@frozen
class DriverFiles:
    """What one complete driver installation offers to containers; each tuple is sorted."""

    version: str  # "580.95.05", as in file names
    root: str  # "/run/nvidia/driver"
    machine: str  # "x86_64" or "aarch64"
    lib_dir: str  # where libcuda is: "/run/nvidia/driver/usr/lib/x86_64-linux-gnu"
    libraries: tuple[DriverLibrary, ...]
    tools: tuple[HostFile, ...] = ()
    firmware: tuple[HostFile, ...] = ()
    graphics: tuple[HostFile, ...] = ()  # what EGL, Vulkan and OptiX look for
    sockets: tuple[HostFile, ...] = ()

    def inside(self, host_path: str) -> str:
        """*host_path* as the installation itself calls it, with its root as ``/``."""
        return host_path.removeprefix(self.root.rstrip("/"))


@ordered
class DeviceFile:
    """A character device."""

    host_path: str  # "/run/nvidia/driver/dev/nvidia0"
    container_path: str  # "/dev/nvidia0"
    major: int
    minor: int


@frozen
class DeviceFiles:
    """Device files: those that every GPU container needs, and one for each GPU by minor number."""

    common: tuple[DeviceFile, ...]
    gpus: Mapping[int, DeviceFile]
    capabilities: Mapping[str, DeviceFile] = field(default_factory=dict)  # "gpu0/mig/gi1/ci0"

"""What comes from the distribution: runc, a static busybox, the CNI plugins, openssl."""

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from hack.testbed.cache import Progress
from hack.testbed.errors import ClusterError

INSTALL_SECONDS = 600
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CNI_DIRECTORIES = (Path("/usr/lib/cni"), Path("/usr/libexec/cni"), Path("/opt/cni/bin"))


def system_program(name: str) -> Path | None:
    """Where a program of the system is; a user's PATH may lack the sbin directories."""
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}")
    return Path(path) if path else None


def cni_directory() -> Path | None:
    """The first directory with the plugins that our network configuration names."""
    plugins = ("bridge", "host-local")
    directories = (d for d in _CNI_DIRECTORIES if all((d / name).exists() for name in plugins))
    return next(directories, None)


def static_busybox() -> Path | None:
    """A busybox that runs where there is no C library."""
    path = system_program("busybox")
    # A dynamic program names its loader, in the first page or so.
    return path if path and b"ld-linux" not in path.read_bytes()[:4096] else None


_NEEDED_BY_ALL: Mapping[str, Callable[[], object]] = {"openssl": lambda: system_program("openssl")}
_NEEDED_BY_NODE: Mapping[str, Callable[[], object]] = {
    "runc": lambda: system_program("runc"),
    "busybox-static": static_busybox,
    "containernetworking-plugins": cni_directory,
    "iproute2": lambda: system_program("ip"),
    "mount": lambda: system_program("umount"),
}


def install(*, node: bool, progress: Progress) -> None:
    """Install what is missing, when we may; else say what is missing."""
    needed = {**_NEEDED_BY_ALL, **(_NEEDED_BY_NODE if node else {})}
    missing = [package for package, is_installed in needed.items() if not is_installed()]
    if not missing:
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise ClusterError(
            f"not installed: {', '.join(missing)} (names of Debian packages). Install them, "
            f"on Debian and Ubuntu as root: apt-get install {' '.join(missing)}"
        )
    progress(f"installing Debian packages: {' '.join(missing)}")
    _apt_get("update", "-qq")
    _apt_get("install", "-y", "-qq", "--no-install-recommends", *missing)
    if still := [package for package in missing if not needed[package]()]:
        raise ClusterError(f"apt-get installed {', '.join(still)}, but not what we need of them")


def _apt_get(*arguments: str) -> None:
    answer = subprocess.run(
        ["apt-get", *arguments],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=INSTALL_SECONDS,
        check=False,
    )
    if answer.returncode != 0:
        ending = "\n".join((answer.stdout + answer.stderr).splitlines()[-15:])
        raise ClusterError(f"apt-get {' '.join(arguments)} failed:\n{ending}")

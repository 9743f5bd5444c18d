"""Which files of the packages and wheels the image keeps, and where they lie in it."""

import os
import subprocess
import tarfile
import zipfile
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from hack.container_image.commands import COMMAND_SECONDS, run
from hack.container_image.debian import NEEDS
from hack.container_image.errors import ImageError

PYTHON = "usr/bin/python3.11"
SITE = "usr/local/lib/python3.11/dist-packages"
PROGRAM = "usr/local/bin/dra-driver"

# In these patterns a * also stands for slashes.
_OF_PACKAGES = (
    "etc/os-release",
    "usr/lib/os-release",
    "lib/*",
    "lib64/*",
    "usr/lib/*-linux-gnu/*.so*",
    PYTHON,
    "usr/lib/python3.11/*",
    "usr/sbin/chroot",
    "usr/share/common-licenses/*",
    "usr/share/doc/*/copyright",
)
_NOT_OF_PACKAGES = (
    "usr/lib/*-linux-gnu/gconv/*",
    "usr/lib/*-linux-gnu/engines-3/*",
    "usr/lib/*-linux-gnu/ossl-modules/*",
    "usr/lib/python3.11/sitecustomize.py",
    # What serves to test, to develop or to install Python programs.
    *(
        f"usr/lib/python3.11/{name}/*"
        for name in ("distutils", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "test", "venv")
    ),
    "usr/lib/python3.11/turtle*",
    "usr/lib/python3.11/lib-dynload/_test*",
    "usr/lib/python3.11/lib-dynload/_xxtest*",
    "usr/lib/python3.11/lib-dynload/xxlimited*",
    # What needs libraries that the image does not have, and the driver does not need.
    *(f"usr/lib/python3.11/{name}/*" for name in ("curses", "dbm", "sqlite3", "tkinter")),
    *(
        f"usr/lib/python3.11/lib-dynload/{name}.*"
        for name in ("_bz2", "_crypt", "_curses", "_curses_panel", "_dbm", "_lzma", "_sqlite3")
    ),
    *(
        f"usr/lib/python3.11/lib-dynload/{name}.*"
        for name in ("_uuid", "nis", "ossaudiodev", "readline")
    ),
    *(f"usr/lib/python3.11/{name}.py" for name in ("bz2", "crypt", "lzma")),
)
_NOT_OF_WHEELS = (
    "*/tests/*",
    # The asynchronous client, the generated calls and models: the driver sends JSON itself.
    "kubernetes/aio/*",
    "kubernetes/client/api/*",
    "kubernetes/client/models/[!_]*",
)
# What the Lease lock of the official client uses, by which the replicas of the controller agree.
_KEPT_OF_WHEELS = (
    "kubernetes/client/api/__init__.py",
    "kubernetes/client/api/coordination_v1_api.py",
    *(
        f"kubernetes/client/models/v1_{name}.py"
        for name in (
            *("api_resource", "api_resource_list", "delete_options", "lease", "lease_list"),
            *("lease_spec", "list_meta", "managed_fields_entry", "object_meta", "owner_reference"),
            *("preconditions", "shard_info", "status", "status_cause", "status_details"),
        )
    ),
)
_OWN_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/sbin/nologin\n",
    "etc/group": "root:x:0:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
_START = f"""\
#!/{PYTHON}
import sys

from dra_driver.__main__ import main

sys.exit(main())
"""


def unpack_base(packages: Iterable[Path], tree: Path) -> None:
    """The files of the Debian packages, and what the C library asks for in /etc."""
    for package in packages:
        _unpack_package(package, tree)
    for name, text in _OWN_FILES.items():
        _write(tree / name, text.encode(), 0o644)


def _unpack_package(package: Path, tree: Path) -> None:
    """Also what scanners of images look for: the package's own description."""
    control = run(["dpkg-deb", "--field", str(package)], needs=NEEDS)
    name = run(["dpkg-deb", "--field", str(package), "Package"]).decode().strip()
    _write(tree / "var/lib/dpkg/status.d" / name, control, 0o644)
    data = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE)
    assert data.stdout
    with data, tarfile.open(fileobj=data.stdout, mode="r|") as members:
        for member in members:
            _unpack_member(members, member, tree)
    if data.wait(COMMAND_SECONDS) != 0:
        raise ImageError(f"dpkg-deb cannot read {package}")


def _unpack_member(members: tarfile.TarFile, member: tarfile.TarInfo, tree: Path) -> None:
    name = member.name.removeprefix("./")
    # One package's licence is in the directory of another.
    is_doc_link = member.issym() and PurePosixPath(name).parent.match("usr/share/doc")
    if member.isdir() or not (is_kept_of_package(name) or is_doc_link):
        return
    target = tree / name
    if member.issym():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(member.linkname)
    elif member.islnk():
        os.link(tree / member.linkname.removeprefix("./"), target)
    elif content := members.extractfile(member):
        _write(target, content.read(), 0o755 if member.mode & 0o100 else 0o644)
    else:
        raise ImageError(f"{name} is neither a file nor a link")


def is_kept_of_package(name: str) -> bool:
    """Whether the image keeps this file of a Debian package."""
    return _matches(name, _OF_PACKAGES) and not _matches(name, _NOT_OF_PACKAGES)


def is_kept_of_wheel(name: str) -> bool:
    """Whether the image keeps this file of a wheel."""
    return name in _KEPT_OF_WHEELS or not _matches(name, _NOT_OF_WHEELS)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def unpack_wheels(wheels: Iterable[Path], tree: Path) -> None:
    """The modules of wheels, and what tells of them; no programs."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.infolist():
                name = entry.filename
                if PurePosixPath(name).parts[0].endswith(".data"):
                    raise ImageError(f"{wheel.name} wants to install {name}, which is no module")
                if not entry.is_dir() and is_kept_of_wheel(name):
                    _write(tree / SITE / name, archive.read(entry), 0o644)


def write_host_links(tree: Path) -> None:
    """What leads into /usr in the root of a node, for a chart that mounts only directories of it
    below /host."""
    (tree / "host").mkdir(parents=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        (tree / "host" / name).symlink_to(f"usr/{name}")


def write_program(tree: Path) -> None:
    """The command dra-driver."""
    _write(tree / PROGRAM, _START.encode(), 0o755)


def _write(path: Path, content: bytes, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        raise ImageError(f"two packages have the file {path}")
    path.write_bytes(content)
    path.chmod(mode)

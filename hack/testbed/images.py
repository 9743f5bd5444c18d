"""Container images made from the programs of this machine, since none can be pulled."""

import io
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hack.container_image import oci
from hack.container_image.layers import Content, Link, write_tar
from hack.testbed.errors import ClusterError
from hack.testbed.packages import SYSTEM_PATH, static_busybox, system_program

PAUSE = "dra.test/pause:1"
BUSYBOX = "dra.test/busybox:1"
GLIBC = "dra.test/glibc:1"

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_COREUTILS = (
    "bash",
    "basename",
    "cat",
    "chmod",
    "cp",
    "cut",
    "date",
    "dd",
    "df",
    "dirname",
    "echo",
    "env",
    "false",
    "find",
    "grep",
    "head",
    "id",
    "ldd",
    "ln",
    "ls",
    "mkdir",
    "mktemp",
    "mv",
    "nproc",
    "printenv",
    "printf",
    "ps",
    "pwd",
    "readlink",
    "realpath",
    "rm",
    "sed",
    "seq",
    "sha256sum",
    "sleep",
    "sort",
    "stat",
    "tail",
    "test",
    "timeout",
    "touch",
    "tr",
    "true",
    "uname",
    "wc",
)
_PASSWD = b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n"
_GROUP = b"root:x:0:\nnobody:x:65534:\n"


@dataclass(frozen=True, slots=True)
class Image:
    """One layer of files by path (without a leading slash)."""

    name: str
    files: Mapping[str, Content]
    command: Sequence[str] = ("/bin/sh",)
    environment: Mapping[str, str] = field(default_factory=lambda: {"PATH": SYSTEM_PATH})


def write_images(archive: Path, images: Iterable[Image]) -> None:
    """An archive for this machine's architecture; the same images give the same bytes."""
    oci.write_archive(archive, map(_oci_image, images))


def this_architecture() -> str:
    """Of this machine, as images name it."""
    return _ARCHITECTURES.get(platform.machine(), platform.machine())


def _oci_image(image: Image) -> oci.Image:
    layer = io.BytesIO()
    write_tar(layer, image.files)
    content = layer.getvalue()
    environment = [f"{name}={value}" for name, value in sorted(image.environment.items())]
    return oci.Image(
        image.name,
        [
            oci.Platform(
                this_architecture(),
                [oci.Layer(content, oci.digest_of(content))],
            )
        ],
        {"Cmd": list(image.command), "Env": environment},
    )


def standard_images() -> list[Image]:
    """Pause, busybox, and one with the C library and a shell of this machine."""
    return [_pause(), _busybox(), _glibc()]


def _the_busybox() -> Path:
    busybox = static_busybox()
    if busybox is None:
        raise ClusterError("no static busybox here: install the package busybox-static")
    return busybox


def _pause() -> Image:
    return Image(PAUSE, {"bin/busybox": _the_busybox()}, ("/bin/busybox", "sleep", "2147483647"))


def _busybox() -> Image:
    busybox = _the_busybox()
    listed = _output([str(busybox), "--list-full"]).split()
    applets = {path: Link("/bin/busybox") for path in listed if path != "bin/busybox"}
    accounts = {"etc/passwd": _PASSWD, "etc/group": _GROUP}
    return Image(BUSYBOX, {**applets, "bin/busybox": busybox, **accounts})


def _glibc() -> Image:
    """No /etc/ld.so.cache on purpose: libraries must be found where the loader looks by itself."""
    programs = [path for name in _COREUTILS if (path := system_program(name))]
    files: dict[str, Content] = {f"usr/bin/{path.name}": path.resolve() for path in programs}
    for library in _libraries(programs):
        files[_below_usr(library)] = library.resolve()
    top = {"bin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib64", "sbin": "usr/sbin"}
    links = {name: Link(target) for name, target in top.items()}
    return Image(
        GLIBC,
        {
            **files,
            **links,
            "usr/bin/sh": Link("bash"),
            "usr/sbin/.keep": b"",
            "etc/passwd": _PASSWD,
            "etc/group": _GROUP,
        },
    )


def _libraries(programs: Iterable[Path]) -> list[Path]:
    paths: set[str] = set()
    for program in programs:
        answer = subprocess.run(
            ["ldd", str(program)], capture_output=True, text=True, timeout=30, check=False
        )
        paths.update(re.findall(r"(/\S+) \(0x", answer.stdout))
    return [Path(path) for path in sorted(paths)]


def _below_usr(library: Path) -> str:
    path = str(library).lstrip("/")
    return path if path.startswith("usr/") else f"usr/{path}"


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout

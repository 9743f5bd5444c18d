"""Container images made from the programs of this machine, since none can be pulled."""

import hashlib
import io
import json
import platform
import re
import subprocess
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
class Link:
    """A symbolic link in an image."""

    target: str


@dataclass(frozen=True, slots=True)
class Image:
    """One layer of files by path (without a leading slash): a host's file, bytes, or a link."""

    name: str
    files: Mapping[str, Path | bytes | Link]
    command: Sequence[str] = ("/bin/sh",)
    environment: Mapping[str, str] = field(default_factory=lambda: {"PATH": SYSTEM_PATH})


def write_images(archive: Path, images: Iterable[Image]) -> None:
    """An archive as `docker save` writes it; the same images give the same bytes."""
    manifest = []
    with tarfile.open(archive, "w", format=tarfile.GNU_FORMAT) as tar:
        for image in images:
            layer = _layer(image)
            digest = hashlib.sha256(layer).hexdigest()
            config = _config(image, digest)
            config_name = f"{hashlib.sha256(config).hexdigest()}.json"
            _add(tar, f"{digest}/layer.tar", layer)
            _add(tar, config_name, config)
            manifest.append(
                {
                    "Config": config_name,
                    "RepoTags": [image.name],
                    "Layers": [f"{digest}/layer.tar"],
                }
            )
        _add(tar, "manifest.json", json.dumps(manifest, sort_keys=True).encode())


def _config(image: Image, layer_digest: str) -> bytes:
    return json.dumps(
        {
            "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {
                "Cmd": list(image.command),
                "Env": [f"{name}={value}" for name, value in sorted(image.environment.items())],
            },
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
        },
        sort_keys=True,
    ).encode()


def _layer(image: Image) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for directory in _directories(image.files):
            entry = tarfile.TarInfo(directory)
            entry.type = tarfile.DIRTYPE
            entry.mode = 0o1777 if directory == "tmp" else 0o755
            tar.addfile(entry)
        for path, content in sorted(image.files.items()):
            _add_content(tar, path, content)
    return buffer.getvalue()


def _directories(files: Mapping[str, object]) -> list[str]:
    parents = {str(parent) for path in files for parent in Path(path).parents}
    return sorted(parents - {"."} | {"tmp", "root"})


def _add_content(tar: tarfile.TarFile, path: str, content: Path | bytes | Link) -> None:
    match content:
        case Link(target=target):
            entry = tarfile.TarInfo(path)
            entry.type = tarfile.SYMTYPE
            entry.linkname = target
            tar.addfile(entry)
        case Path():
            _add(tar, path, content.read_bytes(), content.stat().st_mode & 0o755)
        case bytes():
            _add(tar, path, content)


def _add(tar: tarfile.TarFile, path: str, content: bytes, mode: int = 0o644) -> None:
    # TarInfo's own defaults are what makes it repeatable: owner 0, time 0.
    entry = tarfile.TarInfo(path)
    entry.size = len(content)
    entry.mode = mode
    tar.addfile(entry, io.BytesIO(content))


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
    files: dict[str, Path | bytes | Link] = {
        f"usr/bin/{path.name}": path.resolve() for path in programs
    }
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

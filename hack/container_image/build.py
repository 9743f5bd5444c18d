"""The whole image, from the lock files and the working tree to the archive."""

import hashlib
import json
import platform as machine
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hack.container_image import contents, debian, layers, oci, sbom, wheels
from hack.container_image.commands import run
from hack.container_image.environment import ENVIRONMENT
from hack.container_image.errors import ImageError
from hack.testbed.cache import Progress, cache_dir, made

REPOSITORY = Path(__file__).parents[2]
LOCK = REPOSITORY / "deploy/debian.lock"
WHEELS_LOCK = REPOSITORY / "requirements-runtime.lock"

_NATIVE = {"x86_64": "amd64", "aarch64": "arm64"}
_ORIGINS = ("Debian packages", "locked wheels", "dra-driver")


@dataclass(frozen=True, slots=True)
class Size:
    """Of the image for one architecture, in bytes: as a registry has it, and on a node."""

    architecture: str
    packed: int
    unpacked: int


@dataclass(frozen=True, slots=True)
class Built:
    """An archive, the lists of what is in it, and the digest by which a registry will know it."""

    archive: Path
    sboms: Sequence[Path]
    digest: str
    sizes: Sequence[Size]


@dataclass(frozen=True, slots=True)
class _Inputs:
    architecture: str
    packages: Sequence[debian.Package]
    wheels: Sequence[Path]  # the driver's is the last
    trees: Sequence[Path]  # one for each layer


def build(name: str, directory: Path, progress: Progress, kept: Path | None = None) -> Built:
    """Write the archive of the image *name* (with a tag) and its SBOMs into *directory*.

    *kept*: where the layers of Debian packages and locked wheels are, which are made again only
    when something changes that they are made of; else they are in the cache.
    """
    native = _NATIVE.get(machine.machine())
    if native is None:
        raise ImageError(f"the image is built on x86_64 or aarch64, not on {machine.machine()}")
    packages = debian.parse_lock(LOCK.read_text())
    with tempfile.TemporaryDirectory(prefix="dra-image-") as place:
        own_wheel = wheels.own(REPOSITORY, Path(place))
        inputs = [
            _unpack(architecture, packages, own_wheel, Path(place, architecture), progress)
            for architecture in debian.ARCHITECTURES
        ]
        native_base = next(each.trees[0] for each in inputs if each.architecture == native)
        python = _python(native_base)
        kept = kept or cache_dir()
        platforms = [_packed(each, python, kept, progress) for each in inputs]
        return _write(name, directory, inputs, platforms)


def fetch(progress: Progress) -> None:
    """Have here what is downloaded: then the image can be built without a network."""
    for package in debian.parse_lock(LOCK.read_text()):
        debian.fetch(package, progress)
    for architecture in debian.ARCHITECTURES:
        wheels.locked(WHEELS_LOCK, architecture, progress)


def _unpack(
    architecture: str,
    packages: Sequence[debian.Package],
    own_wheel: Path,
    place: Path,
    progress: Progress,
) -> _Inputs:
    own_packages = [package for package in packages if package.architecture == architecture]
    locked = wheels.locked(WHEELS_LOCK, architecture, progress)
    base, libraries, driver = (place / name for name in ("base", "wheels", "driver"))
    contents.unpack_base((debian.fetch(package, progress) for package in own_packages), base)
    contents.unpack_wheels(locked, libraries)
    contents.unpack_wheels([own_wheel], driver)
    contents.write_program(driver)
    contents.write_host_links(driver)
    return _Inputs(architecture, own_packages, [*locked, own_wheel], [base, libraries, driver])


def _python(base: Path) -> list[str]:
    """The command that runs the image's Python here, with the image's own libraries."""
    [loader] = base.glob("lib/*-linux-gnu/ld-linux-*.so.*")
    libraries = f"{loader.parent}:{base / 'usr/lib' / loader.parent.name}"
    # Without what this machine's Python finds in its environment and its own directories.
    return [str(loader), "--library-path", libraries, str(base / contents.PYTHON), "-PsS"]


def _packed(inputs: _Inputs, python: Sequence[str], kept: Path, progress: Progress) -> oci.Platform:
    *locked, driver = inputs.trees

    def make(directory: Path) -> None:
        progress(f"compiling and packing what is locked for {inputs.architecture}")
        for tree in locked:
            _pack(tree, directory, python)

    made_at = made(kept / f"layers-{inputs.architecture}-{_locked_key()}", make, progress)
    progress(f"compiling and packing the driver for {inputs.architecture}")
    _pack(driver, driver.parent, python)
    places = [*(made_at / tree.name for tree in locked), driver]
    origins = zip(places, _ORIGINS, strict=True)
    return oci.Platform(inputs.architecture, [_layer(*each) for each in origins])


def _locked_key() -> str:
    """Another one when the locked layers may be others: a lock file or the code that packs is."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    texts = (path.read_bytes() for path in (LOCK, WHEELS_LOCK, *sources))
    return hashlib.sha256(b"".join(texts)).hexdigest()


def _pack(tree: Path, directory: Path, python: Sequence[str]) -> None:
    """Write the layer of *tree* into *directory*, and beside it what the image says of it."""
    target = directory / f"{tree.name}.tar.gz"
    # Hashes of strings are the same each time: bytecode may depend on the order of a set.
    environment = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    answer = run([*python, layers.__file__, str(tree), str(target)], env=environment)
    target.with_name(f"{tree.name}.json").write_bytes(answer)


def _layer(at: Path, origin: str) -> oci.Layer:
    answer = json.loads(at.with_name(f"{at.name}.json").read_text())
    content = at.with_name(f"{at.name}.tar.gz").read_bytes()
    return oci.Layer(content, answer["diff_id"], origin, answer["unpacked"])


def _write(
    name: str, directory: Path, inputs: Sequence[_Inputs], platforms: Sequence[oci.Platform]
) -> Built:
    version = wheels.version(inputs[0].wheels[-1])
    labels = {
        "org.opencontainers.image.title": "dra-driver-gpu",
        "org.opencontainers.image.version": version,
        "org.opencontainers.image.licenses": "Apache-2.0",
    }
    config = {"Entrypoint": ["dra-driver"], "Env": ENVIRONMENT, "Labels": labels}
    directory.mkdir(parents=True, exist_ok=True)
    stem = name.rpartition("/")[2].replace(":", "-")
    archive = directory / f"{stem}.tar"
    [digests] = oci.write_archive(archive, [oci.Image(name, platforms, config)])
    sboms = []
    for each in inputs:
        path = directory / f"{stem}-{each.architecture}.cdx.json"
        path.write_text(_sbom(each, version, digests.platforms[each.architecture]))
        sboms.append(path)
    return Built(archive, sboms, digests.image, [_size(each) for each in platforms])


def _sbom(inputs: _Inputs, version: str, digest: str) -> str:
    base = inputs.trees[0]
    packages = [sbom.debian_component(package, base) for package in inputs.packages]
    return sbom.document(
        version, digest, packages, [sbom.wheel_component(wheel) for wheel in inputs.wheels]
    )


def _size(platform: oci.Platform) -> Size:
    packed = sum(len(layer.content) for layer in platform.layers)
    return Size(
        platform.architecture, packed, sum(layer.unpacked_bytes for layer in platform.layers)
    )

"""An image with Python and the CUDA programs of these tests, made of this machine's own files."""

from pathlib import Path

from dra_driver.model.driver_files import DriverFiles
from hack.container_image.layers import Content, Link
from hack.testbed.images import Image, write_images
from hack.testbed.packages import SYSTEM_PATH
from tests.gpu.bundle import python_home
from tests.gpu.rootfs import make_rootfs, stdlib

CUDA_IMAGE = "dra.test/cuda:1"
_PROGRAMS = "/programs"
_LEFT_OUT = ("__pycache__", "site-packages", "dist-packages", "test", "idlelib", "ensurepip")


def write_cuda_image(archive: Path, directory: Path, driver: DriverFiles) -> None:
    """Write the image into *archive*; *directory* is made, and holds what goes into it."""
    make_rootfs(directory, driver)
    files = _files(directory, directory)
    library = stdlib()
    files |= {str(path).lstrip("/"): path for path in library.rglob("*") if _belongs(path, library)}
    for path in Path(__file__).parent.glob("*.py"):
        files[f"{_PROGRAMS}/tests/gpu/{path.name}".lstrip("/")] = path
    files["usr/bin/sh"] = Link("bash")
    environment = {
        "PATH": SYSTEM_PATH,
        "PYTHONHOME": python_home(),
        "PYTHONPATH": _PROGRAMS,
        "PYTHONUNBUFFERED": "1",
    }
    image = Image(CUDA_IMAGE, files, ("/usr/bin/bash",), environment)
    write_images(archive, [image])


def _files(directory: Path, root: Path) -> dict[str, Content]:
    """What is in a directory, by its path in the image."""
    files: dict[str, Content] = {}
    for path in directory.iterdir():
        if path.is_symlink():
            files[str(path.relative_to(root))] = Link(str(path.readlink()))
        elif path.is_dir():
            files |= _files(path, root)
        else:
            files[str(path.relative_to(root))] = path
    return files


def _belongs(path: Path, library: Path) -> bool:
    parts = path.relative_to(library).parts
    return path.is_file() and not set(parts) & set(_LEFT_OUT)

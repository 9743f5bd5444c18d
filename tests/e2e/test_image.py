"""The image that hack/image builds: what is in it, and that containerd runs the driver from it."""

from pathlib import PurePosixPath

import pytest

from hack.container_image import contents, debian
from hack.container_image.build import build
from hack.testbed.cache import cache_dir
from tests.container_image.archives import Archive
from tests.container_image.shared_libraries import needed
from tests.e2e.release import IMAGE

PROGRAMS = {contents.PYTHON, contents.PROGRAM, "usr/sbin/chroot"}
IMPORT_EVERYTHING = """
import importlib, os, pkgutil, subprocess, sys
import api, cdi, dra_driver, google._upb._message, grpc, kubernetes.config, kubernetes.client.rest
import prometheus_client, pydantic, pydantic_core, pynvml, tenacity, urllib3, yaml, yaml._yaml
for package in (api, cdi, dra_driver):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
subprocess.run(["chroot", "/", "dra-driver", "--help"], stdout=subprocess.DEVNULL, check=True)
bytecode = {name: getattr(module, "__cached__", None) for name, module in sys.modules.items()}
compiled = {name for name, path in bytecode.items() if path and os.path.exists(path)}
expected = {name for name, path in bytecode.items() if path} | {"dra_driver.__main__", "asyncio"}
print("not compiled:", sorted(expected - compiled))
"""


@pytest.fixture(scope="module")
def archive(image):
    return Archive(image.archive)


def test_built_twice_it_is_the_same(image, tmp_path):
    """What is locked is packed anew for amd64 only: the same code packs it for arm64, and those
    layers are taken as they are kept."""
    kept = tmp_path / "layers"
    kept.mkdir()
    for layers in cache_dir().glob("layers-arm64-*"):
        (kept / layers.name).symlink_to(layers)
    again = build(IMAGE, tmp_path, print, kept=kept)
    assert again.digest == image.digest
    assert again.archive.read_bytes() == image.archive.read_bytes()
    assert [p.read_bytes() for p in again.sboms] == [p.read_bytes() for p in image.sboms]


@pytest.mark.parametrize("architecture", debian.ARCHITECTURES)
def test_it_has_no_shell_package_manager_compiler_or_perl(archive, architecture):
    image = archive.image(IMAGE, architecture)
    executable = {name for name, file in image.files.items() if file.isfile() and file.mode & 0o111}
    libraries = {name for name in executable if ".so" in PurePosixPath(name).name}
    modules = {name for name in executable if name.endswith(".py")}
    assert executable - libraries - modules == PROGRAMS
    assert not {"usr/lib/apt", "usr/share/perl", f"{contents.SITE}/pip"} & image.files.keys()


@pytest.mark.parametrize("architecture", debian.ARCHITECTURES)
def test_it_has_every_shared_library_that_one_of_its_files_needs(archive, architecture):
    image = archive.image(IMAGE, architecture)
    libraries = {PurePosixPath(name).name for name in image.files if ".so" in name}
    missing = {
        (name, library)
        for name, content in image.contents.items()
        for library in needed(content)
        if library not in libraries
    }
    assert "libc.so.6" in needed(image.contents[contents.PYTHON])
    assert missing == set()


def run(kube, name, *command, entrypoint=()):
    """What a container of the image printed, which is never pulled, once it has ended well."""
    main = {
        "name": "main",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "args": list(command),
        "securityContext": {"readOnlyRootFilesystem": True},
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],  # for what the simulation writes
    }
    if entrypoint:
        main["command"] = list(entrypoint)
    volumes = [{"name": "tmp", "emptyDir": {}}]
    spec = {"restartPolicy": "Never", "containers": [main], "volumes": volumes}
    kube.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})
    try:
        phase = kube.wait_pod(name, "Succeeded", "Failed")
        printed = kube.logs(name)
        assert phase == "Succeeded", printed
        return printed
    finally:
        kube.delete_now(name)


def test_a_pod_of_it_shows_simulated_gpus(kube, imported):
    printed = run(kube, "image-devices", "devices", "--sim", "h100x8")
    assert [f"gpu-{minor}" in printed for minor in range(8)] == [True] * 8


def test_a_pod_of_it_knows_the_options_of_the_plugin(kube, imported):
    assert "--kubelet-dir" in run(kube, "image-help", "kubelet-plugin", "--help")


def test_every_module_can_be_imported_and_is_compiled_and_chroot_runs_programs(kube, imported):
    python = (f"/{contents.PYTHON}", "-c", IMPORT_EVERYTHING)
    assert run(kube, "image-imports", entrypoint=python) == "not compiled: []\n"

"""Finding the driver: every usual layout, and nothing half."""

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.model.driver_files import DriverLibrary, HostFile
from dra_driver.node.driver.commands import Command
from dra_driver.node.driver.root import DriverRoot
from dra_driver.node.driver.watch import watching
from tests.fakes.driver import (
    LIBRARIES,
    VERSION,
    install,
    install_extras,
    install_own_versions,
    listen,
    load_module,
    make_system,
    relink,
)
from tests.fakes.elf import elf_library

CONTAINER = "run/nvidia/driver"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """An empty host, whose root this process sees somewhere else."""
    (tmp_path / "host").mkdir()
    return tmp_path / "host"


def sonames(driver: DriverRoot) -> set[str]:
    return {library.soname for library in driver.files().libraries}


@pytest.mark.parametrize(
    ("root", "directory", "tools"),
    [
        pytest.param("/", "usr/lib/x86_64-linux-gnu", "usr/bin", id="Debian or Ubuntu"),
        pytest.param("/", "usr/lib/x86_64-linux-gnu/nvidia/current", "usr/bin", id="Debian's own"),
        pytest.param("/", "usr/lib64", "usr/bin", id="RHEL"),
        pytest.param("/", "usr/lib", "usr/bin", id="Arch"),
        pytest.param("/", "run/opengl-driver/lib", "run/current-system/sw/bin", id="NixOS"),
        pytest.param(f"/{CONTAINER}", "usr/lib64", "usr/bin", id="a driver container"),
        pytest.param("/home/kubernetes/bin/nvidia", "lib64", "bin", id="GKE"),
        pytest.param("/usr/local/nvidia", "lib", "bin", id="a prefix"),
    ],
)
def test_the_driver_is_found_by_itself(host: Path, root: str, directory: str, tools: str) -> None:
    install(host / root.strip("/"), directory=directory, tools=tools)
    files = DriverRoot(None, host).files()
    base = root.rstrip("/")
    assert (files.root, files.version, files.machine) == (root, VERSION, "x86_64")
    assert files.lib_dir == f"{base}/{directory}"
    assert {library.soname for library in files.libraries} == {
        soname or f"{stem}.so.{VERSION}" for stem, soname in LIBRARIES
    }
    assert HostFile(f"{base}/{tools}/nvidia-smi", "/usr/bin/nvidia-smi") in files.tools


def test_arm_libraries_are_found_where_debian_keeps_them(host: Path) -> None:
    install(host, directory="usr/lib/aarch64-linux-gnu", machine="aarch64")
    files = DriverRoot(None, host).files()
    assert (files.machine, files.lib_dir) == ("aarch64", "/usr/lib/aarch64-linux-gnu")


def test_a_library_knows_its_soname_and_the_other_names_the_host_gives_it(host: Path) -> None:
    install(host)
    directory = "/usr/lib/x86_64-linux-gnu"
    libraries = DriverRoot(None, host).files().libraries
    assert DriverLibrary(f"{directory}/libcuda.so.{VERSION}", "libcuda.so.1", ("libcuda.so",)) in (
        libraries
    )
    assert DriverLibrary(
        f"{directory}/libGLX_nvidia.so.{VERSION}", "libGLX_nvidia.so.0", ("libGLX_indirect.so.0",)
    ) in (libraries)


def test_libraries_under_versions_of_their_own_belong_to_the_driver(host: Path) -> None:
    install_own_versions(install(host))
    assert {"libnvidia-nvvm70.so.4", "libnvidia-egl-gbm.so.1"} <= sonames(DriverRoot(None, host))


def test_libraries_of_other_programs_and_of_desktops_are_left_alone(host: Path) -> None:
    install(host, names=(*LIBRARIES, ("libnvidia-gtk3", ""), ("libnvidia-wayland-client", "")))
    directory = host / "usr/lib/x86_64-linux-gnu"
    (directory / "libz.so.1.3.1").write_bytes(elf_library("libz.so.1"))
    (directory / "libnvidia-container.so.1.18.0").write_bytes(
        elf_library("libnvidia-container.so.1")
    )
    assert sonames(DriverRoot(None, host)) == {
        soname or f"{stem}.so.{VERSION}" for stem, soname in LIBRARIES
    }


def test_32_bit_libraries_are_passed_over(host: Path) -> None:
    install(host, directory="usr/lib64")
    install(host, directory="usr/lib", machine="i386")
    files = DriverRoot(None, host).files()
    assert {library.host_path.rpartition("/")[0] for library in files.libraries} == {"/usr/lib64"}


def test_firmware_graphics_files_and_sockets_come_along(host: Path) -> None:
    install_extras(install(host))
    (host / "run").mkdir()
    with listen(host / "run/nvidia-persistenced/socket"):
        files = DriverRoot(None, host).files()
    assert files.firmware == tuple(
        HostFile(
            f"/usr/lib/firmware/nvidia/{VERSION}/{name}", f"/lib/firmware/nvidia/{VERSION}/{name}"
        )
        for name in ("gsp_ga10x.bin", "gsp_tu10x.bin")
    )
    assert files.graphics == (
        HostFile("/usr/share/vulkan/icd.d/nvidia_icd.json", "/etc/vulkan/icd.d/nvidia_icd.json"),
        HostFile(
            "/usr/share/glvnd/egl_vendor.d/10_nvidia.json",
            "/usr/share/glvnd/egl_vendor.d/10_nvidia.json",
        ),
    )
    socket = "/run/nvidia-persistenced/socket"
    assert files.sockets == (HostFile(socket, socket),)


def test_a_file_where_a_socket_should_be_is_no_socket(host: Path) -> None:
    install(host)
    (host / "run/nvidia-fabricmanager").mkdir(parents=True)
    (host / "run/nvidia-fabricmanager/socket").write_text("")
    assert DriverRoot(None, host).files().sockets == ()


def test_absolute_links_lead_inside_the_driver_root(host: Path) -> None:
    """As Debian's alternatives: libcuda.so.1 of the usual directory leads through /etc."""
    root = install(host / CONTAINER, directory="opt/driver/lib", tools="opt/driver/bin")
    (root / "usr/lib").mkdir(parents=True)
    relink(root / "usr/lib/x86_64-linux-gnu", "/etc/alternatives/nvidia")
    (root / "etc/alternatives").mkdir(parents=True)
    relink(root / "etc/alternatives/nvidia", "/opt/driver/lib")
    relink(root / "usr/bin", "/opt/driver/bin")
    files = DriverRoot(None, host).files()
    assert files.lib_dir == f"/{CONTAINER}/opt/driver/lib"
    assert files.tools[-1].host_path == f"/{CONTAINER}/opt/driver/bin/nvidia-smi"


def test_a_link_that_climbs_stays_inside_the_driver_root(host: Path) -> None:
    root = install(host / CONTAINER, directory="lib64")
    (root / "usr").mkdir(exist_ok=True)
    relink(root / "usr/lib64", "../../../../../lib64")
    assert DriverRoot(None, host).files().lib_dir == f"/{CONTAINER}/lib64"


def test_a_driver_root_behind_a_link_is_named_by_what_it_is(host: Path) -> None:
    install(host / CONTAINER)
    (host / "var").mkdir()
    relink(host / "var/run", "/run")
    assert DriverRoot(f"/var/{CONTAINER}", host).files().root == f"/{CONTAINER}"


def test_links_in_a_circle_are_an_error_and_no_hang(host: Path) -> None:
    (host / "usr").mkdir()
    relink(host / "usr/lib64", "lib64")
    with pytest.raises(NodeError, match=r"usr/lib64: Too many levels of symbolic links"):
        DriverRoot("/", host).files()


def test_a_driver_container_comes_before_the_host(host: Path) -> None:
    install(host)
    install(host / CONTAINER)
    assert DriverRoot(None, host).files().root == f"/{CONTAINER}"


def test_an_incomplete_candidate_is_passed_over(host: Path) -> None:
    install(host)
    install(host / CONTAINER, names=LIBRARIES[:2])
    assert DriverRoot(None, host).files().root == "/"


def test_a_root_that_was_named_is_the_only_one_that_counts(host: Path) -> None:
    install(host)
    with pytest.raises(NodeError, match=r"/opt/nvidia does not exist\. Is the driver installed"):
        DriverRoot("/opt/nvidia", host).files()


def test_without_a_driver_every_place_is_named_and_what_to_do(host: Path) -> None:
    with pytest.raises(NodeError) as e:
        DriverRoot(None, host).files()
    assert str(e.value) == (
        "no complete NVIDIA driver: /run/nvidia/driver does not exist; "
        "/ has no libcuda.so.<version> in its library directories; "
        "/home/kubernetes/bin/nvidia does not exist; /usr/local/nvidia does not exist. "
        "Is the driver installed? If it is somewhere else, set --driver-root to the directory "
        "that holds its lib and bin directories"
    )


@pytest.mark.parametrize("name", ["libnvidia-ml.so", "libnvidia-ptxjitcompiler.so", "nvidia-smi"])
def test_a_driver_that_lacks_a_part_is_refused(host: Path, name: str) -> None:
    install(host)
    for path in host.rglob(f"{name}*"):
        path.unlink()
    with pytest.raises(NodeError, match=rf"driver {VERSION} in / is incomplete: no {name}"):
        DriverRoot("/", host).files()


def test_of_two_drivers_the_loaded_one_counts(host: Path) -> None:
    install(host, "570.172.08")
    install(host)
    load_module(host, VERSION)
    files = DriverRoot(None, host).files()
    assert files.version == VERSION
    assert all("570" not in library.host_path for library in files.libraries)


def _half_copied(host: Path) -> None:
    os.truncate(host / f"usr/lib/x86_64-linux-gnu/libnvidia-nvvm.so.{VERSION}", 70)


def _second_driver(host: Path) -> None:
    install(host, "570.172.08")


def _other_module(host: Path) -> None:
    load_module(host, "570.172.08", "x86_64 Kernel Module")


def _unreadable_version(host: Path) -> None:
    (host / "proc/driver/nvidia/version").mkdir(parents=True)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_half_copied, r"libnvidia-nvvm.so.* not a whole ELF library"),
        (_second_driver, rf"/ has drivers 570\.172\.08, {VERSION} side by side"),
        (_other_module, rf"{VERSION}, but the loaded kernel module is 570.*finish"),
        (_unreadable_version, r"proc/driver/nvidia/version: Is a directory"),
    ],
)
def test_a_driver_that_is_not_whole_or_not_the_loaded_one_is_refused_with_the_reason(
    host: Path, spoil: Callable[[Path], None], message: str
) -> None:
    install(host)
    driver = DriverRoot("/", host)
    driver.files()
    spoil(host)
    with pytest.raises(NodeError, match=message):
        driver.files()


def test_nvml_is_named_as_this_process_sees_it(host: Path) -> None:
    install(host / CONTAINER)
    assert DriverRoot(None, host).nvml_library() == (
        host / CONTAINER / f"usr/lib/x86_64-linux-gnu/libnvidia-ml.so.{VERSION}"
    )


def test_a_program_is_named_as_the_host_sees_it(host: Path) -> None:
    install(host / "home/kubernetes/bin/nvidia", directory="lib64", tools="bin")
    driver = DriverRoot(None, host)
    assert driver.tool("nvidia-modprobe") == "/home/kubernetes/bin/nvidia/bin/nvidia-modprobe"
    with pytest.raises(NodeError, match=r"kubernetes/bin/nvidia has no nvidia-imex: install"):
        driver.tool("nvidia-imex")


@pytest.mark.parametrize(
    ("machine", "loader"),
    [("x86_64", "lib64/ld-linux-x86-64.so.2"), ("aarch64", "lib/ld-linux-aarch64.so.1")],
)
def test_a_program_of_a_driver_container_runs_inside_it(
    host: Path, machine: str, loader: str
) -> None:
    libraries = f"usr/lib/{machine}-linux-gnu"
    root = install(host / CONTAINER, directory=libraries, machine=machine)
    make_system(root, loader)
    assert DriverRoot(None, host).command("nvidia-smi", "-L") == Command(
        "/usr/bin/nvidia-smi", ("-L",), str(root), f"/{libraries}"
    )


@pytest.mark.parametrize("directories", [[], ["dev", "proc", "sys"]])
def test_a_program_of_a_bare_prefix_runs_on_the_host(host: Path, directories: list[str]) -> None:
    prefix = install(host / "usr/local/nvidia", directory="lib64", tools="bin")
    for name in directories:  # places for mounts, with nothing in them
        (prefix / name).mkdir()
    (host / "dev").mkdir()
    assert DriverRoot(None, host).command("nvidia-smi") == Command(
        "/usr/local/nvidia/bin/nvidia-smi", (), str(host), "/usr/local/nvidia/lib64"
    )


def _upgrade(host: Path) -> None:
    for path in (host / "usr/lib/x86_64-linux-gnu").iterdir():
        path.unlink()
    install(host, "590.48.01")


def _driver_container(host: Path) -> None:
    install(host / CONTAINER)


def _library_in_place(host: Path) -> None:
    library = host / f"usr/lib/x86_64-linux-gnu/libnvidia-cfg.so.{VERSION}"
    library.write_bytes(elf_library("libnvidia-cfg.so.2"))


def _socket(host: Path) -> None:
    listen(host / "run/nvidia-persistenced/socket").close()


def _tool_gone(host: Path) -> None:
    (host / "usr/bin/nvidia-debugdump").unlink()


def _link_turned(host: Path) -> None:
    lib = host / "usr/lib"
    shutil.move(lib / "x86_64-linux-gnu", host / "usr/other")
    relink(lib / "x86_64-linux-gnu", "/usr/other")


@pytest.mark.parametrize(
    "change",
    [_upgrade, _driver_container, _library_in_place, _socket, _tool_gone, _link_turned],
)
@pytest.mark.parametrize("watch", [nullcontext, watching])
def test_a_change_on_disk_is_seen_at_the_next_look(
    host: Path,
    change: Callable[[Path], None],
    watch: Callable[[DriverRoot], AbstractContextManager[None]],
) -> None:
    install(host)
    driver = DriverRoot(None, host)
    with watch(driver):
        before = driver.files()
        assert driver.files() is before
        change(host)
        after = driver.files()
        assert after != before
        assert after == DriverRoot(None, host).files()
        assert driver.files() is after


def test_a_driver_that_vanishes_is_an_error_and_no_memory(host: Path) -> None:
    install(host)
    driver = DriverRoot("/", host)
    driver.files()
    shutil.rmtree(host / "usr")
    with pytest.raises(NodeError, match="no complete NVIDIA driver"):
        driver.files()

"""Containers for the GPU tests: their root, their configuration, and that they start."""

import doctest
import os
from pathlib import Path

import pytest

from cdi.spec import ContainerEdits, DeviceNode, Mount
from dra_driver.model.driver_files import DriverFiles, DriverLibrary
from hack.cdi_apply import apply_edits
from tests.gpu import bundle, rootfs
from tests.gpu.bundle import Bundle, Chroot, base_config, chroot_script, runtime, why_not
from tests.gpu.rootfs import PROGRAM, PYTHON, make_rootfs

DRIVER = DriverFiles(
    version="580.95.05", root="/", machine=os.uname().machine, lib_dir="/lib", libraries=()
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bundle") / "rootfs"
    make_rootfs(directory, DRIVER)
    return directory


def test_the_example_in_the_module_holds():
    assert doctest.testmod(rootfs).failed == 0


def test_the_root_has_its_programs_and_what_they_are_linked_with(root):
    inside = {str(path.relative_to(root)) for path in root.rglob("*")}

    assert {"usr/bin/bash", "usr/bin/ls", "usr/bin/env", PYTHON[1:], PROGRAM[1:]} <= inside
    names = {Path(path).name for path in inside}
    assert "libc.so.6" in names
    assert any(name.startswith("ld-linux") for name in names)


def test_either_spelling_of_a_librarys_path_leads_to_the_same_file(root):
    assert (root / "lib").resolve() == (root / "usr/lib").resolve()
    assert (root / "lib64").resolve() == (root / "usr/lib64").resolve()


def test_the_hosts_driver_is_not_in_it(tmp_path):
    libc = next(path for path in rootfs.needed(["/bin/ls"], set()) if "libc.so" in path)
    driver = DriverFiles("1", "/", DRIVER.machine, "/lib", (DriverLibrary(libc, "libc.so.6"),))

    make_rootfs(tmp_path / "rootfs", driver)

    assert "libc.so.6" not in {path.name for path in (tmp_path / "rootfs").rglob("*")}


def test_the_chroot_gets_the_mounts_and_devices_of_a_spec(tmp_path):
    edits = ContainerEdits(
        env=("A=b c",),
        device_nodes=(DeviceNode("/dev/gpu0", "/dev/null"),),
        mounts=(Mount("/usr/bin/env", "/usr/lib/some library.so"),),
    )

    lines = chroot_script(apply_edits(base_config(), edits), tmp_path, ["ls", "-l"]).splitlines()

    assert f"mount --rbind /usr/bin/env '{tmp_path}/usr/lib/some library.so'" in lines
    assert any(f"mknod -m 666 {tmp_path}/dev/gpu0 c 1 3 ||" in line for line in lines)
    assert lines[-1].startswith(f"exec chroot {tmp_path} /usr/bin/env -i ")
    assert lines[-1].endswith(" 'A=b c' ls -l")


def test_the_runtime_can_be_named(monkeypatch):
    monkeypatch.setenv("OCI_RUNTIME", "/opt/crun")

    assert runtime() == "/opt/crun"


def test_why_a_container_does_not_start_is_told():
    assert why_not(lambda config, args: bundle.Ran(1, "", "no privileges\n")) == "no privileges"
    assert "No such file" in why_not(Bundle(Path("/nowhere"), "/nowhere/runc").run)


@pytest.mark.parametrize("kind", ["container", "chroot"])
def test_it_starts_and_gets_what_a_spec_gives_it(root, kind):
    program = runtime()
    if kind == "container" and program is None:
        pytest.skip("no OCI runtime: install runc or crun, or name one in OCI_RUNTIME")
    place = Bundle(root.parent, str(program)) if kind == "container" else Chroot(root)
    if reason := why_not(place.run):
        pytest.skip(f"no {kind} starts here: {reason}")
    edits = ContainerEdits(
        env=("GPU=0",),
        device_nodes=(DeviceNode("/dev/gpu0", "/dev/null"),),
        mounts=(Mount(__file__, "/usr/lib/given.py", options=("ro", "rbind")),),
    )

    ran = place.run(
        apply_edits(base_config(), edits), ["bash", "-c", "echo $GPU; ls /dev /usr/lib"]
    )

    assert ran.code == 0, ran.err
    assert ran.out.startswith("0\n")
    assert {"gpu0", "given.py"} <= set(ran.out.split())

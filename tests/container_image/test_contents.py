"""What the image keeps of packages and wheels."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hack.container_image.contents import (
    SITE,
    is_kept_of_package,
    is_kept_of_wheel,
    unpack_base,
    unpack_wheels,
    write_host_links,
    write_program,
)
from hack.container_image.errors import ImageError
from hack.container_image.layers import Link, files_in


@pytest.mark.parametrize(
    ("name", "is_kept"),
    [
        ("usr/bin/python3.11", True),
        ("usr/sbin/chroot", True),
        ("usr/bin/env", False),
        ("usr/lib/python3.11/json/decoder.py", True),
        ("usr/lib/python3.11/test/support/__init__.py", False),
        ("usr/lib/python3.11/lib-dynload/_ssl.cpython-311-x86_64-linux-gnu.so", True),
        ("usr/lib/python3.11/lib-dynload/_sqlite3.cpython-311-x86_64-linux-gnu.so", False),
        ("lib/aarch64-linux-gnu/libc.so.6", True),
        ("lib/ld-linux-aarch64.so.1", True),
        ("usr/lib/aarch64-linux-gnu/libssl.so.3", True),
        ("usr/lib/aarch64-linux-gnu/gconv/BIG5.so", False),
        ("usr/share/doc/libc6/copyright", True),
        ("usr/share/doc/libc6/changelog.Debian.gz", False),
        ("usr/share/man/man1/chroot.1.gz", False),
    ],
)
def test_the_image_keeps_what_runs_and_its_licences(name, is_kept):
    assert is_kept_of_package(name) == is_kept


@pytest.mark.parametrize(
    ("name", "is_kept"),
    [
        ("kubernetes/client/rest.py", True),
        ("kubernetes/client/models/__init__.py", True),
        ("kubernetes/client/models/v1_pod.py", False),
        ("kubernetes/aio/client/rest.py", False),
        ("certifi/tests/test_certifi.py", False),
        ("certifi/cacert.pem", True),
    ],
)
def test_the_image_keeps_the_modules_that_the_driver_can_use(name, is_kept):
    assert is_kept_of_wheel(name) == is_kept


def test_the_image_keeps_the_modules_with_which_the_controllers_agree_on_a_leader():
    """Those that are imported when the official client's lock is made, by a process of its own."""
    program = """
import sys
import dra_driver.controller.run
from kubernetes.leaderelection.resourcelock.leaselock import LeaseLock
LeaseLock("a", "b", "c")
names = [name for name in sys.modules if name.startswith("kubernetes.")]
print(*(sys.modules[name].__file__.partition("site-packages/")[2] for name in names))
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    )

    files = ran.stdout.split()
    assert "kubernetes/client/models/v1_lease.py" in files
    assert [file for file in files if not is_kept_of_wheel(file)] == []


@pytest.fixture
def package(tmp_path):
    if not shutil.which("dpkg-deb"):
        pytest.skip("needs dpkg-deb")
    root = tmp_path / "package"
    texts = {
        "DEBIAN/control": "Package: python-x\nVersion: 1\nArchitecture: all\n"
        "Maintainer: x <x@example.com>\nDescription: x\n",
        "usr/lib/python3.11/x.py": "x = 1\n",
        "usr/bin/x": "#!",
        "usr/sbin/chroot": "#!",
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "usr/sbin/chroot").chmod(0o4755)
    (root / "usr/share/doc").mkdir(parents=True)
    (root / "usr/share/doc/python-x").symlink_to("python-y")
    built = ["dpkg-deb", "--root-owner-group", "--build", root, tmp_path / "x.deb"]
    subprocess.run(built, check=True, capture_output=True, timeout=60)
    return tmp_path / "x.deb"


def test_a_package_is_unpacked_with_its_description_and_without_special_rights(package, tmp_path):
    tree = tmp_path / "tree"
    unpack_base([package], tree)
    files = files_in(tree)
    assert {*files} == {
        "etc/passwd",
        "etc/group",
        "etc/nsswitch.conf",
        "usr/lib/python3.11/x.py",
        "usr/sbin/chroot",
        "usr/share/doc/python-x",
        "var/lib/dpkg/status.d/python-x",
    }
    assert oct((tree / "usr/sbin/chroot").stat().st_mode & 0o7777) == "0o755"
    assert oct((tree / "usr/lib/python3.11/x.py").stat().st_mode & 0o7777) == "0o644"
    assert files["usr/share/doc/python-x"] == Link("python-y")
    assert "Version: 1\n" in (tree / "var/lib/dpkg/status.d/python-x").read_text()


def wheel(tmp_path, **files):
    path = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_a_wheel_is_unpacked_beside_the_others(tmp_path):
    files = {"x/__init__.py": "", "x/tests/test_x.py": "", "x-1.dist-info/METADATA": "Name: x\n"}
    unpack_wheels([wheel(tmp_path, **files)], tmp_path / "tree")
    assert {*files_in(tmp_path / "tree")} == {
        f"{SITE}/x/__init__.py",
        f"{SITE}/x-1.dist-info/METADATA",
    }


def test_a_wheel_that_installs_something_else_than_modules_is_refused(tmp_path):
    with pytest.raises(ImageError, match=r"x-1.data/scripts/x"):
        unpack_wheels([wheel(tmp_path, **{"x-1.data/scripts/x": "#!"})], tmp_path / "tree")


def test_two_wheels_with_the_same_file_are_refused(tmp_path):
    same = wheel(tmp_path, **{"x.py": ""})
    with pytest.raises(ImageError, match="two packages have the file"):
        unpack_wheels([same, same], tmp_path / "tree")


def test_the_command_starts_the_driver_with_the_python_of_the_image(tmp_path):
    write_program(tmp_path)
    program = tmp_path / "usr/local/bin/dra-driver"
    assert program.read_text().startswith("#!/usr/bin/python3.11\n")
    assert program.stat().st_mode & 0o111 == 0o111


def test_the_programs_of_a_node_find_their_libraries_where_only_usr_is_mounted(tmp_path):
    if not Path("/lib").is_symlink():
        pytest.skip("/lib of this machine is no link into /usr")
    write_host_links(tmp_path)
    (tmp_path / "host/usr").mkdir()
    script = f"mount --rbind /usr {tmp_path}/host/usr && chroot {tmp_path}/host /bin/true"
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0:
        pytest.skip("mounting is not permitted here")

    ran = subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True)

    assert ran.returncode == 0, ran.stderr
    assert files_in(tmp_path) == {
        f"host/{name}": Link(f"usr/{name}") for name in ("bin", "lib", "lib64", "sbin")
    }

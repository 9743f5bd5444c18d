"""The pinned Debian packages: the lock file, and where its packages come from."""

import hashlib
from pathlib import Path

import pytest

from hack.container_image.build import LOCK
from hack.container_image.debian import (
    ARCHITECTURES,
    PACKAGES,
    Package,
    fetch,
    lock_text,
    parse_index,
    parse_lock,
)
from hack.container_image.errors import ImageError
from hack.testbed.cache import silent

CONTENT = b"a package"


def packages():
    return [
        Package(architecture, name, "1:2-3", "0" * 64, f"pool/{name}_2-3_{architecture}.deb")
        for architecture in ARCHITECTURES
        for name in PACKAGES
    ]


def test_the_lock_pins_every_package_for_each_architecture_and_names_no_mirror():
    locked = parse_lock(LOCK.read_text())
    assert {package.architecture for package in locked} == {"amd64", "arm64"}
    assert all(len(package.sha256) == 64 for package in locked)
    assert all(package.path.startswith("pool/") for package in locked)
    assert lock_text(locked) == LOCK.read_text()


def test_what_is_written_into_a_lock_is_read_from_it():
    assert parse_lock(lock_text(packages()[::-1])) == packages()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            lambda text: text[: text.rindex("arm64  ")], "hack/update-image", id="lacks one"
        ),
        pytest.param(lambda text: text + "amd64 bash 1\n", "five words expected", id="no hash"),
        pytest.param(
            lambda text: text + f"amd64 bash 1 {'0' * 64} pool/bash.deb\n",
            "does not have every package",
            id="another",
        ),
    ],
)
def test_a_lock_that_lacks_a_package_or_has_another_is_refused(change, message):
    with pytest.raises(ImageError, match=message):
        parse_lock(change(lock_text(packages())))


def index(*names):
    return "\n\n".join(
        f"Package: {name}\nVersion: 1:2-3\nDescription: words\n more: words\n"
        f"Filename: pool/{name}_2-3_arm64.deb\nSHA256: {'0' * 64}"
        for name in names
    )


def test_the_index_of_apt_says_what_the_newest_packages_are():
    assert parse_index(index(*PACKAGES), "arm64") == [
        package for package in packages() if package.architecture == "arm64"
    ]


def test_another_release_of_debian_is_refused_by_the_packages_that_it_lacks():
    with pytest.raises(ImageError, match=r"lack libssl3, zlib1g for arm64.*takes Debian 12"):
        parse_index(index(*(set(PACKAGES) - {"libssl3", "zlib1g"})), "arm64")


@pytest.fixture
def mirrors(tmp_path, monkeypatch):
    """Two mirrors on this disk, known to an apt-get that knows nothing else; an empty cache."""
    if not Path("/usr/lib/apt/apt-helper").exists():
        pytest.skip("needs apt")
    places = [tmp_path / "mirror-a", tmp_path / "mirror-b"]
    for place in places:
        (place / "pool").mkdir(parents=True)
    program = tmp_path / "bin/apt-get"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n" + "".join(f"echo file:{place}/\n" for place in places))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setenv("DRA_CACHE", str(tmp_path / "cache"))
    return places


def pinned(content=CONTENT):
    return Package("amd64", "x", "1", hashlib.sha256(content).hexdigest(), "pool/x_1_amd64.deb")


def test_a_package_comes_from_the_mirror_that_has_it_and_then_from_the_cache(mirrors):
    (mirrors[1] / pinned().path).write_bytes(CONTENT)
    assert fetch(pinned(), silent).read_bytes() == CONTENT
    (mirrors[1] / pinned().path).unlink()
    assert fetch(pinned(), silent).read_bytes() == CONTENT


def test_a_package_that_no_mirror_has_any_longer_is_refused_with_what_to_do(mirrors):
    with pytest.raises(ImageError, match=r"x 1 \(amd64\).*\n?.*hack/update-image"):
        fetch(pinned(), silent)


def test_a_package_with_other_bytes_is_refused(mirrors):
    (mirrors[0] / pinned().path).write_bytes(b"something else")
    with pytest.raises(ImageError, match="Hash Sum mismatch"):
        fetch(pinned(), silent)

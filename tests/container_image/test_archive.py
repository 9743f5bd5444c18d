"""Layers and archives: what runtimes read, and the same bytes each time."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from hack.container_image import layers
from hack.container_image.layers import Link, files_in, write_tar
from hack.container_image.oci import Image, Layer, Platform, digest_of, write_archive
from tests.container_image.archives import Archive

NAME = "example.com/driver:1"


def packed(tree: Path, target: Path, umask: int) -> Layer:
    """As the image's Python does it, here by the one that runs this test."""
    command = [sys.executable, "-PsS", layers.__file__, str(tree), str(target)]
    environment = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    printed = subprocess.check_output(command, env=environment, umask=umask, timeout=60)
    answer = json.loads(printed)
    assert answer["digest"] == digest_of(target.read_bytes())
    assert answer["size"] == target.stat().st_size
    return Layer(target.read_bytes(), answer["diff_id"], "modules", answer["unpacked"])


def tree(directory: Path) -> Path:
    (directory / "lib/package").mkdir(parents=True)
    source = "NAMES = frozenset({'a', 'b', 'c'})\nvalue = 1\n"
    (directory / "lib/package/__init__.py").write_text(source)
    (directory / "bin").symlink_to("usr/bin")
    program = directory / "usr/bin/program"
    program.parent.mkdir(parents=True)
    program.write_text("#!")
    program.chmod(0o777)
    return directory


def archive_of(directory: Path, umask: int = 0o022) -> Path:
    directory.mkdir()
    layer = packed(tree(directory / "tree"), directory / "layer.tar.gz", umask)
    platforms = [Platform("amd64", [layer]), Platform("arm64", [layer])]
    archive = directory / "image.tar"
    write_archive(archive, [Image(NAME, platforms, {"Entrypoint": ["program"]})])
    return archive


def test_the_same_files_give_the_same_archive_wherever_and_by_whomever_they_are_packed(tmp_path):
    first = archive_of(tmp_path / "a")
    second = archive_of(tmp_path / "another directory", umask=0o077)
    assert first.read_bytes() == second.read_bytes()


def test_a_runtime_finds_the_image_of_each_architecture(tmp_path):
    archive = Archive(archive_of(tmp_path / "a"))
    for architecture in ("amd64", "arm64"):
        image = archive.image(NAME, architecture)
        assert image.config["architecture"] == architecture
        assert image.config["config"] == {"Entrypoint": ["program"]}
        assert image.contents["usr/bin/program"] == b"#!"
        assert image.files["bin"].linkname == "usr/bin"


def test_docker_without_an_image_store_of_containerd_finds_the_first_architecture(tmp_path):
    archive = Archive(archive_of(tmp_path / "a"))
    [image] = json.loads(archive.members["manifest.json"])
    assert image["RepoTags"] == [NAME]
    assert json.loads(archive.members[image["Config"]])["architecture"] == "amd64"
    assert all(layer in archive.members for layer in image["Layers"])


def test_files_belong_to_root_and_only_root_may_write_them(tmp_path):
    files = Archive(archive_of(tmp_path / "a")).image(NAME, "amd64").files
    assert {(f.uid, f.gid, f.mtime) for f in files.values()} == {(0, 0, 0)}
    assert oct(files["usr/bin/program"].mode) == "0o755"
    assert oct(files["tmp"].mode) == "0o1777"
    assert {oct(f.mode) for f in files.values() if f.isdir() and f.name != "tmp"} == {"0o755"}


def test_modules_are_compiled_and_their_sources_are_not_looked_at_again(tmp_path):
    contents = Archive(archive_of(tmp_path / "a")).image(NAME, "amd64").contents
    [bytecode] = [name for name in contents if name.endswith(".pyc")]
    assert bytecode == importlib.util.cache_from_source("lib/package/__init__.py", optimization=2)
    unchecked_hash = 0b01  # PEP 552
    assert int.from_bytes(contents[bytecode][4:8], "little") == unchecked_hash
    assert b"/lib/package/__init__.py" in contents[bytecode]
    assert str(tmp_path).encode() not in contents[bytecode]


def test_links_are_kept_as_links_also_to_directories(tmp_path):
    assert files_in(tree(tmp_path / "a"))["bin"] == Link("usr/bin")


def test_an_unpacked_layer_is_not_called_packed(tmp_path):
    with (tmp_path / "layer.tar").open("wb") as output:
        write_tar(output, {"etc/z": b"z"})
    content = (tmp_path / "layer.tar").read_bytes()
    platforms = [Platform("amd64", [Layer(content, digest_of(content))])]
    write_archive(tmp_path / "image.tar", [Image(NAME, platforms)])
    assert Archive(tmp_path / "image.tar").image(NAME, "amd64").contents == {"etc/z": b"z"}

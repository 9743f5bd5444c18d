"""What is pinned in files: Go modules, paths, images."""

from pathlib import Path

import pytest

from hack.container_image.layers import Link
from hack.testbed.assets import CONTAINERD, HELM, VERSIONS, Recipe, kubernetes
from hack.testbed.errors import ClusterError
from hack.testbed.images import Image, this_architecture, write_images
from hack.testbed.layout import ROOT, Layout
from hack.testbed.toolchain import GO_BIN_VERSION, go_version
from tests.container_image.archives import Archive

LONGEST_UNIX_SOCKET = 107
RECIPES = [*map(kubernetes, VERSIONS), CONTAINERD, HELM]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_every_module_is_locked_and_the_go_from_pypi_can_build_it(recipe: Recipe) -> None:
    assert (recipe.module / "go.sum").stat().st_size > 0
    go_mod = (recipe.module / "go.mod").read_text()
    go_line = next(line for line in go_mod.splitlines() if line.startswith("go "))
    assert go_version(go_line) <= go_version(GO_BIN_VERSION)


def test_the_digest_of_a_recipe_changes_with_its_version() -> None:
    assert len({recipe.digest() for recipe in RECIPES}) == len(RECIPES)


def test_a_version_that_is_not_pinned_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"1\.2\.3 is not among those pinned"):
        kubernetes("1.2.3")


def test_the_registration_socket_of_a_driver_fits_a_unix_socket() -> None:
    uid = "00000000-0000-0000-0000-000000000000"
    socket = Layout(ROOT).kubelet / "plugins_registry" / f"gpu.nvidia.com-{uid}-reg.sock"
    assert len(str(socket)) <= LONGEST_UNIX_SOCKET


@pytest.mark.parametrize(
    ("text", "version"),
    [
        pytest.param("go1.26.8", (1, 26, 8), id="as go env GOVERSION says it"),
        pytest.param("go 1.26", (1, 26), id="as go.mod says it"),
        pytest.param("", (), id="nothing is older than everything"),
    ],
)
def test_go_versions_compare_as_numbers(text: str, version: tuple[int, ...]) -> None:
    assert go_version(text) == version


def test_the_same_image_gives_the_same_archive(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"#!")
    program.chmod(0o755)
    image = Image(
        "dra.test/x:1", {"bin/x": program, "bin/y": Link("x"), "etc/z": b"z"}, ("/bin/x",)
    )
    write_images(tmp_path / "a.tar", [image])
    program.touch()
    write_images(tmp_path / "b.tar", [image])
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    files = Archive(tmp_path / "a.tar").image("dra.test/x:1", this_architecture()).files.values()
    assert {f.name: (oct(f.mode), f.linkname) for f in files if not f.isdir()} == {
        "bin/x": ("0o755", ""),
        "bin/y": ("0o644", "x"),
        "etc/z": ("0o644", ""),
    }

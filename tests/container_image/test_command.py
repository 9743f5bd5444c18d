"""The command hack/image: names, its report, and the engines that take the archive."""

from pathlib import Path

import pytest
import yaml

from hack.container_image.__main__ import load, report, with_tag
from hack.container_image.build import REPOSITORY, Built, Size
from hack.container_image.errors import ImageError

CHART = REPOSITORY / "deploy/helm/dra-driver-gpu"


def test_without_a_name_the_image_is_the_one_that_the_chart_asks_for():
    image = yaml.safe_load((CHART / "values.yaml").read_text())["image"]
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert image["tag"] == ""
    assert with_tag("dra-driver-gpu") == f"{image['repository']}:{version}"


@pytest.mark.parametrize("name", ["x:1", "example.com:5000/team/x:1"])
def test_a_tag_that_is_given_is_kept(name):
    assert with_tag(name) == name


@pytest.mark.parametrize("name", ["REGISTRY/x:1", "x:", "x y", "", "/x", "x@sha256:1"])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(ImageError, match="is no name of an image"):
        with_tag(name)


def test_the_port_of_a_registry_is_no_tag():
    assert with_tag("example.com:5000/x").startswith("example.com:5000/x:0.")


def test_the_report_has_the_digest_and_the_size_for_each_architecture():
    sizes = [Size("amd64", 31_300_000, 93_600_000), Size("arm64", 30_000_000, 90_000_000)]
    text = report(Built(Path("dist/x.tar"), [Path("dist/x.cdx.json")], "sha256:1", sizes))
    assert "amd64: 31.3 MB to pull, 93.6 MB on the node\n" in text
    assert text.endswith("digest   sha256:1")


def engine(directory: Path, name: str, info_code: int) -> None:
    program = directory / name
    script = f'#!/bin/sh\n[ "$1" != info ] || exit {info_code}\necho "{name} $*"\n'
    program.write_text(script)
    program.chmod(0o755)


def test_the_archive_is_loaded_into_the_engines_that_work(tmp_path, monkeypatch, capsys):
    engine(tmp_path, "docker", info_code=1)  # its daemon is not running
    engine(tmp_path, "podman", info_code=0)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    load(Path("dist/x.tar"))
    assert capsys.readouterr().out == "podman load --input dist/x.tar\n"

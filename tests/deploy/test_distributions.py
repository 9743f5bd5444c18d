"""The values that docs/install.md names for a distribution, and a tree of files as on its nodes:
what the chart renders with these values finds the driver there. No such node was tried."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from dra_driver.node.driver.root import DriverRoot
from tests.deploy.chart import MPS_AGENT, REPOSITORY, host_paths, pod_spec, render, variables
from tests.fakes.driver import VERSION, install, relink

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]  # helm is built on first use
PAGE = (REPOSITORY / "docs/install.md").read_text()
SYSROOT = "x86_64-bottlerocket-linux-gnu/sys-root"


@dataclass(frozen=True, slots=True)
class Distribution:
    """Where a distribution has NVIDIA's driver. *values* stand in docs/install.md."""

    tree: Callable[[Path], object]
    root: str
    lib_dir: str
    smi: str
    values: tuple[str, ...] = ()


def talos(host: Path) -> None:
    """The extensions bring a glibc of their own, and the driver with it."""
    install(host, directory="usr/local/glibc/usr/lib", tools="usr/local/bin")


def bottlerocket(host: Path) -> None:
    """/usr is a link, and programs have a second name below /usr/libexec."""
    install(host / SYSROOT, directory="usr/lib/nvidia/tesla")
    relink(host / "usr", f"{SYSROOT}/usr")
    old_names = host / SYSROOT / "usr/libexec/nvidia/tesla/bin"
    old_names.mkdir(parents=True)
    relink(old_names / "nvidia-smi", "../../../../bin/nvidia-smi")


def older_bottlerocket(host: Path) -> None:
    directory, tools = "usr/lib/nvidia/tesla", "usr/libexec/nvidia/tesla/bin"
    install(host / SYSROOT, directory=directory, tools=tools)
    relink(host / "usr", f"{SYSROOT}/usr")


DISTRIBUTIONS = {
    "OpenShift, with the driver container of the GPU operator": Distribution(
        lambda host: install(host / "run/nvidia/driver", directory="usr/lib64"),
        "/run/nvidia/driver",
        "/run/nvidia/driver/usr/lib64",
        "/run/nvidia/driver/usr/bin/nvidia-smi",
    ),
    "Talos 1.13 and newer": Distribution(
        lambda host: install(host, directory="usr/lib", tools="usr/bin"),
        "/",
        "/usr/lib",
        "/usr/bin/nvidia-smi",
        ("cdiDir=/var/cdi/dynamic",),
    ),
    "Talos before 1.13": Distribution(
        talos,
        "/",
        "/usr/local/glibc/usr/lib",
        "/usr/local/bin/nvidia-smi",
        ("cdiDir=/var/cdi/dynamic",),
    ),
    "Container-Optimized OS on GKE": Distribution(
        lambda host: install(host / "home/kubernetes/bin/nvidia", directory="lib64", tools="bin"),
        "/home/kubernetes/bin/nvidia",
        "/home/kubernetes/bin/nvidia/lib64",
        "/home/kubernetes/bin/nvidia/bin/nvidia-smi",
    ),
    "Bottlerocket": Distribution(
        bottlerocket,
        "/",
        f"/{SYSROOT}/usr/lib/nvidia/tesla",
        f"/{SYSROOT}/usr/bin/nvidia-smi",
    ),
    "Bottlerocket, with the programs where they were": Distribution(
        older_bottlerocket,
        "/",
        f"/{SYSROOT}/usr/lib/nvidia/tesla",
        f"/{SYSROOT}/usr/libexec/nvidia/tesla/bin/nvidia-smi",
    ),
}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_what_the_chart_renders_finds_the_driver_of_the_distribution(
    tmp_path: Path, distribution: Distribution
) -> None:
    distribution.tree(tmp_path)
    rendered = render(*(f"--set={value}" for value in distribution.values))
    for component in ("", MPS_AGENT):
        root = variables(pod_spec(rendered, component)).get("DRIVER_ROOT")
        driver = DriverRoot(root, tmp_path)
        files = driver.files()
        assert (files.root, files.lib_dir) == (distribution.root, distribution.lib_dir)
        assert files.version == VERSION
        assert driver.tool("nvidia-smi") == distribution.smi
    for value in distribution.values:
        name, _, text = value.partition("=")
        assert f"`{name}: {text}`" in PAGE
        if name == "cdiDir":
            assert variables(pod_spec(rendered))["CDI_DIR"] == text
            assert host_paths(pod_spec(rendered))["cdi"] == text

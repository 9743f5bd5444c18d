"""The files of the components, for each version of Kubernetes."""

from pathlib import Path

import pytest
import yaml

from hack.testbed.assets import VERSIONS
from hack.testbed.components import Site, components
from hack.testbed.configs import kubelet_config
from hack.testbed.layout import Layout
from hack.testbed.network import PORT_NAMES

LAYOUT = Layout(Path("/run/testbed"))
PORTS = {name: 21000 + index for index, name in enumerate(PORT_NAMES)}
CONTAINERD = "unix:///run/testbed/run/containerd.sock"


def config_of(version: str) -> dict[str, object]:
    return yaml.safe_load(kubelet_config(version, LAYOUT, PORTS, {}))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_kubelet_is_told_once_where_containerd_is(version: str) -> None:
    parts = components(Site(version, LAYOUT, PORTS, {}), node=True)
    (kubelet,) = [part for part in parts if part.name == "kubelet"]
    flag = f"--container-runtime-endpoint={CONTAINERD}"

    told = [config_of(version).get("containerRuntimeEndpoint")] + [
        argument.partition("=")[2] for argument in kubelet.arguments if argument == flag
    ]

    assert [place for place in told if place] == [CONTAINERD]


@pytest.mark.parametrize(
    ("version", "unknown"),
    [
        ("1.26.13", {"containerRuntimeEndpoint", "podLogsDir", "failCgroupV1"}),
        ("1.28.15", {"podLogsDir", "failCgroupV1"}),
        ("1.30.14", {"failCgroupV1"}),
    ],
)
def test_an_older_kubelet_gets_no_field_that_it_does_not_know(
    version: str, unknown: set[str]
) -> None:
    newest = config_of(VERSIONS[0])

    older = config_of(version)

    assert older == {name: value for name, value in newest.items() if name not in unknown}

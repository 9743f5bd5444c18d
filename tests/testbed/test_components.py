"""Command lines of the components."""

from pathlib import Path

from hack.testbed.assets import DEFAULT_VERSION, VERSIONS
from hack.testbed.components import CONTROL_PLANE, Site, components
from hack.testbed.layout import Layout
from hack.testbed.network import PORT_NAMES, choose_ports

PORTS = {name: 21000 + index for index, name in enumerate(PORT_NAMES)}


def site(version: str = DEFAULT_VERSION, **fields) -> Site:
    return Site(version, Layout(Path("/run/testbed")), PORTS, {}, **fields)


def arguments(place: Site) -> dict[str, tuple[str, ...]]:
    return {part.name: part.arguments for part in components(place, node=False)}


def test_flags_of_a_caller_follow_those_of_the_component_so_that_they_count():
    usual = arguments(site())
    changed = arguments(site(flags={"controller-manager": ("--kube-api-qps=5",)}))

    assert tuple(usual) == CONTROL_PLANE
    assert "--kube-api-qps=200" in usual["controller-manager"]
    assert changed["controller-manager"] == (*usual["controller-manager"], "--kube-api-qps=5")
    assert changed["scheduler"] == usual["scheduler"]


def test_only_versions_with_dra_are_asked_for_its_api():
    asked = {
        version: [
            argument
            for argument in arguments(site(version))["apiserver"]
            if "resource.k8s.io" in argument
        ]
        for version in VERSIONS
    }

    assert [version for version in VERSIONS if asked[version]] == ["1.36.3", "1.35.4", "1.34.4"]


def test_a_second_control_plane_gets_ports_of_its_own():
    ports = choose_ports(27000)

    assert set(ports) == set(PORT_NAMES)
    assert len(set(ports.values())) == len(PORT_NAMES)
    assert min(ports.values()) >= 27000

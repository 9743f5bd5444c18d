"""The oldest version that can say a spec."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings

from cdi.encoding import from_document, to_json
from cdi.errors import CdiSpecError
from cdi.spec import CdiDevice, ContainerEdits, DeviceNode, IntelRdt, Mount, NetDevice, Spec
from cdi.validate import VERSIONS, oldest_version
from tests.cdi.strategies import one_device, specs

ENV = ContainerEdits(env=("A=1",))


def of(**edits):
    return one_device(ContainerEdits(**edits))


@pytest.mark.parametrize(
    ("spec", "version"),
    [
        (one_device(ENV), "0.3.0"),
        (of(mounts=(Mount("/a", "/a", "none"),)), "0.4.0"),
        (of(device_nodes=(DeviceNode("/a", "/b"),)), "0.5.0"),
        (one_device(ENV, name="0a"), "0.5.0"),
        (one_device(ENV, kind="v.example/a.b"), "0.6.0"),
        (Spec("vendor/gpu", (("a", "b"),), (CdiDevice("d", (), ENV),)), "0.6.0"),
        (Spec("vendor/gpu", devices=(CdiDevice("d", (("a", "b"),), ENV),)), "0.6.0"),
        (of(additional_gids=(1,)), "0.7.0"),
        (of(intel_rdt=IntelRdt()), "0.7.0"),
        (of(intel_rdt=IntelRdt(schemata=("L3:0=f",))), "1.1.0"),
        (of(intel_rdt=IntelRdt(enable_monitoring=True)), "1.1.0"),
        (of(net_devices=(NetDevice("a", "b"),)), "1.1.0"),
        (replace(one_device(ENV), container_edits=ContainerEdits(additional_gids=(1,))), "0.7.0"),
    ],
)
def test_each_field_needs_the_version_that_brought_it(spec, version):
    assert oldest_version(spec) == version


@pytest.mark.point(96)
@settings(max_examples=30)
@given(specs)
def test_a_spec_loads_at_its_version_and_above_and_not_one_below(spec):
    document = json.loads(to_json(spec))
    needed = VERSIONS.index(document["cdiVersion"])

    assert from_document(document | {"cdiVersion": VERSIONS[-1]}) == spec
    assert from_document(document | {"cdiVersion": VERSIONS[needed]}) == spec
    with pytest.raises(CdiSpecError, match=f"^cdiVersion: must be at least {VERSIONS[needed]}"):
        from_document(document | {"cdiVersion": VERSIONS[needed - 1]})


def test_a_version_that_is_too_old_for_what_the_spec_uses_is_refused():
    document = json.loads(to_json(of(additional_gids=(1,))))

    with pytest.raises(CdiSpecError, match=r"^cdiVersion: must be at least 0\.7\.0"):
        from_document(document | {"cdiVersion": "0.6.0"})


@pytest.mark.parametrize("version", ["1.2.0", "v0.5.0", "0.5", ""])
def test_a_version_that_never_was_is_refused(version):
    with pytest.raises(CdiSpecError, match=r"^cdiVersion: unknown version"):
        from_document(json.loads(to_json(one_device(ENV))) | {"cdiVersion": version})

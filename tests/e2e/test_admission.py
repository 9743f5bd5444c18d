"""Wrong configurations are refused when they are applied, in words; right ones are let through.

No node is asked: the admission policy of the chart is all that judges here.
"""

import json
import subprocess
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.claim_configs import QUANTITY_PATTERN
from dra_driver.base.errors import ClaimError, Refused
from dra_driver.k8s.claims import OpaqueConfig
from dra_driver.model.profiles import SharingStrategy
from dra_driver.plan.prepare.claim import plan_claim
from dra_driver.plan.prepare.sharing import decode_configs
from tests.builders import POOL, allocation, claim, fraction, offer
from tests.e2e.admission import (
    PLACES,
    POLICY,
    denial,
    not_enforced,
    text_of,
    wait_enforced,
    with_paths,
    words_of,
    written,
)
from tests.e2e.kube import wait
from tests.e2e.manifests import pod
from tests.fakes import judged_configs as configs
from tests.fakes.configs import LONGEST, MOST, shapes
from tests.fakes.judged_configs import PER_DEVICE, RIGHT, VERSION, WRONG
from tests.fakes.pods import NOBODY

WRONG_ONE, WORDS = WRONG["two mistakes"]
RIGHT_ONE = RIGHT["every limit"]


@pytest.fixture(scope="module")
def judging(kube, chart):
    """The API server, once it enforces the policy."""
    wait_enforced(kube)
    return kube


@pytest.mark.parametrize(("parameters", "words"), WRONG.values(), ids=WRONG)
def test_a_wrong_configuration_is_refused_with_its_path_and_the_remedy(judging, parameters, words):
    assert denial(judging, written("ResourceClaim", parameters)) == with_paths(words)


@pytest.mark.parametrize("parameters", RIGHT.values(), ids=RIGHT)
def test_a_right_configuration_is_let_through(judging, parameters):
    assert denial(judging, written("ResourceClaim", parameters)) == ""


@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1"])
@pytest.mark.parametrize("kind", PLACES)
def test_claims_templates_and_classes_of_each_version_are_judged(judging, kind, version):
    wrong = written(kind, RIGHT_ONE, WRONG_ONE, version=version)

    assert denial(judging, wrong) == with_paths(WORDS, kind, 1)
    assert denial(judging, written(kind, RIGHT_ONE, version=version)) == ""


@pytest.mark.parametrize("kind", PLACES)
def test_what_is_for_another_driver_is_not_judged(judging, kind):
    for drivers, words in (
        (("gpu.example.com", "gpu.example.com"), ""),
        (("gpu.example.com", "gpu.nvidia.com"), with_paths(WORDS, kind, 1)),
    ):
        assert denial(judging, written(kind, WRONG_ONE, WRONG_ONE, drivers=drivers)) == words


def test_all_that_is_wrong_is_said_in_one_message(judging):
    wrong = written("ResourceClaim", WRONG_ONE, RIGHT_ONE, WRONG_ONE)

    assert denial(judging, wrong) == "; ".join((with_paths(WORDS), with_paths(WORDS, number=2)))


def test_of_more_than_a_message_can_hold_the_beginning_is_said(judging):
    for name, length in (("x" * 100, 4800), ("\u20ac" * 100, 1200)):
        fields = {f"{number}{name}": 1 for number in range(8)}
        words = denial(judging, written("ResourceClaim", *[configs.mps(**fields)] * MOST))

        assert words.endswith("… and more") and len(words) == length + len("… and more")
        assert len(words.encode()) < 5 * 1024


def largest_config(limit: str = "10Gi") -> str:
    """One with all limits that there can be, each as long as it can be, and filled with nulls."""
    limits = {str(number): limit.rjust(64, "0") for number in range(64)}
    whole = json.dumps(configs.per_device(**limits))
    nulls = [f'"{number:x}":null' for number in range(1000)]
    while len(whole) + len(", ".join(nulls)) + 2 > LONGEST:
        nulls.pop()
    return f"{whole[:-1]}, {', '.join(nulls)}}}"


def applied(kube, tmp_path, text: str) -> str:
    """What the policy says to a claim that is too deep for Python; empty: it would be created."""
    path = tmp_path / "claim.json"
    path.write_text(text)
    try:
        kube.kubectl("create", "--dry-run=server", "--validate=false", "-f", str(path))
    except subprocess.CalledProcessError as e:
        return words_of(e.stderr)
    return ""


def test_the_largest_claim_that_there_can_be_is_judged(judging, tmp_path):
    right, wrong = largest_config(), largest_config("10GB")
    assert LONGEST - 20 < len(right) <= LONGEST

    assert applied(judging, tmp_path, text_of("largest", right, MOST)) == ""
    assert PER_DEVICE in applied(judging, tmp_path, text_of("largest", wrong, MOST))


@pytest.mark.parametrize("shape", shapes())
def test_the_costliest_claims_are_judged(judging, tmp_path, shape):
    words = applied(judging, tmp_path, text_of("costly", shapes()[shape], MOST))

    assert bool(words) == (shape != "nulls")
    assert len(words.encode()) < 5 * 1024


@pytest.fixture(scope="module")
def older(judging, tmp_path_factory):
    """The paths of objects that are wrong, by kind, and were created before the policy was.

    By kubectl, whose JSON is as a patch leaves it: in any other, the API server takes a patch of
    the metadata for a change of the configuration.
    """
    file = tmp_path_factory.mktemp("older") / "object.json"
    paths = {}
    with not_enforced(judging):
        for kind in PLACES:
            file.write_text(json.dumps(written(kind, WRONG_ONE, name="older")))
            judging.kubectl("create", "-f", str(file))
            paths[kind] = f"{judging.path(kind, 'default')}/older"
    yield paths
    for path in paths.values():
        judging.api.delete(path)


@pytest.mark.parametrize("kind", PLACES)
def test_metadata_of_an_older_wrong_object_can_be_written(judging, older, kind):
    for finalizers in (["example.com/mine"], []):
        metadata = {"finalizers": finalizers, "labels": {"count": str(len(finalizers))}}
        patched = judging.api.patch(older[kind], {"metadata": metadata})

        assert patched["metadata"].get("finalizers", []) == finalizers


def test_the_status_of_an_older_wrong_claim_can_be_written(judging, older):
    result = {"request": "gpu", "driver": "gpu.nvidia.com", "pool": "pool", "device": "gpu-0"}
    allocated = {"status": {"allocation": {"devices": {"results": [result]}}}}

    patched = judging.api.patch(f"{older['ResourceClaim']}/status", allocated)

    assert patched["status"]["allocation"]["devices"]["results"] == [result]
    judging.api.patch(f"{older['ResourceClaim']}/status", {"status": {"allocation": None}})


def test_a_pod_is_told_in_an_event_that_its_older_template_is_wrong(judging, older):
    judging.apply(pod("of-older", template="older"))
    try:

        def event():
            return next((e for e in judging.events("of-older") if POLICY in e), "")

        assert words_of(wait("an event of the pod", event)).startswith(with_paths(WORDS))
    finally:
        judging.delete_now("of-older")


def test_the_spec_of_a_class_is_judged_when_it_changes(judging, older):
    path = older["DeviceClass"]
    for number, parameters in enumerate((WRONG_ONE, RIGHT_ONE, WRONG_ONE)):
        config = written("DeviceClass", parameters, RIGHT_ONE)["spec"]["config"]
        if parameters is RIGHT_ONE:
            judging.api.patch(path, {"spec": {"config": config}})
            continue
        with pytest.raises(Refused) as refused:
            judging.api.patch(path, {"spec": {"config": config}})
        assert words_of(str(refused.value)) == with_paths(WORDS, "DeviceClass"), number


SCALARS = (True, 0, 101, -1, 0.5, 10**30, "", "MPS", "TimeSlicing", "Long", "10Gi", "é\n")
ANYTHING = st.sampled_from((*SCALARS, [], ["MPS"], {}, {"strategy": "MPS"}, {"0": "1Gi"}))
WHOLE = ("10Gi", "256Mi", "255Mi", "262144Ki", "262143Ki", "268435456", "268435455", "9E", "-1Gi")
BROKEN = ("268435455.9", "268435455999m", "268.435456M", "0.25Gi", "3e8", "2e8", "1e-9", "1e99")
QUANTITIES = st.sampled_from((*WHOLE, *BROKEN, "1 Gi")) | st.from_regex(
    QUANTITY_PATTERN, fullmatch=True
)


def part(**fields):
    """An object with some of *fields*: mostly as they should be, or null; one in eight is not."""
    often_null = st.one_of(*[st.none()] * 7, ANYTHING)
    return st.fixed_dictionaries(
        {}, optional={**{k: mostly(v) for k, v in fields.items()}, "colour": often_null}
    )


def mostly(right):
    return st.one_of(*[right] * 6, st.none(), ANYTHING)


def either(*strategies, **fields):
    """Objects with one of *strategies*, or another; and some of *fields*, be they of it or not."""
    tags = mostly(st.sampled_from(strategies))
    return st.builds(lambda tag, rest: {"strategy": tag, **rest}, tags, part(**fields))


INTERVALS = part(interval=st.sampled_from(["Default", "Short", "Medium", "Long"]))
LIMITS = part(
    defaultActiveThreadPercentage=st.sampled_from([0, 1, 50, 100]),
    defaultPinnedDeviceMemoryLimit=QUANTITIES,
    defaultPerDevicePinnedMemoryLimit=st.dictionaries(
        st.sampled_from("0123456789"), mostly(QUANTITIES), max_size=10
    ),
    multiUser=st.booleans(),
    clientPriority=st.sampled_from(["Normal", "BelowNormal"]),
)
SHARING = st.one_of(
    either("TimeSlicing", timeSlicingConfig=INTERVALS),
    either("MPS", mpsConfig=LIMITS),
    either("MPS", mpsConfig=LIMITS, timeSlicingConfig=INTERVALS),
)
IOMMU = part(
    backendPolicy=st.sampled_from(["LegacyOnly", "PreferIommuFD"]), enableAPIDevice=st.booleans()
)
CONFIGS = st.builds(
    lambda version, kind, fields: {"apiVersion": version, "kind": kind, **fields},
    st.one_of(*[st.just(VERSION)] * 20, ANYTHING),
    st.one_of(*[st.sampled_from(["GpuConfig", "MigDeviceConfig"])] * 20, ANYTHING),
    part(sharing=SHARING),
) | st.builds(
    lambda fields: {"apiVersion": VERSION, "kind": "VfioDeviceConfig", **fields}, part(iommu=IOMMU)
)


def at_prepare(parameters):
    """What a node says to a claim with such a configuration, before it looks at devices."""
    config = OpaqueConfig("FromClaim", (), parameters, "p")
    try:
        decode_configs(claim("gpu-0", configs=(config,)))
    except ClaimError as e:
        return str(e)
    return ""


@settings(max_examples=400, deadline=None)
@given(parameters=CONFIGS)
def test_the_policy_refuses_what_a_node_refuses_and_nothing_else(judging, parameters):
    words = denial(judging, written("ResourceClaim", parameters))

    assert bool(words) == bool(at_prepare(parameters)), (words, at_prepare(parameters))


TURNS_ONLY = offer(strategies=(SharingStrategy.TIME_SLICING,))
MIG_CONFIG, VFIO_CONFIG = configs.mig(), configs.vfio()

LEFT_TO_PREPARE = {
    "a limit for a GPU that is not of the claim": (
        configs.per_device(**{"7": "1Gi"}),
        allocation(),
        "is no GPU of the claim",
    ),
    "a configuration for a partition, of a request that was given a GPU": (
        MIG_CONFIG,
        allocation(),
        "write a GpuConfig",
    ),
    "passthrough to a virtual machine": (VFIO_CONFIG, allocation(), "is not offered"),
    "an interval for a fraction": (
        configs.interval("Long"),
        fraction(),
        "only a claim that has a whole GPU sets it",
    ),
    "cores that are reserved, and time-slicing": (
        configs.turns(),
        fraction(cores="30"),
        "can be reserved under MPS only",
    ),
    "a strategy that the profile of the node does not allow": (
        configs.mps(),
        fraction(),
        "is shared by TimeSlicing only",
    ),
}
"""All that prepare refuses and the policy lets through: what depends on devices, on what else the
claim asks for, and on the profile of the node."""


@pytest.mark.parametrize(
    ("parameters", "allocated", "problem"), LEFT_TO_PREPARE.values(), ids=LEFT_TO_PREPARE
)
def test_what_the_policy_cannot_know_is_said_at_prepare(judging, parameters, allocated, problem):
    assert denial(judging, written("ResourceClaim", parameters)) == ""

    config = OpaqueConfig("FromClaim", ("gpu",), parameters, "p")
    asked = replace(claim(configs=(config,)), allocations=(allocated,))
    node = TURNS_ONLY if problem == "is shared by TimeSlicing only" else offer()
    with pytest.raises(ClaimError, match=problem):
        plan_claim(asked, node, (), POOL, NOBODY)

"""What the API server and the scheduler take of a pool, as the fake one knows it."""

import pytest

from dra_driver.kubeletplugin.slices.reconcile import Pool, SliceContent, split_into_slices
from tests.fakes.pool_rules import validate_pool


def device(name="gpu-0", **more):
    return {"name": name, **more}


def of(*devices, counters=()):
    return split_into_slices("n1", devices, counters)


def counter_set(name="set", **counters):
    return {"name": name, "counters": {key: {"value": value} for key, value in counters.items()}}


def consuming(**sets):
    return [
        {"counterSet": name, "counters": {key: {"value": "1"} for key in counters}}
        for name, counters in sets.items()
    ]


RANGE = {"default": "2Gi", "validRange": {"min": "1Gi", "max": "4Gi", "step": "1Gi"}}


def sized(value="4Gi", policy=None, many=True):
    entry = {"value": value} | ({"requestPolicy": policy} if policy else {})
    return device(capacity={"memory": entry}, allowMultipleAllocations=many)


@pytest.mark.parametrize(
    "pool",
    [
        pytest.param(of(), id="nothing"),
        pytest.param(Pool("n1/gpus.example.com"), id="a name of two parts"),
        pytest.param(of(*(device(f"d{i}") for i in range(129))), id="more than one slice of them"),
        pytest.param(
            of(
                device(
                    attributes={
                        "b": {"bool": False},
                        "i": {"int": -(2**63)},
                        "s": {"string": "x" * 64},
                        "v": {"version": "580.95.5-rc.1+build"},
                        "resource.kubernetes.io/pciBusID": {"string": "0000:00:00.0"},
                        "list": {"strings": ["a", "b"]},
                    }
                )
            ),
            id="attributes of every kind",
        ),
        pytest.param(of(sized()), id="a capacity"),
        pytest.param(of(sized(policy=RANGE)), id="a range"),
        pytest.param(
            of(sized(policy={"default": "1Gi", "validRange": {"min": "1Gi"}})), id="an open range"
        ),
        pytest.param(
            of(sized(policy={"default": "1Gi", "validValues": ["1Gi", "2048Mi"]})), id="values"
        ),
        pytest.param(of(sized(policy={"default": "0"})), id="only a default"),
        pytest.param(
            of(device(consumesCounters=consuming(set=["m"])), counters=[counter_set(m="1")]),
            id="a counter",
        ),
        pytest.param(
            of(device(taints=[{"key": "a.b/c", "value": "v", "effect": "NoSchedule"}])),
            id="a taint",
        ),
    ],
)
def test_what_is_taken_has_no_problems(pool):
    assert validate_pool(pool, "gpu.example.com") == ()


def attribute(key="a", **value):
    return of(device(attributes={key: value}))


@pytest.mark.point(75, 80)
@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        (Pool("Node"), "pool 'Node'"),
        (Pool("a/" * 130 + "a"), "DNS subdomains"),
        (of(device("GPU")), "not a DNS label"),
        (of(device("a" * 64)), "not a DNS label"),
        (of(device(), device()), "'gpu-0' is there more than once"),
        (
            Pool("n1", (SliceContent((device("a"),)), SliceContent((device("a"),)))),
            "'a' is there more than once",
        ),
        (
            Pool("n1", (SliceContent(tuple(device(f"d{i}") for i in range(129))),)),
            "129 devices in a slice, at most 128",
        ),
        (Pool("n1", (SliceContent((device(),), (counter_set(m="1"),)),)), "slices of their own"),
        (
            Pool("n1", (SliceContent((), tuple(counter_set(f"s{i}", m="1") for i in range(9))),)),
            "9 counter sets in a slice, at most 8",
        ),
        (attribute(string="x" * 65), "65 bytes, at most 64"),
        (attribute(string="ü" * 33), "66 bytes"),
        (attribute(version="535.104"), "semantic version"),
        (attribute(version="580.95.05"), "semantic version"),
        (attribute(version="v1.2.3"), "semantic version"),
        (attribute(), "exactly one of"),
        (attribute(int=1, string="a"), "exactly one of"),
        (attribute(float=1.5), "exactly one of"),
        (attribute(int=True), "not of type int"),
        (attribute(int=2**63), "64 bits"),
        (attribute(bool=1), "not of type bool"),
        (attribute(string=1), "is not a string"),
        (attribute(ints=[]), "without values"),
        (attribute("a-b", int=1), "'a-b': a name is a C identifier"),
        (attribute("a" * 33, int=1), "C identifier"),
        (attribute("A.b/c", int=1), "C identifier"),
        (attribute("/c", int=1), "C identifier"),
        (
            of(device(attributes={"a": {"int": 1}, "gpu.example.com/a": {"int": 1}})),
            "with and without the driver's domain",
        ),
        (
            of(device(attributes={f"a{i}": {"int": i} for i in range(33)})),
            "33 attributes and capacities, at most 32",
        ),
        (of(device(attributes={"a": {"ints": list(range(49))}})), "49 attribute values"),
        (of(sized("80GB")), "'80GB' is not a quantity"),
        (of(sized(policy=RANGE, many=False)), "allowMultipleAllocations"),
        (of(sized(policy={"validRange": {"min": "1Gi"}})), "min and default"),
        (
            of(sized(policy={"default": "8Gi", "validRange": {"min": "1Gi"}})),
            "default is more than value",
        ),
        (of(sized(policy={"default": "8Gi"})), "default is more than value"),
        (of(sized(policy={"default": "1Gi", "validRange": {"min": "2Gi"}})), "min <= default"),
        (
            of(sized(policy={"default": "1.5Gi", "validRange": {"min": "1Gi", "step": "1Gi"}})),
            "multiple of step",
        ),
        (
            of(sized(policy={"default": "1Gi", "validRange": {"min": "1Gi", "step": "4Gi"}})),
            "min + step",
        ),
        (of(sized(policy=RANGE | {"validValues": ["2Gi"]})), "exclude each other"),
        (of(sized(policy={"default": "3Gi", "validValues": ["1Gi", "2Gi"]})), "one of them"),
        (of(sized(policy={"default": "1Gi", "validValues": ["2Gi", "1Gi"]})), "ascend"),
        (
            of(sized(policy={"default": "1", "validValues": [str(i) for i in range(11)]})),
            "11 validValues",
        ),
        (of(device(consumesCounters=consuming(set=["m"]))), "'set', which the pool does not have"),
        (
            of(device(consumesCounters=consuming(set=["x"])), counters=[counter_set(m="1")]),
            "counter 'x' of 'set', which the pool does not have",
        ),
        (
            of(
                device(consumesCounters=consuming(a=["m"], b=["m"], c=["m"])),
                counters=[counter_set(name, m="1") for name in "abc"],
            ),
            "consumes 3 counter sets, at most 2",
        ),
        (
            of(device(consumesCounters=consuming(set=[])), counters=[counter_set(m="1")]),
            "consumes 0 counters",
        ),
        (
            of(device(consumesCounters=consuming(set=["m"]) * 2), counters=[counter_set(m="1")]),
            "'set' more than once",
        ),
        (
            of(counters=[counter_set(m="1"), counter_set(m="1")]),
            "counter set 'set' is there more than once",
        ),
        (of(counters=[counter_set()]), "has 0 counters"),
        (of(counters=[counter_set("S", m="1")]), "not a DNS label"),
        (of(counters=[counter_set(M="1")]), "counter 'M'"),
        (of(device(taints=[{"key": "k", "effect": "No"}])), "effect 'No'"),
        (of(device(taints=[{"effect": "None"}])), "not a label name"),
        (of(device(taints=[{"key": "k", "value": "a b", "effect": "None"}])), "not a label value"),
        (
            of(device(taints=[{"key": f"k{i}", "effect": "None"} for i in range(17)])),
            "17 taints, at most 16",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused_is_said_before(pool, expected):
    problems = validate_pool(pool, "gpu.example.com")

    assert any(expected in problem for problem in problems), problems


def test_everything_that_is_wrong_is_said_at_once():
    wrong = of(
        device("A", attributes={"a": {}, "v": {"version": "1"}}),
        device("b", capacity={"m": {"value": "x"}}),
    )

    assert len(validate_pool(wrong)) == 4

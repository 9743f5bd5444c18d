"""Which pods that name resources can never be scheduled: what is told, and what is not."""

from dataclasses import replace

import pytest

from dra_driver.cli.doctor.scheduling.pending_pods import (
    PodVerdict,
    asks_for_gpus,
    judge_pods,
    of_pods,
    to_be_had,
)
from dra_driver.cli.findings import Level
from tests.cli.scheduling import DRIVER, OURS, A, device_class, published, slices
from tests.plan.mig.boards import dynamic, mig_gpu

IMPLICIT = "deviceclass.resource.kubernetes.io/"


def partitions(profile):
    expression = f"{OURS} && {A}.type == 'mig' && {A}.profile == '{profile}'"
    name = f"mig-{profile.replace('.', '-')}.{DRIVER}"
    return device_class(name, expression, resource=f"nvidia.com/mig-{profile}")


CLASSES = (
    device_class(DRIVER, f"{OURS} && {A}.type == 'gpu'", resource="nvidia.com/gpu"),
    device_class(f"any.{DRIVER}", OURS),
    device_class("nic", "device.driver == 'nic.example'", resource="nvidia.com/nic"),
    partitions("1g.5gb"),
    partitions("3g.20gb"),
)


def published_node(*gpus, classes=CLASSES, **rules):
    """Two GPUs on a node, unless *gpus* are there."""
    return published(slices(*gpus, **rules), classes=classes)


def a100():
    """In partitions."""
    return published_node(mig_gpu(on=True), rules=dynamic())


def container(name="main", **amounts):
    return {"name": name, "resources": {"limits": {k: str(v) for k, v in amounts.items()}}}


def pod(*containers, name="a", **spec):
    return {
        "metadata": {"namespace": "team-a", "name": name},
        "spec": {"containers": list(containers), **spec},
    }


def asking(resource, count=1):
    return pod(container(**{resource: count}))


def why(*pods, on=None, plugins=()):
    """Why the pods can never be scheduled; empty: they may be."""
    return "; ".join(judge_pods(pods, on or published_node(), plugins).problems)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(asking("nvidia.com/gpu", 2), id="all GPUs of the node"),
        pytest.param(asking(f"{IMPLICIT}{DRIVER}"), id="a class by its own name"),
        pytest.param(asking("nvidia.com/nic", 9), id="a class of another driver's"),
        pytest.param(asking("example.com/fpga"), id="nobody's resource that is no GPU"),
        pytest.param(asking("nvidia.com/hostdev"), id="NVIDIA's, but no GPU"),
        pytest.param(asking(f"{IMPLICIT}nic.example"), id="a class that another driver could have"),
    ],
)
def test_what_may_be_served_or_is_not_for_us_is_not_told(given):
    assert why(given) == ""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param(
            asking("nvidia.com/gpu", 3),
            "container main, nvidia.com/gpu: asks for 3, but no node has more than 2 such (n1)",
            id="more than a node has",
        ),
        pytest.param(
            asking("nvidia.com/mig-1g.5gb"),
            "container main, nvidia.com/mig-1g.5gb: no node publishes a device that DeviceClass "
            f"mig-1g-5gb.{DRIVER} selects; there are devices of type gpu, gpu-monitor",
            id="nobody offers partitions",
        ),
        pytest.param(
            asking("nvidia.com/mig-1g.99gb"),
            "container main, nvidia.com/mig-1g.99gb: no DeviceClass has it as its "
            "extendedResourceName, and no node offers it",
            id="no class has the name",
        ),
        pytest.param(
            asking("nvidia.com/gpu.shared"),
            "container main, nvidia.com/gpu.shared: no DeviceClass has it as its "
            "extendedResourceName, and no node offers it",
            id="no class for fractions",
        ),
        pytest.param(
            asking(f"{IMPLICIT}mig-9g.{DRIVER}"),
            f"container main, {IMPLICIT}mig-9g.{DRIVER}: there is no DeviceClass mig-9g.{DRIVER}",
            id="no class of ours has that name",
        ),
    ],
)
def test_what_no_node_has_is_told_with_container_and_resource(given, expected):
    assert why(given) == expected


def test_what_a_device_plugin_offers_somewhere_is_its_business():
    requested = [asking("nvidia.com/gpu", 99), asking("nvidia.com/mig-1g.99gb")]
    plugins = {"nvidia.com/gpu", "nvidia.com/mig-1g.99gb"}

    verdict = judge_pods(requested, published_node(), plugins)

    assert verdict == PodVerdict(0, {}, of_plugins=2)
    (finding,) = of_pods(verdict, published_node())
    assert finding.message.startswith("2 wait for what a device plugin offers")


def test_partitions_that_do_not_fit_on_one_board_together_are_told():
    both = pod(container("a", **{"nvidia.com/mig-3g.20gb": 2}), container("b"))
    more = pod(
        container("a", **{"nvidia.com/mig-3g.20gb": 2}),
        container("b", **{"nvidia.com/mig-1g.5gb": 1}),
    )

    assert why(both, on=a100()) == ""
    assert why(more, on=a100()).startswith("its containers together: on no node can it have all")


def test_pods_that_wait_for_the_same_reason_are_told_together():
    same = [pod(container(**{"nvidia.com/gpu": 3}), name=name) for name in "ba"]

    verdict = judge_pods([*same, asking("nvidia.com/gpu")], published_node(), ())

    assert verdict.judged == 3
    assert list(verdict.problems.values()) == [("team-a/a", "team-a/b")]


class Counted(tuple):
    """Devices that know how often somebody went through them."""

    looks = 0

    def __iter__(self):
        self.looks += 1
        return super().__iter__()


def test_pods_that_ask_for_the_same_are_judged_once():
    def looks(number):
        devices = Counted(published_node().devices)
        many = [
            pod(container(**{"nvidia.com/gpu": 3, "example.com/fpga": 1}), name=f"web-{n}")
            for n in range(number)
        ]
        verdict = judge_pods(many, replace(published_node(), devices=devices), ())
        assert verdict.judged == number
        assert [len(pods) for pods in verdict.problems.values()] == [number]
        return devices.looks

    assert looks(1) > 0
    assert looks(50) == looks(1)


@pytest.mark.parametrize(
    ("given", "asks"),
    [
        pytest.param(asking("nvidia.com/gpu"), True, id="it waits"),
        pytest.param(pod(container(**{"nvidia.com/gpu": 1}), nodeName="n1"), False, id="it has"),
        pytest.param(pod(container(cpu=1)), False, id="for nothing"),
    ],
)
def test_pods_that_wait_for_a_node_and_ask_for_something_are_looked_at(given, asks):
    assert asks_for_gpus(given) is asks
    gone = {**given, "metadata": {**given["metadata"], "deletionTimestamp": "2026-01-01"}}
    assert not asks_for_gpus(gone)


def test_what_there_is_to_be_had_are_the_names_that_lead_to_devices():
    assert list(to_be_had(published_node())) == ["nvidia.com/gpu"]
    assert list(to_be_had(a100())) == ["nvidia.com/mig-1g.5gb", "nvidia.com/mig-3g.20gb"]


def pod_findings(given, on):
    return list(of_pods(judge_pods([given], on, ()), on))


def test_the_mend_names_what_there_is():
    (finding,) = pod_findings(asking("nvidia.com/mig-1g.99gb"), a100())

    assert finding.level is Level.WARN
    assert finding.message.startswith(
        "team-a/a can never be scheduled: container main, nvidia.com/mig"
    )
    assert "what there is (nvidia.com/mig-1g.5gb, nvidia.com/mig-3g.20gb)" in finding.remedy


def test_where_no_class_names_a_resource_the_mend_says_what_that_takes():
    plain = [
        {**device_class, "spec": {"selectors": device_class["spec"]["selectors"]}}
        for device_class in CLASSES
    ]

    (finding,) = pod_findings(asking("nvidia.com/gpu"), published_node(classes=plain))

    assert "no DeviceClass has it" in finding.message
    assert "DRAExtendedResource" in finding.remedy and "spec.resourceClaims" in finding.remedy


def test_where_nothing_is_published_pods_are_counted():
    empty = published(classes=CLASSES)

    (finding,) = pod_findings(asking("nvidia.com/gpu"), empty)

    assert (finding.level, finding.message) == (
        Level.WARN,
        f"1 wait, and no node publishes a device of {DRIVER}",
    )


def test_reasons_are_told_as_far_as_people_read():
    problems = {f"reason {number:02}": (f"team-a/{number}",) for number in range(25)}

    *_, last = of_pods(PodVerdict(25, problems), published_node())

    assert last.message == "5 more reasons"


def test_pods_of_which_nothing_is_known_are_counted():
    (finding,) = pod_findings(asking("nvidia.com/gpu"), published_node())

    assert (finding.level, finding.message) == (
        Level.OK,
        "1 wait for a GPU, and nothing is known that they could not get",
    )

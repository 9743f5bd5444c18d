"""A claim whose containers use one GPU by requests of their own: each has its own limits there."""

from dataclasses import replace

import pytest

from cdi.encoding import to_json
from cdi.spec import CdiDevice, ContainerEdits, Spec
from dra_driver.cli.claims.run import report_document
from dra_driver.cli.mps_usage import MpsReport
from dra_driver.k8s.claims import Pod, PodUid, PreparedDevice, ShareId
from dra_driver.model.mps import MpsClient, MpsNamespaceName, MpsServer, MpsStatus, ServedNamespace
from dra_driver.model.records import ClaimRecord
from dra_driver.model.steps import ServeMpsNamespace
from dra_driver.plan.prepare.cdi_spec import mps_edits
from tests.builders import holding, ref
from tests.cli import mps
from tests.cli.mps import GIB, GPU, SERVER, SLICEABLE, namespace

KIND = "k8s.gpu.nvidia.com/claim"
POD = Pod("pod", PodUid("pod"))
BIG = replace(namespace("big", percent=60, memory=20 * GIB), claim=ref("a").uid)
SMALL = replace(namespace("small", percent=10, memory=5 * GIB), claim=ref("a").uid)
NAMES = ("big", "small")


def share_holding(share, namespaces=(BIG, SMALL)):
    namespace = namespaces[NAMES.index(share)]
    memory = f"{namespace.memory_bytes[0] // GIB}Gi"
    consumed = (("cores", str(namespace.percent)), ("memory", memory), ("shares", "1"))
    return holding("a", share=ShareId(share), consumed=consumed, shape=SLICEABLE)


def served(namespace, protocol=3):
    """With protocol 2 all namespaces of a server have one directory."""
    return ServedNamespace(
        namespace, protocol, f"/run/mps/{namespace.name}" if protocol > 2 else "/run/mps/pipe"
    )


def edits(namespace, name):
    return ContainerEdits(env=(f"REQUEST={name}",)) + mps_edits(namespace)


def claim(namespaces=(BIG, SMALL), protocol=3, completed=True):
    """Two shares of one GPU, each in a namespace of its own. The steps are the other way round."""
    begun = ClaimRecord(
        ref("a"),
        tuple(share_holding(name, namespaces) for name in NAMES),
        steps=tuple(ServeMpsNamespace(namespace) for namespace in reversed(namespaces)),
        pods=(POD,),
    )
    if not completed:
        return begun
    devices = [
        CdiDevice(name, container_edits=edits(served(namespace, protocol), name))
        for name, namespace in zip(NAMES, namespaces, strict=True)
    ]
    prepared = tuple(
        PreparedDevice((name,), "n1", GPU.name, (f"{KIND}={name}",), ShareId(name))
        for name in NAMES
    )
    return replace(begun, prepared=prepared, spec=to_json(Spec(KIND, devices=tuple(devices))))


def status(*clients, namespaces=(BIG, SMALL), protocol=3):
    served_namespaces = tuple(served(namespace, protocol) for namespace in namespaces)
    mps_clients = tuple(
        MpsClient(pid, MpsNamespaceName(f"c_{name}") if name else None) for pid, name in clients
    )
    return MpsStatus(
        (
            MpsServer(
                SERVER,
                (GPU.uuid,),
                protocol,
                True,
                namespaces=served_namespaces,
                clients=mps_clients,
            ),
        )
    )


def report(record, now=None, **fields):
    return mps.report(record, answer=MpsReport(now, **fields))


def lines(record, now=None, output="bars", **fields):
    return mps.report_lines(record, answer=MpsReport(now, **fields), output=output)


def mps_of_devices(*args, **fields):
    """The ``mps`` of both devices: percent, limit and clients."""
    (claim_document,) = report_document(report(*args, **fields))["claims"]
    return [
        device["mps"]
        and (device["mps"]["percent"], device["mps"]["memoryLimitBytes"], device["mps"]["clients"])
        for device in claim_document["devices"]
    ]


def test_each_device_has_the_limits_and_clients_of_its_own_namespace():
    now = status((7, "big"), (8, "small"), (9, "small"))

    assert mps_of_devices(claim(), now) == [(60, 20 * GIB, [7]), (10, 5 * GIB, [8, 9])]


def test_the_bars_have_a_line_for_each():
    now = status((7, "big"), (8, "small"), (9, "small"))

    _, big, small, _ = lines(claim(), now, used={GPU.uuid: {7: GIB, 8: GIB, 9: 2 * GIB}})

    assert "MPS 60 %, limit 20.0 GiB, 1 client uses 1.0 GiB" in big
    assert "MPS 10 %, limit 5.0 GiB, 2 clients use 3.0 GiB" in small


@pytest.mark.parametrize("protocol", [2, 3])
def test_the_limits_of_each_are_told_without_the_agent(protocol):
    assert mps_of_devices(claim(protocol=protocol)) == [
        (60, 20 * GIB, None),
        (10, 5 * GIB, None),
    ]


def test_namespaces_with_the_same_limits_are_told_apart_by_the_way_that_leads_to_them():
    twins = (replace(BIG, percent=30), replace(BIG, name=SMALL.name, percent=30))
    now = status((7, "big"), (8, "small"), namespaces=twins)

    assert mps_of_devices(claim(twins), now) == [(30, 20 * GIB, [7]), (30, 20 * GIB, [8])]


def test_with_protocol_2_clients_of_a_pod_with_both_namespaces_are_known_of_neither():
    now = status((7, None), protocol=2)
    usages = mps_of_devices(claim(protocol=2), now, pods={7: POD.uid})

    assert usages == [(60, 20 * GIB, None), (10, 5 * GIB, None)]


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(claim(completed=False), id="it is not prepared yet"),
        pytest.param(replace(claim(), spec="{}"), id="its CDI file says nothing"),
        pytest.param(
            replace(claim(), spec=claim((replace(BIG, percent=8), replace(SMALL, percent=9))).spec),
            id="its CDI file says something else",
        ),
    ],
)
def test_where_nobody_can_tell_which_device_is_in_which_namespace_both_are_told(record):
    assert mps_of_devices(record) == [None, None]
    _, *both = lines(record)
    for line in both[:2]:
        assert "MPS 10 %, limit 5.0 GiB or 60 %, limit 20.0 GiB" in line
    (claim_document,) = report_document(report(record))["claims"]
    assert [
        (namespace["name"], namespace["gpu"], namespace["percent"])
        for namespace in claim_document["mpsNamespaces"]
    ] == [
        ("c_small", GPU.uuid, 10),
        ("c_big", GPU.uuid, 60),
    ]


def test_the_namespaces_of_a_claim_have_what_devices_have():
    (claim_document,) = report_document(report(claim(), status((7, "big"))))["claims"]

    mps = [device["mps"] for device in claim_document["devices"]]
    assert [
        {k: v for k, v in namespace.items() if k not in ("name", "gpu")}
        for namespace in claim_document["mpsNamespaces"]
    ] == mps[::-1]


def test_the_table_has_both_also_where_their_words_are_the_same():
    twins = (replace(BIG, percent=30), replace(BIG, name=SMALL.name, percent=30))
    now = status((7, "big"), (8, "small"), namespaces=twins)

    _, row, _ = lines(claim(twins), now, output="table")

    assert row.endswith("30 %, limit 20.0 GiB, 1 client; 30 %, limit 20.0 GiB, 1 client")
    _, row = lines(claim(), output="table")
    assert row.endswith("10 %, limit 5.0 GiB; 60 %, limit 20.0 GiB")


def test_one_namespace_that_the_agent_does_not_serve_is_told_of_it_alone():
    now = status((7, "big"), namespaces=(BIG,))

    _, big, small, _ = lines(claim(), now)

    assert "1 client" in big and "not served by the agent" not in big
    assert "MPS 10 %, limit 5.0 GiB, not served by the agent" in small

"""Who holds what on this node, read from the ledger by a process that changes nothing."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from dra_driver.k8s.claims import Pod, PodUid, PreparedDevice
from dra_driver.kubeletplugin.device_plugin.resources import DeviceId, ResourceName
from dra_driver.model.gpus import DeviceName, GpuUuid
from dra_driver.model.offer import AdminAccess, Fractional
from dra_driver.model.profiles import GuardPolicy, GuardRules
from dra_driver.model.records import ClaimMemoryLimit, ClaimRecord, DeviceAllocation, Holding
from dra_driver.model.steps import SetTimeSlice, TimeSliceInterval
from dra_driver.node.cgroups.procfs import boot_id
from dra_driver.node.state.ledger import Ledger
from dra_driver.sim.node_spec import node_file, read_node
from tests.builders import POOL, ref
from tests.fakes.simulated import h100
from tests.fakes.user import locked_out

BOOT = boot_id(Path("/"))
GIB = 1024**3
TOTAL = 81559 * 1024**2
UUIDS = [GpuUuid(str(gpu.uuid)) for gpu in read_node(node_file("h100x8")).gpus]
UUID = UUIDS[0]
SLICEABLE = Fractional(TOTAL, GIB, 1024**2, shares=48)


def record(name: str, *devices: str, completed: bool = True, **fields) -> ClaimRecord:
    claim = ref(name)
    holdings = tuple(
        Holding(claim, DeviceName(device), UUIDS[int(device[4])], **fields) for device in devices
    )
    cdi_ids = tuple(f"k8s.gpu.nvidia.com/claim={claim.uid}-{device}" for device in devices)
    prepared = (PreparedDevice(("gpu",), POOL, devices[0], cdi_ids),)
    return ClaimRecord(
        claim,
        holdings,
        prepared=prepared if completed else None,
        spec="{}" if completed else None,
    )


def fraction(name: str, memory: str, device="gpu-0", **fields) -> ClaimRecord:
    claim = ref(name)
    holding = Holding(
        claim,
        DeviceName(device),
        consumed=(("cores", "25"), ("memory", memory), ("shares", "1")),
        gpu=UUIDS[int(device[4])],
        shape=SLICEABLE,
        limit=ClaimMemoryLimit(10 * GIB, GuardRules(GuardPolicy.KILL, 10.0)),
    )
    steps = (SetTimeSlice(UUID, TimeSliceInterval.LONG),)
    return ClaimRecord(
        claim, (holding,), steps=steps, pods=(Pod("train-0", PodUid("p")),), **fields
    )


@pytest.fixture
def state(tmp_path):
    return tmp_path / "state"


@pytest.fixture
def ledger(state):
    return Ledger(state / "claims", BOOT)


@pytest.fixture
def claims(type_in, state, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    where = ("--state-dir", state, "--sim", "h100x8", "--mps-socket", "")
    return lambda *words: type_in("claims", *where, *words)


def test_a_node_that_holds_nothing_shows_its_free_gpus_and_where_it_looked(claims, state):
    answer = claims()

    *gpus, last = answer.out.splitlines()
    assert answer.code == 0
    assert len(gpus) == 8
    assert all(line.endswith("]  all 79.6 GiB free") for line in gpus)
    assert last == f"no claim is prepared on this node (ledger: {state / 'claims'})"
    assert not state.exists(), "asking makes nothing"


def test_from_the_ledger_alone_there_is_nothing_to_show_of_free_gpus(claims, state):
    answer = claims("--ledger-only")

    assert answer.out == f"no claim is prepared on this node (ledger: {state / 'claims'})\n"


def test_each_gpu_has_its_bar_and_its_claims_below(claims, ledger):
    ledger.write(record("training", "gpu-1", "gpu-2"))
    ledger.write(record("monitor", "gpu-1-mon", admin=True, shape=AdminAccess()))
    ledger.write(fraction("notebook", "10Gi"))

    lines = claims().out.splitlines()

    assert [line.split()[0] for line in lines if line.startswith("gpu-")] == [
        f"gpu-{minor}" for minor in range(8)
    ]
    first, below = lines[:2]
    assert first.endswith("10.0 of 79.6 GiB held, 69.6 free, 25 % of the cores, 1 of 48 shares")
    assert "default/notebook" in below
    assert "interval Long" in below
    assert "pod train-0" in below
    assert ["default/monitor" in line or "default/training" in line for line in lines[2:]] == [
        False,
        True,
        True,
        False,
        True,
        *[False] * 5,
    ]


def test_a_bar_is_drawn_without_colours_where_nobody_looks(claims, ledger):
    ledger.write(fraction("notebook", "10Gi"))

    answer = claims()

    assert "[█" in answer.out, "what catches the output here is UTF-8"
    assert "\x1b" not in answer.out


def test_where_the_gpus_cannot_be_seen_the_ledger_still_answers(type_in, state, ledger, tmp_path):
    ledger.write(fraction("notebook", "10Gi"))
    broken = tmp_path / "node.yaml"
    broken.write_text(yaml.safe_dump({"gpus": [h100("1b")], "driver": "not-loaded"}))

    answer = type_in("claims", "--state-dir", state, "--sim", broken)

    assert answer.code == 0
    head, below, gone = answer.out.splitlines()
    assert "10.0 of 79.6 GiB held" in head
    assert "default/notebook" in below
    assert gone.startswith("not offered: all GPUs: ")


def test_as_a_table_claims_are_listed_with_their_devices_and_how_far_they_are(claims, ledger):
    ledger.write(record("training", "gpu-0", "gpu-1"))
    ledger.write(record("monitor", "gpu-0", admin=True))
    ledger.write(record("starting", "gpu-2", completed=False))
    ledger.write(record("twice", "gpu-3", "gpu-3"))

    head, *rows = (line.split("   ") for line in claims("-o", "table").out.splitlines())

    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert [cell.strip() for cell in head if cell.strip()][:2] == ["NAMESPACE", "CLAIM"]
    assert cells == [
        ["default", "monitor", "gpu-0 (admin)", "prepared", "uid-monitor"],
        ["default", "starting", "gpu-2", "started", "uid-starting"],
        ["default", "training", "gpu-0,gpu-1", "prepared", "uid-training"],
        ["default", "twice", "gpu-3 x2", "prepared", "uid-twice"],
    ]


def test_as_json_it_has_what_a_program_asks_for(claims, ledger):
    ledger.write(fraction("notebook", "10Gi"))

    document = json.loads(claims("-o", "json").out)

    assert document["gpus"][0] | {"uuid": "", "product": ""} == {
        "name": "gpu-0",
        "uuid": "",
        "product": "",
        "memoryBytes": TOTAL,
        "heldBytes": 10 * GIB,
        "freeBytes": TOTAL - 10 * GIB,
        "coresHeld": 25,
        "sharesHeld": 1,
        "shares": 48,
        "claims": ["default/notebook"],
        "partitions": [],
    }
    assert len(document["gpus"]) == 8
    assert document["claims"] == [
        {
            "namespace": "default",
            "name": "notebook",
            "uid": "uid-notebook",
            "state": "started",
            "pods": ["train-0"],
            "allocation": None,
            "devices": [
                {
                    "name": "gpu-0",
                    "gpu": UUID,
                    "share": None,
                    "adminAccess": False,
                    "shape": "sliceable",
                    "whole": False,
                    "memoryBytes": 10 * GIB,
                    "cores": 25,
                    "shares": 1,
                    "partition": None,
                    "interval": "Long",
                    "limit": {
                        "memoryBytes": 10 * GIB,
                        "strict": False,
                        "guard": "Kill",
                        "graceSeconds": 10.0,
                    },
                    "mps": None,
                }
            ],
            "mpsNamespaces": [],
            "cdiDevices": [],
        }
    ]
    assert (document["unreadable"], document["notOffered"]) == ([], [])
    assert document["mpsServers"] == []


def test_a_whole_gpu_in_json_has_no_amounts_of_its_own(claims, ledger):
    ledger.write(record("training", "gpu-0"))

    document = json.loads(claims("-o", "json").out)

    (device,) = document["claims"][0]["devices"]
    assert (device["whole"], device["memoryBytes"], device["limit"]) == (True, None, None)
    held = document["gpus"][0]
    assert (held["heldBytes"], held["freeBytes"], held["coresHeld"]) == (TOTAL, 0, 100)
    assert document["claims"][0]["cdiDevices"] == ["k8s.gpu.nvidia.com/claim=uid-training-gpu-0"]


def test_from_the_ledger_alone_json_says_what_it_does_not_know(claims, ledger):
    ledger.write(record("training", "gpu-3"))

    (gpu,) = json.loads(claims("-o", "json", "--ledger-only").out)["gpus"]

    assert gpu == {
        "name": "gpu-3",
        "uuid": UUIDS[3],
        "product": None,
        "memoryBytes": None,
        "heldBytes": None,
        "freeBytes": 0,
        "coresHeld": 100,
        "sharesHeld": 1,
        "shares": None,
        "claims": ["default/training"],
        "partitions": [],
    }


@pytest.mark.parametrize(
    ("text", "held"),
    [
        pytest.param("{", [], id="nothing of it"),
        pytest.param(
            '{"holdings": [{"device":"gpu-2","gpu":"GPU-2"},{"device":"gpu-1","gpu":"GPU-1"}], "co',
            ["gpu-1", "gpu-2"],
            id="its devices",
        ),
    ],
)
def test_a_record_that_cannot_be_read_is_shown_with_what_it_may_hold_and_left_where_it_is(
    claims, ledger, state, text, held
):
    ledger.write(record("training", "gpu-0"))
    damaged = state / "claims" / BOOT / "0b7e.json"
    damaged.write_text(text)

    for form in ("bars", "table"):
        line = claims("-o", form).out.splitlines()[-1]
        assert line.startswith(f"unreadable: {damaged}: it is not JSON")
        assert line.endswith(f"; its claim may hold {', '.join(held) or 'any GPU'}")
    (unreadable,) = json.loads(claims("-o", "json").out)["unreadable"]
    assert (unreadable["uid"], unreadable["path"]) == ("0b7e", str(damaged))
    assert unreadable["mayHold"] == held
    assert damaged.read_text() == text


@pytest.mark.parametrize(
    ("text", "uncertain"),
    [
        pytest.param("{", range(1, 8), id="any GPU but one that is all held"),
        pytest.param(
            f'{{"holdings": [{{"device":"gpu-1","gpu":"{UUIDS[1]}"}}], "co', [1], id="one in parts"
        ),
        pytest.param(
            f'{{"holdings": [{{"device":"gpu-2-mig-1g10gb-19-0","gpu":"{UUIDS[2]}"}}], "co',
            [2],
            id="a free one",
        ),
    ],
)
def test_what_a_damaged_record_may_hold_is_not_shown_as_free(
    claims, ledger, state, text, uncertain
):
    ledger.write(record("training", "gpu-0"))
    ledger.write(fraction("notebook", "10Gi", device="gpu-1"))
    (state / "claims" / BOOT / "0b7e.json").write_text(text)

    heads = [line for line in claims().out.splitlines() if line.startswith("gpu-")]
    gpus = json.loads(claims("-o", "json").out)["gpus"]

    for minor, (head, gpu) in enumerate(zip(heads, gpus, strict=True)):
        assert head.endswith("it is not known what is free") is (minor in uncertain)
        assert ("·" in head or "free," in head) is (minor > 0 and minor not in uncertain)
        assert (gpu["freeBytes"] is None) is (minor in uncertain)
    assert ("█??" in heads[1] and "]  10.0 GiB held, it is" in heads[1]) is (1 in uncertain)


def test_what_an_earlier_boot_held_is_not_held(claims, state):
    Ledger(state / "claims", "an-earlier-boot").write(record("training", "gpu-0"))

    assert "no claim is prepared" in claims().out


def test_a_simulated_node_that_is_none_is_a_wrong_question(type_in, state):
    assert type_in("claims", "--state-dir", state, "--sim", "h100x9").code == 2


@pytest.mark.parametrize("mode", [0o000, 0o111], ids=["not entered", "entered only"])
@pytest.mark.parametrize("words", [(), ("--ledger-only",), ("-o", "table")], ids=str)
def test_who_may_not_read_the_ledger_is_told_so_and_not_that_it_is_empty(
    type_in, public, mode, words
):
    Ledger(public / "claims", BOOT).write(fraction("notebook", "10Gi"))
    ask = ("claims", "--state-dir", public, "--sim", "h100x8", *words)
    assert "notebook" in type_in(*ask).out

    with locked_out(public / "claims" / BOOT, mode):
        answer = type_in(*ask)

    assert (answer.code, answer.out) == (1, "")
    ledger = public / "claims" / BOOT
    message = answer.err.splitlines()[-1]
    assert message.startswith(f"dra-driver: cannot read the ledger in {ledger}: ")
    assert message.endswith("; ask as root, or give another --state-dir")


def test_a_file_where_the_ledger_should_be_is_no_empty_ledger(claims, state):
    state.mkdir()
    (state / "claims").write_text("")

    answer = claims()

    assert (answer.code, answer.out) == (1, "")
    assert "remove the file that stands where the directory should be" in answer.err


def test_what_a_container_has_by_the_device_plugin_api_is_shown_with_its_pod(claims, ledger):
    given = DeviceAllocation(ResourceName("nvidia.com/gpu"), (DeviceId(UUID),))
    plain = record("dp-0", "gpu-0")
    ledger.write(replace(plain, allocation=given, pods=(Pod("train", PodUid("p")),)))

    line = next(line for line in claims().out.splitlines() if "nvidia.com/gpu" in line)
    assert line.split() == ["█", "nvidia.com/gpu", "all", "of", "it", "pod", "default/train"]
    row = claims("-o", "table").out.splitlines()[1].split()
    assert row[:4] == ["default", "nvidia.com/gpu", "gpu-0", "prepared"]
    (known,) = json.loads(claims("-o", "json").out)["claims"]
    assert known["allocation"] == {"resource": "nvidia.com/gpu", "ids": [UUID]}
    assert known["pods"] == ["train"]

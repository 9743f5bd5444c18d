"""Who holds what on this node, read from the ledger by a process that changes nothing."""

import json
from pathlib import Path

import pytest

from dra_driver.kubeletplugin.claims import PreparedDevice
from dra_driver.model.devices import DeviceName
from dra_driver.model.holdings import Holding, Record
from dra_driver.node.boot import boot_id
from dra_driver.node.ledger import Ledger
from tests.fakes.values import POOL, ref

BOOT = boot_id(Path("/"))


def record(name: str, *devices: str, completed: bool = True, admin: bool = False) -> Record:
    claim = ref(name)
    holdings = tuple(Holding(claim, DeviceName(device), admin=admin) for device in devices)
    cdi_ids = tuple(f"k8s.gpu.nvidia.com/claim={claim.uid}-{device}" for device in devices)
    prepared = (PreparedDevice(("gpu",), POOL, devices[0], cdi_ids),)
    return Record(claim, holdings, (), prepared if completed else None, "{}" if completed else None)


@pytest.fixture
def state(tmp_path):
    return tmp_path / "state"


@pytest.fixture
def ledger(state):
    return Ledger(state / "claims", BOOT)


@pytest.fixture
def claims(type_in, state):
    return lambda *words: type_in("claims", "--state-dir", state, *words)


def test_a_node_that_holds_nothing_says_so_and_where_it_looked(claims, state):
    answer = claims()

    assert answer.code == 0
    assert answer.out == (f"no claim is prepared on this node (ledger: {state / 'claims'})\n")
    assert not state.exists(), "asking makes nothing"


def test_claims_are_listed_with_their_devices_and_how_far_they_are(claims, ledger):
    ledger.write(record("training", "gpu-0", "gpu-1"))
    ledger.write(record("monitor", "gpu-0", admin=True))
    ledger.write(record("starting", "gpu-2", completed=False))

    head, *rows = (line.split("   ") for line in claims().out.splitlines())

    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert [cell.strip() for cell in head if cell.strip()][:2] == ["NAMESPACE", "CLAIM"]
    assert cells == [
        ["default", "monitor", "gpu-0 (admin)", "prepared", "uid-monitor"],
        ["default", "starting", "gpu-2", "started", "uid-starting"],
        ["default", "training", "gpu-0,gpu-1", "prepared", "uid-training"],
    ]


def test_as_json_it_has_what_a_program_asks_for(claims, ledger):
    ledger.write(record("training", "gpu-0"))

    assert json.loads(claims("-o", "json").out) == {
        "claims": [
            {
                "namespace": "default",
                "name": "training",
                "uid": "uid-training",
                "state": "prepared",
                "devices": [{"name": "gpu-0", "share": None, "adminAccess": False}],
                "cdiDevices": ["k8s.gpu.nvidia.com/claim=uid-training-gpu-0"],
            }
        ],
        "unreadable": [],
    }


def test_a_record_that_cannot_be_read_is_shown_with_its_reason_and_left_where_it_is(
    claims, ledger, state
):
    ledger.write(record("training", "gpu-0"))
    damaged = state / "claims" / BOOT / "0b7e.json"
    damaged.write_text("{")

    assert f"unreadable: {damaged}: it is not JSON" in claims().out
    (unreadable,) = json.loads(claims("-o", "json").out)["unreadable"]
    assert (unreadable["uid"], unreadable["path"]) == ("0b7e", str(damaged))
    assert damaged.read_text() == "{"


def test_what_an_earlier_boot_held_is_not_held(claims, state):
    Ledger(state / "claims", "an-earlier-boot").write(record("training", "gpu-0"))

    assert "no claim is prepared" in claims().out

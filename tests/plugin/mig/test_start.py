"""GPUs are partitioned on a thread of its own, which looks when one of its inputs changed."""

import contextlib
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dra_driver.base.errors import ApiServerError, Unreachable
from dra_driver.k8s.node_labels import NodeLabels
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mig_layouts import MigState
from dra_driver.model.offer import ApiFeatures
from dra_driver.model.steps import SetMigMode
from dra_driver.node.cgroups.procfs import boot_id
from dra_driver.node.state.ledger import Ledger
from dra_driver.node.state.mig_state import MigStateFile
from dra_driver.plugin.metrics import Metrics
from dra_driver.plugin.mig.start import (
    MigLooks,
    connect,
    mig_enabled_by_claims,
    on_value_change,
)
from dra_driver.plugin.publish.profiles import EffectiveProfile
from tests.builders import record
from tests.fakes.boards import HOPPER, Board, Boards, Claims
from tests.plugin.mig.reconciler import profile
from tests.waiting import eventually

DYNAMIC = profile(dynamic=True)


class FakeReconciler:
    """Looks as long as a test wants."""

    def __init__(self):
        self.may_end = threading.Event()
        self.may_end.set()
        self.looks = 0
        self.waiting = False

    def look(self):
        self.looks += 1
        assert self.may_end.wait(50)


@pytest.fixture
def reconciler():
    return FakeReconciler()


@pytest.fixture
def looks(reconciler):
    looks = MigLooks(reconciler, 3600)
    yield looks
    reconciler.may_end.set()
    looks.loop.stop()


def test_the_first_look_is_waited_for_and_others_come_when_they_are_asked_for(reconciler, looks):
    looks.start(10)
    assert reconciler.looks == 1

    looks.loop.soon()

    eventually(lambda: reconciler.looks == 2)


def test_a_look_that_takes_long_is_not_waited_for(reconciler, looks):
    reconciler.may_end.clear()
    begun = time.monotonic()

    looks.start(0.05)

    assert time.monotonic() - begun < 20


def test_a_claim_that_was_given_back_is_a_reason_only_where_something_waits(reconciler, looks):
    looks.start(10)
    looks.claim_changed()
    reconciler.waiting = True
    time.sleep(0.05)
    assert reconciler.looks == 1

    looks.claim_changed()

    eventually(lambda: reconciler.looks == 2)


def test_a_claim_that_was_given_back_may_be_deallocated_a_little_later(reconciler, looks):
    looks.start(10)
    reconciler.waiting = True
    looks.claim_changed()

    eventually(lambda: reconciler.looks == 3)


def test_only_a_label_that_is_read_is_a_reason_to_look():
    changes, answers = [], ["", "", "x", ApiServerError("away"), ApiServerError("away"), "x", "x"]

    def read():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    look = on_value_change(read, lambda: changes.append(len(answers)))
    while answers:
        look()

    assert changes == [6, 4, 3, 1]


class Away:
    """An API server that cannot be reached."""

    def list(self, *request):
        raise Unreachable("no answer")

    watch = patch = list


def parts_in_outage(tmp_path):
    """A node whose profile has partitions created for claims, and no API server."""
    api: Any = Away()
    return SimpleNamespace(
        settings=SimpleNamespace(
            mig_state=tmp_path / "mig.json",
            host_root=Path("/"),
            profiles=None,
            look_interval=3600,
        ),
        node=Boards(Board(HOPPER)),
        ledger=Ledger(tmp_path / "claims", "boot"),
        prepared_claims=Claims(),
        lease=SimpleNamespace(held=lambda seconds: contextlib.nullcontext()),
        api=api,
        labels=NodeLabels(api, "node-1"),
        profile=SimpleNamespace(current=lambda: DYNAMIC),
        effective_profile=EffectiveProfile(lambda: DYNAMIC),
        api_features=ApiFeatures,
        claims=SimpleNamespace(allocated=frozenset),
        is_newest=lambda: True,
        scan_soon=lambda: None,
        published_since=lambda since: True,
        metrics=Metrics(),
        events=None,
    )


@pytest.mark.parametrize(
    ("last", "is_dynamic"), [("", True), ("all-balanced", False), (None, False)]
)
def test_before_the_label_is_read_its_last_value_decides_whether_partitions_are_created(
    last, is_dynamic, tmp_path
):
    parts = parts_in_outage(tmp_path)
    MigStateFile(parts.settings.mig_state, boot_id(Path("/"))).write(MigState(label=last))
    with contextlib.ExitStack() as stack:
        stack.callback(parts.labels.stop)
        looks = connect(parts, stack)
        assert (parts.effective_profile.profile() is DYNAMIC) is is_dynamic
        looks.start(10)

        assert (parts.effective_profile.profile() is DYNAMIC) is is_dynamic


def test_claims_turned_on_what_they_found_off():
    gpus = [GpuUuid(f"GPU-{number}") for number in range(4)]
    steps = (
        SetMigMode(gpus[0], True, before=False),
        SetMigMode(gpus[1], True, before=True),
        SetMigMode(gpus[2], True),
        SetMigMode(gpus[3], False, before=True),
    )

    assert mig_enabled_by_claims([record("a", steps=steps)]) == {gpus[0]}

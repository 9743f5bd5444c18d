"""What doctor says of GPUs that can be partitioned, each with what to do about it."""

from dataclasses import replace
from functools import partial

import pytest

from dra_driver.base.errors import NodeError
from dra_driver.cli.doctor import mig_checks
from dra_driver.cli.findings import Level
from dra_driver.model.driver_files import DeviceFile
from dra_driver.model.gpus import GuestRestriction, Inventory, MigInfo
from dra_driver.model.steps import SetMigMode
from dra_driver.plan.mig.claims import with_lost_instances
from tests import builders
from tests.builders import gpu
from tests.cli.findings import levels
from tests.cli.mig import a100, holding, instance, unusable

ONE, THREE = instance("1g.5gb", 0, 1), instance("3g.20gb", 4, 2)


def record(name, *where, completed=True, **fields):
    partition = instance(*where) if completed else None
    of_partition = holding(name, *where, **{"instance": partition} | fields)
    return builders.record(of_partition.claim, of_partition, completed=completed)


def instance_findings(*gpus, before=(), after=None):
    """What is said of instances; the ledger has *before* and then *after*."""
    snapshots = iter([before, before if after is None else after])
    return list(mig_checks.check_mig_instances(lambda: Inventory(gpus), partial(next, snapshots)))


def files(*names, absent=()):
    def of(capabilities):
        if missing := set(capabilities) - {*names, *absent, "mig/monitor"}:
            raise NodeError(f"there is no capability {sorted(missing)[0]}")
        device_files = {name: DeviceFile(f"/dev/{name}", f"/dev/{name}", 240, 1) for name in names}
        return device_files | dict.fromkeys(absent)

    return of


def device_file_findings(*gpus, find=files()):  # noqa: B008 - it has no state
    return list(mig_checks.check_mig_device_files(lambda: Inventory(gpus), find))


def test_nothing_is_said_where_no_gpu_can_be_partitioned():
    assert list(mig_checks.check_mig_modes([gpu(0)])) == []
    assert instance_findings(gpu(0)) == device_file_findings(gpu(0)) == []


def test_no_file_is_looked_for_while_mig_mode_is_off():
    assert device_file_findings(a100(0, on=False, pending=False)) == []


def test_modes_are_one_line_while_none_waits_for_a_reset():
    (finding,) = mig_checks.check_mig_modes(
        [a100(0), a100(1, on=False, pending=False), gpu(2), a100(3)]
    )

    assert (finding.level, finding.message) == (Level.OK, "on: gpu-0, gpu-3; off: gpu-1")


def test_a_mode_that_waits_for_a_reset_says_how_to_make_one():
    first, second = mig_checks.check_mig_modes([a100(0, on=False), a100(1, pending=False)])

    assert first.level is second.level is Level.WARN
    assert first.message == "gpu-0: it is off, and goes on with the next reset of the GPU"
    assert second.message == "gpu-1: it is on, and goes off with the next reset of the GPU"
    assert first.remedy.endswith("nvidia-smi -i 0000:18:00.0 --gpu-reset")
    assert "drain the node and reboot it" in first.remedy
    assert "this driver's plugin" in first.remedy
    assert "nvidia-smi -i 0000:18:00.0 -pm 0" in first.remedy


def test_a_mode_that_waits_in_a_virtual_machine_waits_for_a_reboot():
    (finding,) = mig_checks.check_mig_modes([a100(0, on=False, fixed=GuestRestriction.MODE)])

    assert (finding.level, finding.remedy) == (Level.WARN, "drain and reboot the node")


def test_instances_are_told_apart_by_who_made_them():
    ours = record("a", "1g.5gb", 0)

    unmanaged, created = instance_findings(a100(0, ONE, THREE), before=[ours])

    assert unmanaged.level is created.level is Level.OK
    assert unmanaged.message.endswith("left as they are: gpu-0-mig-3g20gb-9-4")
    assert created.message == "created for claims: 1"


def test_an_instance_of_an_unknown_profile_is_named_all_the_same():
    bare = gpu(0, mig=MigInfo(True, True, False, (), (ONE,)))

    (unmanaged,) = instance_findings(bare)

    assert unmanaged.message.endswith("gpu-0, profile 19 at 0")


def test_an_instance_that_is_no_partition_says_how_to_mend_it():
    empty, full = instance_findings(
        a100(unusable=(unusable("3g.20gb", 4), unusable("1g.5gb", 0, cis=2, number=3)))
    )

    assert empty.level is full.level is Level.WARN
    assert empty.message.startswith(
        "gpu-0, 3g.20gb at 4: GPU instance 9 without a compute instance"
    )
    assert "-gi 9 -cci), or remove it: nvidia-smi mig" in empty.remedy
    assert full.remedy == (
        "remove it: nvidia-smi mig -i 0000:18:00.0 -gi 3 -dci, then "
        "nvidia-smi mig -i 0000:18:00.0 -gi 3 -dgi"
    )


def test_a_partition_that_vanished_under_its_claim_fails():
    failed, _ = instance_findings(a100(), before=[record("a", "1g.5gb", 0)])

    assert failed.level is Level.FAIL
    assert failed.message.startswith("claim team-a/a has gpu-0-mig-1g5gb-19-0, which is not there")
    assert "delete the pods" in failed.remedy


def test_an_instance_made_anew_where_a_claims_was_given_up_is_a_warning():
    before = record("a", "1g.5gb", 0)
    switch = SetMigMode(a100().uuid, on=True)
    after = with_lost_instances(replace(before, steps=(switch,)), before.holdings)

    warned, unmanaged = instance_findings(a100(0, ONE), before=[after])

    assert warned.level is Level.WARN
    assert warned.message.startswith("claim team-a/a had gpu-0-mig-1g5gb-19-0, which was removed")
    assert "delete the pods" in warned.remedy
    assert unmanaged.message.endswith("left as they are: gpu-0-mig-1g5gb-19-0")
    assert levels(instance_findings(a100(), before=[after])) == [Level.FAIL]
    assert instance_findings(gpu(0), before=[after]) == []


CLAIM, BEGUN = record("a", "1g.5gb", 0), record("a", "1g.5gb", 0, completed=False)
OWN = instance("1g.5gb", 0, 7)


@pytest.mark.parametrize(
    ("board", "before", "after", "expected"),
    [
        pytest.param(
            a100(0, ONE),
            [record("a", "1g.5gb", 0, instance=OWN)],
            None,
            [Level.FAIL, Level.OK],
            id="another instance in the place of the claim's",
        ),
        pytest.param(
            a100(unusable=(unusable("1g.5gb", 0),)), [], [BEGUN], [Level.OK], id="just being made"
        ),
        pytest.param(
            a100(0, ONE),
            [record("a", "1g.5gb", 0, created_for_claims=False)],
            None,
            [Level.OK],
            id="a claim that was given what was there",
        ),
        pytest.param(a100(), [CLAIM], [], [Level.OK], id="a claim that went meanwhile"),
        pytest.param(a100(), [], [CLAIM], [Level.OK], id="a claim that came meanwhile"),
        pytest.param(a100(), [BEGUN], None, [Level.OK], id="a claim that is not prepared"),
        pytest.param(
            a100(), [record("a", "1g.5gb", 0, minor=5)], None, [Level.OK], id="a GPU that is gone"
        ),
        pytest.param(
            a100(),
            [record("a", "1g.5gb", 1, admin=True, created_for_claims=False)],
            None,
            [],
            id="admin access",
        ),
    ],
)
def test_only_an_instance_that_a_prepared_claim_lost_is_missed(board, before, after, expected):
    assert levels(instance_findings(board, before=before, after=after)) == expected


GI, CI = "gpu0/mig/gi1", "gpu0/mig/gi1/ci0"


@pytest.mark.parametrize(
    ("board", "find", "message"),
    [
        pytest.param(
            a100(0, ONE), files(GI, CI, "mig/monitor"), "2 that the instances need", id="all"
        ),
        pytest.param(
            a100(0, ONE),
            files(GI, "mig/monitor", absent=[CI]),
            "2 that the instances need, 1 of them made when a claim does",
            id="one that is made when a claim needs it",
        ),
        pytest.param(a100(), files("mig/monitor"), "none is needed now", id="none"),
    ],
)
def test_every_instance_has_the_files_of_its_capabilities(board, find, message):
    (finding,) = device_file_findings(board, find=find)

    assert (finding.level, finding.message) == (Level.OK, message)


def test_a_driver_without_the_file_for_admin_access_is_no_fault():
    assert levels(device_file_findings(a100())) == [Level.OK, Level.SKIP]


def test_a_capability_without_its_file_fails_and_says_where_to_look():
    (finding,) = device_file_findings(a100(0, ONE))

    assert (finding.level, finding.message) == (Level.FAIL, f"there is no capability {GI}")
    assert "/proc/driver/nvidia/capabilities" in finding.remedy


def test_an_instance_that_goes_while_its_files_are_looked_at_is_no_fault():
    boards = iter([a100(0, ONE), a100(0, ONE), a100()])

    findings = mig_checks.check_mig_device_files(
        lambda: Inventory((next(boards),)), files("mig/monitor")
    )

    assert levels(findings) == [Level.OK]

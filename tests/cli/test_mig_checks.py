"""What doctor says of GPUs that can be cut, each with what to do about it."""

from dataclasses import replace

from dra_driver.base.errors import NodeError
from dra_driver.cli.doctor import gpu_checks
from dra_driver.cli.doctor.host_checks import LedgerSnapshot
from dra_driver.cli.findings import Level
from dra_driver.model.driver_files import DeviceFile
from dra_driver.model.gpus import GuestRestriction, Inventory, MigInfo
from dra_driver.model.steps import SetMigMode
from dra_driver.plan.mig.claims import with_lost_instances
from tests import builders
from tests.builders import gpu
from tests.cli.mig import a100, holding, instance, unusable

ONE, THREE = instance("1g.5gb", 0, 1), instance("3g.20gb", 4, 2)


def record(name, *where, completed=True, **fields):
    partition = instance(*where) if completed else None
    of_partition = holding(name, *where, **{"instance": partition} | fields)
    return builders.record(of_partition.claim, of_partition, completed=completed)


def seen(*gpus, before=(), after=None):
    """What is said of instances; the ledger has *before* and then *after*."""
    books = iter([before, before if after is None else after])
    return list(
        gpu_checks.check_mig_instances(
            lambda: Inventory(gpus),
            lambda: LedgerSnapshot({record.claim.uid: record for record in next(books)}, {}),
        )
    )


def files(*names, absent=()):
    def of(capabilities):
        if missing := set(capabilities) - {*names, *absent, "mig/monitor"}:
            raise NodeError(f"there is no capability {sorted(missing)[0]}")
        device_files = {name: DeviceFile(f"/dev/{name}", f"/dev/{name}", 240, 1) for name in names}
        return device_files | dict.fromkeys(absent)

    return of


def test_nothing_is_said_where_no_gpu_can_be_cut():
    assert list(gpu_checks.check_mig_modes([gpu(0)])) == []
    assert seen(gpu(0)) == []
    assert list(gpu_checks.check_mig_device_files(lambda: Inventory((gpu(0),)), files())) == []


def test_no_file_is_looked_for_while_mig_mode_is_off():
    off = a100(0, on=False, pending=False)

    assert list(gpu_checks.check_mig_device_files(lambda: Inventory((off,)), files())) == []


def test_modes_are_one_line_while_none_waits_for_a_reset():
    (finding,) = gpu_checks.check_mig_modes(
        [a100(0), a100(1, on=False, pending=False), gpu(2), a100(3)]
    )

    assert (finding.level, finding.message) == (Level.OK, "on: gpu-0, gpu-3; off: gpu-1")


def test_a_mode_that_waits_for_a_reset_says_how_to_make_one():
    first, second = gpu_checks.check_mig_modes([a100(0, on=False), a100(1, pending=False)])

    assert first.level is second.level is Level.WARN
    assert first.message == "gpu-0: it is off, and goes on with the next reset of the GPU"
    assert second.message == "gpu-1: it is on, and goes off with the next reset of the GPU"
    assert first.remedy.endswith("nvidia-smi -i 0000:18:00.0 --gpu-reset")
    assert "drain the node and reboot it" in first.remedy
    assert "this driver's plugin" in first.remedy
    assert "nvidia-smi -i 0000:18:00.0 -pm 0" in first.remedy


def test_a_mode_that_waits_in_a_virtual_machine_waits_for_a_reboot():
    (finding,) = gpu_checks.check_mig_modes([a100(0, on=False, fixed=GuestRestriction.MODE)])

    assert (finding.level, finding.remedy) == (Level.WARN, "drain and reboot the node")


def test_instances_are_told_apart_by_who_made_them():
    ours = record("a", "1g.5gb", 0)

    foreign, cut = seen(a100(0, ONE, THREE), before=[ours])

    assert foreign.level is cut.level is Level.OK
    assert foreign.message.endswith("left as they are: gpu-0-mig-3g20gb-9-4")
    assert cut.message == "created for claims: 1"


def test_an_instance_of_an_unknown_profile_is_named_all_the_same():
    bare = gpu(0, mig=MigInfo(True, True, False, (), (ONE,)))

    (foreign,) = seen(bare)

    assert foreign.message.endswith("gpu-0, profile 19 at 0")


def test_an_instance_that_is_no_partition_says_how_to_mend_it():
    empty, full = seen(
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


def test_an_instance_that_is_just_being_cut_is_no_trouble():
    begun = record("a", "3g.20gb", 4, completed=False)

    (finding,) = seen(a100(unusable=(unusable("3g.20gb", 4),)), before=[], after=[begun])

    assert finding.level is Level.OK


def test_a_partition_that_vanished_under_its_claim_fails():
    failed, _ = seen(a100(), before=[record("a", "1g.5gb", 0)])

    assert failed.level is Level.FAIL
    assert failed.message.startswith("claim team-a/a has gpu-0-mig-1g5gb-19-0, which is not there")
    assert "delete the pods" in failed.remedy


def test_another_instance_in_the_place_of_a_claims_is_not_its_own():
    mine, remade = instance("1g.5gb", 0, 1), instance("1g.5gb", 0, 7)

    failed, _ = seen(a100(0, remade), before=[record("a", "1g.5gb", 0, instance=mine)])

    assert failed.level is Level.FAIL


def test_an_instance_made_anew_where_a_claims_was_given_up_is_a_warning():
    before = record("a", "1g.5gb", 0)
    switch = SetMigMode(a100().uuid, on=True)
    after = with_lost_instances(replace(before, steps=(switch,)), before.holdings)

    warned, foreign = seen(a100(0, ONE), before=[after])

    assert warned.level is Level.WARN
    assert warned.message.startswith("claim team-a/a had gpu-0-mig-1g5gb-19-0, which was removed")
    assert "delete the pods" in warned.remedy
    assert foreign.message.endswith("left as they are: gpu-0-mig-1g5gb-19-0")
    assert [finding.level for finding in seen(a100(), before=[after])] == [Level.FAIL]
    assert seen(gpu(0), before=[after]) == []


def test_a_claim_that_was_given_what_was_there_is_told_nothing():
    given = record("a", "1g.5gb", 0, created_for_claims=False)

    (foreign,) = seen(a100(0, ONE), before=[given])

    assert foreign.level is Level.OK


def test_a_claim_that_came_or_went_meanwhile_says_nothing():
    claim = record("a", "1g.5gb", 0)

    assert [each.level for each in seen(a100(), before=[claim], after=[])] == [Level.OK]
    assert [each.level for each in seen(a100(), before=[], after=[claim])] == [Level.OK]


def test_nothing_vanished_that_is_not_prepared_or_is_of_a_gpu_that_is_gone():
    begun = record("a", "1g.5gb", 0, completed=False)
    elsewhere = record("b", "1g.5gb", 0, minor=5)
    watcher = record("c", "1g.5gb", 1, admin=True, created_for_claims=False)

    findings = seen(a100(), before=[begun, elsewhere, watcher])

    assert [each.level for each in findings] == [Level.OK]


def test_every_instance_has_the_files_of_its_capabilities():
    board = a100(0, ONE)
    capabilities = ("gpu0/mig/gi1", "gpu0/mig/gi1/ci0")

    (finding,) = gpu_checks.check_mig_device_files(
        lambda: Inventory((board,)), files(*capabilities, "mig/monitor")
    )

    assert (finding.level, finding.message) == (Level.OK, "2 that the instances need")


def test_a_driver_without_the_file_for_who_looks_on_is_no_fault():
    finding, absent = gpu_checks.check_mig_device_files(lambda: Inventory((a100(),)), files())

    assert (finding.level, finding.message) == (Level.OK, "none is needed now")
    assert absent.level is Level.SKIP


def test_a_capability_without_its_file_fails_and_says_where_to_look():
    (finding,) = gpu_checks.check_mig_device_files(lambda: Inventory((a100(0, ONE),)), files())

    assert finding.level is Level.FAIL
    assert finding.message == "there is no capability gpu0/mig/gi1"
    assert "/proc/driver/nvidia/capabilities" in finding.remedy


def test_a_file_that_is_made_when_a_claim_needs_it_is_no_fault():
    of = files("gpu0/mig/gi1", "mig/monitor", absent=["gpu0/mig/gi1/ci0"])
    (finding,) = gpu_checks.check_mig_device_files(lambda: Inventory((a100(0, ONE),)), of)

    assert finding.level is Level.OK
    assert finding.message == "2 that the instances need, 1 of them made when a claim does"


def test_an_instance_that_goes_while_its_files_are_looked_at_is_no_fault():
    looks = iter([a100(0, ONE), a100(0, ONE), a100()])

    findings = list(
        gpu_checks.check_mig_device_files(lambda: Inventory((next(looks),)), files("mig/monitor"))
    )

    assert [each.level for each in findings] == [Level.OK]

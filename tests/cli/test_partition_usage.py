"""Who has how much of which partition, as people and as programs read it."""

from dra_driver.cli.claims.bars import usage_bars
from dra_driver.cli.claims.run import report_document
from dra_driver.cli.terminal import Terminal
from dra_driver.cli.usage import gpu_usages
from dra_driver.model.gpus import DeviceName, MigInfo
from dra_driver.model.offer import AdminAccess, Fractional, Replica
from tests import builders
from tests.builders import MIB, gpu
from tests.cli.mig import a100, holding, instance, unusable
from tests.cli.mps import report, report_lines

GIB = 1024 * MIB
OF_3G = Fractional(19968 * MIB, GIB, MIB, shares=48)
THREE, ONE = instance("3g.20gb", 0, 1), instance("1g.5gb", 5, 2)
BOARD = a100(0, THREE, ONE)


def record(name, *where, **fields):
    of_partition = holding(name, *where, **fields)
    return builders.record(of_partition.claim, of_partition)


def part(name, gib, **fields):
    """Some memory of the first half of the board."""
    consumed = (("memory", f"{gib}Gi"), ("shares", "1"))
    return record(name, "3g.20gb", 0, consumed=consumed, shape=OF_3G, instance=THREE, **fields)


def shown(*records, gpus=(BOARD,), width=100, **fields):
    return usage_bars(gpu_usages(records, gpus), Terminal(width=width, **fields)).splitlines()


def test_a_partition_that_several_claims_share_has_a_bar_with_all_of_them():
    lines = shown(part("a", 5), part("b", 10))

    head, large, first, second, small = lines
    assert head.startswith("gpu-0")
    assert "[AAAA" in head and head.endswith("2 partitions with 24.2 of 40.0 GiB")
    assert large.startswith("  A gpu-0-mig-3g20gb-9-0  ")
    assert large.endswith("]  15.0 of 19.5 GiB held, 4.5 free, 2 of 48 shares")
    assert large.count("#") * 1.5 < large.count("=") + 2 < large.count("#") * 2.5
    assert first == "      # team-a/a   5.0 GiB  no limit"
    assert second == "      = team-a/b  10.0 GiB  no limit"
    assert small.startswith("  b gpu-0-mig-1g5gb-19-5") and small.endswith("all 4.8 GiB free")


def test_bars_of_gpus_and_partitions_stand_below_each_other():
    lines = shown(part("a", 5), gpus=(BOARD, gpu(1)))

    heads = [line for line in lines if "[" in line]
    assert len(heads) == 4
    assert len({line.index("[") for line in heads}) == 1
    unit_line, *bars = heads
    assert len({line.index("]") for line in bars}) == 1
    assert unit_line.index("]") <= bars[0].index("]")


def test_a_gpu_that_without_partitions_looks_as_ever():
    off = a100(0, on=False)

    assert shown(gpus=(off,))[0].endswith("]  all 40.0 GiB free")


def test_a_partition_that_is_not_created_yet_is_shown_where_it_will_be():
    (head, line, below) = shown(record("new", "2g.10gb", 4), gpus=(a100(),))

    assert head.endswith("1 partition with 9.6 of 40.0 GiB")
    assert "[...|...|...|...|AAAAAAA|...|...]" in head
    assert line.startswith("  A gpu-0-mig-2g10gb-14-4  ")
    assert line.endswith("all 9.6 GiB held")
    assert below == "      # team-a/new  all of it"


def test_what_lies_on_no_partition_is_drawn_and_gets_no_bar_of_its_own():
    board = a100(0, ONE, unusable=(unusable("3g.20gb", 0),))

    head, line = shown(gpus=(board,))

    assert "[aaaa" in head
    assert line.startswith("  b gpu-0-mig-1g5gb-19-5")


def test_a_narrow_terminal_leaves_out_the_units_but_not_the_bars():
    lines = shown(part("a", 5), width=77)

    assert "[" not in lines[0]
    assert "[" in lines[1]


def test_without_a_look_at_the_gpus_partitions_have_the_names_of_the_ledger():
    head, line, *_ = shown(part("a", 5), gpus=())

    assert head.startswith("gpu-0") and head.rstrip().endswith("1 partition")
    assert line.startswith("  - gpu-0-mig-3g20gb-9-0")
    assert line.endswith("5.0 of 19.5 GiB held, 14.5 free, 1 of 48 shares")


def test_a_partition_follows_its_gpu_to_another_name():
    moved = a100(3)
    claim = part("a", 5, gpu=moved.uuid)

    (usage,) = gpu_usages([claim], [moved])

    assert usage.name == "gpu-3"
    assert [partition.name for partition in usage.parts] == ["gpu-3-mig-3g20gb-9-0"]


def test_a_profile_that_the_board_lacks_leaves_the_name_of_the_device():
    bare = gpu(0, mig=MigInfo(True, True, False, (), (instance("1g.5gb", 6),)))

    (usage,) = gpu_usages([part("a", 5, gpu=bare.uuid)], [bare])

    names = [partition.name for partition in usage.parts]
    assert names == ["gpu-0-mig-3g20gb-9-0", "profile 19 at 6"]


def document(*records, gpus=(BOARD,)):
    return report_document(report(*records, gpus=gpus))


def test_as_json_a_gpu_lists_its_partitions_and_counts_what_is_held_of_them():
    (board,) = document(part("a", 5), part("b", 10))["gpus"]

    assert board["heldBytes"] == 15 * GIB
    assert board["freeBytes"] == (40960 - 19968 - 4864) * MIB
    assert board["claims"] == ["team-a/a", "team-a/b"]
    assert board["partitions"] == [
        {
            "name": "gpu-0-mig-3g20gb-9-0",
            "uuid": THREE.uuid,
            "profile": "3g.20gb",
            "start": 0,
            "size": 4,
            "memoryBytes": 19968 * MIB,
            "heldBytes": 15 * GIB,
            "freeBytes": 19968 * MIB - 15 * GIB,
            "coresHeld": 0,
            "sharesHeld": 2,
            "shares": 48,
            "claims": ["team-a/a", "team-a/b"],
        },
        {
            "name": "gpu-0-mig-1g5gb-19-5",
            "uuid": ONE.uuid,
            "profile": "1g.5gb",
            "start": 5,
            "size": 1,
            "memoryBytes": 4864 * MIB,
            "heldBytes": 0,
            "freeBytes": 4864 * MIB,
            "coresHeld": 0,
            "sharesHeld": 0,
            "shares": None,
            "claims": [],
        },
    ]


def test_as_json_a_device_says_which_partition_it_is_and_whether_it_goes_with_the_claim():
    claims = document(part("a", 5), record("new", "1g.5gb", 4))["claims"]

    assert [claim["devices"][0]["partition"] for claim in claims] == [
        {"start": 0, "size": 4, "uuid": THREE.uuid, "created": True},
        {"start": 4, "size": 1, "uuid": None, "created": True},
    ]


def test_what_nobody_knows_of_a_gpu_that_was_not_looked_at_is_null():
    (board,) = document(record("whole", "1g.5gb", 4), gpus=())["gpus"]

    assert (board["memoryBytes"], board["heldBytes"], board["freeBytes"]) == (None, None, None)
    assert board["partitions"][0]["profile"] is None
    assert board["uuid"] == a100().uuid


def test_a_monitor_is_told_of_on_the_gpu_and_takes_none_of_it():
    watcher = record("watcher", admin=True, shape=AdminAccess())

    lines = report_lines(watcher, part("a", 5), gpus=(BOARD,))

    assert lines[0].endswith("2 partitions with 24.2 of 40.0 GiB")
    assert lines[1].split() == ["o", "team-a/watcher", "admin", "access"]


def test_replicas_of_a_partition_have_its_bar_together():
    shape = Replica(1, 4, 4992 * MIB)
    name = DeviceName("gpu-0-mig-3g20gb-9-0-1")

    for gpus in ((BOARD,), ()):
        lines = shown(record("a", "3g.20gb", 0, shape=shape, device=name), gpus=gpus)

        assert any("gpu-0-mig-3g20gb-9-0  " in line for line in lines)
        assert any("1 of 4 shares" in line for line in lines)
        assert lines[-1 if not gpus else 2].startswith("      # team-a/a  4.9 GiB")

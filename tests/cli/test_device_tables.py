"""Devices as rows: GPUs and monitors in one table, partitions in another."""

import re
from dataclasses import replace

from dra_driver.cli.devices.run import device_tables
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.offer import AdminAccess, Device, Fractional, Replica
from dra_driver.model.profiles import Rules, SharingStrategy
from tests.builders import MIB, gpu
from tests.cli.mig import a100, instance, offered, partition


def rows(*devices, wide=False):
    """The cells of each table."""
    return [
        [re.split(r" {3,}", line) for line in table.splitlines()]
        for table in device_tables(devices, wide)
    ]


def test_a_node_without_partitions_has_one_table():
    (table,) = rows(Device(gpu(0)), Device(gpu(0), AdminAccess()))

    assert [row[0] for row in table] == ["DEVICE", "gpu-0", "gpu-0-mon"]
    assert device_tables((), wide=False) == []


def test_partitions_of_a_profile_that_are_alike_share_a_row():
    (table,) = rows(*offered(a100(0), a100(1)).devices)

    assert table[0] == [
        *("PARTITION", "PROFILE", "SMS", "MEMORY", "SHAPE", "DEFAULT", "LEAST", "STEP", "SHARES"),
        *("CORES", "UUID"),
    ]
    assert table[1] == [
        *("gpu-0-mig-1g5gb-19-{0,1,2,3,4,5,6}", "1g.5gb", "14", "4.8 GiB", "exclusive"),
        *("-", "-", "-", "-", "-", "created for claims"),
    ]
    assert [row[0] for row in table[2:6]] == [
        "gpu-0-mig-2g10gb-14-{0,2,4}",
        "gpu-0-mig-3g20gb-9-{0,4}",
        "gpu-0-mig-7g40gb-0-0",
        "gpu-1-mig-1g5gb-19-{0,1,2,3,4,5,6}",
    ]
    assert len(table) == 9


def test_a_partition_that_exists_or_has_another_shape_has_its_own_row():
    board, made = a100(), instance("1g.5gb", 2)
    first, second, third = (Device(board, partition=partition("1g.5gb", n)) for n in range(3))
    parts = Fractional(4864 * MIB, 1024 * MIB, MIB, shares=48, cores=False)

    (table,) = rows(replace(third, instance=made), first, replace(second, shape=parts, as_gpu=True))

    assert [(row[0], row[-1]) for row in table[1:]] == [
        ("gpu-0-mig-1g5gb-19-2", made.uuid),
        ("gpu-0-mig-1g5gb-19-0", "created for claims"),
        ("gpu-0-mig-1g5gb-19-1", "created for claims"),
    ]
    assert table[3][4:10] == ["sliceable (also as GPU)", "4864Mi", "1024Mi", "1Mi", "48", "-"]


def test_a_wide_table_has_a_row_for_each_partition_with_its_engines_and_what_keeps_it_apart():
    whole, *parts = offered(a100(), whole=True).devices
    mps = Rules(strategies=(SharingStrategy.MPS,), default_strategy=SharingStrategy.MPS)

    gpus, table = rows(whole, replace(parts[0], rules=mps), *parts[1:], wide=True)

    assert len(gpus) == 2
    assert len(table) == 14
    assert table[0][11:] == ["SHARED BY", "COPY", "DEC", "ENC", "JPEG", "OFA", "TAKES"]
    assert table[1][11:] == ["MPS", "1", "0", "0", "0", "0", "1 of memory-slice-0"]
    assert table[-1][0] == "gpu-0-mig-7g40gb-0-0"


def test_what_nothing_keeps_apart_takes_nothing():
    (table,) = rows(Device(a100(), partition=partition("1g.5gb", 0)), wide=True)

    assert table[1][-1] == "-"


def test_replicas_of_partitions_that_a_layout_will_create_share_rows_by_their_number():
    replicas = [
        Device(
            a100(),
            Replica(place, 2, 2432 * MIB),
            partition=partition("1g.5gb", start),
            instance=replace(instance("1g.5gb", start), uuid=GpuUuid("")),
        )
        for place in (0, 1)
        for start in (4, 5)
    ]

    (table,) = rows(*replicas)

    assert [(row[0], *row[4:6], row[-1]) for row in table[1:]] == [
        ("gpu-0-mig-1g5gb-19-{4,5}-0", "1 of 2 replicas", "2432Mi", "created by a layout"),
        ("gpu-0-mig-1g5gb-19-{4,5}-1", "2 of 2 replicas", "2432Mi", "created by a layout"),
    ]

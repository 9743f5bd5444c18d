"""The kernel's log says of which process an Xid is."""

import pytest

from dra_driver.node.kernel_log import KernelLog

GPU = "0000:65:00.0"


def xid(number, more, slot="0000:65:00"):
    return f"4,1234,5678901234,-;NVRM: Xid (PCI:{slot}): {number}, {more}\n"


@pytest.fixture
def file(tmp_path):
    made = tmp_path / "kmsg"
    made.write_text(xid(31, "pid=1, name=before"))
    return made


@pytest.fixture
def log(file):
    opened = KernelLog(file)
    opened.open()
    yield opened
    opened.close()


def add(file, *lines):
    with file.open("a") as kmsg:
        kmsg.write("".join(lines))


def test_each_line_names_a_process_once(file, log):
    add(file, xid(31, "pid=1234, name=python, Ch 00000010"))
    log.read()

    assert log.take(GPU, None, "31") == 1234
    assert log.take(GPU, None, "31") is None


def test_lines_from_before_are_of_nobody(log):
    log.read()

    assert log.take(GPU, None, "31") is None


def test_only_the_gpu_and_the_number_of_the_line_are_meant(file, log):
    add(file, xid(31, "pid=1234, name=python"))
    log.read()

    assert log.take("0000:66:00.0", None, "31") is None
    assert log.take(GPU, None, "13") is None


@pytest.mark.parametrize(("slot", "gpu"), [("00000000:65:00", GPU), ("0000:1B:00", "0000:1b:00.0")])
def test_a_bus_id_is_understood_however_it_is_written(file, log, slot, gpu):
    add(file, xid(31, "pid=7, name=a", slot))
    log.read()

    assert log.take(gpu, None, "31") == 7


@pytest.mark.parametrize(
    "more", ["Ch 00000010, engmask 00000101", "pid='<unknown>', name=<unknown>, Ch 8"]
)
def test_a_line_without_a_process_names_none(file, log, more):
    add(file, xid(31, more))
    log.read()

    assert log.take(GPU, None, "31") is None


def test_a_line_of_an_instance_is_of_that_instance(file, log):
    add(file, xid(31, "pid=1234, name=python", "0000:65:00 GPU-I:02 GPU-CI:00"))
    log.read()

    assert log.take(GPU, None, "31") is None
    assert log.take(GPU, 3, "31") is None
    assert log.take(GPU, 2, "31") == 1234


def test_a_line_that_is_still_being_written_is_read_once_it_is_whole(file, log):
    line = xid(31, "pid=1234, name=python")
    add(file, "6,1,2,-;usb 1-1: new device\n", line[:25])
    log.read()
    assert log.take(GPU, None, "31") is None
    add(file, line[25:])
    log.read()

    assert log.take(GPU, None, "31") == 1234


def test_what_nobody_asked_for_in_time_is_forgotten(file):
    now = [100.0]
    log = KernelLog(file, lambda: now[0])
    log.open()
    add(file, xid(31, "pid=1234, name=python"))
    log.read()
    now[0] += 2.5
    log.read()

    assert log.take(GPU, None, "31") is None
    log.close()


def test_without_a_log_no_process_is_known(tmp_path):
    log = KernelLog(tmp_path / "missing")
    log.open()
    log.read()

    assert log.take(GPU, None, "31") is None
    log.close()

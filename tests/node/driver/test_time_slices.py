"""The interval of a GPU: read from whatever nvidia-smi prints, set, or refused with a reason."""

import contextlib
import doctest
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from dra_driver.base.errors import ClaimError, NodeError, TimedOut
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.steps import TimeSliceInterval
from dra_driver.node.driver import time_slices
from dra_driver.node.driver.commands import Command, run_command
from dra_driver.node.driver.root import DriverRoot
from dra_driver.node.driver.time_slices import TimeSlices, parse_time_slice
from dra_driver.sim.host.directory import run_on_simulated_host
from tests.fakes.driver import install, make_system
from tests.fakes.simulated import Node, h100
from tests.waiting import eventually

P4 = {"product": "P4", "bus_id": "0000:88:00.0"}
REFUSED = "Failed to set timeslice policy with value {} for GPU 0 : {}"


def table(*rows: str) -> str:
    return "\n".join(("+------+", "| GPU compute policies: |", *rows, "+------+"))


LISTS = [
    pytest.param(
        table("| GPU     Name             Value      |", "|   0     Timeslice        Short     |"),
        TimeSliceInterval.SHORT,
        id="a table with a policy per row",
    ),
    pytest.param(
        table(
            "| GPU | Name      | Value | Default | Since |",
            "| 0   | Timeslice | Long  | Default | 12:30 |",
            "| 0   | Preempt   | Short | Default | 12:30 |",
        ),
        TimeSliceInterval.LONG,
        id="more columns and more policies",
    ),
    pytest.param(
        table("| Bus-Id           Policy      Value |", "| 00000000:1B:00.0  Time Slice  MEDIUM |"),
        TimeSliceInterval.MEDIUM,
        id="another spelling",
    ),
    pytest.param(
        table("| GPU | Timeslice config | Preemption |", "| 0   | SHORT (1)   | Default |"),
        TimeSliceInterval.SHORT,
        id="a table with a policy per column",
    ),
    pytest.param(
        table("| GPU Name Value |", "| 0 Timeslice Long |"), TimeSliceInterval.LONG, id="narrow"
    ),
    pytest.param("GPU  0: Timeslice: Default\n", TimeSliceInterval.DEFAULT, id="a line"),
    pytest.param("GPU 0: Timeslice Medium", TimeSliceInterval.MEDIUM, id="a line with one colon"),
    pytest.param(
        "GPU 00000000:1B:00.0\n    Compute Policies\n        Timeslice          : Short\n",
        TimeSliceInterval.SHORT,
        id="as -q writes",
    ),
    pytest.param("timeslice = 3\n", TimeSliceInterval.LONG, id="a number"),
    pytest.param(
        "GPU 0: Timeslice: Short\nGPU 1: Timeslice: Short",
        TimeSliceInterval.SHORT,
        id="two that agree",
    ),
    pytest.param("GPU 0: Timeslice: Short\nGPU 1: Timeslice: Long", None, id="two that differ"),
    pytest.param("|   0     Timeslice        N/A       |", None, id="it has none"),
    pytest.param(table("| GPU | Timeslice |", "| 0 | N/A |"), None, id="it has none, in a column"),
    pytest.param("timeslice = 7\n", None, id="a number that is no interval"),
    pytest.param("GPU 0: Timeslice: 2000 us\n", None, id="a time"),
    pytest.param("GPU 0: Compute Mode: Default\n", None, id="something else"),
    pytest.param("| GPU | Timeslice | Preemption |\n| Short |", None, id="another width"),
    pytest.param("", None, id="nothing"),
]


@pytest.mark.parametrize(("text", "interval"), LISTS)
def test_the_interval_is_found_in_a_list_of_any_shape(text, interval):
    assert parse_time_slice(text) is interval


@pytest.fixture
def node(tmp_path):
    node = Node(tmp_path, {"gpus": [h100("1b"), h100("43"), P4]})
    assert node.host
    return node


def simulated(node: Node) -> TimeSlices:
    root = str(node.root)
    driver = DriverRoot(root, Path("/"), proc=f"{root}/proc")
    return TimeSlices(driver, node.root.parent / "kept", "boot", run_on_simulated_host)


def uuids(node: Node) -> list[GpuUuid]:
    return [GpuUuid(str(gpu.uuid)) for gpu in node.live.current().gpus]


@pytest.mark.parametrize("interval", TimeSliceInterval)
def test_what_was_set_is_read_on_that_gpu_and_no_other(node, interval):
    slices, (first, second, _) = simulated(node), uuids(node)
    slices.set(first, interval)
    assert (slices.read(first), slices.read(second)) == (interval, TimeSliceInterval.DEFAULT)
    slices.restore(first, TimeSliceInterval.DEFAULT)
    assert slices.read(first) is TimeSliceInterval.DEFAULT


def test_a_gpu_without_intervals_does_not_say_and_refuses_with_the_mend(node):
    slices, (_, _, old) = simulated(node), uuids(node)
    assert slices.read(old) is None
    with pytest.raises(ClaimError, match=r"has no time-slice interval to set .*Not Supported") as e:
        slices.set(old, TimeSliceInterval.SHORT)
    assert "leave out sharing.timeSlicingConfig" in str(e.value) and old in str(e.value)


def test_the_default_interval_is_what_a_gpu_without_intervals_has(node):
    slices, (_, _, old) = simulated(node), uuids(node)
    slices.set(old, TimeSliceInterval.DEFAULT)
    slices.restore(old, TimeSliceInterval.DEFAULT)


def test_a_gpu_that_fails_now_is_asked_again_later(node):
    node.change(gpu=0, fails={"compute-policy": "UNKNOWN"})
    node.live.current()
    slices, (first, _, _) = simulated(node), uuids(node)
    assert slices.read(first) is None
    for act in (slices.set, slices.restore):
        with pytest.raises(NodeError, match=f"{first} cannot be set to Long: .*Unknown Error"):
            act(first, TimeSliceInterval.LONG)
    node.change(gpu=0, fails={})
    node.live.current()
    slices.set(first, TimeSliceInterval.LONG)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"gpu": 0, "present": False}, id="the GPU is gone"),
        pytest.param({"gpu": 0, "fails": {"compute-policy": "GPU_IS_LOST"}}, id="the GPU is lost"),
        pytest.param({"driver": "not-loaded"}, id="the driver was unloaded"),
        pytest.param({"driver": "no-library"}, id="the driver was removed"),
    ],
)
def test_where_the_setting_is_gone_there_is_nothing_to_restore(node, change):
    slices, (first, _, _) = simulated(node), uuids(node)
    slices.set(first, TimeSliceInterval.LONG)
    node.change(**change)
    node.live.current()
    slices.restore(first, TimeSliceInterval.DEFAULT)
    with pytest.raises(NodeError):
        slices.set(first, TimeSliceInterval.LONG)


class Smi:
    """An nvidia-smi that says, or raises, what a test wants, and remembers how it was run."""

    def __init__(self, answer: str | NodeError) -> None:
        self.answer = answer
        self.runs: list[Command] = []

    def __call__(self, command: Command, timeout_seconds: float) -> str:
        assert 0 < timeout_seconds <= 15
        self.runs.append(command)
        if isinstance(self.answer, NodeError):
            raise self.answer
        return self.answer


def test_the_program_of_a_driver_container_runs_in_there(tmp_path):
    make_system(install(tmp_path / "run/nvidia/driver"))
    smi = Smi("GPU 0: Timeslice: Short")
    slices = TimeSlices(DriverRoot(None, tmp_path), tmp_path / "kept", "boot", smi)
    assert slices.read(GpuUuid("GPU-a")) is TimeSliceInterval.SHORT
    slices.set(GpuUuid("GPU-a"), TimeSliceInterval.LONG)
    inside = ("chroot", f"{tmp_path}/run/nvidia/driver", "/usr/bin/nvidia-smi", "compute-policy")
    assert [command.argv for command in smi.runs] == [
        (*inside, "-l", "-i", "GPU-a"),
        (*inside, "--set-timeslice=3", "-i", "GPU-a"),
    ]


@pytest.mark.parametrize("word", ["Default", "Long"])
def test_a_refusal_of_the_real_program_is_understood(tmp_path, word):
    install(tmp_path)
    smi = Smi(
        NodeError(f"nvidia-smi … failed with code 3: {REFUSED.format(word, 'Not Supported')}")
    )
    slices = TimeSlices(DriverRoot(None, tmp_path), tmp_path / "kept", "boot", smi)
    assert slices.read(GpuUuid("GPU-a")) is None
    with pytest.raises(ClaimError, match="has no time-slice interval"):
        slices.set(GpuUuid("GPU-a"), TimeSliceInterval.LONG)


def test_who_may_not_set_it_is_told_so(tmp_path):
    install(tmp_path)
    smi = Smi(NodeError(REFUSED.format("Long", "Insufficient Permissions")))
    slices = TimeSlices(DriverRoot(None, tmp_path), tmp_path / "kept", "boot", smi)
    with pytest.raises(NodeError, match="Insufficient Permissions; it takes root"):
        slices.set(GpuUuid("GPU-a"), TimeSliceInterval.LONG)


GPU = GpuUuid("GPU-a")
LATE = TimedOut("nvidia-smi was killed")


def late(tmp_path: Path, smi: Smi | None = None, boot: str = "boot") -> TimeSlices:
    install(tmp_path / "host")
    loaded = tmp_path / "host/proc/driver/nvidia/version"
    loaded.parent.mkdir(parents=True, exist_ok=True)
    loaded.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Fri\n")
    driver = DriverRoot(None, tmp_path / "host")
    return TimeSlices(driver, tmp_path / "kept", boot, smi or Smi(LATE))


def test_a_program_that_does_not_end_is_an_error_when_a_claim_comes(tmp_path):
    slices = late(tmp_path)
    with pytest.raises(TimedOut):
        slices.set(GPU, TimeSliceInterval.SHORT)
    with pytest.raises(TimedOut):
        slices.read(GPU)
    assert slices.unrestored() == {}


def test_what_cannot_be_put_back_in_time_is_owed_until_it_was_also_after_a_restart(tmp_path):
    late(tmp_path).restore(GPU, TimeSliceInterval.SHORT)

    smi = Smi(LATE)
    restarted = late(tmp_path, smi)
    assert restarted.unrestored() == {GPU: TimeSliceInterval.SHORT}
    assert not restarted.retry_setting_restores()
    assert restarted.unrestored() == {GPU: TimeSliceInterval.SHORT}
    smi.answer = "done"
    assert restarted.retry_setting_restores()
    assert smi.runs[-1].args[1] == "--set-timeslice=1"
    assert restarted.unrestored() == {}
    assert not restarted.retry_setting_restores()


def test_no_claim_gets_an_interval_on_a_gpu_that_is_owed_one(tmp_path):
    smi = Smi(LATE)
    slices = late(tmp_path, smi)
    slices.restore(GPU, TimeSliceInterval.DEFAULT)
    smi.answer = "GPU 0: Timeslice: Long"
    before = len(smi.runs)

    with pytest.raises(NodeError, match=f"interval of {GPU}, .* is still to be restored"):
        slices.set(GPU, TimeSliceInterval.LONG)
    with pytest.raises(NodeError, match=f"interval of {GPU}, .* is still to be restored"):
        slices.read(GPU)
    assert len(smi.runs) == before
    assert slices.read(GpuUuid("GPU-b")) is TimeSliceInterval.LONG


def test_a_program_that_fails_in_time_owes_nothing_and_fails_the_claim(tmp_path):
    slices = late(tmp_path, Smi(NodeError("Unknown Error")))

    with pytest.raises(NodeError, match="Unknown Error"):
        slices.restore(GPU, TimeSliceInterval.DEFAULT)
    assert slices.unrestored() == {}


def test_an_owed_interval_of_a_gpu_that_is_gone_is_owed_no_more(tmp_path):
    smi = Smi(LATE)
    slices = late(tmp_path, smi)
    slices.restore(GPU, TimeSliceInterval.LONG)
    smi.answer = NodeError("No devices were found")

    assert slices.retry_setting_restores()
    assert slices.unrestored() == {}


def test_one_that_fails_does_not_keep_others_from_being_put_back(tmp_path):
    smi = Smi(LATE)
    slices = late(tmp_path, smi)
    slices.restore(GPU, TimeSliceInterval.LONG)
    slices.restore(GpuUuid("GPU-b"), TimeSliceInterval.LONG)

    def answer(command, timeout_seconds):
        if command.args[-1] == GPU:
            raise NodeError("Unknown Error")
        return ""

    slices = TimeSlices(DriverRoot(None, tmp_path / "host"), tmp_path / "kept", "boot", answer)
    assert slices.retry_setting_restores()
    assert slices.unrestored() == {GPU: TimeSliceInterval.LONG}


def test_nothing_is_owed_that_an_earlier_boot_noted(tmp_path):
    late(tmp_path, boot="earlier").restore(GPU, TimeSliceInterval.LONG)
    smi = Smi("GPU 0: Timeslice: Short")
    slices = late(tmp_path, smi)

    assert slices.unrestored() == {}
    assert not slices.retry_setting_restores()
    assert slices.read(GPU) is TimeSliceInterval.SHORT
    assert [run.args[1] for run in smi.runs] == ["-l"], "an administrator may have set it since"


def test_a_note_that_a_power_cut_left_empty_owes_nothing(tmp_path):
    slices = late(tmp_path)
    slices.restore(GPU, TimeSliceInterval.LONG)
    (note,) = (path for path in (tmp_path / "kept").iterdir() if path.suffix != ".lock")
    note.write_text("")

    assert slices.unrestored() == {}


def test_what_was_put_back_while_others_took_long_is_not_put_back_again(tmp_path):
    """Another claim may have set its own by then."""
    late(tmp_path).restore(GPU, TimeSliceInterval.LONG)
    late(tmp_path).restore(GpuUuid("GPU-b"), TimeSliceInterval.LONG)
    ran = []

    def answer(command, timeout_seconds):
        ran.append(command.args[-1])
        if command.args[-1] == GPU:
            late(tmp_path, Smi("done")).restore(GpuUuid("GPU-b"), TimeSliceInterval.LONG)
        return ""

    assert TimeSlices(
        DriverRoot(None, tmp_path / "host"), tmp_path / "kept", "boot", answer
    ).retry_setting_restores()
    assert ran == [GPU]


def test_what_is_owed_and_cannot_be_written_down_keeps_the_claim(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / f"kept/.{GPU}.to-restore.tmp").mkdir()

    with pytest.raises(NodeError, match="cannot write down that the interval of GPU-a"):
        late(tmp_path).restore(GPU, TimeSliceInterval.LONG)


@pytest.fixture
def stuck(tmp_path):
    """An nvidia-smi that outlives being killed, as one that is stuck in the kernel: by a process
    that has left its group and holds what it was given. Each writes a line when it starts."""
    install(tmp_path / "host")
    program = tmp_path / "host/usr/bin/nvidia-smi"
    program.write_text(
        f"#!/bin/sh\necho $$ >> {tmp_path}/started\n"
        f"[ -e {tmp_path}/well ] && exit 0\n"
        f"setsid sh -c 'echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; "
        "exec sleep 600' > /dev/null 2>&1 &\n"
        "exec sleep 600\n"
    )
    program.chmod(0o755)

    def impatient(command: Command, timeout_seconds: float) -> str:
        on_host = replace(command, root="/", program=str(program), library_path="")
        while True:  # it may have been killed before it had got stuck
            try:
                return run_command(on_host, 30 if (tmp_path / "well").exists() else 0.5)
            except TimedOut:
                if (tmp_path / "pid").exists():
                    raise

    yield TimeSlices(DriverRoot(None, tmp_path / "host"), tmp_path / "kept", "boot", impatient)
    if (tmp_path / "pid").exists():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_no_second_one_is_started_for_a_gpu_while_the_first_lives(tmp_path, stuck):
    stuck.restore(GPU, TimeSliceInterval.SHORT)
    started = (tmp_path / "started").read_text()
    pid = int((tmp_path / "pid").read_text())

    stuck.restore(GPU, TimeSliceInterval.SHORT)
    assert not stuck.retry_setting_restores()
    assert (tmp_path / "started").read_text() == started, "not even once more"
    assert stuck.unrestored() == {GPU: TimeSliceInterval.SHORT}

    (tmp_path / "well").touch()
    os.kill(pid, signal.SIGKILL)
    eventually(stuck.retry_setting_restores)
    assert stuck.unrestored() == {}


def test_other_gpus_go_on_while_the_program_hangs_for_one(tmp_path, stuck):
    with pytest.raises(TimedOut, match="was still running"):
        stuck.set(GPU, TimeSliceInterval.SHORT)
    (tmp_path / "well").touch()

    stuck.set(GpuUuid("GPU-b"), TimeSliceInterval.SHORT)
    with pytest.raises(TimedOut, match="until an earlier nvidia-smi has ended"):
        stuck.set(GPU, TimeSliceInterval.SHORT)


def test_the_documentation_is_true():
    assert doctest.testmod(time_slices).failed == 0

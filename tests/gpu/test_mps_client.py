"""The programs of the MPS tests ask CUDA for the right things, and no wait for them is for ever."""

import ctypes
import sys

import pytest

from tests.gpu import mps_client
from tests.gpu.programs import Program, pids, pipe_of, until
from tests.gpu.test_cuda_program import Driver

GIB = 1 << 30
# Answers as the real one does, without a GPU: "silence" is no answer, "crash" is the end.
ECHO = """
import json, os, sys
say = lambda error: print(json.dumps({"error": error}), flush=True)
say(os.environ.get("CUDA_SAID", ""))
for line in sys.stdin:
    if line == "crash\\n":
        sys.exit("CUDA went away")
    if line != "silence\\n":
        say(line.strip())
"""


class LimitedDriver(Driver):
    """With half of the multiprocessors, and *most* bytes of memory for it."""

    def __init__(self, most=GIB, refuses=""):
        super().__init__()
        self._free = most
        self._refuses = refuses

    def __call__(self, function, *args):
        if function == self._refuses:
            raise SystemExit(f"{function}: CUDA_ERROR_UNKNOWN (999)")
        super().__call__(function, *args)

    def _cuDeviceGetAttribute(self, value, attribute, device):  # noqa: N802
        assert attribute.value == 16
        assert device.value == 0
        value._obj.value = 66

    def _cuMemGetInfo_v2(self, free, total):  # noqa: N802
        free._obj.value, total._obj.value = self._free, 141 * GIB

    def _cuMemAlloc_v2(self, address, size):  # noqa: N802
        if size.value > self._free:
            raise SystemExit("cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (2)")
        self._free -= size.value
        if size.value < GIB // 2:
            super()._cuMemAlloc_v2(address, size)
            return
        address._obj.value = 1 << 40  # an address without memory behind it
        self._memory[address._obj.value] = ctypes.c_uint32(0)


@pytest.fixture
def started():
    """Starts what answers as a CUDA program does."""
    programs = []

    def run(**variables):
        programs.append(Program([sys.executable, "-c", ECHO], variables))
        return programs[-1]

    yield run
    for program in programs:
        program.end()


def answers(driver, *questions):
    given_answers = []
    mps_client.serve(driver, questions, given_answers.append)
    return given_answers


def test_it_says_first_what_it_sees():
    (first,) = answers(LimitedDriver())

    assert first == {
        "error": "",
        "cuda": 13000,
        "gpus": 1,
        "name": "NVIDIA H200",
        "multiprocessors": 66,
        "free": GIB,
        "total": 141 * GIB,
    }


def test_memory_that_it_takes_stays_taken_until_its_end():
    driver = LimitedDriver()
    _, *later_answers = answers(driver, f"allocate {GIB // 2}\n", f"allocate {GIB}\n", "compute\n")

    assert [answer["error"] for answer in later_answers] == [
        "",
        "cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (2)",
        "",
    ]
    assert driver.calls[-1] == "cuDevicePrimaryCtxRelease_v2"
    assert driver.calls.count("cuLaunchKernel") == 1


def test_what_it_does_not_know_it_says():
    assert answers(LimitedDriver(), "dance\n")[1] == {"error": "nobody knows how to 'dance'"}


@pytest.mark.parametrize("function", ["cuInit", "cuDevicePrimaryCtxRetain", "cuMemGetInfo_v2"])
def test_a_gpu_that_cannot_be_used_is_its_only_answer(function):
    given_answers = answers(LimitedDriver(refuses=function), "compute\n")

    assert given_answers == [{"error": f"{function}: CUDA_ERROR_UNKNOWN (999)"}]


def test_a_context_that_cannot_be_left_is_no_error():
    driver = LimitedDriver(refuses="cuDevicePrimaryCtxRelease_v2")

    assert [answer["error"] for answer in answers(driver, "compute\n")] == ["", ""]


def test_questions_are_answered_one_by_one(started):
    program = started()

    assert (program.error, program.ask("one"), program.ask("two")) == ("", "one", "two")


def test_a_program_has_only_the_mps_that_it_was_given(started, monkeypatch):
    monkeypatch.setenv("CUDA_SAID", "of this shell")

    assert (started().error, started(CUDA_SAID="given").error) == ("", "given")


def test_no_answer_is_waited_for_in_vain(started):
    assert started().ask("silence", 0.1) == "no answer in 0.1 s"


def test_a_program_that_ends_is_told_with_its_last_words(started):
    program = started()

    assert program.ask("crash") == "it has ended: code 1 CUDA went away"
    assert program.ask("one") == "it has ended: code 1 CUDA went away"


def test_a_program_that_does_not_end_by_itself_is_killed():
    argv = [sys.executable, "-c", 'import time; print(\'{"error": ""}\', flush=True); ']
    argv[-1] += "time.sleep(600)"
    program = Program(argv, {}, end_seconds=0.1)

    program.end()

    assert program.pid not in pids()


def test_a_process_is_found_by_its_pipe_directory(started):
    program = started(CUDA_MPS_PIPE_DIRECTORY="/tmp/mps-of-a-test/gpu/pipe")

    assert pipe_of(program.pid) == "/tmp/mps-of-a-test/gpu/pipe"


def test_waiting_stops_with_what_is_awaited_and_with_the_time():
    numbers = iter(range(9))

    assert until(lambda: next(numbers), lambda number: number == 1) == 1
    assert until(lambda: 7, lambda number: number == 1, 0.0) == 7

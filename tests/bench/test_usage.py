"""Memory and processor time of a process, as the kernel counts them."""

import os
import subprocess
import sys
import time

import pytest

from hack.benchmark.errors import BenchError
from hack.benchmark.usage import cpu_seconds, rss_mib


def test_memory_in_all_is_files_and_its_own():
    usage = rss_mib(os.getpid())

    assert usage["all"] == pytest.approx(usage["own"] + usage["files"], abs=1.0)
    assert usage["peak"] >= usage["all"] > 1


def test_processor_time_of_another_process_is_that_of_all_its_threads():
    before = cpu_seconds(os.getpid())
    begun = time.process_time()
    while time.process_time() - begun < 0.02:
        pass

    assert cpu_seconds(os.getpid()) - before >= 0.02


def test_a_process_that_is_gone_is_an_error():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(10)

    with pytest.raises(BenchError, match=f"process {ended.pid} is gone"):
        cpu_seconds(ended.pid)
    with pytest.raises(BenchError, match=f"process {ended.pid} is gone"):
        rss_mib(ended.pid)

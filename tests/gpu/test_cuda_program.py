"""The CUDA program asks the driver for the right things, and its kernel is well formed."""

import ctypes
import re

import pytest

from tests.gpu import cuda_program
from tests.gpu.cuda_program import COUNT, PATTERN, PTX


class Driver:
    """CUDA's driver API over this machine's memory: what goes in has to be what it expects."""

    def __init__(self, wrong=0):
        self.calls = []
        self._wrong = wrong
        self._memory = {}

    def __call__(self, function, *args):
        self.calls.append(function)
        getattr(self, f"_{function}")(*args)

    def _cuInit(self, flags):  # noqa: N802
        assert flags.value == 0

    def _cuDriverGetVersion(self, version):  # noqa: N802
        version._obj.value = 13000

    def _cuDeviceGetCount(self, count):  # noqa: N802
        count._obj.value = 1

    def _cuDeviceGet(self, device, index):  # noqa: N802
        assert index == 0
        device._obj.value = 0

    def _cuDeviceGetName(self, name, length, device):  # noqa: N802
        assert length == len(name)
        name.value = b"NVIDIA H200"

    def _cuDevicePrimaryCtxRetain(self, context, device):  # noqa: N802
        context._obj.value = 1

    def _cuCtxSetCurrent(self, context):  # noqa: N802
        assert context.value

    def _cuMemAlloc_v2(self, address, size):  # noqa: N802
        block = (ctypes.c_uint32 * (size.value // 4))()
        address._obj.value = ctypes.addressof(block)
        self._memory[address._obj.value] = block

    def _cuMemsetD32_v2(self, address, word, count):  # noqa: N802
        self._memory[address.value][:] = [word.value] * count.value

    def _cuMemcpyHtoD_v2(self, address, words, size):  # noqa: N802
        ctypes.memmove(self._memory[address.value], words, size.value)

    def _cuMemcpyDtoH_v2(self, words, address, size):  # noqa: N802
        ctypes.memmove(words, self._memory[address.value], size.value)

    def _cuModuleLoadData(self, module, image):  # noqa: N802
        assert image.value.decode() == PTX
        module._obj.value = 1

    def _cuModuleGetFunction(self, kernel, module, name):  # noqa: N802
        assert f".visible .entry {name.decode()}(" in PTX
        kernel._obj.value = 2

    def _cuLaunchKernel(self, kernel, *args):  # noqa: N802
        *sizes, stream, pointers, extra = args
        x, y, z, threads, *_ = (size.value for size in sizes)
        assert (y, z, stream.value, extra.value) == (1, 1, None, None)
        read = [ctypes.cast(pointers[i], ctypes.POINTER(ctypes.c_uint64))[0] for i in range(3)]
        count = ctypes.cast(pointers[3], ctypes.POINTER(ctypes.c_uint32))[0]
        assert x * threads >= count
        first, second, total = (self._memory[address] for address in read)
        total[:] = [a + b for a, b in zip(first, second, strict=True)]
        total[count - 1] += self._wrong

    def _cuCtxSynchronize(self):  # noqa: N802
        """It is done already."""

    def _cuModuleUnload(self, module):  # noqa: N802
        assert module.value

    def _cuMemFree_v2(self, address):  # noqa: N802
        del self._memory[address.value]

    def _cuDevicePrimaryCtxRelease_v2(self, device):  # noqa: N802
        assert not self._memory, "everything is freed before"


def test_it_computes_and_says_what_it_found():
    assert cuda_program.compute(Driver()) == {
        "cuda": 13000,
        "gpus": 1,
        "name": "NVIDIA H200",
        "words": COUNT,
        "right": True,
    }


def test_one_wrong_sum_is_noticed():
    with pytest.raises(SystemExit, match="the sums are wrong"):
        cuda_program.compute(Driver(wrong=1))


def test_where_cuda_is_not_there_it_fails():
    with pytest.raises(OSError, match="libnone"):
        cuda_program.Cuda("libnone.so.1")


def test_no_sum_overflows():
    assert PATTERN + COUNT < 2**32


def test_the_kernel_declares_every_register_that_it_uses():
    declared = {
        prefix: int(count) for prefix, count in re.findall(r"\.reg \.\w+ %(\w+)<(\d+)>;", PTX)
    }
    used = re.findall(r"%(rd|r|p)(\d+)\b", PTX)

    assert set(declared) == {prefix for prefix, _ in used}
    assert all(int(number) < declared[prefix] for prefix, number in used)


def test_the_kernel_reads_every_parameter_and_jumps_to_a_label_that_is_there():
    parameters = re.findall(r"\.param \.u\d+ (\w+)", PTX)

    assert all(f"[{name}]" in PTX for name in parameters)
    assert len(parameters) == 4
    assert all(f"{label}:" in PTX for label in re.findall(r"bra (\w+);", PTX))
    assert PTX.count("{") == PTX.count("}") == 1

"""Takes memory of GPU 0 and keeps it: arguments are how much in bytes, and CUDA's library.

It says "ready" once it has the memory, and ends after some minutes by itself.
"""

import ctypes
import sys
import time

from tests.gpu.cuda_program import Cuda

_SECONDS = 240


def hold(cuda, size):
    """Take *size* bytes of GPU 0 in this process's primary context."""
    device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    cuda("cuInit", ctypes.c_uint(0))
    cuda("cuDeviceGet", ctypes.byref(device), 0)
    cuda("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    cuda("cuCtxSetCurrent", context)
    cuda("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))


if __name__ == "__main__":
    hold(Cuda(sys.argv[2]), int(sys.argv[1]))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    time.sleep(_SECONDS)

"""Uses GPU 0 and says what it finds, for as long as it is asked: the argument is CUDA's library.

It writes a line of JSON once it uses the GPU, and one more for each line that it reads: "allocate
BYTES" (which it keeps), "compute". "error" in there is empty, or what failed, with CUDA's own name
for it. It ends with its input, and after some minutes by itself.
"""

import contextlib
import ctypes
import json
import signal
import sys

from tests.gpu.cuda_program import Cuda, add_up, describe

_SECONDS = 240
_MULTIPROCESSOR_COUNT = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT


class Program:
    """A process of CUDA, with a context on GPU 0."""

    def __init__(self, cuda):
        self._cuda = cuda
        self._taken = []
        cuda("cuInit", ctypes.c_uint(0))
        self._device, self._facts = describe(cuda)
        context = ctypes.c_void_p()
        cuda("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        cuda("cuCtxSetCurrent", context)

    def look(self):
        """What it sees of the GPU."""
        count, free, total = ctypes.c_int(), ctypes.c_size_t(), ctypes.c_size_t()
        attribute = ctypes.c_int(_MULTIPROCESSOR_COUNT)
        self._cuda("cuDeviceGetAttribute", ctypes.byref(count), attribute, self._device)
        self._cuda("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        view = {"multiprocessors": count.value, "free": free.value, "total": total.value}
        return {**self._facts, **view}

    def do(self, question):
        word, _, amount = question.strip().partition(" ")
        if word == "allocate":
            address = ctypes.c_uint64()
            self._cuda("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(int(amount)))
            self._taken.append(address)
        elif word == "compute":
            add_up(self._cuda)
        else:
            raise SystemExit(f"nobody knows how to {question.strip()!r}")

    def end(self):
        """Leave nothing on the GPU."""
        for address in self._taken:
            self._cuda("cuMemFree_v2", address)
        self._cuda("cuDevicePrimaryCtxRelease_v2", self._device)


def serve(cuda, questions, say):
    """Answer *questions* until there are no more; a GPU that cannot be used is the only answer."""
    try:
        program = Program(cuda)
        say({"error": "", **program.look()})
    except SystemExit as e:
        say({"error": str(e)})
        return
    for question in questions:
        try:
            program.do(question)
        except SystemExit as e:
            say({"error": str(e)})
        else:
            say({"error": ""})
    with contextlib.suppress(SystemExit):  # where CUDA has failed, there is nothing to leave
        program.end()


def _say(answer):
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    signal.alarm(_SECONDS)
    serve(Cuda(sys.argv[1]), sys.stdin, _say)

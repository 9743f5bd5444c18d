"""A computation over CUDA's driver API, with Python's standard library alone.

Run as a program, it fills memory on GPU 0, reads it back, adds two vectors with a kernel, checks
every number, and prints what it did as one line of JSON. Any error ends it with a code other
than 0 and CUDA's own name for it.
"""

import ctypes
import json
import sys

COUNT = 1 << 16
BLOCK = 256
PATTERN = 0xC0FFEE

# What nvcc makes of `c[i] = a[i] + b[i]`, by hand: the oldest target that every driver takes.
PTX = """\
.version 6.0
.target sm_50
.address_size 64

.visible .entry vector_add(
    .param .u64 param_a,
    .param .u64 param_b,
    .param .u64 param_c,
    .param .u32 param_n
)
{
    .reg .pred %p<2>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<11>;

    ld.param.u64 %rd1, [param_a];
    ld.param.u64 %rd2, [param_b];
    ld.param.u64 %rd3, [param_c];
    ld.param.u32 %r1, [param_n];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra DONE;
    cvta.to.global.u64 %rd4, %rd1;
    cvta.to.global.u64 %rd5, %rd2;
    cvta.to.global.u64 %rd6, %rd3;
    mul.wide.u32 %rd7, %r5, 4;
    add.s64 %rd8, %rd4, %rd7;
    add.s64 %rd9, %rd5, %rd7;
    add.s64 %rd10, %rd6, %rd7;
    ld.global.u32 %r6, [%rd8];
    ld.global.u32 %r7, [%rd9];
    add.s32 %r8, %r6, %r7;
    st.global.u32 [%rd10], %r8;
DONE:
    ret;
}
"""


class Cuda:
    """libcuda, each call checked."""

    def __init__(self, library="libcuda.so.1"):
        self._cuda = ctypes.CDLL(library)

    def __call__(self, function, *args):
        code = getattr(self._cuda, function)(*args)
        if code != 0:
            name = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(name))
            raise SystemExit(f"{function}: {(name.value or b'?').decode()} ({code})")


class Memory:
    """COUNT 32-bit words on the GPU; a CUdeviceptr has 64 bits."""

    def __init__(self, cuda):
        self._cuda = cuda
        self.address = ctypes.c_uint64()
        cuda("cuMemAlloc_v2", ctypes.byref(self.address), ctypes.c_size_t(4 * COUNT))

    def fill(self, word):
        self._cuda("cuMemsetD32_v2", self.address, ctypes.c_uint(word), ctypes.c_size_t(COUNT))

    def write(self, words):
        size = ctypes.c_size_t(4 * COUNT)
        self._cuda("cuMemcpyHtoD_v2", self.address, (ctypes.c_uint32 * COUNT)(*words), size)

    def read(self):
        words = (ctypes.c_uint32 * COUNT)()
        self._cuda("cuMemcpyDtoH_v2", words, self.address, ctypes.c_size_t(4 * COUNT))
        return list(words)

    def free(self):
        self._cuda("cuMemFree_v2", self.address)


def describe(cuda):
    """How many GPUs there are, and the name of the first."""
    version, count, device = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    cuda("cuDriverGetVersion", ctypes.byref(version))
    cuda("cuDeviceGetCount", ctypes.byref(count))
    cuda("cuDeviceGet", ctypes.byref(device), 0)
    cuda("cuDeviceGetName", name, len(name), device)
    facts = {"cuda": version.value, "gpus": count.value, "name": name.value.decode()}
    return device, facts


def vector_add(cuda, first, second, total):
    """Launch the kernel on three Memory of COUNT words, and wait for it."""
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    cuda("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(PTX.encode()))
    cuda("cuModuleGetFunction", ctypes.byref(kernel), module, b"vector_add")
    values = [first.address, second.address, total.address, ctypes.c_uint(COUNT)]
    pointers = (ctypes.c_void_p * len(values))(
        *(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values)
    )
    grid, block = [(COUNT + BLOCK - 1) // BLOCK, 1, 1], [BLOCK, 1, 1]
    sizes = [ctypes.c_uint(size) for size in (*grid, *block, 0)]  # 0: no shared memory
    cuda("cuLaunchKernel", kernel, *sizes, ctypes.c_void_p(), pointers, ctypes.c_void_p())
    cuda("cuCtxSynchronize")
    cuda("cuModuleUnload", module)


def add_up(cuda):
    """Fill memory, read it back, add two vectors, in the context that is current: every number
    is right, or it ends."""
    memories = first, second, total = [Memory(cuda) for _ in range(3)]
    first.fill(PATTERN)
    if first.read() != [PATTERN] * COUNT:
        raise SystemExit("memory that was filled reads otherwise")
    second.write(range(COUNT))
    vector_add(cuda, first, second, total)
    if total.read() != [PATTERN + index for index in range(COUNT)]:
        raise SystemExit("the sums are wrong")
    for memory in memories:
        memory.free()


def compute(cuda):
    """The whole computation; what was found, once every number is right."""
    cuda("cuInit", ctypes.c_uint(0))
    device, facts = describe(cuda)
    # The primary context and not one of cuCtxCreate, whose parameters changed with CUDA 13.
    context = ctypes.c_void_p()
    cuda("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    cuda("cuCtxSetCurrent", context)
    add_up(cuda)
    cuda("cuDevicePrimaryCtxRelease_v2", device)
    return {**facts, "words": COUNT, "right": True}


if __name__ == "__main__":
    json.dump(compute(Cuda()), sys.stdout)

"""How fast mma.sync alone runs on this GPU: the roofline of kernels that are built on it.

A kernel in PTX, which the driver compiles: each warp multiplies 4 fragments of A with 4 of B, all
in registers, again and again. On Hopper this is below what cuBLAS reaches with wgmma.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

ROWS, COLUMNS = 4, 4  # fragments of A and of B: 16 independent accumulators
THREADS = 256
BLOCKS_PER_SM = 2
LOOPS = 4096
FLOP_PER_MMA = 2 * 16 * 8 * 16
PTX_TYPES = {"float16": "f16", "bfloat16": "bf16"}


def ptx(dtype: str) -> str:
    """`peak(values, out, loops)`: fragments are read from values, 24 words a thread."""
    kind = PTX_TYPES[dtype]
    words = 4 * ROWS + 2 * COLUMNS
    accumulators = 4 * ROWS * COLUMNS
    lines = [
        ".version 7.0",
        ".target sm_80",
        ".address_size 64",
        ".visible .entry peak(.param .u64 values, .param .u64 out, .param .u32 loops)",
        "{",
        ".reg .pred %p;",
        f".reg .b32 %w<{words}>;",
        f".reg .f32 %c<{accumulators}>;",
        ".reg .b32 %i, %n, %t, %g, %m;",
        ".reg .b64 %v, %o, %x;",
        "ld.param.u64 %v, [values];",
        "ld.param.u64 %o, [out];",
        "ld.param.u32 %n, [loops];",
        "cvta.to.global.u64 %v, %v;",
        "cvta.to.global.u64 %o, %o;",
        "mov.u32 %t, %tid.x;",
        f"mul.wide.u32 %x, %t, {4 * words};",
        "add.u64 %v, %v, %x;",
    ]
    lines += [f"ld.global.b32 %w{i}, [%v+{4 * i}];" for i in range(words)]
    lines += [f"mov.f32 %c{i}, 0f00000000;" for i in range(accumulators)]
    lines += ["mov.u32 %i, 0;", "again:"]
    for row in range(ROWS):
        for column in range(COLUMNS):
            c = ", ".join(f"%c{4 * (row * COLUMNS + column) + i}" for i in range(4))
            a = ", ".join(f"%w{4 * row + i}" for i in range(4))
            b = ", ".join(f"%w{4 * ROWS + 2 * column + i}" for i in range(2))
            lines.append(
                f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
                f"{{{c}}}, {{{a}}}, {{{b}}}, {{{c}}};"
            )
    lines += ["add.u32 %i, %i, 1;", "setp.lt.u32 %p, %i, %n;", "@%p bra again;"]
    # The sum is stored, so that nothing is left out.
    lines += [f"add.f32 %c0, %c0, %c{i};" for i in range(1, accumulators)]
    lines += [
        "mov.u32 %g, %ctaid.x;",
        f"mad.lo.u32 %m, %g, {THREADS}, %t;",
        "mul.wide.u32 %x, %m, 4;",
        "add.u64 %o, %o, %x;",
        "st.global.f32 [%o], %c0;",
        "ret;",
        "}",
    ]
    return "\n".join(lines) + "\n"


class Peak:
    """The kernel, loaded into PyTorch's context; OSError or RuntimeError where that fails."""

    def __init__(self, dtype: str) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.torch.cuda.synchronize()  # the context of this thread
        self.cuda: Any = ctypes.CDLL("libcuda.so.1")
        self.blocks = BLOCKS_PER_SM * int(
            self.torch.cuda.get_device_properties(0).multi_processor_count
        )
        words = THREADS * (4 * ROWS + 2 * COLUMNS)
        self.values = self.torch.randn(2 * words, device="cuda").to(getattr(self.torch, dtype))
        self.out = self.torch.empty(self.blocks * THREADS, device="cuda")
        self.module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        self._check("cuModuleLoadData", ctypes.byref(self.module), ptx(dtype).encode())
        self._check("cuModuleGetFunction", ctypes.byref(self.function), self.module, b"peak")

    def _check(self, name: str, *arguments: Any) -> None:
        status = getattr(self.cuda, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} returned CUDA error {status}")

    @property
    def flop(self) -> float:
        warps = self.blocks * THREADS // 32
        return float(FLOP_PER_MMA * ROWS * COLUMNS * LOOPS * warps)

    def launch(self, turn: int = 0) -> None:
        values = [
            ctypes.c_uint64(self.values.data_ptr()),
            ctypes.c_uint64(self.out.data_ptr()),
            ctypes.c_uint32(LOOPS),
        ]
        addresses = [ctypes.cast(ctypes.pointer(x), ctypes.c_void_p) for x in values]
        stream = ctypes.c_void_p(self.torch.cuda.current_stream().cuda_stream)
        self._check(
            "cuLaunchKernel", self.function, self.blocks, 1, 1, THREADS, 1, 1, 0, stream,
            (ctypes.c_void_p * 3)(*addresses), None,
        )  # fmt: skip

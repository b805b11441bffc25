"""A worker that gives the device, before step 2 of a case, work on memory that is not there: FAULTY is `kernel` or `gemm`.

The call itself succeeds. The error shows wherever the library next waits for the device.
"""

from __future__ import annotations

import ctypes
import os

from isolate.case import Step
from isolate.replay import engine, worker

STEP = 2
#: It writes to an address that no allocation has.
PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry nowhere() {
  .reg .b64 %a;
  .reg .b32 %v;
  mov.u64 %a, 0x100000000000;
  mov.u32 %v, 1;
  st.global.u32 [%a], %v;
  ret;
}
"""


class Dimensions(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


def launch_nowhere(hooks: ctypes.CDLL) -> None:
    runtime = ctypes.CDLL("libcudart.so.13", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    library, kernel, one = ctypes.c_void_p(), ctypes.c_void_p(), Dimensions(1, 1, 1)
    code = runtime.cudaLibraryLoadData(ctypes.byref(library), PTX, None, None, 0, None, None, 0)
    code = code or runtime.cudaLibraryGetKernel(ctypes.byref(kernel), library, b"nowhere")
    launch = hooks["__cudaLaunchKernel"]
    launch.argtypes = (ctypes.c_void_p, Dimensions, Dimensions, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    code = code or launch(kernel, one, one, None, 0, None)
    assert code == 0, code


def multiply_nowhere(hooks: ctypes.CDLL) -> None:
    handle, one = ctypes.c_void_p(), ctypes.c_float(1)
    gemm = hooks.cublasSgemm_v2
    whole, pointer, number = ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_float)
    gemm.argtypes = (pointer, *[whole] * 5, number, pointer, whole, pointer, whole, number, pointer, whole)
    code = hooks.cublasCreate_v2(ctypes.byref(handle))
    nowhere = 1 << 44
    code = code or gemm(handle, 0, 0, 64, 64, 64, one, nowhere, 64, nowhere, 64, one, nowhere, 64)
    assert code == 0, code


FAULTS = {"kernel": launch_nowhere, "gemm": multiply_nowhere}
original = engine.Engine._do


def with_fault(self: engine.Engine, index: int, step: Step) -> engine.Result:
    if index == STEP:
        FAULTS[os.environ["FAULTY"]](self.writer.library)
    return original(self, index, step)


engine.Engine._do = with_fault  # type: ignore[method-assign]
worker.main()

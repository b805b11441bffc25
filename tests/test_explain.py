"""Why a call failed: what is said follows from what was read, and nothing more is said."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from isolate.fault import StepInFlight
from isolate.trace.explain import cuda_fault, error_text, explanation, reported_by, why_refused
from isolate.trace.launch import chrome_trace, counts, kernel_name, launch_of, line, select
from isolate.trace.origin import Origin
from isolate.trace.record import CopyDetail, Detail, Failure, Kind, LaunchDetail, Record
from isolate.trace.ring import Ring

#: of an H200, as cudaDeviceGetAttribute answers there
H200 = {
    **{"max_threads": 1024, "block_x": 1024, "block_y": 1024, "block_z": 64},
    **{"grid_x": 2147483647, "grid_y": 65535, "grid_z": 65535, "shared": 49152, "shared_optin": 232448},
    **{"registers": 65536, "warp": 32, "major": 9, "minor": 0, "processors": 132},
}
#: of mul_mat_vec_q_moe<Q3_K, 2> compiled for 8.0
MOE = {
    **{"shared_static": 0, "constant": 0, "local": 0, "max_threads": 160, "registers": 62, "ptx": 80, "binary": 90},
    "shared_dynamic_max": 49152,
}
MOE_NAME = "_Z17mul_mat_vec_q_moeIL9ggml_type11ELi2ELb0EEvPKvS2_PKi31ggml_cuda_mm_fusion_args_devicePfj5uint3jjjjjjjjj"
LOG = """\
ggml_cuda_compute_forward: MUL_MAT_ID failed
CUDA error: invalid argument
  current device: 0, in function ggml_cuda_kernel_launch at /build/ggml/src/ggml-cuda/common.cuh:1707
  cudaGetLastError()
"""


def record(number: int, call: str, kind: Kind = Kind.LAUNCH, detail: Detail = (), **fields: Any) -> Record:
    blank = Record(
        number=number, kind=kind, done=True, capturing=False, injected=False, begin_ns=1000 * number,
        end_ns=1000 * number + 500, step=2, launch=585, stream=7, thread=11, device=0, call=call, name="", code=0,
        before=0, after=0, sync=None, detail=detail,
    )  # fmt: skip
    return replace(blank, **fields)


def launch(
    grid: tuple[int, int, int] = (384, 2, 1),
    block: tuple[int, int, int] = (32, 8, 1),
    shared: int = 0,
    cluster: tuple[int, int, int] = (0, 0, 0),
    **fields: Any,
) -> Record:
    return record(
        5, "__cudaLaunchKernel", detail=LaunchDetail(grid, block, cluster, shared, 99), name=MOE_NAME, **fields
    )


def failed(at: Record, attributes: dict[str, int] = MOE, limits: dict[str, int] = H200) -> Failure:
    return Failure(at, attributes, limits, (), "")


LAST_ERROR = record(6, "cudaGetLastError", Kind.QUERY, code=1)


def test_the_seed() -> None:
    at = launch(code=1, after=1)
    said = explanation(Origin(at, failed(at), LAST_ERROR, 1, exact=True))
    assert said == (
        "launch 585 of mul_mat_vec_q_moe<(ggml_type)11, 2, false> cannot run: "
        "(32, 8, 1) = 256 threads a block, and this kernel allows at most 160; "
        "its code was compiled for compute capability 8.0 and the device has 9.0: a limit that the host picks by the "
        "device need not be the one that the code has; it was only reported by cudaGetLastError"
    )


@pytest.mark.parametrize(
    ("at", "attributes", "clauses"),
    [
        (launch(block=(32, 5, 1)), MOE, []),
        (launch(block=(32, 6, 1)), MOE, ["(32, 6, 1) = 192 threads a block, and this kernel allows at most 160"]),
        (launch(block=(1025, 1, 1)), {}, [
            "block (1025, 1, 1) has x = 1025, and the device allows 1024",
            "(1025, 1, 1) = 1025 threads a block, and the device allows 1024",
        ]),
        (launch(block=(1, 1, 65)), {}, ["block (1, 1, 65) has z = 65, and the device allows 64"]),
        (launch(grid=(1, 65536, 1)), MOE | {"max_threads": 1024}, [
            "grid (1, 65536, 1) has y = 65536, and the device allows 65535"
        ]),
        (launch(grid=(0, 1, 1), block=(32, 1, 1)), MOE, ["grid (0, 1, 1) has a dimension of 0"]),
        (launch(block=(1024, 1, 1)), MOE | {"max_threads": 256, "registers": 254}, [
            "(1024, 1, 1) = 1024 threads a block, and with its 254 registers a thread this kernel allows 256 "
            "(the device has 65536 registers a block)"
        ]),
        (launch(block=(32, 1, 1), shared=49153), MOE, [
            "49153 bytes of dynamic shared memory, and this kernel allows 49152 until cudaFuncSetAttribute raises it"
        ]),
        (launch(block=(32, 1, 1), shared=230000), MOE | {"shared_static": 16384, "shared_dynamic_max": 232448}, [
            "230000 bytes of dynamic shared memory and 16384 that the kernel has itself, and the device allows 232448 "
            "a block"
        ]),
        (launch(block=(32, 1, 1), grid=(2, 1, 1), cluster=(3, 1, 1)), MOE, [
            "a cluster of (3, 1, 1) does not divide grid (2, 1, 1)"
        ]),
        (launch(block=(32, 1, 1), grid=(16, 1, 1), cluster=(16, 1, 1)), MOE, [
            "a cluster of 16 blocks, and 8 is what every kernel may have"
        ]),
    ],
)  # fmt: skip
def test_the_broken_limit_is_named(at: Record, attributes: dict[str, int], clauses: list[str]) -> None:
    assert why_refused(failed(at, attributes)) == clauses


def test_nothing_is_claimed_that_was_not_read() -> None:
    at = launch(code=1)
    assert why_refused(failed(at, {}, {})) == []
    said = explanation(Origin(at, failed(at, {}, {}), at, 1, exact=True))
    assert said == (
        "cudaErrorInvalidValue: a parameter of the call is outside of what is allowed; none of the limits that were "
        "read is broken by launch 585 of mul_mat_vec_q_moe<(ggml_type)11, 2, false>"
    )


def test_code_for_the_device_itself_is_no_reason() -> None:
    at = launch(code=1)
    said = explanation(Origin(at, failed(at, MOE | {"ptx": 90}), at, 1, exact=True))
    assert "compute capability" not in said


def test_an_error_of_the_device_is_exact_or_an_upper_bound() -> None:
    at = launch(sync=700)
    said = explanation(Origin(at, failed(at), at, 700, exact=True))
    assert "cudaErrorIllegalAddress" in said
    assert (
        "the device was in order before launch 585 of mul_mat_vec_q_moe<(ggml_type)11, 2, false> and not after" in said
    )
    synchronize = record(9, "cudaStreamSynchronize", Kind.SYNC, (0,) * 10, code=700)
    said = explanation(Origin(synchronize, failed(synchronize), synchronize, 700, exact=False))
    assert "this origin is an upper bound" in said


def test_other_calls_are_named_with_what_they_did() -> None:
    at = record(5, "cudaMemcpyAsync", Kind.COPY, CopyDetail(4096, 1, 2, 1, 0), code=1)
    said = explanation(Origin(at, failed(at), at, 1, exact=True))
    assert said.startswith("cudaMemcpyAsync of 4096 bytes returned cudaErrorInvalidValue: ")
    blas = record(5, "cublasSgemm_v2", Kind.BLAS, (0,) * 10, code=13)
    assert "CUBLAS_STATUS_EXECUTION_FAILED" in explanation(Origin(blas, None, blas, 13, exact=True))
    assert "no call that the hooks saw made it" in explanation(Origin(None, None, LAST_ERROR, 1, exact=True))
    assert error_text(12345) == "cuda error 12345"


def test_the_place_that_reported_is_read_from_the_log() -> None:
    report = reported_by("something else\n" + LOG + "more\n")
    assert report is not None
    assert (report.call, report.file, report.line) == ("ggml_cuda_kernel_launch", "common.cuh", 1707)
    assert report.text == "invalid argument; MUL_MAT_ID failed; cudaGetLastError()"
    assert reported_by("CUDA error: invalid argument\n") is None


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        (MOE_NAME, "mul_mat_vec_q_moe<(ggml_type)11, 2, false>"),
        ("_Z13quantize_q8_1PKfPvlllllj5uint3", "quantize_q8_1"),
        (
            "_Z11k_bin_bcastIXadL_ZN42_INTERNAL_75f38565_11_binbcast_cu_6840010b6op_mulEffEEfffJPKfEEvPKT0_PKT1_PT2_"
            "jjj5uint3SB_SB_SB_SB_jjjjjjjjjjjDpT3_",
            "k_bin_bcast<&op_mul(float, float), float, float, float, float const*>",
        ),
        ("not mangled", "not mangled"),
        ("", ""),
    ],
)
def test_names_of_kernels_are_the_same_in_every_build(mangled: str, name: str) -> None:
    assert kernel_name(mangled) == name
    assert kernel_name(mangled.replace("75f38565", "e1387027")) == name


def test_records_are_selected_counted_and_written() -> None:
    copy = record(6, "cudaMemcpyAsync", Kind.COPY, CopyDetail(64, 1, 2, 1, 0), step=3, stream=8)
    records = [launch(), launch(code=1), copy]
    assert list(select(records, step=3)) == [copy]
    assert list(select(records, stream=8)) == [copy]
    assert list(select(records, kernel="mul_mat")) == records[:2]
    (kernel, other) = counts(records)
    assert (kernel.name, kernel.calls, kernel.failed, kernel.host_ns) == (kernel_name(MOE_NAME), 2, 1, 1000)
    assert (other.name, other.calls) == ("cudaMemcpyAsync", 1)
    assert line(records[1]) == (
        "      5  step   2  launch 585 mul_mat_vec_q_moe<(ggml_type)11, 2, false> grid 384,2,1 block 32,8,1  returned 1"
    )
    assert line(copy) == "      6  step   3  cudaMemcpyAsync  64 bytes  host to device"
    events = chrome_trace(records)["traceEvents"]
    assert [(event["ph"], event["ts"], event["dur"]) for event in events] == [
        ("X", 5, 0.5),
        ("X", 5, 0.5),
        ("X", 6, 0.5),
    ]
    one = launch_of(launch(code=1), failed(launch()))
    assert one is not None
    assert (one.number, one.attributes["max_threads"], one.attributes["device_max_threads"]) == (585, 160, 1024)
    assert launch_of(copy) is None


def test_a_trace_without_an_error_is_no_fault() -> None:
    descriptor = Ring.create_anonymous(64, 4096)
    try:
        assert cuda_fault(Ring(descriptor), StepInFlight(0, "decode"), LOG) is None
    finally:
        os.close(descriptor)

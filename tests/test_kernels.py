"""The kernel table: what each compiled version of a kernel allows, which one a GPU runs, and files that lie."""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from isolate.errors import BuildError
from isolate.trace import cubin as cubins
from isolate.trace import fatbin, kernels
from isolate.trace import ptx as ptxs
from isolate.trace.bounds import Bounds
from isolate.trace.kernels import Code, Kernel, select
from tests import cuda_builds
from tests.fatbinary import LZ4, ZSTD, Entry, build, container, cubin, elf, ptx, shared


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def library(folder: Path, *fatbins: bytes) -> Path:
    return build(folder / "libkernels.so", fatbins, None, "-shared", "-Wl,--build-id")


def table_of(folder: Path, *entries: Entry) -> dict[str, Kernel]:
    return {kernel.name: kernel for kernel in kernels.read(library(folder, container(entries))).kernels}


def bounds_of(folder: Path, text: bytes) -> dict[str, Bounds]:
    return {name: kernel.codes[0].bounds for name, kernel in table_of(folder, Entry("ptx", 90, text)).items()}


def test_ptx_says_how_a_kernel_may_be_launched(tmp_path: Path) -> None:
    found = bounds_of(
        tmp_path,
        ptx(
            {
                "bound": ".maxntid 32, 5, 1\n.minnctapersm 2\n.maxnreg 40",
                "required": ".reqntid 128",
                "cluster": ".explicitcluster\n.reqnctapercluster 2, 1, 1",
                "rank": ".maxntid 128, 1, 1\n.maxclusterrank 4",
                "plain": "",
            }
        ),
    )
    assert found["bound"].max_threads == (32, 5, 1)
    assert (found["bound"].most_threads, found["bound"].min_blocks, found["bound"].max_registers) == (160, 2, 40)
    assert found["required"].required_threads == (128, 1, 1)
    assert found["required"].most_threads == 128
    assert found["cluster"].cluster == (2, 1, 1)
    assert found["rank"].max_cluster == 4
    assert found["plain"] == Bounds("plain", parameters=(8,))


def test_ptx_parameters_have_their_sizes(tmp_path: Path) -> None:
    text = b""".version 9.0
.target sm_80
.visible .entry mixed(
\t.param .u64 .ptr .align 1 mixed_param_0,
\t.param .f32 mixed_param_1,
\t.param .align 4 .b8 mixed_param_2[20],
\t.param .u8 mixed_param_3
)
.maxntid 64, 1, 1
{
\tret;

}
.visible .entry none()
{
\tret;

}
"""
    found = bounds_of(tmp_path, text)
    assert found["mixed"].parameters == (8, 4, 20, 1)
    assert found["mixed"].most_threads == 64
    assert found["none"].parameters == ()


def test_ptx_shared_memory_is_laid_to_who_uses_it(tmp_path: Path) -> None:
    common = (
        ".shared .align 4 .b8 common[400];\n.shared .align 16 .f32 wide[8];\n.extern .shared .align 16 .b8 dynamic[];\n"
        ".func helper()\n{\n\tmov.u32 %r1, wide;\n\tret;\n\n}\n"
    )
    found = bounds_of(
        tmp_path,
        ptx(
            {
                "own": f"|{shared(1000, 'ownshared')}",
                "uses_common": "|\tmov.u32 %r1, common;",
                "uses_both": f"|{shared(10, 'bothshared')}\tmov.u32 %r1, common;\n\tcall.uni helper, ();",
                "uses_none": "|\tmov.u32 %r1, commonplace;\n\tmov.u32 %r2, dynamic;",
            },
            before=common,
        ),
    )
    assert found["own"].static_shared == 1000
    assert found["uses_common"].static_shared == 400
    # 10 bytes, then 400 at a multiple of 4, then 32 at a multiple of 16
    assert found["uses_both"].static_shared == 416 + 32
    assert found["uses_none"].static_shared == 0


@pytest.mark.parametrize("architecture", [86, 90, 120])
def test_cubin_says_how_a_kernel_may_be_launched(tmp_path: Path, architecture: int) -> None:
    content = cubin(
        architecture,
        {
            "bound": {"threads": (160, 1, 1), "registers": 255, "shared": 4096, "parameters": (8, 4)},
            "other": {"required": (128, 2, 1), "cluster": (2, 1, 1), "registers": 32},
        },
        compiled_for=75,
    )
    found = table_of(tmp_path, Entry("cubin", architecture, content))
    bound, other = found["bound"].codes[0].bounds, found["other"].codes[0].bounds
    assert (bound.most_threads, bound.registers, bound.static_shared, bound.parameters) == (160, 255, 4096, (8, 4))
    assert found["bound"].codes[0].compiled_for == 75
    assert (other.required_threads, other.cluster, other.registers, other.static_shared) == (
        (128, 2, 1),
        (2, 1, 1),
        32,
        0,
    )


@pytest.mark.parametrize("packing", [0, ZSTD, LZ4])
def test_packed_payloads_are_read(tmp_path: Path, packing: int) -> None:
    text = ptx({f"kernel{number}": f".maxntid {number + 1}, 1, 1" for number in range(300)})
    found = table_of(tmp_path, Entry("ptx", 80, text, packing=packing))
    assert {name: kernel.codes[0].bounds.most_threads for name, kernel in found.items()} == {
        f"kernel{number}": number + 1 for number in range(300)
    }


def test_the_same_name_in_two_translation_units_is_two_kernels(tmp_path: Path) -> None:
    one = container([Entry("ptx", 80, ptx({"same": ".maxntid 64, 1, 1"}))])
    other = container([Entry("ptx", 80, ptx({"same": ".maxntid 128, 1, 1"}))])
    found = kernels.read(library(tmp_path, one, other)).kernels
    assert [kernel.codes[0].bounds.most_threads for kernel in found] == [64, 128]
    assert found[0].container != found[1].container


def versions(*names: str) -> Kernel:
    """A kernel of versions such as ptx80, cubin90a."""
    codes = []
    for name in names:
        kind = "ptx" if name.startswith("ptx") else "cubin"
        digits = name.removeprefix(kind)
        number = digits.rstrip("af")
        codes.append(Code(kind, int(number), digits[len(number) :], int(number), Bounds(name)))
    return Kernel("kernel", 0, tuple(codes))


@pytest.mark.parametrize(
    ("names", "capability", "chosen"),
    [
        # an H200 chose these, driver 580 (tests/data/h200_calls.txt)
        ("ptx80 ptx90 ptx90a", 90, "ptx90a"),
        ("ptx90a ptx90 ptx80", 90, "ptx90a"),
        ("cubin90 ptx90a", 90, "cubin90"),
        ("cubin90 cubin90a", 90, "cubin90a"),
        ("cubin90a ptx90", 90, "cubin90a"),
        ("cubin89 cubin80 ptx80", 90, "ptx80"),
        ("cubin89 cubin80", 90, None),
        # by NVIDIA's guide
        ("cubin86 cubin89", 89, "cubin89"),
        ("cubin80 ptx89", 86, "cubin80"),
        ("cubin86 ptx89", 89, "cubin86"),
        ("cubin80 cubin86", 86, "cubin86"),
        ("ptx75 ptx80 ptx90", 89, "ptx80"),
        ("ptx75 ptx80 ptx90", 61, None),
        ("cubin90a ptx90a", 100, None),
        ("cubin120a ptx90", 121, "ptx90"),
        ("cubin120a cubin121a", 121, "cubin121a"),
        ("cubin100f", 103, "cubin100f"),
        ("cubin100f", 110, None),
        ("ptx100f ptx90", 120, "ptx90"),
        ("ptx90 cubin86", 110, "ptx90"),
        # machine code of desktop GPUs is not for Jetsons, nor theirs for others
        ("cubin86 ptx80", 87, "ptx80"),
        ("cubin87 ptx80", 87, "cubin87"),
        ("cubin87", 89, None),
    ],
)
def test_a_gpu_runs_the_code_that_the_driver_would_choose(names: str, capability: int, chosen: str | None) -> None:
    code = select(versions(*names.split()), capability)
    assert (code and code.bounds.name) == chosen


def test_a_table_is_read_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = library(tmp_path, container([Entry("ptx", 80, ptx({"kernel": ""}))]))
    first = kernels.read(path)
    moved = path.rename(tmp_path / "moved.so")

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("read again")

    with monkeypatch.context() as patch:
        patch.setattr(fatbin, "entries", fail)
        assert kernels.read(moved).kernels == first.kernels
    for kept in (cache / "isolate" / "kernels").iterdir():
        kept.write_bytes(b"not ours")
    assert kernels.read(moved) == kernels.Table(str(moved), first.build_id, first.kernels)


def test_a_changed_library_is_not_taken_for_the_one_it_was(tmp_path: Path, cache: Path) -> None:
    """Damage leaves a library's build id and size."""
    path = library(tmp_path, container([Entry("ptx", 80, ptx({"one_kernel": ""}))]))
    before = kernels.read(path)
    path.write_bytes(path.read_bytes().replace(b"one_kernel", b"any_kernel"))
    after = kernels.read(path)
    assert before.build_id == after.build_id
    assert [kernel.name for kernel in (*before.kernels, *after.kernels)] == ["one_kernel", "any_kernel"]


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    path = library(tmp_path, container([Entry("ptx", 80, ptx({"kernel": ""}))]))
    assert [kernel.name for kernel in kernels.read(path).kernels] == ["kernel"]


def test_a_library_without_kernels_has_an_empty_table(tmp_path: Path) -> None:
    assert kernels.read(library(tmp_path)).kernels == ()


def test_files_that_are_no_library_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("hello")
    with pytest.raises(BuildError, match="not an ELF file"):
        kernels.read(text)
    with pytest.raises(BuildError, match="No such file"):
        kernels.read(tmp_path / "missing")


def section(content: bytes) -> bytes:
    """An ELF file of one section .nv_fatbin, as the reader of fat binaries gets it."""
    return elf([(".nv_fatbin", 1, content, len(content))])


def parse(data: bytes) -> list[Bounds]:
    found = []
    for entry in fatbin.entries(memoryview(data), "library"):
        plain = fatbin.unpack(entry, "library")
        if entry.kind == "ptx":
            found += ptxs.kernels(plain, "library")
        else:
            found += cubins.kernels(plain, "library", entry.architecture)
    return found


CONTENT = container(
    [
        Entry("ptx", 80, ptx({"one": ".maxntid 160, 1, 1", "two": f"|{shared(64, 'v')}"}), packing=ZSTD),
        Entry("ptx", 75, ptx({"one": ""}), packing=LZ4),
        Entry("cubin", 86, cubin(86, {"one": {"threads": (160, 1, 1), "parameters": (8,)}})),
    ]
)


def test_a_file_cut_anywhere_is_refused_or_read(tmp_path: Path) -> None:
    whole = section(CONTENT)
    assert len(parse(whole)) == 4
    for length in range(len(whole)):
        with pytest.raises(BuildError, match="library is"):
            parse(whole[:length])


def test_damaged_bytes_are_refused_or_read(tmp_path: Path) -> None:
    whole = section(CONTENT)
    chance = random.Random(1)
    refused = 0
    for _ in range(3000):
        damaged = bytearray(whole)
        for _ in range(chance.choice([1, 1, 4, 32])):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        try:
            parse(bytes(damaged))
        except BuildError as error:
            assert error.message.startswith("library is ")
            refused += 1
    assert refused > 500


@pytest.mark.parametrize("packing", [ZSTD, LZ4])
@pytest.mark.parametrize("plain", [1, 99_999, 1 << 27, 1 << 40])
def test_a_payload_that_lies_about_its_size_is_refused(packing: int, plain: int) -> None:
    content = bytearray(container([Entry("ptx", 80, b"\0" * 100_000, packing=packing)]))
    struct.pack_into("<Q", content, 16 + 56, plain)
    with pytest.raises(BuildError, match=r"library is (damaged|refused)"):
        parse(section(bytes(content)))


def test_a_library_that_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fatbin, "MOST_BYTES_OF_A_LIBRARY", 1 << 20)
    entry = Entry("ptx", 80, b"\0" * (1 << 19), packing=ZSTD)
    with pytest.raises(BuildError, match="unpack to more than"):
        parse(section(container([entry] * 3)))


def test_the_build_for_8_0_has_the_bound_that_started_this() -> None:
    table = kernels.read(cuda_builds.ptx80() / "libggml-cuda.so")
    assert len(table.kernels) == 6991
    (kernel,) = (
        kernel for kernel in table.kernels if kernel.name.startswith("_Z17mul_mat_vec_q_moeIL9ggml_type11ELi2ELb0E")
    )
    code = select(kernel, 90)
    assert code is not None
    assert (str(code), code.bounds.most_threads) == ("compute_80", 160)
    assert select(kernel, 75) is None


@pytest.mark.slow
def test_the_released_build_is_read_and_then_found_in_the_cache() -> None:
    path = cuda_builds.stock() / "libggml-cuda.so"
    table = kernels.read(path)
    assert kernels.read(path).kernels == table.kernels
    assert len(table.kernels) == 6731
    chosen = {
        capability: Counter(str(select(kernel, capability)) for kernel in table.kernels)
        for capability in (75, 86, 89, 90, 100, 120, 121)
    }
    assert {capability: next(iter(found)) for capability, found in chosen.items() if len(found) == 1} == {
        75: "compute_75", 86: "sm_86", 89: "sm_89", 90: "compute_90", 100: "compute_90", 120: "sm_120a", 121: "sm_121a",
    }  # fmt: skip


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("packing", ["none", "speed", "size"])
@pytest.mark.parametrize("architecture", ["90", "90a", "100f", "120a"])
def test_what_nvcc_writes_says_the_same_as_text_and_as_machine_code(
    tmp_path: Path, packing: str, architecture: str
) -> None:
    output = tmp_path / "bounds.fatbin"
    source = Path(__file__).parent / "native" / "bounds.cu"
    generate = f"arch=compute_{architecture},code=[sm_{architecture},compute_{architecture}]"
    command: list[str | Path] = [
        "nvcc",
        "-fatbin",
        f"--compress-mode={packing}",
        "-gencode",
        generate,
        "-o",
        output,
        source,
    ]
    subprocess.run(command, check=True, capture_output=True)
    found = {kernel.name: kernel.codes for kernel in kernels.read(library(tmp_path, output.read_bytes())).kernels}
    assert len(found) == 8
    for codes in found.values():
        bounds = {code.kind: code.bounds for code in codes}
        assert {str(code) for code in codes} == {f"sm_{architecture}", f"compute_{architecture}"}
        assert bounds["cubin"].registers
        text = msgspec.structs.replace(bounds["ptx"], min_blocks=None)
        assert text == msgspec.structs.replace(bounds["cubin"], registers=None, local=None)
    named = {name.lstrip("_Z0123456789"): codes[0].bounds for name, codes in found.items()}
    assert named["own_and_commonPi"].static_shared == 4400
    assert named["plain5LargePifc5Small"].parameters == (6000, 8, 4, 1, 20)
    assert named["boundPi"].most_threads == 160
    assert named["fixedPi"].required_threads == (128, 2, 1)

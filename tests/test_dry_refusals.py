"""Launches that are wrong on purpose: each is refused with the code a driver gives and a sentence that says why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests import calls
from tests.calls import Client, environment
from tests.compile import ROOT
from tests.fatbinary import Entry, build, container, cubin


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernel tables of small test programs do not belong in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


BOUND = {"threads": (160, 1, 1), "registers": 32}
HEAVY = {"registers": 254}
STATIC = {"registers": 32, "shared": 20000}
FIXED = {"required": (128, 1, 1), "registers": 32}
PAIR = {"cluster": (2, 1, 1), "registers": 32}
#: gpu, the kernel's bounds, its architecture, the launch, the code, what the sentence says
VARIANTS: list[tuple[str, Mapping[str, object], int, str, int, str]] = [
    # threads
    ("h200", BOUND, 90, "launch k 1 1 1 161 1 1 0 0", 1, "161 threads a block, its launch bound is 160 .compiled for sm_90."),
    ("h200", BOUND, 90, "launch k 1 1 1 32 6 1 0 0", 1, "192 threads a block, its launch bound is 160"),
    ("h200", BOUND, 90, "launch k 384 2 1 32 8 1 0 0", 1, "256 threads a block, its launch bound is 160"),
    ("h200", BOUND, 90, "launch k 1 1 1 4 4 11 0 0", 1, "176 threads a block, its launch bound is 160"),
    ("h200", BOUND, 90, "launchex k 1 1 1 161 1 1 0 0", 1, "161 threads a block, its launch bound is 160"),
    ("h200", BOUND, 90, "cooperative k 1 1 1 161 1 1 0 0", 1, "161 threads a block, its launch bound is 160"),
    ("a100", BOUND, 80, "launch k 1 1 1 161 1 1 0 0", 1, "161 threads a block, its launch bound is 160 .compiled for sm_80."),
    ("rtx3060", BOUND, 80, "launch k 1 1 1 161 1 1 0 0", 1, "its launch bound is 160 .compiled for sm_80."),
    ("h200", {}, 90, "launch k 1 1 1 1025 1 1 0 0", 1, "block .1025,1,1. is over the limit of .1024,1024,64."),
    ("h200", {}, 90, "launch k 1 1 1 1 1025 1 0 0", 1, "block .1,1025,1. is over the limit"),
    ("h200", {}, 90, "launch k 1 1 1 1 1 65 0 0", 1, "block .1,1,65. is over the limit"),
    ("h200", {}, 90, "launch k 1 1 1 33 32 1 0 0", 1, "1056 threads a block, a device can have 1024"),
    ("h200", {}, 90, "launch k 1 1 1 512 3 1 0 0", 1, "1536 threads a block, a device can have 1024"),
    ("h200", {}, 90, "launch k 1 1 1 0 1 1 0 0", 1, "a dimension is 0: grid .1,1,1., block .0,1,1."),
    ("h200", {}, 90, "launch k 1 1 1 1 0 1 0 0", 1, "a dimension is 0"),
    ("h200", {}, 90, "launch k 1 1 1 1 1 0 0 0", 1, "a dimension is 0"),
    ("h200", FIXED, 90, "launch k 1 1 1 64 1 1 0 0", 1, "block .64,1,1., it must be .128,1,1."),
    ("h200", FIXED, 90, "launch k 1 1 1 64 2 1 0 0", 1, "block .64,2,1., it must be .128,1,1."),
    ("h200", FIXED, 90, "launch k 1 1 1 256 1 1 0 0", 1, "block .256,1,1., it must be .128,1,1."),
    # registers
    ("h200", HEAVY, 90, "launch k 1 1 1 257 1 1 0 0", 701, "257 threads of 254 registers each, a block can have 65536 .*256 threads"),
    ("h200", HEAVY, 90, "launch k 1 1 1 1024 1 1 0 0", 701, "1024 threads of 254 registers each"),
    ("h200", {"registers": 128}, 90, "launch k 1 1 1 513 1 1 0 0", 701, "513 threads of 128 registers each"),
    ("h200", {"registers": 72}, 90, "launch k 1 1 1 1024 1 1 0 0", 701, "which is 896 threads"),
    ("t4", {"registers": 128}, 75, "launch k 1 1 1 1024 1 1 0 0", 701, "1024 threads of 128 registers each"),
    # grid
    ("h200", {}, 90, "launch k 2147483648 1 1 1 1 1 0 0", 1, "grid .2147483648,1,1. is over the limit of .2147483647,65535,65535."),
    ("h200", {}, 90, "launch k 1 65536 1 1 1 1 0 0", 1, "grid .1,65536,1. is over the limit"),
    ("h200", {}, 90, "launch k 1 1 65536 1 1 1 0 0", 1, "grid .1,1,65536. is over the limit"),
    ("h200", {}, 90, "launch k 1 100000 100000 1 1 1 0 0", 1, "grid .1,100000,100000. is over the limit"),
    ("h200", {}, 90, "launch k 0 1 1 1 1 1 0 0", 1, "a dimension is 0: grid .0,1,1."),
    ("h200", {}, 90, "launch k 1 0 1 1 1 1 0 0", 1, "a dimension is 0"),
    ("h200", {}, 90, "launch k 1 1 0 1 1 1 0 0", 1, "a dimension is 0"),
    # shared memory
    ("h200", {}, 90, "launch k 1 1 1 32 1 1 49153 0", 1, "49153 bytes of dynamic shared memory, 49152 are allowed .*up to 232448 on NVIDIA H200"),
    ("h200", STATIC, 90, "launch k 1 1 1 32 1 1 29153 0", 1, "29153 bytes of dynamic shared memory, 29152 are allowed .*up to 212448"),
    ("h200", {}, 90, "attribute k 8 232449", 1, "cudaFuncSetAttribute to 232449 bytes .*a block of NVIDIA H200 can have 232448"),
    ("h200", STATIC, 90, "attribute k 8 212449", 1, "to 212449 bytes .*with 20000 of static"),
    ("h200", {}, 90, "attribute k 8 -1", 1, "to -1 bytes"),
    ("a100", {}, 80, "attribute k 8 166913", 1, "a block of NVIDIA A100-SXM4-80GB can have 166912"),
    ("rtx3090ti", {}, 86, "attribute k 8 101377", 1, "can have 101376"),
    ("t4", {}, 75, "attribute k 8 65537", 1, "a block of Tesla T4 can have 65536"),
    ("gtx1080ti", {}, 61, "attribute k 8 49153", 1, "can have 49152"),
    ("t4", {}, 75, "launch k 1 1 1 32 1 1 65536 0", 1, "65536 bytes of dynamic shared memory, 49152 are allowed"),
    ("rtx5090", {}, 120, "launch k 1 1 1 32 1 1 101376 0", 1, "101376 bytes of dynamic shared memory, 49152 are allowed"),
    # clusters
    ("h200", {}, 90, "launchex k 2 1 1 32 1 1 0 0 3 1 1", 912, "cluster .3,1,1. does not divide grid .2,1,1."),
    ("h200", {}, 90, "launchex k 4 3 1 32 1 1 0 0 2 2 1", 912, "does not divide grid .4,3,1."),
    ("h200", {}, 90, "launchex k 16 1 1 32 1 1 0 0 16 1 1", 912, "16 blocks a cluster, 8 are allowed"),
    ("h200", PAIR, 90, "launch k 3 1 1 32 1 1 0 0", 912, "cluster .2,1,1. does not divide grid .3,1,1."),
    ("h200", PAIR, 90, "launchex k 4 1 1 32 1 1 0 0 4 1 1", 912, "cluster .4,1,1., it was compiled for .2,1,1."),
    ("a100", {}, 80, "launchex k 2 1 1 32 1 1 0 0 2 1 1", 912, "clusters of blocks, which NVIDIA A100-SXM4-80GB does not have"),
    # cooperative launches
    ("h200", {"registers": 32}, 90, "cooperative k 265 1 1 1024 1 1 0 0", 720, "265 blocks, 264 can run at once .2 on each of 132"),
    ("h200", {"registers": 64}, 90, "cooperative k 133 1 1 1024 1 1 0 0", 720, "133 blocks, 132 can run at once"),
    ("t4", {"registers": 32}, 75, "cooperative k 41 1 1 1024 1 1 0 0", 720, "41 blocks, 40 can run at once .1 on each of 40"),
    # no code
    ("h200", {}, 100, "launch k 1 1 1 1 1 1 0 0", 209, "no code for compute capability 9.0 .NVIDIA H200."),
    ("t4", {}, 86, "launch k 1 1 1 1 1 1 0 0", 209, "no code for compute capability 7.5 .Tesla T4."),
    ("rtx3060", {}, 89, "launch k 1 1 1 1 1 1 0 0", 209, "no code for compute capability 8.6"),
    ("orin", {}, 86, "launch k 1 1 1 1 1 1 0 0", 209, "no code for compute capability 8.7 .Orin."),
    ("b200", {}, 90, "attributes k", 209, "no code for compute capability 10.0 .NVIDIA B200."),
    ("rtx5090", {}, 90, "occupancy k 32 0", 209, "no code for compute capability 12.0"),
]  # fmt: skip


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Mapping[str, object], int], Client]:
    """Programs with one kernel called k, made once for each bounds and architecture."""
    made: dict[str, Client] = {}
    folder = tmp_path_factory.mktemp("variants")

    def make(bounds: Mapping[str, object], architecture: int) -> Client:
        key = repr((bounds, architecture))
        if key not in made:
            content = container([Entry("cubin", architecture, cubin(architecture, {"k": dict(bounds)}))])
            source = str(ROOT / "tests" / "native" / "dry_client.c")
            made[key] = Client(build(folder / f"variant{len(made)}", [content], source), "k")
        return made[key]

    return make


def test_there_are_fifty_variants() -> None:
    assert len(VARIANTS) >= 50


@pytest.mark.parametrize(("gpu", "bounds", "architecture", "call", "code", "sentence"), VARIANTS)
def test_a_wrong_launch_is_refused_with_its_code_and_a_sentence(
    gpu: str,
    bounds: Mapping[str, object],
    architecture: int,
    call: str,
    code: int,
    sentence: str,
    variants: Callable[[Mapping[str, object], int], Client],
) -> None:
    program = variants(bounds, architecture)
    answers = program.run([call, "message", "peek"], environment(program.program, gpu))
    returned = answers[0].removeprefix(f"{call} -> ").split()[0]
    assert int(returned) == code
    assert answers[2] == f"peek -> {code}"
    message = answers[1].removeprefix("message -> 0 ")
    assert message.startswith("k: ")
    assert re.search(sentence, message), message


def test_a_bound_in_ptx_is_named_by_what_it_was_compiled_for(tmp_path: Path) -> None:
    client = calls.client(tmp_path)
    answers = client.run(["launch bound160 1 1 1 161 1 1 0 0", "message"], environment(client.program))
    assert answers[1].endswith("bound160: 161 threads a block, its launch bound is 160 (compiled for compute_80)")


def test_different_gpus_run_different_code(variants: Callable[[Mapping[str, object], int], Client]) -> None:
    program = variants(BOUND, 80)
    script = ["launch k 1 1 1 1 1 1 0 0", "device 1", "launch k 1 1 1 1 1 1 0 0", "deviceattribute 16 1"]
    answers = program.run(script, environment(program.program, "h200,a100"))
    assert [answer.partition(" -> ")[2] for answer in answers] == ["209", "0", "0", "0 108"]

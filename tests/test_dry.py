"""The dry device: answers every call as an H200 did, refuses what it would refuse and says why, keeps nothing in memory."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from isolate.errors import DeviceError
from isolate.trace import dry, gpus, kernels
from isolate.trace.dry import native_folder
from isolate.trace.symbols import exports
from tests import calls, cuda_builds
from tests.calls import Client, environment
from tests.compile import ROOT
from tests.compile import build as compile_program
from tests.fatbinary import Entry, build, container, ptx

RECORDED = calls.recorded()
#: Kernels are not run there, so none can fail.
NOT_SIMULATED = {"a fault on the device"}
#: Here registers decide, which only machine code has before a driver compiled it.
REGISTERS_DECIDE = {"occupancy", "registers of a block"}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernel tables of small test programs do not belong in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Client:
    return calls.client(tmp_path_factory.mktemp("client"))


@pytest.fixture(scope="module")
def known_client(tmp_path_factory: pytest.TempPathFactory) -> Client:
    return calls.known_client(tmp_path_factory.mktemp("client"))


@pytest.mark.parametrize("title", [title for title in RECORDED if title not in NOT_SIMULATED])
def test_calls_are_answered_as_by_an_h200(title: str, client: Client, known_client: Client) -> None:
    program = known_client if title in REGISTERS_DECIDE else client
    answers = program.run(calls.script(RECORDED[title]), environment(program.program))
    assert answers == RECORDED[title]


def test_calls_are_answered_the_same_by_libcudart_12(client: Client) -> None:
    answers = client.run(calls.script(RECORDED["memory"]), environment(client.program), major=12)
    assert answers == RECORDED["memory"]


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, ...]]:
    """The dry device and its clients built with the address and undefined behaviour sanitizers."""
    folder = tmp_path_factory.mktemp("checked")
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
    shared_flags = ("-shared", "-fPIC", "-fvisibility=hidden", *flags)
    sources = {path.name for path in (ROOT / "native/dry").glob("*.c")}
    stand_ins = {
        "libcudart.so.13": {name for name in sources if name.startswith("cudart")},
        "libcublas.so.13": {"cublas.c"},
        "libcuda.so.1": {"driver.c"},
    }
    parts = sources.difference(*stand_ins.values())
    compile_program(folder / "libisolate_dry.so", [f"native/dry/{name}" for name in parts], *shared_flags)
    for library, own in stand_ins.items():
        linking = (str(folder / "libisolate_dry.so"), f"-Wl,-rpath,{folder},-soname,{library}", "-DCUDART_MAJOR=13")
        compile_program(folder / library, [f"native/dry/{name}" for name in own], *shared_flags, *linking)
    return folder, flags


def test_no_call_reads_or_writes_what_it_should_not(checked: tuple[Path, tuple[str, ...]]) -> None:
    folder, flags = checked
    program = calls.client(folder, *flags)
    settings = {"ASAN_OPTIONS": "detect_leaks=0:handle_segv=0", **environment(program.program, libraries=folder)}
    for title, answers in RECORDED.items():
        if title not in NOT_SIMULATED | REGISTERS_DECIDE:
            assert program.run(calls.script(answers), settings) == answers


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        (["malloc a 1000", "host h 4096", "copy a+100 h 901 1"], "901 bytes at byte 100 of the destination, which is device memory of 1000 bytes"),
        (["malloc a 1000", "host h 4096", "copy h a 1001 2"], "1001 bytes at byte 0 of the source, which is device memory of 1000 bytes"),
        (["malloc a 1000", "host h 8", "free a", "copy a h 8 1"], "is in device memory of 1000 bytes that was freed"),
        (["malloc a 1000", "free a", "free a"], "cudaFree: .* is in device memory of 1000 bytes that was freed"),
        (["malloc a 1000", "free a+256"], "is byte 256 of device memory of 1000 bytes, not its start"),
        (["pinned p 1000", "free p"], "is pinned host memory of 1000 bytes, which another call frees"),
        (["malloc a 1000", "freehost a"], "is device memory of 1000 bytes, which another call frees"),
        (["host h 8", "free h"], "is in no allocation"),
        (["malloc a 1000", "set a+990 11"], "11 bytes at byte 990 of the destination, which is device memory of 1000 bytes"),
        (["malloc a 200000000000"], "200000000000 bytes do not fit in device 0 .NVIDIA H200.: 149556297728 of 150108897280 bytes are free"),
        (["malloc a 1000", "host h 8", "copy h a 8 1"], "the destination, .* is in no allocation"),
        (["blas k", "malloc a 1024", "gemm k 16 16 16 a 16 a 16 a 17"], "matrix C of 1084 bytes ends beyond its memory"),
    ],
)  # fmt: skip
def test_a_wrong_address_is_named_with_the_sizes(script: list[str], sentence: str, client: Client) -> None:
    answers = client.run([*script, "message"], environment(client.program))
    assert re.search(sentence, answers[-1]), answers[-1]


def test_what_is_uploaded_is_dropped_and_what_is_read_is_zeros(client: Client) -> None:
    script = [
        "malloc a 100000000000",
        "host h 4096",
        "copy a+99999990000 h 4096 1",
        "byte h",
        "copy h a+99999990000 4096 2",
        "byte h",
    ]
    assert client.run(script, environment(client.program))[3::2] == ["byte h -> 0 170", "byte h -> 0 0"]


def test_two_gpus_have_their_own_memory_and_errors(client: Client) -> None:
    script = [
        "count", "canpeer 0 1", "enablepeer 1", "enablepeer 1", "malloc a 100000000000", "device 1", "malloc b 100000000000",
        "malloc c 100000000000", "peer b 1 a 0 1000 0", "peer b 1 a 0 100000000001 0", "peer b 2 a 0 1000 0", "stream s 1",
        "device 0", "launch bound160 1 1 1 32 1 1 0 s", "stream t 1", "event e 2", "record e s", "record e t", "wait s e",
        "blas k", "gemm k 16 16 16 0x1000 16 a 16 a 16", "devicesync", "malloc d 1", "device 1", "malloc d 1",
    ]  # fmt: skip
    answers = [answer.partition(" -> ")[2] for answer in client.run(script, environment(client.program, "h200,h200"))]
    assert answers[:12] == ["0 2", "0 1", "0", "704", "0", "0", "0", "2", "0", "1", "101", "0"]
    # NVIDIA's guide: a stream of device 1 takes no launch while device 0 is current, nor an event of device 0; any may wait
    assert answers[12:19] == ["0", "400", "0", "0", "400", "0", "0"]
    assert answers[19:] == ["0", "0", "700", "700", "0", "0"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the configuration of the dry device, .*: No such file"),
        ("", "no configuration"),
        ("hello\n", "is not a configuration of the dry device: line 1 says 'hello'"),
        ("isolate dry device\t1\ngpu\nprocessors\t8\nnonsense\t1\n", "line 4 says 'nonsense'"),
        ("isolate dry device\t1\ngpu\nkernel\t0\tk\tptx\t1\n", "line 3 says 'kernel'"),
    ],
)
def test_without_a_configuration_there_is_no_device(
    content: str | None, message: str, client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "configuration"
    if content is not None:
        path.write_text(content)
    settings = {"ISOLATE_DRY": "" if content == "" else str(path), "LD_LIBRARY_PATH": str(native_folder())}
    answers = client.run(["count", "malloc a 1", "last"], settings)
    assert answers == ["count -> 100 0", "malloc a 1 -> 100", "last -> 100"]
    done = subprocess.run(
        [client.program, client.kernels],
        input="count\n",
        env={**os.environ, **settings},
        text=True,
        capture_output=True,
        check=True,
    )
    assert re.search(message, done.stderr)


def test_every_function_that_ggml_imports_is_there() -> None:
    folder = native_folder()
    stand_ins = [folder / name for name in ("libcudart.so.13", "libcublas.so.13", "libcuda.so.1")]
    for library in (cuda_builds.ptx80() / "libggml-cuda.so", cuda_builds.stock() / "libggml-cuda.so"):
        dry.check_imports([library], stand_ins)


#: Functions of the sources of llama-cpp-python 0.3.16, 0.3.36 and the TurboQuant fork, built for CUDA, that differ between them.
OTHERS = (
    "cudaMemcpyToSymbol cudaMemcpyFromSymbol cudaMemcpy3DPeerAsync cudaLaunchHostFunc cudaMemAdvise cudaDeviceDisablePeerAccess "
    "cudaOccupancyMaxActiveBlocksPerMultiprocessor cublasLoggerConfigure cublasSgemmBatched cudaGraphInstantiate cudaMemcpyPeerAsync"
)


@pytest.mark.parametrize("major", [12, 13])
def test_functions_of_other_releases_are_there(major: int) -> None:
    folder = native_folder()
    offered = exports(folder / f"libcudart.so.{major}") | exports(folder / f"libcublas.so.{major}")
    assert not set(OTHERS.split()) - offered
    assert ("cudaGetDeviceProperties_v2" if major == 12 else "cudaGetDeviceProperties") in offered


def test_a_function_that_is_not_there_is_named(tmp_path: Path) -> None:
    source = tmp_path / "uses.c"
    source.write_text(
        "int cudaMallocPitch(void); int cudaFree(void *); int use(void) { return cudaMallocPitch() + cudaFree(0); }\n"
    )
    standin = tmp_path / "standin.c"
    standin.write_text("int cudaMallocPitch(void) { return 0; } int cudaFree(void *p) { return p != 0; }\n")
    version = tmp_path / "map"
    version.write_text("libcudart.so.13 { global: *; };\n")
    runtime, library = tmp_path / "libcudart.so.13", tmp_path / "libuses.so"
    compile_program(
        runtime, [str(standin)], "-shared", "-fPIC", f"-Wl,-soname,{runtime.name},--version-script={version}"
    )
    compile_program(library, [str(source)], "-shared", "-fPIC", str(runtime))
    with pytest.raises(DeviceError, match=r"the dry device cannot run .*libuses\.so: it has no cudaMallocPitch$"):
        dry.prepare(gpus.find_all("h200"), [library])


def test_a_build_without_cuda_is_refused() -> None:
    with pytest.raises(DeviceError, match="no library needs libcudart"):
        dry.prepare(gpus.find_all("h200"), [native_folder() / "libisolate_dry.so"])


def test_a_prepared_device_is_prepared_again_at_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    first = dry.configuration(gpus.find_all("h200"), [client.program])

    def fail(*_: object) -> None:
        raise AssertionError("the table was read again")

    monkeypatch.setattr(kernels, "read", fail)
    assert dry.configuration(gpus.find_all("h200"), [client.program]) == first


def test_sorted_experts_read_as_the_first_ones(tmp_path: Path) -> None:
    """ggml asserts that a row has no expert twice, so the indices it reads back must not be zeros."""
    name = "_Z17k_argsort_f32_i32IL15ggml_sort_order1EEvPKfPiii"
    content = container([Entry("ptx", 80, ptx({name: ""}))])
    program = Client(build(tmp_path / "sorts", [content], str(ROOT / "tests" / "native" / "dry_client.c")), name)
    # arguments: the keys, where the indices go, how many a row has; 3 rows
    script = ["malloc a 4096", "host h 48", f"launch {name} 3 1 1 32 1 1 0 0 a a 4", "copy h a 48 2"]
    script += [f"byte h+{place}" for place in range(0, 48, 4)]
    answers = program.run(script, environment(program.program))
    assert [answer.rpartition(" ")[2] for answer in answers[4:]] == list("012301230123")
    assert program.run(["malloc a 64", "host h 64", "copy h a+4 8 2", "byte h"], environment(program.program))[
        3
    ].endswith(" 0")

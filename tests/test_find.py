"""Finding a build: every kind of folder that holds one, and one exact sentence for each that does not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from isolate.errors import BuildError
from isolate.library.elf import ElfError, read_elf
from isolate.library.find import find_build
from tests import stub_build
from tests.compile import COMPILER


@pytest.fixture(autouse=True)
def _no_build_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ISOLATE_BUILD", raising=False)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)


def refusal(where: Path, include: Path | None = None) -> str:
    """The sentence a folder is refused with: one line, one sentence."""
    with pytest.raises(BuildError) as caught:
        find_build(where, include)
    assert "\n" not in caught.value.message and not caught.value.message.endswith(".")
    return caught.value.message


def test_default_is_llama_cpp_pythons_own() -> None:
    build = find_build()
    assert build.folder.parts[-2:] == ("llama_cpp", "lib")
    names = [path.name.split(".so")[0] for path in build.ggml]
    assert names == ["libggml-base", "libggml-cpu", "libggml"]
    assert build.backends is None
    # site-packages/include is beside no lib: it belongs to whichever package installed last.
    assert build.header is None


def test_named_build_comes_before_the_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (stub_build.build(tmp_path / name) for name in ("one", "other"))
    monkeypatch.setenv("ISOLATE_BUILD", str(tmp_path / "one"))
    assert find_build().llama == one
    assert find_build(tmp_path / "other").llama == other
    monkeypatch.setenv("ISOLATE_BUILD", str(tmp_path / "none"))
    assert refusal(tmp_path / "none").endswith(f" (ISOLATE_BUILD is set to {tmp_path / 'none'})")


def test_nothing_is_loaded() -> None:
    code = "from isolate.library.find import find_build; find_build().key(); print(open('/proc/self/maps').read())"
    maps = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "libc.so" in maps and "llama" not in maps.replace("llama_cpp", "") and "libggml" not in maps


@pytest.mark.parametrize("below", ["", "bin", "lib", "lib64"])
def test_folders_above(tmp_path: Path, below: str) -> None:
    llama = stub_build.build(tmp_path / below)
    assert find_build(tmp_path).llama == llama
    assert find_build(llama).llama == llama


def test_links_and_copies_are_one_libllama(tmp_path: Path) -> None:
    llama = stub_build.build(tmp_path / "lib")
    real = llama.rename(llama.with_name("libllama.so.0.5.0"))
    llama.symlink_to(real.name)
    shutil.copy(real, llama.with_name("libllama.so.0"))
    assert find_build(tmp_path).llama.read_bytes() == real.read_bytes()


@pytest.mark.parametrize("tag", ["", ".v0.5.0", ".cuda.v0.5.0"])
def test_names_of_node_llama_cpp_and_its_backends_to_load(tmp_path: Path, tag: str) -> None:
    base = stub_build.library(tmp_path / "libggml-base.so", "int base;")
    ggml = stub_build.library(tmp_path / f"libggml{tag}.so", "int ggml;", [base])
    llama = stub_build.library(tmp_path / f"libllama{tag}.so", "void llama_backend_init(void) {}", [ggml, base])
    stub_build.library(tmp_path / "libllama-common.so", "int common;", [llama])
    stub_build.library(tmp_path / "libggml-cpu-haswell.so", "int cpu;", [base])
    build = find_build(tmp_path)
    assert (build.llama, build.ggml, build.backends) == (llama, (base, ggml), tmp_path)


def test_backends_in_the_bin_beside_lib(tmp_path: Path) -> None:
    base = stub_build.library(tmp_path / "lib" / "libggml-base.so.0", "int base;")
    ggml = stub_build.library(tmp_path / "lib" / "libggml.so.0", "int ggml;", [base])
    stub_build.library(tmp_path / "lib" / "libllama.so.0", "void llama_backend_init(void) {}", [ggml])
    assert "libggml.so.0 loads its backends at run time" in refusal(tmp_path / "lib")
    stub_build.library(tmp_path / "bin" / "libggml-cpu.so", "int cpu;", [base])
    assert find_build(tmp_path / "lib").backends == tmp_path / "bin"


def test_ggml_inside_libllama_needs_nothing_else(tmp_path: Path) -> None:
    stub_build.library(tmp_path / "libllama.so", "void llama_backend_init(void) {}")
    build = find_build(tmp_path)
    assert (build.ggml, build.backends) == ((), None)


def test_ggml_is_found_where_the_library_looks(tmp_path: Path) -> None:
    """A CMake build without one output folder: libllama in src, ggml in ggml/src, found by RUNPATH."""
    ggml = stub_build.library(tmp_path / "ggml" / "src" / "libggml.so", "int ggml; void llama_backend_init(void);")
    cpu = stub_build.library(tmp_path / "ggml" / "src" / "libggml-cpu.so", "int cpu;")
    stub_build.library(ggml, "int ggml;", [cpu])
    llama = tmp_path / "src" / "libllama.so"
    llama.parent.mkdir()
    command = [
        COMPILER,
        "-shared",
        "-fPIC",
        "-x",
        "c",
        "-",
        "-o",
        str(llama),
        "-Wl,--no-as-needed",
        "-x",
        "none",
        str(ggml),
    ]
    runpath = "-Wl,--enable-new-dtags,-rpath,$ORIGIN/../ggml/src"
    subprocess.run([*command, runpath], input="void llama_backend_init(void) {}", text=True, check=True)
    assert find_build(llama).ggml == (cpu, ggml)
    shutil.move(ggml, tmp_path / "elsewhere")
    assert f"{llama} needs libggml.so, which is not in {llama.parent}" in refusal(llama)


# -- what is refused


def test_missing_folder(tmp_path: Path) -> None:
    assert f"{tmp_path / 'none'} does not exist: pass --build" in refusal(tmp_path / "none")


def test_folder_without_libllama(tmp_path: Path) -> None:
    (tmp_path / "libllama-common.so").touch()
    assert f"no libllama.so in {tmp_path} (nor in its bin, lib, lib64): pass --build" in refusal(tmp_path)


def test_static_only_build(tmp_path: Path) -> None:
    subprocess.run(
        [COMPILER, "-c", "-x", "c", "-", "-o", "one.o"], input="int one;", text=True, cwd=tmp_path, check=True
    )
    subprocess.run(["ar", "rcs", "libllama.a", "one.o"], cwd=tmp_path, check=True)
    sentence = f"{tmp_path / 'libllama.a'} is a static library, which cannot be loaded: build llama.cpp with -DBUILD_SHARED_LIBS=ON"
    assert refusal(tmp_path) == sentence
    assert refusal(tmp_path / "libllama.a") == sentence


def test_two_different_libllamas(tmp_path: Path) -> None:
    for folder in ("bin", "lib"):
        stub_build.build(tmp_path / folder, f'const char *name = "{folder}"; void llama_backend_init(void) {{}}')
    sentence = refusal(tmp_path)
    assert "2 different libllamas" in sentence and "pass --build the file that is meant" in sentence
    for folder in ("bin", "lib"):
        assert str(tmp_path / folder / "libllama.so") in sentence
        assert find_build(tmp_path / folder / "libllama.so").folder == tmp_path / folder


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"#!/bin/sh\n", "is not an ELF file"),
        (b"MZ\x90\x00" * 20, "is a Windows library"),
        (b"\xcf\xfa\xed\xfe" * 20, "is a macOS library"),
        (b"\x7fELF\x01\x01\x01" + bytes(60), "is not a 64-bit little-endian ELF file"),
        (b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00\x3e\x00" + bytes(60), "is not a shared library"),
        (b"\x7fELF\x02\x01", "is a truncated or damaged ELF file"),
    ],
)
def test_no_shared_library(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "libllama.so").write_bytes(content)
    assert f"{tmp_path / 'libllama.so'} {said}: pass --build" in refusal(tmp_path)


def test_library_for_another_machine(tmp_path: Path) -> None:
    llama = stub_build.build(tmp_path)
    content = bytearray(llama.read_bytes())
    content[18:20] = (183).to_bytes(2, "little")
    llama.write_bytes(content)
    assert f"{llama} is for aarch64, this machine is {os.uname().machine}: pass --build" in refusal(tmp_path)


def test_file_that_is_another_library(tmp_path: Path) -> None:
    stub_build.build(tmp_path)
    ggml = tmp_path / "libggml.so.0"
    assert f"{ggml} is not a libllama (it has no llama_backend_init): pass --build" in refusal(ggml)


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "libllama.so").symlink_to("/proc/self/mem")
    assert "libllama.so" in refusal(tmp_path)


def test_damaged_elf_is_refused_whatever_is_damaged(tmp_path: Path) -> None:
    """Any byte of the headers changed, any length: an answer or an error of ours, and no other."""
    path = stub_build.build(tmp_path)
    whole = path.read_bytes()
    for at in range(0, 1024, 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        answers(lambda: read_elf(path))
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        answers(lambda: read_elf(path))


def answers(call: Callable[[], object]) -> None:
    """Runs it; only its own error may come."""
    try:
        call()
    except ElfError:
        return


# -- the header


@pytest.mark.parametrize(
    ("variable", "below"), [("CMAKE_HOME_DIRECTORY", "include"), ("llama.cpp_SOURCE_DIR", "include")]
)
@pytest.mark.parametrize("named", ["build", "build/bin"])
def test_header_by_the_builds_cmake_cache(tmp_path: Path, variable: str, below: str, named: str) -> None:
    header = tmp_path / "source" / below / "llama.h"
    header.parent.mkdir(parents=True)
    header.touch()
    stub_build.build(tmp_path / "build" / "bin")
    cache = f"# a cache\nOTHER:STRING=x\n{variable}:INTERNAL={tmp_path / 'source'}\n"
    (tmp_path / "build" / "CMakeCache.txt").write_text(cache)
    assert find_build(tmp_path / named).header == header
    header.unlink()
    assert find_build(tmp_path / named).header is None


@pytest.mark.parametrize("lib", ["lib", "lib64", "lib/x86_64-linux-gnu"])
def test_header_of_an_installed_prefix(tmp_path: Path, lib: str) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "llama.h").touch()
    stub_build.build(tmp_path / lib)
    assert find_build(tmp_path / lib).header == tmp_path / "include" / "llama.h"


def test_header_that_is_named(tmp_path: Path) -> None:
    stub_build.build(tmp_path / "lib")
    (tmp_path / "source" / "include").mkdir(parents=True)
    header = tmp_path / "source" / "include" / "llama.h"
    header.touch()
    for include in (header, header.parent, tmp_path / "source"):
        assert find_build(tmp_path, include).header == header
    assert refusal(tmp_path, tmp_path / "lib") == (
        f"no llama.h in {tmp_path / 'lib'}: pass --include the llama.h the build was made from, or its folder"
    )


# -- the key


def test_key_says_whether_the_build_is_the_same(tmp_path: Path) -> None:
    llama = stub_build.build(tmp_path / "one")
    key = find_build(llama).key()
    assert find_build(tmp_path / "one").key() == key and len(key) == 16
    stub_build.build(tmp_path / "one", "int more; void llama_backend_init(void) {}")
    assert find_build(llama).key() != key

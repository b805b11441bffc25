"""Recordings of a real server: they replay to the same tokens, survive any death, and say what cannot be recorded."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from isolate import case as cases
from isolate.case import Checkpoint, Decode, SeqRm
from isolate.cli import main
from isolate.errors import IsolateError
from isolate.library.find import find_build
from isolate.replay.supervisor import Supervisor
from isolate.serve.program import check_program
from isolate.serve.record import ran_on
from isolate.serve.recorded import Recorded, steps_of
from isolate.serve.recording import Kind, Recording, read
from isolate.trace.ring import Ring, native_library
from tests import cuda_builds
from tests.conftest import ROOT
from tests.servers import ISOLATE, RunningServer, cuda_server, free_port, server_build, server_program

PROMPTS = [[(7 * i + 13 * s) % 120 for i in range(60 + 9 * s)] for s in range(2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid model."""
    path = tmp_path_factory.mktemp("models") / "model.gguf"
    with Supervisor() as children:
        children.make_model("qwen35moe", "Q8_0", 1, path)
    return path


def isolate(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def recorder(out: Path, *command: object) -> subprocess.CompletedProcess[str]:
    words = [*ISOLATE, "record", "--out", out, "--", *command]
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)


def test_a_recorded_run_replays_to_the_tokens_the_server_answered(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "case.json"
    with RunningServer(model, out, "-np", 2, "-c", 2048) as server:
        answers = server.complete(PROMPTS, 12)
        answers += server.complete([[*PROMPTS[0][:40], 1, 2, 3]], 6)
        assert server.end() == 0, server.output
    done = subprocess.run(
        [sys.executable, "-m", "tests.greedy_child", str(server_build()), str(out)],
        capture_output=True, text=True, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    pairs = json.loads(done.stdout)
    assert len(pairs) == sum(len(answer) - 1 for answer in answers)
    assert all(recorded == replayed for _, recorded, replayed in pairs)
    assert isolate("run", out, "--build", server_build(), "--check", "positions,nan")[0] == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_server_that_dies_in_the_middle_leaves_a_case(number: int, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "case.json"
    server = RunningServer(model, out, "-np", 2, "-c", 8192)
    with server:
        asking = threading.Thread(target=_ask_until_it_dies, args=(server,))
        asking.start()
        time.sleep(0.4)
        os.kill(server.server_process(), number)
        asking.join()
        said, _ = server.process.communicate(timeout=30)
    assert server.process.returncode == 1
    assert f"the program died of {signal.Signals(number).name}" in said
    steps = cases.read(out).steps
    assert sum(isinstance(step, Decode) for step in steps) > 10
    assert isolate("run", out, "--build", server_build())[0] == 0


def _ask_until_it_dies(server: RunningServer) -> None:
    try:
        server.complete(PROMPTS, 3000)
    except OSError:
        return


def test_a_recording_is_read_up_to_where_it_is_whole(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "calls"
    file.touch()
    environment = {"LD_LIBRARY_PATH": str(server_build() / "lib"), "ISOLATE_RECORD": str(file)}
    environment["LD_PRELOAD"] = str(native_library("record"))
    words = [server_program(), "-m", model, "-fit", "off", "-c", 512, "-np", 1, "--no-warmup", "--port", free_port()]
    server = subprocess.Popen(
        [str(word) for word in words],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for _ in range(200):
        if len([call for call in read(file).calls if call.kind == Kind.CLEAR]) == 2:
            break
        time.sleep(0.05)
    server.kill()
    server.wait()
    data = file.read_bytes()
    whole = steps_of(read(file)).steps
    assert [step.kind for step in whole][:2] == ["clear", "decode"]
    lengths = set()
    for size in range(0, len(data), 37):
        file.write_bytes(data[:size])
        lengths.add(len(read(file).calls))
    assert max(lengths) <= len(read_of(file, data).calls)
    for place in range(0, len(data) - 4, 101):  # damage anywhere is no exception
        file.write_bytes(data[:place] + struct.pack("<I", 0xFFFFFFFF) + data[place + 4 :])
        try:
            steps_of(read(file))
        except IsolateError:
            continue


def read_of(file: Path, data: bytes) -> Recording:
    file.write_bytes(data)
    recording = read(file)
    assert recording.first(Kind.CONTEXT)
    return recording


# -- what cannot be recorded


def refused(done: subprocess.CompletedProcess[str], words: str) -> None:
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def compiled(folder: Path, name: str, source: str, *options: str) -> Path:
    (folder / f"{name}.c").write_text(source)
    program = folder / name
    subprocess.run(["cc", "-o", str(program), str(folder / f"{name}.c"), *options], check=True)
    return program


def test_a_program_that_cannot_be_recorded_is_refused_in_one_sentence(tmp_path: Path) -> None:
    out = tmp_path / "case.json"
    refused(recorder(out, tmp_path / "nothing"), "no such program")
    (tmp_path / "plain").write_text("no program")
    refused(recorder(out, tmp_path / "plain"), "may not be started")
    refused(recorder(out, "true"), "called no libllama")
    inside = compiled(tmp_path, "inside", "int llama_init_from_model(void) {return 0;}\nint main(void) {return 0;}\n")
    refused(recorder(out, inside), "it links libllama statically")
    static = compiled(tmp_path, "static", "int main(void) {return 3;}\n", "-static")
    refused(recorder(out, static), "the recorder was not loaded into it; it ended with 3")
    refused(recorder(tmp_path / "none" / "case.json", "true"), "there is no folder")
    code, said = isolate("record", "--out", out, "--trace", tmp_path / "none" / "t", "--", "true")
    assert code == 2 and "there is no folder" in said
    assert not out.exists()


def test_a_program_of_another_user_is_refused(tmp_path: Path) -> None:
    program = compiled(tmp_path, "owned", "int main(void) {return 0;}\n")
    program.chmod(0o4755)
    with pytest.raises(IsolateError, match="set-user-id"):
        check_program(program)


def test_a_server_that_does_not_start_is_said(tmp_path: Path) -> None:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(server_build() / "lib")}
    words = [*ISOLATE, "record", "--out", tmp_path / "case.json", "--", server_program(), "-m", tmp_path / "no.gguf"]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert "it was started and made no context; it ended with 1, so there is nothing to record" in last


def test_a_recording_runs_on_a_tiny_model_of_the_same_kind(tmp_path: Path) -> None:
    case = cases.parse(
        b'{"isolate": 1, "model": {"file": "large.gguf"}, "about": "recorded", "steps": [{"step": "decode", "batch": '
        b'[{"slot": 0, "tokens": [150000, 7, 99999]}]}]}',
        "recorded",
    )
    small = cases.with_model(case, "zoo:llama")
    (step,) = small.steps
    assert isinstance(step, Decode)
    size = small.model.vocabulary()
    assert size is not None
    assert step.batch[0].tokens == [150000 % size, 7, 99999 % size]
    assert small.about == f"recorded\nToken ids are folded into the vocabulary of {size} tokens."
    path = tmp_path / "recorded.json"
    case.write(path)
    assert isolate("run", path, "--model", "zoo:llama")[0] == 0


CLIENT = """
#include <stdint.h>
#include <stdlib.h>
struct params { char bytes[512]; };
struct llama_batch { int32_t n_tokens; int32_t *token; float *embd; int32_t *pos; int32_t *n_seq_id; int32_t **seq_id; int8_t *logits; };
struct params llama_model_default_params(void);
struct params llama_context_default_params(void);
void *llama_model_load_from_file(const char *, struct params);
void *llama_init_from_model(void *, struct params);
struct llama_batch llama_batch_get_one(int32_t *, int32_t);
int32_t llama_decode(void *, struct llama_batch);
int main(int n, char **words) {
    int32_t tokens[8] = {1, 2, 3, 4, 5, 6, 7, 8}, failed = 0;
    void *model = llama_model_load_from_file(words[n - 1], llama_model_default_params());
    void *context = llama_init_from_model(model, llama_context_default_params());
    for (int i = 1; i < n - 1; i++) {
        failed |= llama_decode(context, llama_batch_get_one(tokens, atoi(words[i])));
    }
    return failed;
}
"""


def record_client(folder: Path, sizes: list[int], build: Path, *options: object) -> subprocess.CompletedProcess[str]:
    """A program that decodes batches of these numbers of tokens, recorded and traced."""
    model = folder / "model.gguf"
    with Supervisor() as children:
        children.make_model("qwen35moe", "Q3_K", 1, model)
    linked = [f"-L{build}", "-lllama", f"-Wl,-rpath,{build}", "-Wl,--allow-shlib-undefined"]
    client = compiled(folder, "client", CLIENT, *linked)
    words = [*ISOLATE, "record", "--out", folder / "case.json", "--trace", folder / "t", *options, "--"]
    words += [client, *sizes, model]
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)


def test_a_program_without_cuda_has_no_trace_and_is_recorded_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("of another run")
    done = record_client(tmp_path, [8], find_build().folder)
    assert done.returncode == 0, done.stderr
    assert "it made no CUDA call that the hooks saw, so there is no trace" in done.stderr
    assert not (tmp_path / "t").exists()
    assert len(cases.read(tmp_path / "case.json").steps) == 1


def test_an_error_that_the_program_handled_is_no_fault(tmp_path: Path) -> None:
    done = record_client(tmp_path, [*[1] * 5, *[4] * 5] * 3, cuda_builds.ptx80(), "--target", "dry:h200")
    assert (done.returncode, "FAULT" in done.stderr) == (0, False), done.stderr
    with Ring(tmp_path / "t") as trace:
        failed = [record.call for record in trace.records() if record.code > 0]
    assert "cudaGraphExecUpdate" in failed
    # On a real GPU there is nothing but the launches to say that a replay must run there.
    assert (ran_on(tmp_path / "t", None), ran_on(None, None)) == ("cuda", "cpu")


def test_a_cuda_program_fails_in_the_same_launch_on_the_dry_device(tmp_path: Path) -> None:
    build, out = cuda_builds.ptx80(), tmp_path / "case.json"
    done = record_client(tmp_path, [8], build, "--target", "dry:h200")
    assert done.returncode == 1, done.stderr
    said = re.search(r"FAULT  cuda in step 0 `decode`: (launch \d+ of mul_mat_vec_q_moe)", done.stderr)
    assert said, done.stderr
    code, output = isolate("run", out, "--build", build, "--target", "dry:h200")
    assert (code, said[1] in output) == (1, True)
    assert "mul_mat_vec_q_moe" in isolate("trace", tmp_path / "t", "--counts")[1]


@pytest.mark.parametrize("checkpoints", [32, 0])
def test_the_reports_server_dies_on_the_dry_device_with_checkpoints_and_answers_without(
    tmp_path: Path, checkpoints: int
) -> None:
    build, model, out = cuda_builds.ptx80(), tmp_path / "model.gguf", tmp_path / "case.json"
    with Supervisor() as children:
        children.make_model("qwen35moe", "Q3_K", 1, model)
    options = ["-np", 2, "-c", 61440, "-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0", "-ngl", 99]
    options += ["--ctx-checkpoints", checkpoints]
    prompts = [[(7 * i + 13 * slot) % 120 for i in range(1000)] for slot in range(2)]
    recorder = ["--target", "dry:h200"]
    with RunningServer(model, out, *options, program=(cuda_server(), build), switches=recorder) as server:
        if checkpoints:
            with pytest.raises(ConnectionError):
                server.complete(prompts, 200)
            server.process.wait()
        else:
            assert [len(answer) for answer in server.complete(prompts, 200)] == [200, 200]
    # 118 launches are its own decode of two tokens, to see whether a tail can be removed; then 585 as in the table.
    died = re.search(r"FAULT  cuda in step \d+ `decode`: (launch 703 of mul_mat_vec_q_moe)", server.output)
    assert (server.process.returncode, bool(died)) == (bool(checkpoints), bool(checkpoints)), server.output
    code, output = isolate("run", out, "--build", build, "--target", "dry:h200")
    assert code == bool(checkpoints), output
    assert not died or died[1] in output


STUB = """
struct params { char bytes[512]; };
static int context, memory;
void *llama_model_load_from_file(const char *path, struct params params) { (void)path; (void)params; return &context + 1; }
void *llama_init_from_model(void *model, struct params params) { (void)model; (void)params; return &context; }
void llama_free(void *c) { (void)c; }
struct batch { char bytes[56]; };
int llama_decode(void *c, struct batch batch) { (void)c; (void)batch; return 0; }
void abort(void);
unsigned long llama_state_seq_get_size_ext(void *c, int slot, unsigned flags) {
    (void)c; (void)flags;
    if (slot < 0) { abort(); }
    return 8;
}
unsigned llama_n_ctx(const void *c) { (void)c; return 512; }
void *llama_get_memory(const void *c) { (void)c; return &memory; }
_Bool llama_memory_seq_rm(void *m, int slot, int p0, int p1) { (void)m; (void)p1; return (slot + p0) % 3 != 0; }
"""
THREADS = """
#include <pthread.h>
#include <stdlib.h>
struct params { char bytes[512]; };
void *llama_init_from_model(void *, struct params);
void *llama_get_memory(const void *);
_Bool llama_memory_seq_rm(void *, int, int, int);
static void *memory;
static void *work(void *slot) {
    for (int i = 0; i < 5000; i++) {
        llama_memory_seq_rm(memory, (int)(long)slot, i, -1);
    }
    return 0;
}
int main(void) {
    struct params params = {{0}};
    memory = llama_get_memory(llama_init_from_model(0, params));
    pthread_t threads[4];
    for (long i = 0; i < 4; i++) {
        pthread_create(&threads[i], 0, work, (void *)i);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], 0);
    }
    abort();
}
"""


def test_calls_of_several_threads_are_all_there_and_whole(tmp_path: Path) -> None:
    compiled(tmp_path, "libllama.so", STUB, "-shared", "-fPIC", "-Wl,-soname,libllama.so")
    client = compiled(tmp_path, "threads", THREADS, f"-L{tmp_path}", "-lllama", "-lpthread", f"-Wl,-rpath,{tmp_path}")
    file = tmp_path / "calls"
    file.touch()
    environment = {**os.environ, "LD_PRELOAD": str(native_library("record")), "ISOLATE_RECORD": str(file)}
    assert subprocess.run([client], env=environment, check=False).returncode == -signal.SIGABRT
    recording = read(file)
    removals = [call for call in recording.calls if call.kind == Kind.SEQ_RM]
    for slot in range(4):
        own = [call for call in removals if call.a[1] == slot]
        assert [call.a[2] for call in own] == list(range(5000))
        assert all(call.result == ((slot + call.a[2]) % 3 != 0) for call in own)
    library = recording.first(Kind.LIBRARY)
    assert library is not None
    assert Path(library.text()) == tmp_path / "libllama.so"
    assert check_program(client) == tmp_path / "libllama.so"


def recorded_with_stub(folder: Path, source: str) -> tuple[int, Recorded]:
    """How a program that is linked with the stub ended, and the steps of what it called."""
    compiled(folder, "libllama.so", STUB, "-shared", "-fPIC", "-Wl,-soname,libllama.so")
    client = compiled(folder, "client", source, f"-L{folder}", "-lllama", f"-Wl,-rpath,{folder}")
    file = folder / "calls"
    file.touch()
    environment = {**os.environ, "LD_PRELOAD": str(native_library("record")), "ISOLATE_RECORD": str(file)}
    status = subprocess.run([client], env=environment, check=False).returncode
    return status, steps_of(read(file))


AGAIN = """
struct params { char bytes[512]; };
struct batch { char bytes[56]; };
int llama_decode(void *, struct batch);
void *llama_model_load_from_file(const char *, struct params);
void *llama_init_from_model(void *, struct params);
void llama_free(void *);
void *llama_get_memory(const void *);
_Bool llama_memory_seq_rm(void *, int, int, int);
int main(void) {
    struct params params = {{0}};
    for (int i = 0; i < 2; i++) {
        void *context = llama_init_from_model(llama_model_load_from_file(i ? "second" : "first", params), params);
        for (int removed = 0; removed <= i; removed++) {
            llama_memory_seq_rm(llama_get_memory(context), 0, removed, -1);
        }
        if (i) {
            llama_decode(context, (struct batch){{0}});
        }
        llama_free(context);
    }
}
"""


def test_a_model_and_a_context_where_others_were_that_were_freed_are_their_own(tmp_path: Path) -> None:
    status, found = recorded_with_stub(tmp_path, AGAIN)
    assert status == 0
    assert found.model == "second"
    assert [step.p0 for step in found.steps if isinstance(step, SeqRm)] == [0, 1]


def test_a_program_whose_libraries_are_elsewhere_is_not_called_static(tmp_path: Path) -> None:
    compiled(tmp_path, "libllama.so", STUB, "-shared", "-fPIC", "-Wl,-soname,libllama.so")
    client = compiled(tmp_path, "again", AGAIN, f"-L{tmp_path}", "-lllama")
    done = recorder(tmp_path / "case.json", client)
    assert done.returncode == 2
    assert "ended with 127: the linker found no library that it needs" in done.stderr.splitlines()[-1]


SIZES = """
struct params { char bytes[512]; };
void *llama_init_from_model(void *, struct params);
unsigned long llama_state_seq_get_size_ext(void *, int, unsigned);
int main(void) {
    struct params params = {{0}};
    void *context = llama_init_from_model(0, params);
    llama_state_seq_get_size_ext(context, 0, 2);
    llama_state_seq_get_size_ext(context, -1, 2);
}
"""


def test_a_death_while_a_size_is_asked_for_ends_the_case_and_a_size_that_is_told_is_no_step(tmp_path: Path) -> None:
    status, found = recorded_with_stub(tmp_path, SIZES)
    assert status == -signal.SIGABRT
    assert found.unfinished
    (step,) = found.steps
    assert isinstance(step, Checkpoint) and (step.slot, step.flags) == (-1, ["on_device"])

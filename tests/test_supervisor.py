"""However a child ends, the parent comes back with the fault and the step, and nothing is left behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from isolate import case as cases
from isolate.case import Case
from isolate.errors import BuildError, CaseError, ModelError
from isolate.replay.death import tail
from isolate.replay.supervisor import Supervisor
from isolate.replay.target import Target
from tests.conftest import ROOT, TESTS, descendants, signals_as_at_a_terminal

TWO_SLOTS = cases.read(ROOT / "cases" / "two-slots.json")
DECODES = [index for index, step in enumerate(TWO_SLOTS.steps) if step.kind == "decode"]


@pytest.fixture(scope="module")
def planted_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("planted") / "planted.so"
    subprocess.run(["c++", "-shared", "-fPIC", "-o", path, TESTS / "planted.cpp"], check=True)
    return path


def planting(what: str, step: int, library: Path, timeout: float = 120) -> Supervisor:
    environment = {"PLANT": f"{what}@{step}", "PLANT_LIBRARY": str(library), "PYTHONPATH": f"{TESTS}:{ROOT}"}
    return Supervisor(target=Target("cpu", 0, environment=environment), worker="planted_worker", timeout=timeout)


KINDS = {
    "abort": ("signal", signal.SIGABRT),
    "segfault": ("signal", signal.SIGSEGV),
    "hang": ("hang", None),
    "exit": ("exit", 7),
    "kill": ("killed", None),
    "throw": ("exception", None),
    "raise": ("engine", None),
    "callback": ("exception", None),
}


def plant(what: str, step: int, library: Path) -> None:
    with planting(what, step, library, timeout=0.3 if what == "hang" else 120) as children:
        fault = children.run(TWO_SLOTS).fault
    assert fault is not None
    kind, code = KINDS[what]
    assert (fault.kind, fault.signature.code) == (kind, code)
    assert fault.step.index == step
    assert fault.step.kind == fault.signature.step == TWO_SLOTS.steps[step].kind
    assert fault.step.tokens == TWO_SLOTS.steps[step].tokens_by_slot()
    if kind == "exception":
        assert fault.origin.text == "std::runtime_error: planted"


@pytest.mark.parametrize("what", KINDS)
@pytest.mark.usefixtures("nothing_left")
def test_a_planted_fault_comes_back_with_its_step(what: str, planted_library: Path) -> None:
    for step in (DECODES if what == "callback" else range(len(TWO_SLOTS.steps)))[:3]:
        plant(what, step, planted_library)


@pytest.mark.slow
@pytest.mark.parametrize("what", KINDS)
@pytest.mark.usefixtures("nothing_left")
def test_a_hundred_planted_faults_at_random_steps(what: str, planted_library: Path) -> None:
    chance = random.Random(what)
    for _ in range(100):
        plant(what, chance.choice(DECODES if what == "callback" else range(len(TWO_SLOTS.steps))), planted_library)


def test_a_deep_run_names_the_node_that_was_computed(planted_library: Path) -> None:
    with planting("node", 0, planted_library) as children:
        first = children.run(TWO_SLOTS, deep=True).fault
    with planting("node", 5, planted_library) as children:
        fault = children.run(TWO_SLOTS, deep=True).fault
    assert first is not None and first.node is not None and fault is not None and fault.node is not None
    assert (first.node.index, first.node.op, first.node.sources[0]) == (0, "GET_ROWS", "token_embd.weight")
    assert fault.node.index == 5 and fault.node.type == "f32" and fault.node.shape[0] > 0
    assert fault.step.index == 0


def assertion_case() -> Case:
    """r18: more slots than tokens a batch trips an assertion of the released library."""
    return cases.parse(
        b'{"isolate": 1, "model": {"zoo": "llama"}, "context": {"n_batch": 4, "n_ubatch": 4, "n_seq_max": 8}, '
        b'"steps": [{"step": "decode", "batch": [{"slot": 0, "tokens": [1]}]}]}',
        "r18",
    )


@pytest.mark.usefixtures("nothing_left")
def test_a_warm_child_runs_many_cases_and_a_dead_one_is_replaced() -> None:
    with Supervisor() as children:
        first = children.run(TWO_SLOTS)
        child = children._child
        assert first.fault is None and first.steps == len(TWO_SLOTS.steps)
        assert children.run(TWO_SLOTS).fault is None and children._child is child
        fault = children.run(assertion_case()).fault
        assert fault is not None and fault.kind == "assert" and fault.origin.line
        assert children.run(TWO_SLOTS).fault is None and children._child is not child


@pytest.mark.usefixtures("nothing_left")
def test_what_is_not_usable_is_said_and_the_child_lives_on(tmp_path: Path) -> None:
    (tmp_path / "not.gguf").write_bytes(b"GGUX" + bytes(100))
    wrong = cases.with_model(TWO_SLOTS, str(tmp_path / "not.gguf"))
    with Supervisor() as children:
        with pytest.raises(ModelError, match=r"not\.gguf"):
            children.run(wrong)
        child = children._child
        assert children.run(TWO_SLOTS).fault is None and children._child is child


def test_a_token_outside_a_files_vocabulary_is_refused_by_step_and_field(tmp_path: Path) -> None:
    with Supervisor() as children:
        children.make_model("llama", "f32", 1, tmp_path / "m.gguf")
        case = cases.parse(
            b'{"isolate": 1, "model": {"file": "m.gguf"}, "steps": '
            b'[{"step": "decode", "batch": [{"slot": 0, "tokens": [4, 500]}]}]}',
            "x.json",
        )
        with pytest.raises(CaseError, match=r"step 0, field `batch\[0\].tokens`: token 500 .* 128"):
            children.run(case, folder=tmp_path)


@pytest.mark.usefixtures("nothing_left")
def test_a_build_that_dies_while_loading_is_refused(tmp_path: Path) -> None:
    source = (
        "__attribute__((constructor)) static void f(void) { *(volatile int *)8 = 1; } void llama_backend_init(void) {}"
    )
    (tmp_path / "x.c").write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libllama.so", tmp_path / "x.c"], check=True)
    with Supervisor(build=str(tmp_path / "libllama.so")) as children, pytest.raises(BuildError, match="SIGSEGV"):
        children.run(TWO_SLOTS)


def test_a_sandbox_that_hides_oom_score_adj_is_lived_with(tmp_path: Path) -> None:
    worker = "from isolate.replay import worker\n"
    worker += "def refuse(*_):\n    raise PermissionError(13, 'Permission denied')\nworker.Path.write_text = refuse\nworker.main()\n"
    (tmp_path / "sandboxed_worker.py").write_text(worker)
    target = Target("cpu", 0, environment={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    with Supervisor(target=target, worker="sandboxed_worker") as children:
        assert children.run(cases.read(ROOT / "cases/two-slots.json")).fault is None


def test_what_lies_in_the_current_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with an unpacked report may hold anything."""
    for name in ("msgspec", "numpy", "click", "isolate"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(77)")
    monkeypatch.chdir(tmp_path)
    with Supervisor(target=Target("cpu", 0, environment={"PYTHONPATH": str(ROOT)})) as children:
        assert children.run(TWO_SLOTS).fault is None


LIAR = """
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <signal.h>
#include <sys/socket.h>
static void say(const char *text) {
    for (int fd = 3; fd < 64; fd++) if (send(fd, text, strlen(text), MSG_NOSIGNAL) > 0) return;
}
void llama_backend_init(void) {}
__attribute__((constructor)) static void lie(void) {
    const char *what = getenv("LIE");
    if (!strcmp(what, "garbage")) { say("}{\\n"); pause(); }
    if (!strcmp(what, "half")) { say("half an answer"); raise(SIGSEGV); }
    if (!strcmp(what, "fork")) { if (!fork()) { sleep(20); _exit(0); } raise(SIGSEGV); }
}
"""


@pytest.mark.parametrize("lie", ["garbage", "half", "fork"])
def test_a_build_that_lies_or_lets_its_socket_be_held_is_not_waited_for(lie: str, tmp_path: Path) -> None:
    (tmp_path / "liar.c").write_text(LIAR)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libllama.so", tmp_path / "liar.c"], check=True)
    start = time.monotonic()
    target = Target("cpu", 0, environment={"LIE": lie})
    said = pytest.raises(BuildError, match="died while it was loaded")
    with Supervisor(str(tmp_path / "libllama.so"), target=target) as children, said:
        children.run(TWO_SLOTS)
    assert time.monotonic() - start < 15


RUNNER = """
import sys
from pathlib import Path
from isolate import case
from isolate.replay.supervisor import Supervisor
from isolate.replay.target import Target
import os
with Supervisor(target=Target("cpu", 0, environment={"PLANT": "hang@1"}), worker="planted_worker") as children:
    print("running", flush=True)
    children.run(case.read(Path(sys.argv[1])))
"""


def gone(process: int) -> bool:
    for _ in range(100):
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def hanging() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A parent whose child hangs in step 1, and that child."""
    parent = subprocess.Popen(
        [sys.executable, "-c", RUNNER, ROOT / "cases" / "two-slots.json"],
        env={**os.environ, "PYTHONPATH": f"{TESTS}:{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=signals_as_at_a_terminal,
    )
    assert parent.stdout is not None and parent.stdout.readline() == "running\n"
    children: list[int] = []
    while not children:
        children = descendants(parent.pid)
        time.sleep(0.05)
    time.sleep(0.5)
    yield parent, children[0]
    parent.kill()
    parent.wait()
    parent.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_no_child_outlives_its_parent(hanging: tuple[subprocess.Popen[str], int], number: signal.Signals) -> None:
    parent, child = hanging
    parent.send_signal(number)
    parent.wait(10)
    assert gone(child)
    assert not [path for path in Path("/dev/shm").iterdir() if "isolate" in path.name]


def test_of_a_log_the_last_lines_are_kept_and_a_repeated_one_once() -> None:
    log = "first\n" + "same\n" * 50 + "\n" + "\n".join(f"line {number}" for number in range(18)) + "\nlast\n"
    assert tail(log)[0] == "same (50 times)" and tail(log)[-1] == "last" and len(tail(log)) == 20

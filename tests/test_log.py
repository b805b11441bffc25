"""A log alone: the case made of it has the batches that the server decoded, and says what was assumed."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from isolate import case as cases
from isolate.case import Clear, Decode, Step
from isolate.cli import main
from isolate.replay.supervisor import Supervisor
from tests.servers import RunningServer


def shape(steps: list[Step]) -> list[object]:
    """Batches by slot and size; of other steps the kind."""
    return [step.tokens_by_slot() if isinstance(step, Decode) else step.kind for step in steps]


def imported(log: Path, out: Path) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["import-log", str(log), "--out", str(out)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_a_log_gives_the_batches_checkpoints_and_restores_of_the_server(tmp_path: Path) -> None:
    model, recorded, log, out = (tmp_path / name for name in ("model.gguf", "recorded.json", "log", "case.json"))
    with Supervisor() as children:
        children.make_model("qwen35moe", "F32", 1, model)
    options = ["-c", 4096, "-np", 2, "-ub", 64, "-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on", "-lv", 5]
    with RunningServer(model, recorded, *options) as server:
        server.complete([[(7 * i + 13 * s) % 120 for i in range(100 + 20 * s)] for s in range(2)])
        server.complete([[*((7 * i) % 120 for i in range(80)), 1, 2, 3]])
    log.write_text(server.output)
    code, output = imported(log, out)
    assert code == 0
    assert "the case has not" not in output
    assert "the log has not" not in output
    assert "tokens of prompts, but for the beginnings" in output
    case, real = cases.read(out), cases.read(recorded)
    last = max(index for index, step in enumerate(real.steps) if isinstance(step, Clear))
    assert shape(case.steps) == shape(real.steps[last + 1 :])
    assert (case.context.n_ctx, case.context.n_ubatch, case.context.type_k) == (4096, 64, "q8_0")
    assert CliRunner().invoke(main, ["run", str(out)]).exit_code == 0


def test_a_prompt_that_came_back_from_the_prompt_cache_is_loaded_in_the_case(tmp_path: Path) -> None:
    model, recorded, log, out = (tmp_path / name for name in ("model.gguf", "recorded.json", "log", "case.json"))
    with Supervisor() as children:
        children.make_model("llama", "F32", 1, model)
    prompts = [[(7 * i + 13 * s) % 120 for i in range(700)] for s in range(2)]
    with RunningServer(model, recorded, "-c", 4096, "-np", 1, "-lv", 4) as server:
        for prompt in (prompts[0], prompts[1], prompts[0]):
            server.complete([prompt], 3)
    # As at the default level, where only the slot's part is told.
    log.write_text("".join(line for line in server.output.splitlines(True) if "llama_context: n_ctx " not in line))
    code, output = imported(log, out)
    assert code == 0, output
    case, real = cases.read(out), cases.read(recorded)
    last = max(index for index, step in enumerate(real.steps) if isinstance(step, Clear))
    assert shape(case.steps) == shape(real.steps[last + 1 :])
    assert "load" in shape(case.steps) and case.context.n_ctx == 4096


SHORT = """\
0.00.206.778 I slot launch_slot_: id  1 | task 0 | processing task, is_child = 0
0.00.217.181 I slot print_timing: id  1 | task 0 | prompt eval time = 8.46 ms /    10 tokens (    0.85 ms per token)
0.00.217.182 I slot print_timing: id  1 | task 0 |        eval time = 1.85 ms /     5 tokens (    0.46 ms per token)
"""


def test_a_short_log_is_filled_with_assumptions_that_are_listed(tmp_path: Path) -> None:
    log, out = tmp_path / "log", tmp_path / "case.json"
    log.write_text(SHORT)
    code, output = imported(log, out)
    assert code == 0
    assert "the log does not say batch-size, cache-ram" in output
    assert "the zoo's llama for the model: the log names no architecture" in output
    assert [step.tokens_by_slot() for step in cases.read(out).steps if isinstance(step, Decode)] == [
        {1: 10},
        *[{1: 1}] * 4,
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nothing of a server", "no line of it says `processing task`"),
        (SHORT + "n_slots = 0\n", "`parallel`: expected `int` >= 1"),
        (SHORT + "slot x: id  1 | task 0 | task.n_tokens = 99999999\n", "a prompt of 99999999 tokens is more than"),
        (SHORT + "id 999 | task 7 | processing task\n", "`parallel`: expected `int` <= 256"),
    ],
)
def test_a_log_that_cannot_be_used_is_refused_in_one_sentence(text: str, words: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(text)
    code, output = imported(log, tmp_path / "case.json")
    assert code == 2
    assert words in output
    assert len(output.strip().splitlines()) == 1

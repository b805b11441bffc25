"""The slots generator: the batches of the seed, and each rule of the server where it shows in the steps."""

from __future__ import annotations

from typing import Any

import pytest

from isolate.case import Case, Decode, Model, Pattern, Step, parse
from isolate.serve.memory import Memory
from isolate.serve.options import Options, ServeError, options
from isolate.serve.requests import Request
from isolate.serve.slots import Server
from isolate.zoo import ZOO

HYBRID = Memory.of(ZOO["qwen35moe"])
PLAIN = Memory.of(ZOO["llama"])


def serve(requests: list[Request], memory: Memory = HYBRID, answers: dict[int, list[int]] | None = None, **given: Any) -> list[Step]:  # fmt: skip
    """The steps; they always make a valid case."""
    chosen = options({name.replace("_", "-"): value for name, value in given.items()}, "test")
    steps = list(Server(chosen, memory, requests, answers).steps())
    case = Case(isolate=1, model=Model(zoo="llama"), steps=steps, context=chosen.context())
    assert parse(case_bytes(case), "test") == case
    return steps


def case_bytes(case: Case) -> bytes:
    import msgspec

    return msgspec.json.encode(case)


def batches(steps: list[Step]) -> list[int]:
    return [sum(step.tokens_by_slot().values()) for step in steps if isinstance(step, Decode)]


def kinds(steps: list[Step]) -> list[str]:
    return [step.kind for step in steps]


def seed(slots: int) -> list[Request]:
    return [Request(prompt=Pattern(1000, 120, 13 * slot, 7), n_predict=200) for slot in range(slots)]


def prompt(count: int, first: int = 0) -> list[int]:
    return [(first + 7 * i) % 120 for i in range(count)]


@pytest.mark.parametrize(
    ("slots", "given", "sizes"),
    [
        (2, {}, [968, 1024, 8, 2]),
        (3, {}, [1452, 1536, 12, 3]),
        (2, {"b": 512, "ub": 128}, [512, 512, 512, 332]),
        (2, {"ctx-checkpoints": 0}, [2000, 2, 2]),
        (3, {"ctx-checkpoints": 0}, [2048, 954, 3]),
    ],
)
def test_the_batches_of_the_seed(slots: int, given: dict[str, Any], sizes: list[int]) -> None:
    found = batches(serve(seed(slots), parallel=slots, ctx_size=61440, **given))
    assert found[: len(sizes)] == sizes


def test_checkpoints_are_taken_before_the_last_tokens_and_only_where_memory_cannot_go_back() -> None:
    steps = serve([Request(prompt=prompt(1000))], ctx_size=4096)
    assert [step.name for step in steps if step.kind == "checkpoint"] == ["1-slot-0-at-484", "2-slot-0-at-996"]
    assert "checkpoint" not in kinds(serve([Request(prompt=prompt(1000))], PLAIN, ctx_size=4096))
    windowed = Memory.of(ZOO["gemma3"])
    assert "checkpoint" in kinds(serve([Request(prompt=prompt(1000))], windowed, ctx_size=4096))
    assert "checkpoint" not in kinds(serve([Request(prompt=prompt(1000))], windowed, ctx_size=4096, swa_full=True))


def test_a_divergence_goes_back_to_a_checkpoint_or_to_the_beginning() -> None:
    twice = [Request(prompt=prompt(1000)), Request(prompt=[*prompt(600), 1, 2, 3], after=0)]
    steps = serve(twice, ctx_size=4096)
    (restored,) = [step for step in steps if step.kind == "restore"]
    assert restored.name == "1-slot-0-at-484"
    assert batches(steps)[3:] == [603 - 484 - 4, 4]
    assert batches(serve(twice, ctx_size=4096, ctx_checkpoints=0)) == [1000, 603]


def test_plain_attention_keeps_the_common_prefix_and_computes_one_token_at_least() -> None:
    steps = serve([Request(prompt=prompt(100)), Request(prompt=prompt(100), after=0)], PLAIN)
    assert batches(steps) == [100, 1]
    assert [(step.p0, step.p1) for step in steps if step.kind == "seq_rm"] == [(0, -1), (99, -1)]
    assert batches(serve([Request(prompt=prompt(100)), Request(prompt=prompt(100), after=0)], PLAIN, cache_prompt=False)) == [100, 100]  # fmt: skip


def test_chunks_are_moved_when_reuse_is_on() -> None:
    first, second = prompt(90), [*prompt(90)[:20], *prompt(90)[40:]]
    steps = serve([Request(prompt=first), Request(prompt=second, after=0)], PLAIN, cache_reuse=16)
    (moved,) = [step for step in steps if step.kind == "seq_add"]
    assert (moved.p0, moved.p1, moved.delta) == (40, 90, -20)
    assert batches(steps) == [90, 1]


def test_the_prompt_cache_saves_what_is_pushed_out_and_brings_it_back() -> None:
    one, other = prompt(200), prompt(200, first=3)
    requests = [Request(prompt=one), Request(prompt=other, after=0), Request(prompt=one, after=1)]
    steps = serve(requests, PLAIN)
    states = [(step.kind, step.name) for step in steps if step.kind in ("save", "load")]
    assert states == [("save", "1-cached-0-200"), ("save", "2-cached-0-200"), ("load", "1-cached-0-200")]
    assert batches(steps) == [200, 200, 1]
    small = Memory(token_bytes=6000)  # two prompts do not fit into 1 MiB together with a third
    assert batches(serve(requests, small, cache_ram=1)) == [200, 200, 200]
    assert "save" not in kinds(serve(requests, PLAIN, cache_ram=0))


def test_idle_slots_are_saved_when_a_task_starts_and_emptied_in_a_unified_cache() -> None:
    requests = [Request(prompt=prompt(50), slot=0), Request(prompt=prompt(50, first=3), slot=1, after=0)]
    steps = serve(requests, PLAIN, parallel=2)
    assert [(step.kind, step.slot) for step in steps if step.kind in ("save", "seq_rm")] == [("seq_rm", 0), ("save", 0), ("seq_rm", 1)]  # fmt: skip
    unified = serve(requests, PLAIN, parallel=2, kv_unified=True)
    assert [(step.kind, step.slot) for step in unified if step.kind in ("save", "seq_rm")] == [
        ("seq_rm", 1), ("seq_rm", 0), ("save", 0), ("seq_rm", 0), ("seq_rm", 1)]  # fmt: skip
    assert "save" not in kinds(serve(requests, PLAIN, parallel=2, cache_idle_slots=False))


def test_without_continuous_batching_a_prompt_waits_for_the_answers() -> None:
    requests = [Request(prompt=prompt(20), n_predict=4), Request(prompt=prompt(30, first=3), round=2)]
    assert batches(serve(requests, PLAIN, parallel=2)) == [20, 1, 31, 1]
    assert batches(serve(requests, PLAIN, parallel=2, cont_batching=False)) == [20, 1, 1, 1, 30]


def test_a_full_context_is_shifted_or_ends_the_answer() -> None:
    long = [Request(prompt=prompt(200), n_predict=100)]
    shifted = serve(long, PLAIN, ctx_size=256, context_shift=True, keep=10)
    assert [(step.slot, step.p0, step.p1) for step in shifted if step.kind == "seq_rm"][1:] == [(0, 10, 132)]
    assert [(step.p0, step.p1, step.delta) for step in shifted if step.kind == "seq_add"] == [(132, 255, -122)]
    assert len(batches(shifted)) == 100
    assert len(batches(serve(long, PLAIN, ctx_size=256))) == 56


def test_a_batch_without_room_is_tried_in_halves_after_idle_slots_went() -> None:
    requests = [Request(prompt=prompt(200), slot=0), Request(prompt=prompt(200, first=3), slot=1, after=0)]
    steps = serve(requests, PLAIN, parallel=2, ctx_size=256, kv_unified=True, cache_idle_slots=False)
    second = steps[[step.kind for step in steps].index("decode") + 1 :]
    assert [step.kind for step in second] == ["seq_rm", "decode", "seq_rm", "decode"]
    assert (second[1].returns, second[2].slot) == (1, 0)


def test_slots_are_saved_to_files_and_restored() -> None:
    requests = [
        Request(prompt=prompt(50), slot=0),
        Request(action="save", slot=0, name="kept", after=0),
        Request(action="erase", slot=0, after=1),
        Request(action="restore", slot=0, name="kept", after=2),
        Request(prompt=prompt(60), slot=0, after=3),
    ]
    steps = serve(requests, PLAIN)
    assert kinds(steps) == ["seq_rm", "decode", "save", "seq_rm", "load", "seq_rm", "decode"]
    assert batches(steps) == [50, 10]


def test_a_chat_continues_its_answer_when_that_is_known() -> None:
    chat = [Request(prompt=prompt(50), n_predict=3), Request(prompt=[1, 2], continues=0)]
    steps = serve(chat, PLAIN, answers={0: [7, 8, 9]})
    assert [run.tokens for step in steps if step.kind == "decode" for run in step.batch][1:] == [[7], [8], [9, 1, 2]]
    with pytest.raises(ServeError, match="request 0 is continued before its answer is known"):
        serve(chat, PLAIN)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ctx-checkpoint": 3}, "there is no option `ctx-checkpoint`; there are batch-size"),
        ({"parallel": 2, "np": 3}, "`parallel` is given twice (also as `np`)"),
        ({"parallel": 0}, "`parallel`: expected `int` >= 1"),
        ({"fa": "off", "ctv": "q8_0"}, "`flash-attn` off and `cache-type-v` q8_0 exclude each other"),
        ({"cache-reuse": 8, "cache-prompt": False}, "`cache-reuse` 8 needs `cache-prompt`"),
    ],
)
def test_options_that_no_server_could_have_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ServeError) as refused:
        options(given, "row 'x'")
    assert words in refused.value.message
    assert refused.value.message.startswith("row 'x': ")


def test_a_switch_stands_for_the_servers_default() -> None:
    assert options({"ctxcp": True, "cram": False}, "x") == Options(ctx_checkpoints=32, cache_ram=0)

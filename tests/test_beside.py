"""Where a wrong result begins: planted faults of each kind are named by node, layer, slot, positions and kind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from isolate.case import Case, Check, Context, Decode, Model, Pattern, Run
from isolate.cli import main
from isolate.fault import Fault
from isolate.replay.batch import Fed
from isolate.replay.rows import Ubatch, picks, ubatches
from isolate.replay.supervisor import Supervisor
from isolate.replay.target import Target
from isolate.trace.tensors import Graph, Seen, Tensor
from tests.conftest import ROOT, TESTS

F32 = Context(n_ctx=1024, n_batch=256, n_ubatch=64, n_seq_max=2, type_k="f32", type_v="f32", flash_attn_type="disabled")
FLASH = Context(
    n_ctx=1024, n_batch=256, n_ubatch=64, n_seq_max=2, type_k="f32", type_v="f32", flash_attn_type="enabled"
)
UNIFIED = Context(
    n_ctx=1024,
    n_batch=256,
    n_ubatch=64,
    n_seq_max=2,
    type_k="f32",
    type_v="f32",
    flash_attn_type="disabled",
    kv_unified=True,
)
Q8_0 = Context(
    n_ctx=1024, n_batch=256, n_ubatch=64, n_seq_max=2, type_k="q8_0", type_v="q8_0", flash_attn_type="enabled"
)
#: two prompts of 60 tokens, then a batch in which slot 0 has three tokens and slot 1 one
PROMPTS = Decode(batch=[Run(slot, Pattern(60, 120, 13 * slot, 7)) for slot in (0, 1)])
ANSWER = Decode(batch=[Run(0, [1, 4, 9], "all"), Run(1, [2])])


def graph(tokens: list[int], positions: list[int]) -> Graph:
    """The beginning of a graph: tokens are looked up, then turned by their positions."""
    shape, strides = (4, len(tokens), 1, 1), (4, 16, 16, 16)
    weights, ids, places = (
        Tensor(at, name, "NONE", "i32", shape, strides, (), name)
        for at, name in enumerate(("token_embd.weight", "inp_tokens", "inp_pos"))
    )
    rows = Tensor(3, "embd", "GET_ROWS", "f32", shape, strides, (0, 1), "embd")
    turned = Tensor(4, "Qcur-0", "ROPE", "f32", shape, strides, (3, 2), "Qcur-0")
    return Graph(
        [
            Seen(0, rows, None, (weights, ids), {1: np.array(tokens, np.int32)}),
            Seen(1, turned, None, (0, places), {1: np.array(positions, np.int32)}),
        ]
    )


def fed(slot: int, tokens: list[int], start: int) -> Fed:
    return Fed(slot, np.array(tokens, np.int32), start)


def test_rows_of_slots_are_told_apart_by_their_tokens_and_positions() -> None:
    # as split in equal parts: two tokens of each slot, then the rest of slot 0
    graphs = [graph([5, 6, 5, 6], [0, 1, 7, 8]), graph([7, 7], [2, 3])]
    first, second = ubatches(graphs, [fed(1, [5, 6], 7), fed(0, [5, 6, 7, 7], 0)], 0)
    assert first is not None
    assert second is not None
    assert (first.rows, first.positions, first.slots) == ((0, 1), (0, 1), (0, 1))
    assert (second.rows, second.positions) == ((0, 1), (2, 3))


def test_equal_prompts_keep_the_order_of_the_batch() -> None:
    (mine,) = ubatches([graph([5, 6, 5, 6], [0, 1, 0, 1])], [fed(0, [5, 6], 0), fed(1, [5, 6], 0)], 1)
    assert mine is not None
    assert mine.rows == (2, 3)


def test_rows_of_a_node_go_along_tokens_or_tokens_of_a_stream_and_streams() -> None:
    together = Ubatch(6, (3, 4, 5), (7, 8, 9), (1, 0), tuple(range(6)))
    alone = Ubatch(3, (0, 1, 2), (7, 8, 9), (0,), (0, 1, 2))
    values = np.arange(4 * 6, dtype=np.float32).reshape(6, 4).T
    # [width, tokens], and the same as [width, tokens of a stream, 1, streams]
    for shape, one in (((4, 6, 1, 1), (4, 3, 1, 1)), ((4, 3, 1, 2), (4, 3, 1, 1))):
        (pick,) = picks(shape, one, together, alone)
        taken = pick.take(values.reshape(shape, order="F"), pick.mine)
        assert taken.tolist() == values.T[3:].tolist()


@pytest.fixture(scope="module")
def planted() -> Iterator[Supervisor]:
    """A child that does what a case says about itself."""
    target = Target("cpu", 0, environment={"PYTHONPATH": f"{TESTS}:{ROOT}"})
    with Supervisor(target=target, worker="beside_worker") as children:
        yield children


def fault(planted: Supervisor, what: str, zoo: str, context: Context = F32, check: Check = "logits") -> Fault:
    """The fault of a deep run with something planted in the second decode."""
    case = Case(isolate=1, about=f"{what}@1", model=Model(zoo=zoo), context=context, steps=[PROMPTS, ANSWER])
    found = planted.run(case, (check,), deep=True).fault
    assert found is not None
    return found


def begins(planted: Supervisor, what: str, zoo: str, context: Context = F32, check: Check = "logits") -> dict[str, Any]:
    """What a fault says of its beginning, without its words."""
    found = fault(planted, what, zoo, context, check)
    told: dict[str, Any] = found.evidence["begins"]
    if "node" in told:
        # the node and the words say the same
        assert found.node is not None
        assert (found.node.index, found.node.op, found.node.name) == (told["node"], told["op"], told["name"])
        assert f"it begins at graph node {told['node']}, {told['op']} {told['name']}" in found.explanation
        assert told["times_the_noise"] > 100 if check == "logits" else told["nmse"] is None
        assert told["slot"] == 0
    return told


@pytest.mark.parametrize("context", [F32, FLASH, UNIFIED, Q8_0], ids=["f32", "flash", "unified", "q8_0"])
def test_lost_cells(planted: Supervisor, context: Context) -> None:
    told = begins(planted, "lost", "llama", context)
    assert (told["cause"], told["layer"], told["positions"][0]) == ("cell", 0, 60)
    assert told["op"] == ("FLASH_ATTN_EXT" if context in (FLASH, Q8_0) else "MUL_MAT")
    assert told["inputs"] == {"attended": 59, "attended_alone": 61, "lost": [3, 4]}


def test_keys_that_were_turned_wrongly(planted: Supervisor) -> None:
    told = begins(planted, "turn", "llama")
    assert (told["cause"], told["layer"]) == ("cell", 0)
    assert told["inputs"]["other_keys"] == list(range(60))


def test_values_of_the_last_layer(planted: Supervisor) -> None:
    told = begins(planted, "value", "llama")
    assert (told["cause"], told["layer"], told["name"]) == ("cell", 1, "kqv-1")
    assert told["inputs"]["other_values"] == list(range(60))


def test_a_cell_of_another_slot(planted: Supervisor) -> None:
    told = begins(planted, "foreign", "llama", UNIFIED)
    assert (told["cause"], told["positions"]) == ("cell", [60, 61, 62])
    assert told["inputs"] == {"attended": 62, "attended_alone": 61, "too_many": 1}


@pytest.mark.parametrize("zoo", ["gemma3", "deepseek2", "qwen2vl"])
def test_what_another_slot_holds(planted: Supervisor, zoo: str) -> None:
    told = begins(planted, "swap", zoo)
    assert (told["cause"], told["layer"]) == ("cell", 0)
    assert told["inputs"]["other_cells"] == list(range(29 if zoo == "gemma3" else 0, 60))


@pytest.mark.parametrize("zoo", ["mamba2", "qwen35moe", "lfm2"])
def test_the_recurrent_state_of_another_slot(planted: Supervisor, zoo: str) -> None:
    told = begins(planted, "swap", zoo)
    assert (told["cause"], told["op"], told["layer"], told["positions"]) == ("state", "GET_ROWS", 0, [60])
    assert told["inputs"]["tensor"] == "cache_r_l0"


def test_a_mask_that_hides_a_cell(planted: Supervisor) -> None:
    told = begins(planted, "mask", "llama")
    assert (told["cause"], told["positions"]) == ("mask", [60])
    assert told["inputs"]["hidden"] == [3]


def test_a_position_and_a_token_that_the_graph_is_given(planted: Supervisor) -> None:
    told = begins(planted, "position", "llama")
    assert (told["cause"], told["op"], told["name"], told["positions"]) == ("position", "ROPE", "Qcur-0", [60])
    assert told["inputs"] == {"given": 61, "right": 60}
    told = begins(planted, "token", "llama")
    assert (told["cause"], told["node"], told["inputs"]) == ("token", 0, {"given": 0, "right": 1})


def test_a_kernel_that_computes_wrongly(planted: Supervisor) -> None:
    told = begins(planted, "kernel", "llama")
    assert (told["cause"], told["name"], told["layer"], told["positions"]) == ("kernel", "ffn_up-1", 1, [60])


def test_a_row_that_is_handed_out_for_another(planted: Supervisor) -> None:
    found = fault(planted, "row", "llama")
    assert found.evidence["begins"]["cause"] == "row"
    assert found.evidence["begins"]["handed_out"] == "those of another slot"
    assert "no graph node differs" in found.explanation
    assert found.node is None


def test_the_first_node_that_is_not_a_number(planted: Supervisor) -> None:
    told = begins(planted, "nan", "llama", check="nan")
    assert (told["cause"], told["name"], told["positions"]) == ("cell", "kqv-1", [60])


def test_from_the_cpu_it_is_told_which_side_is_right(planted: Supervisor) -> None:
    """Here the CPU is also what is tested, so the slot alone agrees with it."""
    told = begins(planted, "kernel", "llama")
    assert told["cpu"]["alone"] == 0
    assert told["cpu"]["case"] > 1e-3


def test_logits_that_no_graph_computed(planted: Supervisor) -> None:
    """In the release, models of this kind give none where embeddings are asked for, and yet hand some out."""
    context = Context(n_ctx=256, embeddings=True)
    case = Case(isolate=1, model=Model(zoo="lfm2"), context=context, steps=[Decode(batch=[Run(0, [111, 113])])])
    found = planted.run(case, ("logits",), deep=True).fault
    assert found is not None
    assert found.explanation.endswith("its graph computes no logits, and yet some were handed out")


def test_nothing_is_named_where_tensors_cannot_be_read(planted: Supervisor) -> None:
    case = Case(isolate=1, about="blind swap@1", model=Model(zoo="llama"), context=F32, steps=[PROMPTS, ANSWER])
    found = planted.run(case, ("logits",), deep=True).fault
    assert found is not None
    assert found.node is None
    assert "begins" not in found.evidence
    assert found.explanation.endswith("no graph node to name: its tensors are not laid out as expected")


@pytest.mark.parametrize(
    ("name", "cause", "words"),
    [
        ("found/window-in-unified-cache", "cell", "ubatch 1 of 2: positions 17 to 31 of slot 1 are"),
        ("reports/r24-save-before-the-shift-is-done", "cell", "the keys of positions 7 to 26 are others"),
        ("reports/r26-part-copied-of-hybrid-answers", "state", "the recurrent state it starts from (cache_r_l0"),
    ],
)
def test_faults_of_the_release(name: str, cause: str, words: str, tmp_path: Path) -> None:
    """As a user asks for it: the words, the node, and the same in JSON."""
    path = ROOT / "cases" / f"{name}.json"
    run = CliRunner().invoke(main, ["run", str(path), "--deep", "--json", str(tmp_path / "found.json")])
    assert words in run.output
    assert "  node " in run.output
    (finding,) = json.loads((tmp_path / "found.json").read_text())["findings"]
    assert finding["fault"]["evidence"]["begins"]["cause"] == cause
    assert words in finding["fault"]["explanation"]

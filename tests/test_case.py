"""A case is data: what is written is read back, and a bad one is refused by file, step and field."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isolate import case as cases
from isolate.case import Case, Decode, Pattern
from isolate.errors import CaseError

GOOD: dict[str, Any] = {
    "isolate": 1,
    "model": {"zoo": "llama", "type": "q8_0", "seed": 3},
    "context": {"n_seq_max": 2, "n_ctx": 1024, "type_v": "q8_0"},
    "steps": [
        {
            "step": "decode",
            "batch": [{"slot": 0, "tokens": [1, 2]}, {"slot": 1, "tokens": {"count": 9, "modulo": 120}}],
        },
        {"step": "checkpoint", "slot": 0, "name": "a"},
        {"step": "save", "slot": 1, "name": "s", "via": "file"},
        {"step": "restore", "name": "a", "damage": {"cut": 2}, "returns": 0},
        {"step": "load", "name": "s", "slot": 0},
        {"step": "seq_rm", "slot": 0, "p0": 4, "returns": False},
        {"step": "seq_cp", "slot": 0, "into": 1},
        {"step": "seq_add", "slot": 0, "delta": -1},
        {"step": "seq_keep", "slot": 0},
        {"step": "clear", "data": False},
        {"step": "context", "context": {"n_seq_max": 2}},
        {"step": "decode", "batch": [{"slot": 0, "tokens": [1], "logits": "all", "at": 7}]},
        {"step": "decode", "batch": [{"slot": 0, "tokens": "greedy"}]},
    ],
}


def read(data: object) -> Case:
    return cases.parse(json.dumps(data).encode(), "x.json")


def test_every_step_and_field_is_read_and_written_back(tmp_path: Path) -> None:
    case = read(GOOD)
    case.write(tmp_path / "again.json")
    assert cases.read(tmp_path / "again.json") == case
    assert [step.kind for step in case.steps] == [step["step"] for step in GOOD["steps"]]


def test_a_copy_for_another_process_is_written_like_the_case() -> None:
    case = read(GOOD)
    there = pickle.loads(pickle.dumps(case))
    assert there == case and msgspec.json.encode(there) == msgspec.json.encode(case)


def test_a_long_prompt_stays_compact_until_it_is_asked_for() -> None:
    pattern = Pattern(count=6, modulo=120, first=13, stride=7)
    assert pattern.tokens() == [13, 20, 27, 34, 41, 48]
    assert Pattern(count=3, modulo=5, first=4).tokens() == [4, 0, 1]


@given(
    st.builds(
        Pattern,
        count=st.integers(1, 300),
        modulo=st.integers(1, 500),
        first=st.integers(0, 1000),
        stride=st.integers(0, 1000),
    )
)
def test_no_token_of_a_pattern_is_above_the_largest_it_promises(pattern: Pattern) -> None:
    assert max(pattern.tokens()) <= pattern.largest() < pattern.modulo


BAD: list[tuple[str, Callable[[Any], object], str]] = [
    ("unknown field", lambda d: d.update(modle=1), "modle.*allowed: about, api, check, context"),
    (
        "unknown field of a step",
        lambda d: d["steps"][1].update(slto=1),
        "step 1.*slto.*allowed: flags, name, returns, slot, step",
    ),
    ("unknown step", lambda d: d["steps"][1].update(step="fly"), "step 1, field `step`.*'fly'.*checkpoint.*seq_rm"),
    ("unknown setting", lambda d: d["context"].update(n_contx=1), "field `context`.*n_contx.*n_ctx"),
    ("wrong type", lambda d: d["steps"][0]["batch"][0].update(slot="0"), r"step 0, field `batch\[0\].slot`.*int.*str"),
    (
        "a float for a token",
        lambda d: d["steps"][0]["batch"][0].update(tokens=[1.5]),
        r"step 0, field `batch\[0\].tokens",
    ),
    (
        "slot outside",
        lambda d: d["steps"][0]["batch"][1].update(slot=2),
        r"step 0, field `batch\[1\].slot`: slot 2.*0 to 1",
    ),
    ("negative slot", lambda d: d["steps"][1].update(slot=-1), "step 1, field `slot`"),
    ("restore of nothing", lambda d: d["steps"][3].update(name="b"), r"step 3, field `name`.*'b' \(so far: a\)"),
    (
        "load of a checkpoint",
        lambda d: d["steps"][4].update(name="a"),
        r"step 4, field `name`.*save.*'a' \(so far: s\)",
    ),
    (
        "token outside",
        lambda d: d["steps"][0]["batch"][0].update(tokens=[128]),
        "token 128 is outside the vocabulary of 128",
    ),
    ("negative token", lambda d: d["steps"][0]["batch"][0].update(tokens=[-1]), r"step 0, field `batch\[0\].tokens"),
    (
        "more than a batch",
        lambda d: d["steps"][0]["batch"][1]["tokens"].update(count=3000),
        "3002 tokens are more than n_batch",
    ),
    ("abusive count", lambda d: d["steps"][0]["batch"][1]["tokens"].update(count=10**15), r"step 0, field `batch\[1\]"),
    ("no tokens", lambda d: d["steps"][0].update(batch=[]), "step 0, field `batch`.*no token"),
    ("logits outside", lambda d: d["steps"][0]["batch"][0].update(logits=[2]), "index 2 is outside the run of 2"),
    ("greedy of nothing", lambda d: d["steps"][0]["batch"][0].update(tokens="greedy"), "slot 0 has no logits yet"),
    ("n_ctx 0", lambda d: d["context"].update(n_ctx=0), "field `context.n_ctx`.*>= 1"),
    ("n_ctx -1", lambda d: d["context"].update(n_ctx=-1), "field `context.n_ctx`.*>= 1"),
    ("n_ctx huge", lambda d: d["context"].update(n_ctx=10**12), "field `context.n_ctx`.*<= "),
    ("unknown zoo model", lambda d: d["model"].update(zoo="gpt9"), "field `model`.*'gpt9'.*qwen35moe"),
    ("two models", lambda d: d["model"].update(file="x.gguf"), "field `model`.*either"),
    ("more layers than there are", lambda d: d["model"].update(layers=9), "field `model`.*`layers` of .*"),
    ("unknown flag", lambda d: d["steps"][1].update(flags=["fast"]), r"step 1, field `flags\[0\]`.*fast.*partial_only"),
    ("damage of nothing", lambda d: d["steps"][3].update(damage={}), "step 3, field `damage`.*cut"),
    ("another version", lambda d: d.update(isolate=2), "field `isolate`"),
    ("a path for a name", lambda d: d["steps"][1].update(name="../x"), "step 1, field `name`"),
    ("no steps", lambda d: d.pop("steps"), "steps"),
    ("empty steps", lambda d: d.update(steps=[]), "field `steps`.*>= 1"),
    ("unknown kind", lambda d: d.update(expect={"kind": "boom", "step": "decode"}), "field `expect`.*'boom'.*assert"),
    (
        "unknown place",
        lambda d: d.update(expect={"kind": "assert", "step": "decod"}),
        "field `expect`.*'decod'.*decode",
    ),
    (
        "a number varies",
        lambda d: d.update(expect={"kind": "logits", "step": "decode", "varies": True}),
        "field `expect`.*varies.*logits",
    ),
]


@pytest.mark.parametrize(("change", "said"), [pytest.param(c, s, id=name) for name, c, s in BAD])
def test_a_bad_case_is_refused_by_file_step_and_field(change: Callable[[Any], object], said: str) -> None:
    data = copy.deepcopy(GOOD)
    change(data)
    with pytest.raises(CaseError, match=f"^x.json: .*{said}") as refused:
        read(data)
    assert "\n" not in refused.value.message


def test_a_hostile_case_may_overstep_slots_tokens_and_batches() -> None:
    data = copy.deepcopy(GOOD)
    data["hostile"] = True
    data["steps"][0]["batch"] = [{"slot": 7, "tokens": [9999]}, {"slot": -3, "tokens": {"count": 3000, "modulo": 120}}]
    step = read(data).steps[0]
    assert isinstance(step, Decode)
    assert step.tokens_by_slot() == {7: 1, -3: 3000}


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"[]", b'"x"', b"null"])
def test_what_is_not_a_case_at_all_is_refused(data: bytes) -> None:
    with pytest.raises(CaseError, match=r"^x.json: "):
        cases.parse(data, "x.json")


def test_a_field_that_stands_twice_is_refused() -> None:
    with pytest.raises(CaseError, match=r"^x.json: field `isolate` stands twice"):
        cases.parse(b'{"isolate": 1, "isolate": 1}', "x.json")


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(CaseError, match="cannot be read"):
            cases.read(path)


def test_another_model_is_checked_like_the_first() -> None:
    case = cases.with_model(read(GOOD), "zoo:mamba2:q3_k")
    assert (case.model.zoo, case.model.type) == ("mamba2", "q3_k")
    assert cases.with_model(case, "some.gguf").model.file == str(Path("some.gguf").absolute())
    with pytest.raises(CaseError, match="--model zoo:nope: no zoo model"):
        cases.with_model(case, "zoo:nope")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.sampled_from(["decode", "slot", "zoo", "llama"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*list(GOOD), "step", "slot"]), inner),
    max_leaves=20,
)


@given(JSON)
def test_reading_never_does_anything_but_accept_or_refuse(data: object) -> None:
    try:
        read(data)
    except CaseError as refused:
        assert refused.exit_code == 2

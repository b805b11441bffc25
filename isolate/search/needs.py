"""What a fault does not need, in words: what a case had before it was shrunk and has no more."""

from __future__ import annotations

from collections.abc import Iterator

from isolate.case import Case, Context, Decode, Save, Step
from isolate.recipes import Recipe
from isolate.search.without import slots

_STEPS = {
    "checkpoint": "context checkpoint",
    "restore": "restored checkpoint",
    "save": "saved state",
    "load": "loaded state",
    "seq_rm": "removal",
    "seq_cp": "copy between slots",
    "seq_add": "shift",
    "seq_keep": "seq_keep",
    "clear": "clear",
    "context": "new context",
}


def not_needed(before: Case, after: Case) -> Iterator[str]:
    """What `before` has and `after` does without, each in a few words."""
    kinds = {step.kind for step in after.steps}
    for kind, words in _STEPS.items():
        if kind in {step.kind for step in before.steps} - kinds:
            yield f"no {words}"
    if any(isinstance(step, Save) and step.via == "file" for step in before.steps) and "save" in kinds:
        yield from [] if any(isinstance(s, Save) and s.via == "file" for s in after.steps) else ["no state file"]
    if len(slots(after)) < len(slots(before)):
        yield "no second slot" if len(slots(after)) == 1 else f"not more than {len(slots(after))} slots"
    if len(after.steps) < len(before.steps):
        yield f"not {len(before.steps)} steps"
    if tokens(after) < tokens(before):
        yield f"not {tokens(before)} tokens"
    yield from _settings(before.context, after.context)
    yield from _model(before, after)


def what_is_left(case: Case) -> str:
    """The steps in words: `one decode of 6 tokens`, or how many of which kind."""
    if len(case.steps) == 1:
        return f"one {_step(case.steps[0])}"
    counts: dict[str, int] = {}
    for step in case.steps:
        counts[step.kind] = counts.get(step.kind, 0) + 1
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return f"{len(case.steps)} steps ({kinds}) with {tokens(case)} tokens in {len(slots(case))} slot{'s' * (len(slots(case)) != 1)}"


def tokens(case: Case) -> int:
    """Tokens that the case decodes."""
    return sum(sum(step.tokens_by_slot().values()) for step in case.steps)


def _step(step: Step) -> str:
    if not isinstance(step, Decode):
        return step.kind
    counts = step.tokens_by_slot()
    many = f" of {len(counts)} slots" if len(counts) > 1 else ""
    total = sum(counts.values())
    return f"decode of {total} token{'s' * (total != 1)}{many}"


def _settings(before: Context, after: Context) -> Iterator[str]:
    old, new, plain = before.settings(), after.settings(), Context().settings()
    for name, value in old.items():
        if new.get(name) == value:
            continue
        if name in ("n_ctx", "n_seq_max"):
            yield f"not {name} {value} ({new[name]} does)"
        elif name in ("type_k", "type_v"):
            yield f"no {value} {name[-1].upper()} cache"
        elif name == "flash_attn_type":
            yield f"no flash_attn_type {value}"
        else:
            yield f"no {name} {value}" + (f" ({new[name]} does)" if name in plain else "")


def _model(before: Case, after: Case) -> Iterator[str]:
    if before.model == after.model:
        return
    if not isinstance(before.model.zoo, str):
        yield f"not this model ({_name(after)} does)"
        return
    old, new = _recipe(before), _recipe(after)
    if old.memory != new.memory:
        yield f"no {old.memory} memory ({new.name} does)"
    elif old.name != new.name:
        yield f"not {old.name} ({new.name} does)"
    for what, key in (("layers", "block_count"), ("experts", "expert_count")):
        fewer = new.metadata.get(key)
        if old.name == new.name and fewer != old.metadata.get(key):
            yield f"not {old.metadata[key]} {what} ({fewer} do{'es' * (fewer == 1)})"
    if before.model.type != after.model.type:
        yield f"no {before.model.type} weights"


def _recipe(case: Case) -> Recipe:
    return case.model.recipe()


def _name(case: Case) -> str:
    return f"{case.model.zoo} {case.model.type if isinstance(case.model.type, str) else 'F32'}"

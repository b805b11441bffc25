"""Cases for a user's own tests, and for a campaign: model, context settings and steps from one source of chance.

    @given(cases(slots=3, memory="hybrid"))
    def test_my_build(case): ...

Hypothesis shrinks what fails; the case is plain data, so nothing is lost when the process that runs it dies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from hypothesis import strategies
from msgspec import UNSET
from msgspec.structs import replace

from isolate.case import Case, Clear, Context, Model
from isolate.errors import IsolateError
from isolate.recipes import Memory, Recipe
from isolate.search.generate import Generator, weighted
from isolate.search.hostile import Hostile
from isolate.search.serving import served
from isolate.search.without import CELLS
from isolate.zoo import ZOO

#: Types of the KV cache, K and V, with flash attention or without, and how often. In an F32 cache without flash attention
#: rounding hides least, so most cases are run in one.
CACHES: tuple[tuple[tuple[str, str, str], float], ...] = (
    (("f32", "f32", "disabled"), 12),
    (("q8_0", "q8_0", "enabled"), 4),
    (("f16", "f16", "disabled"), 2),
    (("f16", "f16", "enabled"), 1),
    (("q4_0", "q4_0", "enabled"), 0.5),
    (("q8_0", "f16", "disabled"), 0.5),
)
#: Types of weights, and how often, where results are compared: rounding hides least in F32 ones.
WEIGHTS = (("F32", 16), ("Q8_0", 1), ("Q4_0", 1), ("Q3_K", 1), ("F16", 1))
#: The same where launches are looked at: each type has kernels of its own.
LAUNCHED_WEIGHTS = tuple((name, 1) for name in ("F32", "F16", "Q8_0", "Q4_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS"))  # fmt: skip
#: Models whose recurrent state can be taken back by snapshots (llm_arch_supports_rs_rollback of llama.cpp 0.3.36's).
SNAPSHOTS = frozenset({"qwen35moe", "lfm2"})
#: How many of the cases are rounds that are all the same, how many steps and rounds those have.
REPEATED, ROUND, ROUNDS = 0.03, 8, 5
Way = Literal["free", "served"]


@dataclass(frozen=True)
class Space:
    """What cases may be made of; what is None is left to chance."""

    slots: int | None = None
    memory: Memory | None = None
    #: names of zoo models; empty for all
    models: tuple[str, ...] = ()
    #: type of the model's weights
    weights: str | None = None
    #: types of the KV cache that the build has, beyond those of `CACHES`
    kv_types: tuple[str, ...] = ()
    #: least and most steps
    steps: tuple[int, int] = (4, 40)
    #: states on the device may be taken
    on_device: bool = False
    #: the build keeps snapshots of recurrent states
    snapshots: bool = False
    #: launches are seen: many kernels count for more than little rounding
    launches: bool = False
    #: the build can decode through llama_batch_ext
    process: bool = False

    def recipes(self) -> list[Recipe]:
        """The zoo models to choose from. IsolateError where there are none."""
        for name in self.models:
            if name not in ZOO:
                raise IsolateError(f"no zoo model is called {name!r}; there are {', '.join(sorted(ZOO))}")
        found = [
            recipe
            for name, recipe in sorted(ZOO.items())
            if (not self.models or name in self.models) and self.memory in (None, recipe.memory)
        ]
        if not found:
            raise IsolateError(f"none of the models {', '.join(self.models)} has {self.memory} memory")
        return found


@dataclass(frozen=True)
class Ground:
    """What several cases share: what is measured of a model under its settings is measured once."""

    model: Model
    context: Context
    api: Literal["llama_decode", "llama_process"] = "llama_decode"

    @property
    def recipe(self) -> Recipe:
        """The zoo model's."""
        return ZOO[str(self.model.zoo)]


def ground(chance: Random, space: Space) -> Ground:
    """A model and context settings."""
    recipe = chance.choice(space.recipes())
    weights = space.weights or weighted(chance, LAUNCHED_WEIGHTS if space.launches else WEIGHTS)
    model = Model(zoo=recipe.name, type=UNSET if weights == "F32" else weights)
    caches = list(CACHES) + [((kind, kind, "enabled"), 2.0) for kind in space.kv_types]
    caches += [(("q8_0", kind, "enabled"), 2.0) for kind in space.kv_types]
    cache: tuple[str, str, Any] = weighted(chance, caches)
    type_k, type_v, flash = cache
    if recipe.latent and type_v != type_k:
        # A quantized V needs flash attention.
        type_v, flash = type_k, "enabled"
    slots = space.slots or weighted(chance, ((1, 1), (2, 4), (3, 4), (4, 1)))
    unified = chance.random() < 0.5
    room = chance.choice((1, 1, 2)) if recipe.window == 0 else chance.choice((1, 2, 3))
    cells = CELLS * room if unified else CELLS * room * slots
    ubatch = weighted(chance, ((4, 1), (8, 4), (16, 5), (32, 3), (64, 1), (128, 1)))
    batch = min(ubatch * chance.choice((1, 2, 4, 8)), cells)
    context = Context(
        n_ctx=cells, n_batch=batch, n_ubatch=min(ubatch, batch), n_seq_max=slots, type_k=type_k, type_v=type_v,
        flash_attn_type=flash, kv_unified=unified, swa_full=chance.random() < 0.5,
    )  # fmt: skip
    if space.snapshots and recipe.name in SNAPSHOTS and chance.random() < 0.4:
        # An ubatch has to hold more tokens than there are snapshots.
        context = replace(context, n_rs_seq=min(chance.choice((1, 2, 4, 8)), max(1, context.n_ubatch - 2)))
    return Ground(model, context, "llama_process" if space.process and chance.random() < 0.1 else "llama_decode")


def generated(chance: Random, ground: Ground, space: Space, way: Way = "free") -> Case:
    """One case on this ground, every oracle on."""
    if way == "served":
        return replace(served(chance, ground.model, ground.context), api=ground.api)
    generator = Generator(chance, ground.recipe, ground.context, space.on_device)
    if chance.random() < REPEATED:
        # What is not given back shows in rounds that are all the same.
        generator.grow(min(ROUND, space.steps[1]))
        return case_of(ground, [*generator.steps, Clear()] * ROUNDS)
    generator.grow(chance.randint(*space.steps))
    return case_of(ground, generator.steps)


def hostile(chance: Random, ground: Ground, space: Space) -> tuple[Case, frozenset[int]]:
    """One case that oversteps limits, and the numbers of the steps that do."""
    generator = Hostile(chance, ground.recipe, ground.context, space.on_device)
    generator.grow(chance.randint(*space.steps))
    return case_of(ground, generator.steps, hostile=True), frozenset(generator.wild)


def changed(chance: Random, case: Case, space: Space) -> Case:
    """A case that begins as another: its first steps, and then others; or the same steps, in other ubatches or another cache."""
    kept = case.steps[: chance.randint(1, len(case.steps))]
    context = case.context
    if chance.random() < 0.25:
        least = 0 if context.n_rs_seq is UNSET else int(context.n_rs_seq) + 2
        context = replace(context, n_ubatch=max(least, min(context.n_batch, chance.choice((8, 16, 32, 64)))))
    at = Ground(case.model, context, case.api)
    generator = Generator(chance, at.recipe, context, space.on_device)
    for step in kept:
        generator.add(step)
    generator.grow(chance.randint(1, 12))
    return case_of(at, generator.steps)


def case_of(ground: Ground, steps: Sequence[Any], hostile: bool = False) -> Case:
    """Steps as a case with every oracle on."""
    return Case(isolate=1, model=ground.model, context=ground.context, steps=list(steps), check="all", hostile=hostile)


@strategies.composite
def cases(
    draw: strategies.DrawFn,
    slots: int | None = None,
    memory: Memory | None = None,
    model: str | None = None,
    steps: tuple[int, int] = (4, 40),
) -> Case:
    """Cases for `@given`: so many slots, this kind of memory, this zoo model, from least to most steps."""
    space = Space(slots, memory, () if model is None else (model,), steps=steps)
    chance = draw(strategies.randoms(use_true_random=False))
    return generated(chance, ground(chance, space), space)

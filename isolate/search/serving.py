"""Cases that a server would make: random requests to a server with random options, as the calls it makes of libllama."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from random import Random

from isolate.case import Case, Context, Model, Pattern, Step
from isolate.serve.memory import Memory
from isolate.serve.options import Options, ServeError
from isolate.serve.requests import Request
from isolate.serve.slots import Server
from isolate.zoo import ZOO

#: Steps of one case at most: a server that shifts its contexts for long repeats itself.
MOST_STEPS = 200
_WORDS = {"enabled": "on", "disabled": "off", "auto": "auto"}


def served(chance: Random, model: Model, context: Context) -> Case:
    """A server's run with these settings; its other options and what clients ask of it are left to chance."""
    recipe = ZOO[str(model.zoo)]
    while True:
        options = _options(chance, context, recipe.partial_removal)
        server = Server(options, Memory.of(recipe), _requests(chance, options))
        steps: list[Step] = []
        # A prompt that does not fit ends the run: a server answers with an error, without a call.
        with suppress(ServeError):
            steps.extend(islice(server.steps(), MOST_STEPS))
        if steps:
            return Case(isolate=1, model=model, context=options.context(), steps=steps, check="all")


def _options(chance: Random, context: Context, partial_removal: bool) -> Options:
    switch = [True, True, False]
    return Options(
        parallel=context.n_seq_max,
        ctx_size=context.n_ctx,
        batch_size=context.n_batch,
        ubatch_size=context.n_ubatch,
        cont_batching=chance.choice(switch),
        flash_attn=_WORDS[context.flash_attn_type],  # type: ignore[arg-type]
        cache_type_k=context.type_k,
        cache_type_v=context.type_v,
        kv_unified=context.kv_unified,
        swa_full=context.swa_full,
        cache_prompt=(cached := chance.choice(switch)),
        cache_reuse=chance.choice((0, 0, 4, 16)) if cached else 0,
        ctx_checkpoints=chance.choice((32, 32, 32, 3, 1, 0)),
        checkpoint_min_step=chance.choice((0, 0, 16, 64, 8192)),
        cache_ram=chance.choice((8192, 8192, 1, 0)),
        cache_idle_slots=chance.choice(switch),
        # A server that shifts recurrent memory removes a part of it, does not look at the refusal, and goes on.
        context_shift=partial_removal and chance.choice(switch),
        keep=chance.choice((0, 0, 4, -1)),
        slot_prompt_similarity=chance.choice((0.1, 0.1, 0.5, 0.0)),
    )


def _requests(chance: Random, options: Options) -> list[Request]:
    """Some clients: prompts that begin alike, conversations that go on, answers long enough to fill a context now and then."""
    room = options.slot_context()
    found: list[Request] = []
    names: list[str] = []
    for index in range(chance.randint(2, 3 + 2 * options.parallel)):
        answered = [number for number in range(index) if found[number].action == "complete"]
        after = chance.choice(answered) if answered and chance.random() < 0.3 else None
        if index and chance.random() < 0.12:
            action = chance.choice(("save", "restore", "erase"))
            if action == "save" or names:
                name = f"file-{index}" if action == "save" else chance.choice(names or [""])
                slot = chance.randrange(options.parallel)
                found.append(Request(action=action, slot=slot, name=None if action == "erase" else name, after=after))  # type: ignore[arg-type]
                names += [name] if action == "save" else []
                continue
        longest = max(2, room // 4) if chance.random() < 0.8 else room - 2
        count = chance.choice(
            (chance.randint(1, 8), chance.randint(1, longest), options.ubatch() + chance.randint(-1, 6))
        )
        predict = chance.choice(
            (1, 2, chance.randint(1, 12), chance.randint(1, 12), room // 3 if options.context_shift else 4)
        )
        continues = chance.choice(answered) if answered and chance.random() < 0.4 else None
        first = 0 if continues is None and chance.random() < 0.6 else 13 * chance.randint(1, 5)
        found.append(
            Request(
                prompt=Pattern(max(1, min(count, room - 2)), 120, first, 7),
                n_predict=predict,
                continues=continues,
                after=after,
                round=chance.choice((0, 0, 0, 1, 3)),
            )
        )
    return found

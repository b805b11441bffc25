"""Requests in, steps out: what llama-server does with its slots, as a generator that calls no library.

Each round is one pass of the server's loop (`update_slots` of llama.cpp 0.3.36): requests that arrived get slots, full
contexts are shifted, every generating slot gives one token, prompts fill the rest of the batch, checkpoints are taken
before it is decoded, and what was asked for is sampled. Slots are served in the order of their numbers.
The README's table lists the rules; the tests hold them against a recorded server.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET

from isolate.case import Checkpoint, Decode, Flag, Load, Restore, Save, SeqAdd, SeqRm, Step
from isolate.serve.batch import Item, runs
from isolate.serve.cache import Kept, Prompt, PromptCache, common
from isolate.serve.memory import Memory
from isolate.serve.options import Options, ServeError
from isolate.serve.requests import Request, Sampled, Symbol, check, symbols

#: A checkpoint is taken this many tokens before the end of a prompt, and an ubatch before that.
TAIL = 4
#: A slot that keeps less than this of its tokens for a new prompt is saved to the prompt cache first.
WORTH_SAVING = 0.5


@dataclass
class Task:
    """A request in a slot."""

    index: int
    request: Request
    tokens: list[Symbol]
    started: bool = False
    #: the token sampled last, which is decoded in the next round
    last: Symbol | None = None
    generated: int = 0


@dataclass
class Slot:
    """One slot: what it holds in memory, and what it works on."""

    id: int
    prompt: Prompt = field(default_factory=Prompt)
    task: Task | None = None
    used: int = -1
    #: tokens that are in memory; the rest of `prompt.tokens` is in the batch
    decoded: int = 0


class Server:
    """A server with these options on a model with this memory; `steps` can be asked once."""

    def __init__(
        self,
        options: Options,
        memory: Memory,
        requests: Sequence[Request],
        answers: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        check(requests, options.parallel)
        self.options = options
        self.memory = memory
        self.requests = requests
        self.answers = answers or {}
        # A server switches both off where the memory cannot shift.
        self.shifts = options.context_shift and memory.shifts(options)
        self.slots = [Slot(number) for number in range(options.parallel)]
        limit = None if options.cache_ram < 0 else options.cache_ram << 20
        self.cache = PromptCache(limit, options.ctx_size) if options.cache_ram else None
        self.flags: list[Flag] = ["partial_only", *(["on_device"] if options.checkpoints_on_device else [])]  # type: ignore[list-item]
        self.done: set[int] = set()
        #: requests to be given a slot, and those that found none; a slot that is released calls one of these to the front
        self.queue: list[int] = []
        self.deferred: list[int] = []
        self.files: dict[str, Prompt] = {}
        self.clock = 0
        self.named = 0
        self.round = 0

    def steps(self) -> Iterator[Step]:
        """Everything the server calls, in order, until the last request is answered."""
        waiting = list(range(len(self.requests)))
        while waiting or self.queue or any(slot.task for slot in self.slots):
            self.queue += [index for index in waiting if self._arrived(index)]
            waiting = [index for index in waiting if not self._arrived(index)]
            asked, self.queue = self.queue, []
            for index in asked:
                if not (yield from self._assign(index)):
                    self.deferred.append(index)
            if any(slot.task for slot in self.slots):
                yield from self._round()
            elif waiting and not any(self._arrived(index) or self._later(index) for index in waiting):
                raise ServeError(f"request {waiting[0]} waits for one that is never answered")
            self.round += 1

    def _later(self, index: int) -> bool:
        return self.requests[index].round > self.round

    def _arrived(self, index: int) -> bool:
        request = self.requests[index]
        needed = {request.after, request.continues} - {None}
        return request.round <= self.round and needed <= self.done

    # -- a request gets a slot

    def _assign(self, index: int) -> Generator[Step, None, bool]:
        """Give a request its slot, as far as one is free. Returns whether it was taken."""
        request = self.requests[index]
        if request.action != "complete":
            return (yield from self._act(index, request))
        tokens = symbols(self.requests, index, self.answers)
        slot, save = self._choose(request.slot, tokens)
        if slot is None:
            return False
        if save and self.cache is not None:
            yield from self._save(slot)
            yield from self._swap_in(slot, tokens)
            self.cache.update()
        slot.task = Task(index, request, tokens)
        if self.options.idle_slots() and self.cache is not None:
            for idle in self.slots:
                if idle.task is None:
                    if (yield from self._save(idle)):
                        self.cache.update()
                    if self.options.kv_unified:
                        yield from self._empty(idle)
        return True

    def _choose(self, asked: int, tokens: list[Symbol]) -> tuple[Slot | None, bool]:
        """The slot for a prompt, and whether what it holds is saved first: most alike, else longest unused."""
        allowed = [slot for slot in self.slots if slot.task is None and asked in (-1, slot.id)]
        found, best = (self.slots[asked] if asked >= 0 else None), 0.0
        if self.options.slot_prompt_similarity > 0:
            for slot in allowed:
                alike = common(slot.prompt.tokens, tokens) / len(tokens)
                if slot.prompt.tokens and alike > best and alike > self.options.slot_prompt_similarity:
                    found, best = slot, alike
            if found is not None and found.task is None:
                held = len(found.prompt.tokens)
                return found, bool(held) and best * len(tokens) / held < WORTH_SAVING
        if found is not None:
            return (None if found.task else found), False
        # Of slots that were never used the last one is taken.
        oldest = min((slot.used for slot in allowed), default=None)
        return next(((slot, True) for slot in reversed(allowed) if slot.used == oldest), (None, False))

    def _act(self, index: int, request: Request) -> Generator[Step, None, bool]:
        slot = self.slots[request.slot]
        if slot.task is not None:
            return False
        name = str(request.name)
        if request.action == "save":
            self.files[name] = Prompt(list(slot.prompt.tokens), [], slot.prompt.low)
            yield Save(slot.id, name, via="file")
        elif request.action == "restore":
            if name not in self.files:
                raise ServeError(f"request {index}: no earlier request saves {name!r}")
            yield from self._load(slot, name, self.files[name].copy())
        else:
            yield from self._empty(slot)
        self.done.add(index)
        return True

    def _save(self, slot: Slot) -> Generator[Step, None, bool]:
        """The slot's state goes to the prompt cache, unless it is there. Returns whether it went."""
        assert self.cache is not None
        if not slot.prompt.tokens:
            return False
        size = self.memory.state_bytes + self.memory.token_bytes * slot.decoded
        name = self._name(f"cached-{slot.id}-{slot.decoded}")
        if not self.cache.admit(slot.prompt, size, name):
            return False
        yield Save(slot.id, name)
        return True

    def _swap_in(self, slot: Slot, tokens: list[Symbol]) -> Iterator[Step]:
        assert self.cache is not None
        entry = self.cache.best(slot.prompt, tokens)
        if entry is not None:
            yield from self._load(slot, entry.name, entry.prompt)

    def _load(self, slot: Slot, name: str, prompt: Prompt) -> Iterator[Step]:
        """A saved state into a slot; where other slots of a unified cache leave no room for it, the slot is emptied."""
        taken, slot.decoded = slot.decoded, 0
        fits = self._fits(len(prompt.tokens))
        slot.decoded = taken
        yield Load(name, slot.id, returns=UNSET if fits else 0)
        if fits:
            self._hold(slot, prompt)
        else:
            yield from self._empty(slot)

    def _hold(self, slot: Slot, prompt: Prompt) -> None:
        slot.prompt, slot.decoded = prompt, len(prompt.tokens)

    def _empty(self, slot: Slot) -> Iterator[Step]:
        yield SeqRm(slot.id)
        self._hold(slot, Prompt())

    def _name(self, said: str) -> str:
        self.named += 1
        return f"{self.named}-{said}"

    # -- one round

    def _round(self) -> Iterator[Step]:
        yield from self._shift()
        batch: list[Item] = []
        for slot in self.slots:
            if slot.task is not None and slot.task.last is not None:
                batch.append(Item(slot.id, len(slot.prompt.tokens), slot.task.last, True))
                slot.prompt.tokens.append(slot.task.last)
        if self.options.cont_batching or not batch:
            for slot in self.slots:
                if len(batch) >= self.options.batch():
                    break
                if slot.task is not None and slot.task.last is None:
                    yield from self._prompt(slot, slot.task, batch)
        yield from self._decode(batch)

    def _shift(self) -> Iterator[Step]:
        """Full contexts lose the older half of what is not to be kept."""
        for slot in self.slots:
            task, held = slot.task, len(slot.prompt.tokens)
            if not self.shifts or task is None or task.last is None or held + 1 < self.options.slot_context():
                continue
            keep = len(task.tokens) if self.options.keep < 0 else self.options.keep
            keep = min(self.options.slot_context() - 4, keep)
            discard = max(0, min((held - keep) // 2, held - keep - 1))
            yield SeqRm(slot.id, keep, keep + discard)
            yield SeqAdd(slot.id, -discard, keep + discard, held)
            left = [*slot.prompt.tokens[:keep], *slot.prompt.tokens[keep + discard :]]
            self._hold(slot, Prompt(left, moved=True))

    def _prompt(self, slot: Slot, task: Task, batch: list[Item]) -> Iterator[Step]:
        """As much of a slot's prompt as fits, ended where a checkpoint is wanted; then the checkpoint of what was before."""
        if not task.started:
            task.started = True
            if len(task.tokens) >= self.options.slot_context():
                raise ServeError(
                    f"request {task.index}: {len(task.tokens)} tokens do not fit into a slot of {self.options.slot_context()}"
                )
            yield from self._reuse(slot, task)
        held = slot.prompt.tokens
        start = len(held)
        yield SeqRm(slot.id, start)
        slot.decoded = start
        checkpoints = self.memory.takes_checkpoints(self.options)
        ubatch, most = self.options.ubatch(), self.options.batch()
        breaks = {len(task.tokens) - min(most, offset) for offset in (TAIL + ubatch, TAIL)} if checkpoints else set()
        while len(held) < len(task.tokens) and len(batch) < most:
            batch.append(Item(slot.id, len(held), task.tokens[len(held)], False, self._pattern_index(task, len(held))))
            held.append(task.tokens[len(held)])
            if len(held) in breaks:
                break
        near_end = len(task.tokens) < len(held) + ubatch
        if len(held) == len(task.tokens):
            batch[-1].output = True
        elif not near_end:
            return
        if checkpoints and start > 0 and (near_end or self._far(slot, start)):
            yield self._checkpoint(slot, task, start)

    def _far(self, slot: Slot, start: int) -> bool:
        taken = slot.prompt.checkpoints
        return not taken or start > taken[-1].tokens + self.options.checkpoint_min_step

    def _pattern_index(self, task: Task, index: int) -> int | None:
        """Place in the request's own prompt, where that is a pattern."""
        pattern = task.request.pattern()
        own = index - (len(task.tokens) - pattern.count) if pattern else -1
        return own if own >= 0 else None

    def _checkpoint(self, slot: Slot, task: Task, count: int) -> Step:
        taken, most, step = slot.prompt.checkpoints, self.options.ctx_checkpoints, self.options.checkpoint_min_step
        last, index = -1, 0
        while len(taken) + 1 >= most and index < len(taken):
            kept = taken[index]
            if kept.task != task.index and last >= 0 and kept.tokens <= last + step:
                del taken[index]
                continue
            last, index = kept.tokens, index + 1
        while len(taken) >= most:
            del taken[0]
        taken[:] = [kept for kept in taken if kept.tokens != count]
        name = self._name(f"slot-{slot.id}-at-{count}")
        first = self.memory.first_position(count, self.options, slot.prompt.low)
        taken.append(Kept(name, task.index, count, first, count - 1, self.memory.checkpoint_bytes))
        return Checkpoint(slot.id, name, list(self.flags))

    def _reuse(self, slot: Slot, task: Task) -> Iterator[Step]:
        """Keep what a new prompt has in common with the slot's tokens, as far as the memory can go back to it."""
        held, wanted = slot.prompt.tokens, task.tokens
        count = common(held, wanted) if self.options.cache_prompt else 0
        if self.options.cache_prompt and self.options.cache_reuse and self.memory.shifts(self.options):
            count = yield from self._move_chunks(slot, wanted, count)
        end = count
        if count > 0:
            first = self.memory.first_position(slot.decoded, self.options, slot.prompt.low)
            window = self.memory.server_window(self.options)
            bound = max(0, end - window - (0 if count < len(wanted) else 1))
            if first >= bound:
                usable = (
                    kept
                    for kept in reversed(slot.prompt.checkpoints)
                    if kept.last <= end and (kept.first < bound or kept.first == 0)
                )
                kept = next(usable, None)
                if kept is None:
                    count = end = 0
                else:
                    yield Restore(kept.name, slot.id)
                    end = min(end, max(kept.first + 1, kept.last))
                    count = min(end, kept.tokens)
                    slot.prompt.low = kept.first if self.memory.partial_removal else 0
        slot.prompt.checkpoints = [kept for kept in slot.prompt.checkpoints if kept.last <= end]
        if count == len(wanted):
            # At least one token must be computed for its logits.
            count -= 1
        if count == 0:
            slot.prompt.low, slot.prompt.moved = 0, False
        del held[count:]

    def _move_chunks(self, slot: Slot, wanted: list[Symbol], count: int) -> Generator[Step, None, int]:
        """`cache-reuse`: later chunks that the new prompt has, too, are moved to where it has them. Returns the new length."""
        held = slot.prompt.tokens
        here = there = count
        while here < len(held) and there < len(wanted):
            length = common(held[here:], wanted[there:])
            if length < self.options.cache_reuse:
                here += 1
                continue
            yield SeqRm(slot.id, there, here)
            yield SeqAdd(slot.id, there - here, here, here + length)
            slot.prompt.moved = True
            held[there : there + length] = held[here : here + length]
            here, there, count = here + length, there + length, count + length
        return count

    # -- decode and sample

    def _decode(self, batch: list[Item]) -> Iterator[Step]:
        most, place = self.options.batch(), 0
        while place < len(batch):
            part = batch[place : place + most]
            fits = self._fits(len(part))
            decode = Decode(runs(part, self.slots, self.requests), returns=UNSET if fits else 1)
            yield decode
            if not fits:
                if most == 1:
                    yield from self._give_up()
                    return
                purged = next((slot for slot in self.slots if slot.task is None and slot.prompt.tokens), None)
                if self.options.kv_unified and purged is not None:
                    yield from self._empty(purged)
                else:
                    most //= 2
                continue
            place, most = place + len(part), self.options.batch()
            for item in part:
                self.slots[item.slot].decoded = item.position + 1
            self._settle({item.slot for item in part})
            for item in part:
                if item.output:
                    self._sample(self.slots[item.slot])

    def _fits(self, count: int) -> bool:
        """Whether the cells for these tokens are there: only a unified cache can be short of them."""
        if not (self.options.kv_unified and self.memory.has_cells):
            return True
        return sum(slot.decoded for slot in self.slots) + count <= self.options.slot_context()

    def _give_up(self) -> Iterator[Step]:
        """Not even one token fits: every request at work fails, and its slot is emptied."""
        for slot in self.slots:
            if slot.task is not None:
                self._release(slot)
                yield from self._empty(slot)

    def _settle(self, slots: set[int]) -> None:
        for number in slots:
            slot = self.slots[number]
            if self.memory.partial_removal:
                slot.prompt.low = self.memory.first_position(slot.decoded, self.options, slot.prompt.low)

    def _sample(self, slot: Slot) -> None:
        task = slot.task
        assert task is not None
        known = self.answers.get(task.index, ())
        task.last = known[task.generated] if task.generated < len(known) else Sampled(task.index, task.generated)
        task.generated += 1
        full = not self.shifts and len(slot.prompt.tokens) + 1 >= self.options.slot_context()
        if task.generated >= task.request.n_predict or full:
            self._release(slot)

    def _release(self, slot: Slot) -> None:
        assert slot.task is not None
        self.done.add(slot.task.index)
        self.clock += 1
        slot.used, slot.task = self.clock, None
        if self.deferred:
            called = next((index for index in self.deferred if self.requests[index].slot == slot.id), self.deferred[0])
            self.deferred.remove(called)
            self.queue.insert(0, called)

"""Are a slot's logits those it would have alone? Judged by what rounding and what another prefix changes here."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from isolate.case import Context
from isolate.replay import again
from isolate.replay.alone import Alone, Logits, Memo, NotAlone, Single
from isolate.replay.engine import Engine, Row
from isolate.replay.noise import SEPARATED, Noise, distance, measure
from isolate.replay.reference import Act, Decoded, Kind, Removed, Slot

#: llama_rope_type of a model without rotary embedding (llama.h).
NO_ROPE = -1


@dataclass
class _Settings:
    """What is known of a model under some settings."""

    memo: Memo = field(default_factory=Memo)
    noise: Noise | None = None
    #: contexts that were made to compare with; only the settings in use have any
    alone: Alone | None = None

    def close(self) -> None:
        """Free the contexts."""
        if self.alone is not None:
            self.alone.close()
        self.alone = None


#: By the model's path and the settings of a context for one slot; kept from one case to the next.
_known: dict[tuple[Path | None, bytes], _Settings] = {}


@dataclass(frozen=True)
class Difference:
    """A slot's logits are not those it has alone: one sentence, and the numbers behind it."""

    said: str
    evidence: dict[str, Any]


class Judge:
    """Compares the rows of one context with one-slot contexts of the same model and settings."""

    def __init__(self, engine: Engine, kind: Kind, reach: int, note: Callable[[str], None]) -> None:
        self.engine = engine
        self.note = note
        library, model, settings = engine.library, engine.models.handle, engine.settings
        assert model is not None
        self.room = self._room(settings)
        alone = msgspec.json.encode(settings.for_one_slot(self.room))
        self.known = _known.setdefault((engine.models.path, alone), _Settings())
        self.relative = library.llama_model_rope_type(model) != NO_ROPE
        if self.known.alone is None:
            models = engine.models
            # Kept from one case to the next: what they hold need not be decoded again.
            while models.before_free:
                models.before_free.pop()()
            models.before_free.append(self.known.close)
            self.known.alone = Alone(library, model, settings, self.room, kind, reach, self.known.memo)
        self.alone = self.known.alone

    def _room(self, settings: Context) -> int:
        """Positions that one slot has."""
        library, context = self.engine.library, self.engine.context
        if library.has("llama_n_ctx_seq"):
            return int(library.llama_n_ctx_seq(context))
        whole = int(library.llama_n_ctx(context))
        return whole if settings.kv_unified else whole // settings.n_seq_max

    def judge(self, number: int, slot: Slot, rows: list[Row]) -> Difference | None:
        """How the rows of a slot differ from what they should be; None where they do not, or where nothing can be said."""
        if slot.doubt:
            self.note(f"logits: slot {number} was not judged: {slot.doubt}")
            return None
        try:
            return self._compare(number, slot, rows)
        except NotAlone as reason:
            self.note(f"logits: slot {number} was not judged: {reason}")
            return None

    def _compare(self, number: int, slot: Slot, rows: list[Row]) -> Difference | None:
        noise = self._noise()
        moved = slot.moved
        if not noise.separated(moved):
            self.note(
                f"logits: nothing was judged: with this model and these settings rounding changes them by "
                f"{noise.level(moved):.1e} (NMSE) and another prefix by {noise.signal:.1e}, less than {SEPARATED:g} times"
            )
            return None
        found = {row.position: self.engine.logits(row) for row in rows}
        given = {position: logits for position, logits in found.items() if logits is not None}
        limit = noise.tolerance(moved)
        beyond = self._beyond(given, self.alone.rows(slot.acts(), list(given)), limit)
        if beyond:
            # the context that was compared with may itself have gone wrong: only a new one counts
            beyond = self._beyond(given, self.alone.fresh_rows(slot.acts(), list(given)), limit)
        if not beyond:
            return None
        difference = self._difference(number, slot, beyond, noise, noise.level(moved))
        position = difference.evidence["position"]
        acts = [_written(act) for act in slot.acts()]
        difference.evidence["again"] = again.written(again.Alone(number, position, limit, self.room, acts))
        return difference

    def _beyond(self, given: dict[int, Logits], right: dict[int, Logits], limit: float) -> dict[int, float]:
        distances = {position: distance(right[position], logits) for position, logits in given.items()}
        return {position: far for position, far in distances.items() if far > limit}

    def _noise(self) -> Noise:
        """Noise and signal of this model and these settings, measured the first time."""
        if self.known.noise is None:
            library, model = self.engine.library, self.engine.models.handle
            assert model is not None
            context = Single(library, model, self.engine.settings, self.room)
            try:
                self.known.noise = measure(context, self.room, self.relative, self._exact(model), self._exact_cache())
            finally:
                context.close()
        return self.known.noise

    def _exact(self, model: int) -> bool:
        """The weights are floating point numbers, by what the library calls them."""
        name = ctypes.create_string_buffer(256)
        self.engine.library.llama_model_desc(model, name, len(name))
        return name.value.removesuffix(b" (guessed)").endswith((b"F32", b"F16"))

    def _exact_cache(self) -> bool:
        settings = self.engine.settings
        return {settings.type_k, settings.type_v} <= {"f32", "f16", "bf16"}

    def _difference(self, number: int, slot: Slot, beyond: dict[int, float], noise: Noise, level: float) -> Difference:
        position = max(beyond, key=lambda at: beyond[at])
        far = beyond[position]
        alone = "the same tokens decoded alone" if slot.history is None else "its own history gone through alone"
        said = (
            f"slot {number}, position {position}: logits are {far:.1e} (NMSE) from those of {alone}, {far / level:.2g} times "
            f"the noise of {level:.1e} and {far / noise.signal:.2g} times the {noise.signal:.1e} that another prefix changes"
        )
        evidence = {
            "slot": number,
            "position": position,
            "first_position": min(beyond),
            "rows": len(beyond),
            "nmse": far,
            "noise": level,
            "signal": noise.signal,
            "times_the_noise": far / level,
            "times_the_signal": far / noise.signal,
            "compared_with": alone,
            "tokens": len(slot.tokens),
        }
        return Difference(said, evidence)


def _written(act: Act) -> again.Act:
    match act:
        case Decoded():
            return again.Decoded(act.positions[0], list(act.tokens))
        case Removed():
            return again.Removed(act.p0, act.p1)
        case _:
            return again.Moved(act.p0, act.p1, act.delta)

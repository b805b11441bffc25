"""For each planted fault the least that shows it, made by hand: the case, the kind of fault, and on which step."""

from __future__ import annotations

from dataclasses import dataclass, field

from isolate.case import (
    Case,
    Check,
    Checkpoint,
    Clear,
    Context,
    Decode,
    Load,
    Model,
    Pattern,
    Restore,
    Run,
    Save,
    SeqAdd,
    SeqCp,
    SeqKeep,
    SeqRm,
    Step,
)

UBATCH = 16
ALONE = Context(n_ctx=256, n_batch=256, n_ubatch=UBATCH, type_k="f32", type_v="f32", flash_attn_type="disabled")
TWO = Context(n_ctx=512, n_batch=256, n_ubatch=UBATCH, n_seq_max=2, type_k="f32", type_v="f32", flash_attn_type="disabled")  # fmt: skip
THREE = Context(n_ctx=768, n_batch=256, n_ubatch=UBATCH, n_seq_max=3, type_k="f32", type_v="f32", flash_attn_type="disabled")  # fmt: skip
UNIFIED = Context(
    n_ctx=256, n_batch=256, n_ubatch=UBATCH, n_seq_max=2, kv_unified=True, type_k="f32", type_v="f32", flash_attn_type="disabled"
)  # fmt: skip
QUANTIZED = Context(n_ctx=256, n_batch=256, n_ubatch=UBATCH, type_k="q8_0", type_v="q8_0", flash_attn_type="enabled")


@dataclass(frozen=True)
class Kill:
    """Steps that show a planted fault, and no more than that needs."""

    #: kind of the fault, and the step's word
    kind: str
    on: str
    steps: tuple[Step, ...]
    context: Context = field(default=TWO)
    zoo: str = "llama"

    def case(self, check: list[Check] | None = None) -> Case:
        """The case, with every oracle on or only these."""
        checks = {"check": "all"} if check is None else {"check": check}
        return Case(isolate=1, model=Model(zoo=self.zoo), context=self.context, steps=list(self.steps), **checks)


def decode(*runs: tuple[int, int], logits: str = "last") -> Decode:
    """A batch: slots and how many tokens of each; every slot has tokens of its own."""
    return Decode(batch=[Run(slot, Pattern(count, 120, first=13 * slot + 5, stride=7), logits) for slot, count in runs])  # type: ignore[arg-type]


def same(*slots: int) -> Decode:
    """The same token in several slots."""
    return Decode(batch=[Run(slot, [9]) for slot in slots])


A = "a"
WHOLE = Checkpoint(slot=0, name=A)
BACK = Restore(name=A)

KILLS: dict[str, Kill] = {
    # states
    "RestoreDropsTheLastCell": Kill("positions", "restore", (decode((0, 1)), WHOLE, BACK), ALONE),
    "RestoreIntoTheWrongSlot": Kill("positions", "restore", (decode((0, 1)), WHOLE, BACK)),
    "CheckpointOneTokenLate": Kill(
        "logits", "decode", (decode((0, 1)), WHOLE, decode((0, 1)), BACK, decode((0, 1))), ALONE, "mamba2"
    ),
    "RestoreTakesACellOfAnotherSlot": Kill("positions", "restore", (WHOLE, decode((1, 1)), BACK)),
    "StateSetOnlyOnce": Kill("positions", "restore", (decode((0, 1)), WHOLE, BACK, BACK), ALONE),
    "StateOfTheFirstSlotOfEqualLength": Kill(
        "logits", "decode", (decode((0, 1), (1, 1)), Save(slot=1, name=A), Load(name=A), decode((1, 1)))
    ),
    "LongStateIsCutInside": Kill(
        "logits", "decode", (decode((0, 33)), Save(slot=0, name=A), Load(name=A), decode((0, 1))), ALONE
    ),
    "LoadIntoAnotherSlotMoves": Kill("positions", "load", (decode((0, 1)), Save(slot=0, name=A), Load(name=A, slot=1))),
    # with attention the release itself passes over an empty state
    "RestoreGivesTheNewestCheckpoint": Kill(
        "positions", "restore", (WHOLE, decode((0, 1)), Checkpoint(slot=0, name="b"), BACK), ALONE, "mamba2"
    ),
    "CheckpointIgnoresPartialOnly": Kill("cells", "checkpoint", (WHOLE,), ALONE, "lfm2"),
    "LongStateLosesItsMiddle": Kill("cells", "load", (decode((0, 21)), Save(slot=0, name=A), Load(name=A)), ALONE),
    "FileOfASlotGoesToTheFirst": Kill(
        "positions", "load", (decode((0, 1)), Save(slot=0, name=A, via="file"), Load(name=A, slot=1))
    ),
    "RestoreLeaksACell": Kill("decode", "decode", (WHOLE, BACK, decode((0, 256))), ALONE),
    "MixedBatchAfterARestoreAborts": Kill("signal", "decode", (WHOLE, BACK, decode((0, 1), (1, 4)))),
    "RemovingAnEmptySlotAfterARestoreDies": Kill("signal", "seq_rm", (WHOLE, BACK, SeqRm(slot=0)), ALONE),
    "TailRemovalAfterARestoreIsRefused": Kill("memory", "seq_rm", (WHOLE, BACK, SeqRm(slot=0, p0=1)), ALONE),
    "RestoreInTheMiddleOfAPrompt": Kill("logits", "decode", (WHOLE, decode((1, 3)), BACK, decode((1, 2)))),
    # memory
    "RemovalTakesANeighboursCell": Kill("logits", "decode", (decode((1, 3)), SeqRm(slot=0, p0=1), decode((1, 1)))),
    "RemovalTakesOneMore": Kill("logits", "decode", (decode((0, 4)), SeqRm(slot=0, p0=1, p1=2), decode((0, 1))), ALONE),
    "RemovalAtAnUbatchEdgeLeavesOne": Kill(
        "positions", "seq_rm", (decode((0, UBATCH + 1)), SeqRm(slot=0, p0=UBATCH)), ALONE
    ),
    "CopyShares": Kill("positions", "seq_rm", (decode((0, 1)), SeqCp(slot=0, into=1), SeqRm(slot=0))),
    "CopyLosesTheLastCell": Kill("positions", "seq_cp", (decode((0, 2)), SeqCp(slot=0, into=1))),
    "CopyOfRecurrentStateIsShared": Kill(
        "logits",
        "decode",
        (decode((0, 1)), SeqCp(slot=0, into=1), decode((1, 1)), decode((0, 1))),
        zoo="mamba2",
    ),
    "ShiftOfAPartIsOneOff": Kill("positions", "seq_add", (decode((0, 2)), SeqAdd(slot=0, p0=1, delta=1)), ALONE),
    "ShiftDoesNotTurnKeys": Kill("logits", "decode", (decode((0, 1)), SeqAdd(slot=0, delta=1), same(0)), ALONE),
    "ShiftLeavesTheFirstCell": Kill(
        "logits", "decode", (decode((0, 3)), SeqAdd(slot=0, p0=1, delta=1), decode((0, 1))), ALONE
    ),
    "ShiftOfQuantizedKeysLosesACell": Kill(
        "logits", "decode", (decode((0, 3)), SeqAdd(slot=0, delta=1), decode((0, 1))), QUANTIZED
    ),
    "StaleRecurrentStateAfterRemoval": Kill(
        "logits", "decode", (decode((0, 1)), SeqRm(slot=0), decode((0, 1))), ALONE, "mamba2"
    ),
    "KeepKeepsTheNextToo": Kill("positions", "seq_keep", (decode((1, 1)), SeqKeep(slot=0)), UNIFIED),
    "KeepOfTheLastSlotKeepsNothing": Kill("positions", "seq_keep", (decode((1, 1)), SeqKeep(slot=1)), UNIFIED),
    "ClearLeavesASlot": Kill("positions", "clear", (decode((0, 1), (1, 1)), Clear(data=False))),
    "NewestPositionIsStaleAfterRemoval": Kill("positions", "seq_rm", (decode((0, 2)), SeqRm(slot=0, p0=1)), ALONE),
    "OldestPositionForgetsARemoval": Kill("positions", "seq_rm", (decode((0, 2)), SeqRm(slot=0, p0=0, p1=1)), ALONE),
    "GapInAUnifiedCacheIsWrittenOver": Kill(
        "logits",
        "decode",
        (decode((0, 1), (1, 3)), SeqRm(slot=0), decode((0, 2)), decode((1, 1))),
        UNIFIED,
    ),
    # decoding
    "RowsOfSlotsOutOfOrderAreSwapped": Kill("logits", "decode", (decode((1, 1), (0, 1)),)),
    "LastUbatchOfOneIsStale": Kill("logits", "decode", (decode((0, 1)), decode((0, UBATCH + 1))), ALONE),
    "WholeUbatchIsNotANumber": Kill("nan", "decode", (decode((0, UBATCH)),), ALONE),
    "FullCacheHasNoRoom": Kill("decode", "decode", (decode((0, 256)),), ALONE),
    "CacheThatWrapsFails": Kill("decode", "decode", (decode((0, 256)), SeqRm(slot=0), decode((0, 1))), ALONE),
    "ThreeSlotsMoveAPosition": Kill("positions", "decode", (decode((0, 1), (1, 1), (2, 1)),), THREE),
    "EqualTokensShareARow": Kill("logits", "decode", (decode((0, 1), (1, 1)), same(0, 1))),
    "ManyOutputsAreOneOff": Kill("logits", "decode", (decode((0, 9), logits="all"),), ALONE),
    "SingleTokenBesideALongPromptIsSwapped": Kill("logits", "decode", (decode((0, UBATCH), (1, 1)),)),
    "WindowLosesACell": Kill("logits", "decode", (decode((0, 33)), decode((0, 1))), ALONE, "gemma3"),
    "SecondSlotOfALargeBatchIsCut": Kill("logits", "decode", (decode((0, UBATCH + 1), (1, 3)), decode((1, 1)))),
    "AnswerAfterALongPromptIsAnothers": Kill(
        "logits", "decode", (decode((0, UBATCH + 1)), decode((0, 1), (1, 1))), zoo="mamba2"
    ),
}

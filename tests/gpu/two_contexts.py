"""A child with two contexts in two threads, on as many GPUs as there are: TRACE BUILD MODES CODE BEFORE.

MODES are of the hooks, with commas between, and `one` or `other` where only that context is to run. CODE: fail launch 150
with it, 0 for none.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
from pathlib import Path

from isolate import case as cases
from isolate.library.bind import Library
from isolate.library.find import find_build
from isolate.models import make
from isolate.replay.engine import Engine
from isolate.replay.loaded import Models
from isolate.replay.target import ALL_LAYERS
from isolate.trace.hooks import Hooks
from isolate.trace.record import Kind
from isolate.trace.ring import Writer

CONTEXT = {"n_ctx": 512, "n_seq_max": 1, "type_k": "q8_0", "type_v": "q8_0", "flash_attn_type": "enabled"}
#: Prompts of different lengths, so that no launch of one context stands for one of the other.
PROMPTS = {"one": 20, "other": 33}


def case(prompt: int) -> cases.Case:
    batches: list[object] = [
        {"count": prompt, "first": 0, "stride": 7, "modulo": 120},
        *([token] for token in range(12)),
    ]
    steps = [{"step": "decode", "batch": [{"slot": 0, "tokens": tokens}]} for tokens in batches]
    data = {"isolate": 1, "model": {"zoo": "qwen35moe", "type": "q3_k"}, "context": CONTEXT, "steps": steps}
    return cases.parse(json.dumps(data).encode(), "two contexts")


class OnOne(Models):
    """A model all of which is on one GPU."""

    def place(self, path: Path, device: int) -> None:
        params = self.library.model_params()
        devices = (ctypes.c_void_p * 2)(device, None)
        self.library.set_params(params, {"n_gpu_layers": ALL_LAYERS, "devices": devices}, "model")
        self.handle = self.library.llama_model_load_from_file(os.fsencode(path), params)
        assert self.handle
        self.vocabulary = self.library.llama_vocab_n_tokens(self.library.llama_model_get_vocab(self.handle))


def main() -> None:
    trace, build, words, code, *before = sys.argv[1:]
    modes = [word for word in words.split(",") if word]
    writer = Writer(trace)
    hooks = Hooks(writer)
    hooks.set_modes(mode for mode in modes if mode not in PROMPTS)
    library = Library(find_build(build), [Path(path) for path in before])
    library.set_callbacks(writer.on_abort, writer.on_log, 2)
    library.llama_backend_init()
    assert hooks.live().why_not() == ""
    devices = [library.ggml_backend_dev_get(index) for index in range(library.ggml_backend_dev_count())]
    kind = {device: library.ggml_backend_reg_name(library.ggml_backend_dev_backend_reg(device)) for device in devices}
    gpus = [device for device in devices if kind[device] == b"CUDA"]
    path = make(library, "qwen35moe", "Q3_K", 1)
    chosen = [name for name in PROMPTS if name in modes] or list(PROMPTS)
    together = threading.Barrier(len(chosen))
    failed: list[str] = []

    def work(name: str) -> None:
        try:
            models = OnOne(library, writer, ALL_LAYERS)
            models.place(path, gpus[list(PROMPTS).index(name) % len(gpus)])
            engine = Engine(library, writer, models, case(PROMPTS[name]))
            engine.open()
            together.wait()
            os.write(1, f"{name} {threading.get_native_id()}\n".encode())
            assert len(list(engine.steps())) == 13
            together.wait()
            engine.close()
        except BaseException as error:
            failed.append(f"{name}: {error!r}")
            together.abort()

    hooks.inject(Kind.LAUNCH, 150, int(code))
    threads = [threading.Thread(target=work, args=(name,)) for name in chosen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(failed, file=sys.stderr, flush=True)
    os._exit(bool(failed))


if __name__ == "__main__":
    main()

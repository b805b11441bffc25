"""A build, loaded and ready to be called: symbols bound when first used, structs laid out as the build has them.

Only a child process makes a `Library`: what the build does to its process must not reach the parent.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from isolate.errors import BuildError
from isolate.library import layout as layouts
from isolate.library.elf import read_elf
from isolate.library.find import Build
from isolate.library.header import STATE_FLAGS, Field
from isolate.library.prototypes import PROTOTYPES, InitParams, types_of

#: names of ggml types that llama.cpp never takes for a cache: integers, doubles and what only products are made with
_NOT_FOR_CACHE = {"i8", "i16", "i32", "i64", "f64", "q8_1", "q8_K"}
_F32 = 0
#: types the oldest release of the table has (GGML_TYPE_COUNT of 0.3.9); numbers are never given back
_TYPES_OF_ALL = 39
#: room for the headers of three tensors a type
_ARENA_BYTES = 1 << 20
_QUANTIZE = "llama_model_quantize_params"
#: ggml_backend_dev_type (ggml-backend.h)
_DEVICE_TYPES = {0: "CPU", 1: "GPU", 2: "integrated GPU", 3: "accelerator", 4: "meta"}
#: what a build may lack, by what a user can ask for
OPTIONAL = {
    "state of one sequence with flags (checkpoints)": "llama_state_seq_get_data_ext",
    "decode by llama_process and llama_batch_ext": "llama_process",
    "whether positions can be shifted": "llama_memory_can_shift",
    "context size of one sequence": "llama_n_ctx_seq",
    "snapshots of recurrent state": "llama_n_rs_seq",
    "quantize": "llama_model_quantize",
    "abort callback": "ggml_set_abort_callback",
    "version of llama.cpp": "llama_version",
}
_RANGES = {
    **{f"int{bits}_t": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}_t": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
    "int": (-(2**31), 2**31 - 1),
    "size_t": (0, 2**64 - 1),
    "bool": (0, 1),
}
_CUDA = re.compile(r"libggml-cuda\.so(\.\d+)*")


class Library:
    """The calls of one build: every function of `prototypes.py` is an attribute, a plain ctypes function.

    `before` are libraries to load first, for every later one to find (hooks, a simulated device). Quiet until
    `set_callbacks`. The caller calls `llama_backend_init`. `BuildError` where the build cannot be loaded or laid out,
    and where a call it lacks is used.
    """

    def __init__(self, build: Build, before: Sequence[Path] = ()) -> None:
        self.build = build
        self._before = [_load(path, ctypes.RTLD_GLOBAL) for path in before]
        ggml = [_load(path) for path in build.ggml]
        llama = _load(build.llama)
        # The registry of backends comes last of ggml's; libllama finds all of them, the others only themselves.
        self._libraries = (llama, *reversed(ggml))
        self.layout = layouts.establish(llama, build.header)
        # getpid ignores what it is given and does nothing, and needs neither Python nor its lock.
        self._quiet = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)
        self.set_callbacks(None, self._quiet, 0)
        if build.backends is not None:
            self.ggml_backend_load_all_from_path(os.fsencode(build.backends))
            if self.ggml_backend_dev_count() == 0:
                raise BuildError(f"no backend in {build.backends} can run here: pass --build a build for this machine")

    def __getattr__(self, name: str) -> Any:
        if name not in PROTOTYPES:
            raise AttributeError(name)
        function = self._find(name)
        if function is None:
            raise BuildError(
                f"this build has no {name}, which is needed here: pass --build a build that has it ({self.build.llama})"
            )
        try:
            function.restype, function.argtypes = types_of(name, self.layout.structs)
        except KeyError as error:
            raise BuildError(
                self.layout.closed.get((error.args[0], ""), f"this build has no struct {error.args[0]}")
            ) from None
        setattr(self, name, function)
        return function

    def has(self, name: str) -> bool:
        """Whether the build has this function."""
        return name in self.__dict__ or self._find(name) is not None

    def _find(self, name: str) -> Any:
        for library in self._libraries:
            try:
                return library[name]
            except AttributeError:
                continue
        return None

    def set_callbacks(self, on_abort: ctypes.c_void_p | None, on_log: ctypes.c_void_p, user: int) -> None:
        """Sets C functions for ggml's abort message (`ggml_abort_callback_t`) and for log lines (`ggml_log_callback`).

        `user` is the log callback's user data. They must outlive the library: native functions, or ctypes callbacks
        that the caller keeps.
        """
        self.llama_log_set(on_log, user)
        self.ggml_log_set(on_log, user)
        if on_abort is not None and self.has("ggml_set_abort_callback"):
            self.ggml_set_abort_callback(on_abort)

    def LlamaBatch(self) -> ctypes.Structure:
        """An empty llama_batch: no tokens, all arrays NULL."""
        return self.layout.structs["llama_batch"]()

    def model_params(self) -> ctypes.Structure:
        """llama_model_params with the build's defaults."""
        params: ctypes.Structure = self.llama_model_default_params()
        return params

    def context_params(self) -> ctypes.Structure:
        """llama_context_params with the build's defaults."""
        params: ctypes.Structure = self.llama_context_default_params()
        return params

    def quantize_params(self) -> ctypes.Structure:
        """llama_model_quantize_params with the build's defaults."""
        params: ctypes.Structure = self.llama_model_quantize_default_params()
        return params

    def set_params(self, struct: ctypes.Structure, values: Mapping[str, object], what: str) -> None:
        """Sets fields by their llama.h names.

        An enum's value may be its name without the prefix, in small letters ("enabled"), a ggml type's the name ggml
        gives it ("q8_0"); a pointer may be an address, a ctypes pointer, array or callback (which the caller keeps), or
        None. `what` is what to call the struct in an error. `BuildError` lists what there is.
        """
        name = type(struct).__name__
        fields = {field.name: field for field in self.layout.fields[name]}
        for key, value in values.items():
            if key == "flash_attn_type" and key not in fields and "flash_attn" in fields:
                # Before llama.cpp chose by itself, a switch that is off by default: "auto" leaves it.
                if value != "auto":
                    struct.flash_attn = value == "enabled"
                continue
            if key not in fields:
                raise BuildError(f"{what}: this build has no {key}; it has {', '.join(fields)}")
            if (name, key) in self.layout.closed:
                raise BuildError(f"{what}: {key} cannot be set, because {self.layout.closed[name, key]}")
            setattr(struct, key, self._value(fields[key], value, what))

    def check_context(self, context: int, params: ctypes.Structure) -> None:
        """Checks that a new context has what `params` asked for, by what it says of itself; BuildError where it does not.

        The layout of `params` was measured; this is the proof by behaviour that its fields mean what their names say.
        """
        slots = max(params.n_seq_max, 1)
        # llama.cpp shares n_ctx out among the slots and rounds each share, up to a multiple of 256 at most.
        size = range(params.n_ctx - slots, params.n_ctx + 256 * slots)
        seen = {
            "n_seq_max": (slots, self.llama_n_seq_max(context)),
            "n_threads": (params.n_threads, self.llama_n_threads(context)),
            "n_threads_batch": (params.n_threads_batch, self.llama_n_threads_batch(context)),
        }
        if params.n_ctx and self.llama_n_ctx(context) not in size:
            seen["n_ctx"] = (params.n_ctx, self.llama_n_ctx(context))
        for name, (wanted, found) in seen.items():
            if found != wanted:
                raise BuildError(
                    f"{name} was set to {wanted} and the context has {found}, so llama_context_params is not what was taken "
                    f"({self.layout.source}): pass --include the llama.h this build was made from"
                )

    def _value(self, field: Field, value: object, what: str) -> Any:
        if field.enum == "ggml_type" and isinstance(value, str):
            return _chosen(self.kv_types, value, f"{what}: {field.name}")
        if field.enum is not None and isinstance(value, str):
            prefix = field.enum.upper() + "_"
            enum = self.layout.enums.get(field.enum, {})
            return _chosen(
                {key.removeprefix(prefix).lower(): number for key, number in enum.items()},
                value,
                f"{what}: {field.name}",
            )
        if field.type == "pointer" and not (value is None or isinstance(value, int)):
            return ctypes.cast(value, ctypes.c_void_p).value  # type: ignore[arg-type]
        kind = "int32_t" if field.enum else field.type
        if kind in _RANGES:
            low, high = _RANGES[kind]
            if not (isinstance(value, int) and low <= value <= high):
                raise BuildError(f"{what}: {field.name} is {value!r}, which is not a number from {low} to {high}")
        elif kind in ("float", "double") and not isinstance(value, int | float):
            raise BuildError(f"{what}: {field.name} is {value!r}, which is not a number")
        return value

    @cached_property
    def kv_types(self) -> dict[str, int]:
        """ggml type names -> numbers, of the types a cache may have: those a device of this build can write rows of."""
        found: dict[str, int] = {}
        context = self.ggml_init(InitParams(_ARENA_BYTES, None, True))
        for number in range(self._type_count()):
            name = (self.ggml_type_name(number) or b"").decode(errors="replace")
            # A removed type keeps its number, with a remark for a name and no block.
            block = self.ggml_blck_size(number)
            if name.isidentifier() and block and name not in _NOT_FOR_CACHE and name not in found:
                rows = self.ggml_new_tensor_4d(context, _F32, block, 1, 1, 1)
                cache = self.ggml_new_tensor_4d(context, number, block, 1, 1, 1)
                if self._supported(self.ggml_cpy(context, rows, cache)):
                    found[name] = number
        self.ggml_free(context)
        return found

    def _type_count(self) -> int:
        """How many ggml types there are: ggml_type_name reads past its table beyond the last."""
        # Both defaults are GGML_TYPE_COUNT, "none chosen".
        if _QUANTIZE in self.layout.structs:
            params = self.quantize_params()
            if params.output_tensor_type == params.token_embedding_type:
                return int(params.output_tensor_type)
        return _TYPES_OF_ALL

    def _supported(self, operation: int) -> bool:
        devices = (self.ggml_backend_dev_get(index) for index in range(self.ggml_backend_dev_count()))
        return any(self.ggml_backend_dev_supports_op(device, operation) for device in devices)

    @cached_property
    def state_flags(self) -> dict[str, int]:
        """LLAMA_STATE_SEQ_FLAGS_ names without the prefix, in small letters -> values: partial_only, swa_only, on_device."""
        prefix = "LLAMA_STATE_SEQ_FLAGS_"
        flags = {
            name.removeprefix(prefix).lower(): value for name, value in self.layout.enums.get(STATE_FLAGS, {}).items()
        }
        # The older name of the same flag.
        return {"partial_only": flags["swa_only"], **flags} if "swa_only" in flags else flags

    def describe(self) -> dict[str, Any]:
        """What `isolate doctor` prints, as plain data."""
        return {
            "build": {
                "folder": str(self.build.folder),
                "llama": str(self.build.llama),
                "ggml": [str(path) for path in self.build.ggml],
                "backends": None if self.build.backends is None else str(self.build.backends),
                "header": None if self.build.header is None else str(self.build.header),
                "key": self.build.key(),
            },
            "versions": {name: self._text(name) for name in ("llama_version", "ggml_version", "ggml_commit")},
            "layouts": {
                "source": self.layout.source,
                "releases": list(self.layout.releases),
                "bytes": {name: len(found.data) for name, found in self.layout.measured.items()},
                "refused": [
                    why if not field else f"{name}.{field}: {why}"
                    for (name, field), why in self.layout.closed.items()
                    if not field or name != _QUANTIZE
                ],
            },
            "backends": [
                self.ggml_backend_reg_name(self.ggml_backend_reg_get(i)).decode()
                for i in range(self.ggml_backend_reg_count())
            ],
            "devices": [self._device(self.ggml_backend_dev_get(i)) for i in range(self.ggml_backend_dev_count())],
            "kv_types": list(self.kv_types),
            "state_flags": self.state_flags,
            "calls": {
                **{what: self.has(name) for what, name in OPTIONAL.items()},
                "checkpoints on the device": "on_device" in self.state_flags,
            },
            "cuda": self._cuda(),
        }

    def _cuda(self) -> dict[str, Any] | None:
        """The CUDA backend's library and the CUDA runtime it asks for; None where there is none.

        The launch hooks stand in front of a shared runtime; a runtime linked into the backend is out of their reach.
        """
        folder = self.build.backends.iterdir() if self.build.backends is not None else ()
        for path in (*self.build.ggml, *folder):
            if _CUDA.fullmatch(path.name):
                runtime = [name for name in read_elf(path).needed if name.startswith("libcudart.so")]
                return {"library": str(path), "runtime": runtime[0] if runtime else None}
        return None

    def _text(self, name: str) -> str | None:
        return getattr(self, name)().decode(errors="replace") if self.has(name) else None

    def _device(self, device: int) -> dict[str, Any]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        return {
            "name": self.ggml_backend_dev_name(device).decode(errors="replace"),
            "description": self.ggml_backend_dev_description(device).decode(errors="replace"),
            "type": _DEVICE_TYPES.get(self.ggml_backend_dev_type(device), "unknown"),
            "free_bytes": free.value,
            "total_bytes": total.value,
        }


def _load(path: Path, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path), mode=mode)
    except OSError as error:
        reason = str(error)
        if "GLIBC" in reason:
            advice = "it was made for a newer system; pass --build one made for this"
        elif "cannot open shared object file" in reason and reason.startswith("libcu"):
            advice = "install CUDA, put its folder in LD_LIBRARY_PATH, or use --target dry:GPU"
        elif "cannot open shared object file" in reason:
            advice = "put the folder of what is missing in LD_LIBRARY_PATH"
        else:
            advice = "pass --build another build"
        raise BuildError(f"{path} cannot be loaded ({reason}): {advice}") from error


def _chosen(choices: Mapping[str, int], value: str, what: str) -> int:
    if value not in choices:
        raise BuildError(f"{what} is {value!r}, which this build does not have; it has {', '.join(choices)}")
    return choices[value]

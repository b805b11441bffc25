"""A finding as one C++ file against llama.h that ends as the finding does: for a debugger, without isolate."""

from __future__ import annotations

import json
from collections.abc import Iterator

from isolate.case import Case
from isolate.fault import Finding
from isolate.report.lowered import Call, Tokens, calls, model_file

_PROGRAM = r"""
#include "llama.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

static llama_model * model = nullptr;
static llama_context * context = nullptr;
static llama_memory_t memory = nullptr;
static std::map<int, std::vector<uint8_t>> states;
static std::map<int, llama_token> greedy;

struct Run {
    llama_seq_id slot;
    llama_pos start;
    std::vector<llama_token> tokens;  // empty: the token that the slot's last logits put first
    std::vector<int> outputs;
};

[[noreturn]] static void fault(int step, const char * call, long long got, long long wanted) {
    std::printf("FAULT in step %d: %s returned %lld, not %lld\n", step, call, got, wanted);
    std::fflush(stdout);
    std::_Exit(1);
}

[[noreturn, maybe_unused]] static void unusable(const char * what) {
    std::fprintf(stderr, "%s\n", what);
    std::_Exit(2);
}

[[maybe_unused]] static ggml_type type_called(const char * name) {
    for (int type = 0; type < GGML_TYPE_COUNT; type++) {
        const char * known = ggml_type_name(static_cast<ggml_type>(type));
        if (known && std::strcmp(known, name) == 0) {
            return static_cast<ggml_type>(type);
        }
    }
    unusable("this build has no cache type of the case's");
}

[[maybe_unused]] static std::vector<llama_token> pattern(long long first, long long stride, long long modulo, int count) {
    std::vector<llama_token> tokens;
    for (int i = 0; i < count; i++) {
        tokens.push_back(static_cast<llama_token>((first + stride * i) % modulo));
    }
    return tokens;
}

[[maybe_unused]] static std::vector<int> all(int count) {
    std::vector<int> indices;
    for (int i = 0; i < count; i++) {
        indices.push_back(i);
    }
    return indices;
}

static void open(const llama_context_params & params) {
    if (context) {
        llama_free(context);
    }
    context = llama_init_from_model(model, params);
    if (!context) {
        unusable("the build made no context with these settings");
    }
    memory = llama_get_memory(context);
    greedy.clear();
}

[[maybe_unused]] static void decode(int step, int wanted, std::vector<Run> runs) {
    int count = 0;
    for (Run & run : runs) {
        if (run.tokens.empty()) {
            run.tokens.push_back(greedy[run.slot]);
        }
        count += static_cast<int>(run.tokens.size());
    }
    llama_batch batch = llama_batch_init(count > 0 ? count : 1, 0, 1);
    std::map<int, llama_seq_id> rows;
    for (const Run & run : runs) {
        const int begin = batch.n_tokens;
        for (size_t i = 0; i < run.tokens.size(); i++) {
            const int at = batch.n_tokens++;
            batch.token[at] = run.tokens[i];
            batch.pos[at] = run.start + static_cast<llama_pos>(i);
            batch.n_seq_id[at] = 1;
            batch.seq_id[at][0] = run.slot;
            batch.logits[at] = 0;
        }
        for (int index : run.outputs) {
            batch.logits[begin + index] = 1;
            rows[begin + index] = run.slot;
        }
    }
    const int code = llama_decode(context, batch);
    if (code == 0) {
        llama_synchronize(context);
    }
    if (code != wanted) {
        fault(step, "llama_decode", code, wanted);
    }
    llama_batch_free(batch);
    if (code != 0) {
        return;
    }
    const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (const auto & row : rows) {
        const float * logits = llama_get_logits_ith(context, row.first);
        if (!logits) {
            continue;
        }
        int best = 0;
        for (int token = 0; token < vocabulary; token++) {
            if (CHECK_NAN && !std::isfinite(logits[token])) {
                std::printf("FAULT in step %d: a logit of slot %d is not finite\n", step, row.second);
                std::fflush(stdout);
                std::_Exit(1);
            }
            best = logits[token] > logits[best] ? token : best;
        }
        greedy[row.second] = best;
    }
}

[[maybe_unused]] static void take(int step, int number, llama_seq_id slot, llama_state_seq_flags flags, long long wanted) {
    const size_t size = llama_state_seq_get_size_ext(context, slot, flags);
    std::vector<uint8_t> & state = states[number];
    state.assign(size > 0 ? size : 1, 0);
    const size_t moved = llama_state_seq_get_data_ext(context, state.data(), size, slot, flags);
    const bool right = wanted >= 0 ? static_cast<long long>(moved) == wanted : moved == size && size > 0;
    if (!right) {
        fault(step, "llama_state_seq_get_data_ext", static_cast<long long>(moved), wanted >= 0 ? wanted : static_cast<long long>(size));
    }
}

[[maybe_unused]] static void set(int step, int number, llama_seq_id slot, llama_state_seq_flags flags, long long wanted, int cut, int byte, int change) {
    std::vector<uint8_t> state = states[number];
    if (cut >= 0 && static_cast<size_t>(cut) < state.size()) {
        state.resize(static_cast<size_t>(cut));
    }
    if (byte >= 0 && static_cast<size_t>(byte) < state.size()) {
        state[static_cast<size_t>(byte)] = static_cast<uint8_t>(state[static_cast<size_t>(byte)] ^ change);
    }
    const size_t size = state.size();
    const size_t moved = llama_state_seq_set_data_ext(context, state.data(), size, slot, flags);
    const bool right = wanted >= 0 ? static_cast<long long>(moved) == wanted : moved == size && size > 0;
    if (!right) {
        fault(step, "llama_state_seq_set_data_ext", static_cast<long long>(moved), wanted >= 0 ? wanted : static_cast<long long>(size));
    }
}

[[maybe_unused]] static void seq_rm(int step, llama_seq_id slot, llama_pos p0, llama_pos p1, bool wanted) {
    const bool answer = llama_memory_seq_rm(memory, slot, p0, p1);
    if (answer != wanted) {
        fault(step, "llama_memory_seq_rm", answer, wanted);
    }
}

int main(int argc, char ** argv) {
    if (argc != 2) {
        unusable("give the model file");
    }
    llama_backend_init();
    llama_model_params model_params = llama_model_default_params();
    model_params.n_gpu_layers = GPU_LAYERS;
    ggml_backend_dev_t none[] = {nullptr};
    model_params.devices = GPU_LAYERS ? nullptr : none;
    model = llama_model_load_from_file(argv[1], model_params);
    if (!model) {
        unusable("the build could not load the model");
    }
"""


def text(finding: Finding, case: Case) -> str:
    """The file's text. IsolateError where the fault cannot be shown by calls alone."""
    return "\n".join(_lines(finding, case)) + "\n"


def _lines(finding: Finding, case: Case) -> Iterator[str]:
    fault = finding.fault
    model, command = model_file(case)
    gpu = fault.kind == "cuda" or "--target cuda" in finding.replay or "--target dry" in finding.replay
    yield f"// {json.dumps(str(fault.signature))}"
    yield f"// {json.dumps(fault.explanation)}"
    yield "//"
    if command:
        yield f"// model:   {command}"
    yield "// compile: g++ -std=c++17 -g -Wall -Wextra -Werror reproducer.cpp -I $LLAMA_INCLUDE -L $LLAMA_LIB"
    yield "//          -Wl,--unresolved-symbols=ignore-in-shared-libs -lllama -lggml -lggml-base -o reproducer"
    yield f"// run:     LD_LIBRARY_PATH=$LLAMA_LIB ./reproducer {model}"
    yield "// Ends with 0 where the fault is gone, with 1 or as the library dies where it is not, with 2 where it cannot be run."
    yield f"static constexpr int GPU_LAYERS = {9999 if gpu else 0};"
    yield f"static constexpr bool CHECK_NAN = {str(fault.kind == 'nan').lower()};"
    yield from _PROGRAM.strip("\n").split("\n")
    yield from _open(case.context.settings())
    for call in calls(case, fault):
        yield from _call(call)
    yield '    std::printf("no fault\\n");'
    yield "    return 0;"
    yield "}"


def _call(call: Call) -> Iterator[str]:
    numbers = ", ".join(str(value).lower() for value in call.arguments)
    if call.name == "open":
        yield from _open(call.settings or {})
    elif call.name == "decode":
        yield f"    decode({call.index}, {numbers}, {{"
        for run in call.batch:
            yield f"        {{{run.slot}, {run.start}, {_tokens(run)}, {_outputs(run)}}},"
        yield "    });"
    elif call.name in ("take", "set", "seq_rm"):
        yield f"    {call.name}({call.index}, {numbers});"
    else:
        yield f"    llama_memory_{call.name}(memory, {numbers});"


def _tokens(run: Tokens) -> str:
    if run.pattern is not None:
        return f"pattern({', '.join(map(str, run.pattern))}, {run.count})"
    return f"{{{', '.join(map(str, run.explicit or ()))}}}"


def _outputs(run: Tokens) -> str:
    if len(run.outputs) > 8 and run.outputs == tuple(range(run.count)):
        return f"all({run.count})"
    return f"{{{', '.join(map(str, run.outputs))}}}"


def _open(settings: dict[str, int | float | bool | str]) -> Iterator[str]:
    yield "    {"
    yield "        llama_context_params params = llama_context_default_params();"
    for name, value in settings.items():
        yield f"        params.{name} = {_value(name, value)};"
    yield "        open(params);"
    yield "    }"


def _value(name: str, value: int | float | bool | str) -> str:
    if name in ("type_k", "type_v"):
        return f"type_called({json.dumps(value)})"
    if isinstance(value, str):
        kind = {"flash_attn_type": "FLASH_ATTN_TYPE"}.get(name, name.upper())
        return f"LLAMA_{kind}_{value.upper()}"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value!r}f" if isinstance(value, float) else str(value)

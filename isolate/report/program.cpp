//# head
#include "llama.h"

$IMPORTS
#include <cstdio>
#include <cstdlib>

static llama_model * model = nullptr;
static llama_context * context = nullptr;
static llama_memory_t memory = nullptr;

[[noreturn]] static void unusable(const char * what) {
    std::fprintf(stderr, "%s\n", what);
    std::_Exit(2);
}

//# fault(
#include <cstdarg>

[[noreturn, gnu::format(printf, 2, 3)]] static void fault(int step, const char * format, ...) {
    va_list values;
    va_start(values, format);
    std::printf("FAULT in step %d: ", step);
    std::vprintf(format, values);
    std::printf("\n");
    std::fflush(stdout);
    va_end(values);
    std::_Exit(1);
}

//# type_called(
#include <cstring>

static ggml_type type_called(const char * name) {
    for (int type = 0; type < GGML_TYPE_COUNT; type++) {
        const char * known = ggml_type_name(static_cast<ggml_type>(type));
        if (known && std::strcmp(known, name) == 0) {
            return static_cast<ggml_type>(type);
        }
    }
    unusable("this build has no cache type of the case's");
}

//# pattern(
#include <vector>

static std::vector<llama_token> pattern(long long first, long long stride, long long modulo, int count) {
    std::vector<llama_token> tokens;
    for (int i = 0; i < count; i++) {
        tokens.push_back(static_cast<llama_token>((first + stride * i) % modulo));
    }
    return tokens;
}

//# all(
#include <vector>

static std::vector<int> all(int count) {
    std::vector<int> indices;
    for (int i = 0; i < count; i++) {
        indices.push_back(i);
    }
    return indices;
}

//# Run rows greedy GREEDY
#include <map>
#include <vector>

struct Run {
    llama_seq_id slot;
    llama_pos start;
    std::vector<llama_token> tokens;
    std::vector<int> outputs;  // indices of the tokens that get logits
};

struct Row {
    int index;  // in the batch
    llama_seq_id slot;
    llama_pos position;
};

// Stands for the token that the slot's last logits put first.
static constexpr llama_token GREEDY = -1;

static std::map<llama_seq_id, llama_token> greedy;
static std::vector<Row> rows;  // of the last decode of the case

//# submit_llama_decode(
static int submit_llama_decode(llama_context * into, const std::vector<Run> & runs, std::vector<Row> & wanted) {
    int count = 0;
    for (const Run & run : runs) {
        count += static_cast<int>(run.tokens.size());
    }
    llama_batch batch = llama_batch_init(count > 0 ? count : 1, 0, 1);
    for (const Run & run : runs) {
        const int begin = batch.n_tokens;
        for (llama_token token : run.tokens) {
            const int at = batch.n_tokens++;
            batch.token[at] = token;
            batch.pos[at] = run.start + at - begin;
            batch.n_seq_id[at] = 1;
            batch.seq_id[at][0] = run.slot;
            batch.logits[at] = 0;
        }
        for (int index : run.outputs) {
            batch.logits[begin + index] = 1;
            wanted.push_back({begin + index, run.slot, run.start + index});
        }
    }
    const int code = llama_decode(into, batch);
    if (code == 0) {
        llama_synchronize(into);
    }
    llama_batch_free(batch);
    return code;
}

//# submit_llama_process(
static int submit_llama_process(llama_context * into, const std::vector<Run> & runs, std::vector<Row> & wanted) {
    llama_batch_ext * batch = llama_batch_ext_init(into);
    for (const Run & run : runs) {
        std::vector<int> places;
        for (llama_token token : run.tokens) {
            const int at = llama_batch_ext_add_token(batch, run.slot, token);
            if (at < 0) {
                llama_batch_ext_free(batch);
                return at;
            }
            const llama_pos position = run.start + static_cast<llama_pos>(places.size());
            llama_batch_ext_set_pos(batch, at, &position);
            places.push_back(at);
        }
        for (int index : run.outputs) {
            llama_batch_ext_set_output_logits(batch, places[static_cast<size_t>(index)], true);
            wanted.push_back({places[static_cast<size_t>(index)], run.slot, run.start + index});
        }
    }
    const int code = llama_process(into, LLAMA_PROCESS_TYPE_DECODE, batch);
    if (code == 0) {
        llama_synchronize(into);
    }
    llama_batch_ext_free(batch);
    return code;
}

//# decode(
static void decode(int step, int wanted, std::vector<Run> runs) {
    for (Run & run : runs) {
        for (llama_token & token : run.tokens) {
            token = token == GREEDY ? greedy[run.slot] : token;
        }
    }
    rows.clear();
    const int code = submit_$API(context, runs, rows);
    if (code != wanted) {
        fault(step, "$API returned %d, not %d", code, wanted);
    }
    if (code != 0) {
        rows.clear();
    }
    const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (const Row & row : rows) {
        const float * logits = llama_get_logits_ith(context, row.index);
        if (!logits) {
            continue;
        }
        int best = 0;
        for (int token = 0; token < vocabulary; token++) {
            best = logits[token] > logits[best] ? token : best;
        }
        greedy[row.slot] = best;
    }
}

//# open(
static void open(const llama_context_params & params) {
    if (context) {
        llama_free(context);
    }
    context = llama_init_from_model(model, params);
    if (!context) {
        unusable("the build made no context with these settings");
    }
    memory = llama_get_memory(context);
}

//# states
#include <cstdint>
#include <map>
#include <vector>

static std::map<int, std::vector<uint8_t>> states;

//# moved(
// `wanted`: -1 for all bytes of the state, else what the call should return.
static void moved(int step, const char * call, size_t bytes, size_t size, long long wanted) {
    if (wanted < 0 ? bytes != size || size == 0 : static_cast<long long>(bytes) != wanted) {
        fault(step, "%s returned %zu, not %lld", call, bytes, wanted < 0 ? static_cast<long long>(size) : wanted);
    }
}

//# take(
static void take(int step, int number, llama_seq_id slot, llama_state_seq_flags flags, long long wanted) {
    const size_t size = llama_state_seq_get_size_ext(context, slot, flags);
    std::vector<uint8_t> & state = states[number];
    state.assign(size > 0 ? size : 1, 0);
    const size_t bytes = llama_state_seq_get_data_ext(context, state.data(), size, slot, flags);
    moved(step, "llama_state_seq_get_data_ext", bytes, size, wanted);
}

//# StateFile
#include <string>
#include <sys/mman.h>
#include <unistd.h>

// A file without a name: nothing is left behind, however the process ends.
struct StateFile {
    const int descriptor = memfd_create("state", 0);
    const std::string path = "/proc/self/fd/" + std::to_string(descriptor);

    ~StateFile() {
        close(descriptor);
    }

    std::vector<uint8_t> content() const {
        std::vector<uint8_t> bytes(static_cast<size_t>(lseek(descriptor, 0, SEEK_END)));
        if (pread(descriptor, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
            unusable("the file of a state could not be read");
        }
        return bytes;
    }

    void fill(const std::vector<uint8_t> & bytes) const {
        if (pwrite(descriptor, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
            unusable("the file of a state could not be written");
        }
    }
};

//# take_file(
static void take_file(int step, int number, llama_seq_id slot, long long wanted) {
    StateFile file;
    const size_t bytes = llama_state_seq_save_file(context, file.path.c_str(), slot, nullptr, 0);
    states[number] = file.content();
    moved(step, "llama_state_seq_save_file", bytes, states[number].size(), wanted);
}

//# damaged(
static std::vector<uint8_t> damaged(std::vector<uint8_t> state, int cut, int byte, int change) {
    if (cut >= 0 && static_cast<size_t>(cut) < state.size()) {
        state.resize(static_cast<size_t>(cut));
    }
    if (byte >= 0 && static_cast<size_t>(byte) < state.size()) {
        state[static_cast<size_t>(byte)] = static_cast<uint8_t>(state[static_cast<size_t>(byte)] ^ change);
    }
    return state;
}

//# set(
static void set(int step, int number, llama_seq_id slot, llama_state_seq_flags flags, long long wanted, int cut, int byte, int change) {
    const std::vector<uint8_t> state = damaged(states[number], cut, byte, change);
    const size_t bytes = llama_state_seq_set_data_ext(context, state.data(), state.size(), slot, flags);
    moved(step, "llama_state_seq_set_data_ext", bytes, state.size(), wanted);
}

//# set_file(
static void set_file(int step, int number, llama_seq_id slot, long long wanted, int cut, int byte, int change) {
    StateFile file;
    const std::vector<uint8_t> state = damaged(states[number], cut, byte, change);
    file.fill(state);
    llama_token none[1];
    size_t count = 0;
    const size_t bytes = llama_state_seq_load_file(context, file.path.c_str(), slot, none, 1, &count);
    moved(step, "llama_state_seq_load_file", bytes, state.size(), wanted);
}

//# seq_rm(
static void seq_rm(int step, llama_seq_id slot, llama_pos p0, llama_pos p1, bool wanted) {
    const bool answer = llama_memory_seq_rm(memory, slot, p0, p1);
    if (answer != wanted) {
        fault(step, "llama_memory_seq_rm returned %d, not %d", answer, wanted);
    }
}

//# check_positions(
// Where the slot's oldest and newest position can be, first and last of each; or it may hold nothing.
static void check_positions(int step, llama_seq_id slot, llama_pos oldest, llama_pos oldest_to, llama_pos newest, llama_pos newest_to, bool or_none) {
    const llama_pos low = llama_memory_seq_pos_min(memory, slot);
    const llama_pos high = llama_memory_seq_pos_max(memory, slot);
    const bool held = oldest <= low && low <= oldest_to && newest <= high && high <= newest_to;
    if (!held && !(or_none && low == -1 && high == -1)) {
        fault(step, "positions of slot %d: oldest %d, newest %d; expected %d to %d, %d to %d", slot, low, high, oldest, oldest_to, newest, newest_to);
    }
}

//# check_finite(
#include <cmath>

static void check_finite(int step) {
    const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (const Row & row : rows) {
        const float * logits = llama_get_logits_ith(context, row.index);
        for (int token = 0; token < vocabulary; token++) {
            if (!logits || !std::isfinite(logits[token])) {
                fault(step, "logits of slot %d at position %d are not finite, or not there", row.slot, row.position);
            }
        }
    }
}

//# taken(
static std::vector<uint8_t> taken(llama_context * from, llama_seq_id slot, llama_state_seq_flags flags) {
    std::vector<uint8_t> state(llama_state_seq_get_size_ext(from, slot, flags));
    state.resize(llama_state_seq_get_data_ext(from, state.data(), state.size(), slot, flags));
    return state;
}

//# words(
#include <cstring>

// A state's words without those that say of which slot, or of which stream, it is: 0 and the slots' numbers.
static std::vector<int32_t> words(const std::vector<uint8_t> & state, llama_seq_id one, llama_seq_id other) {
    std::vector<int32_t> kept;
    for (size_t at = 0; at < state.size(); at += sizeof(int32_t)) {
        int32_t word = 0;
        std::memcpy(&word, &state[at], state.size() - at < sizeof(word) ? state.size() - at : sizeof(word));
        if (word != 0 && word != one && word != other) {
            kept.push_back(word);
        }
    }
    return kept;
}

//# check_cells(
// The slot holds what the state held when it was taken, perhaps of another slot.
static void check_cells(int step, int number, llama_seq_id was_slot, llama_seq_id slot, llama_state_seq_flags flags) {
    const std::vector<uint8_t> & before = states[number];
    const std::vector<uint8_t> again = taken(context, slot, flags);
    const bool same = was_slot == slot ? before == again : words(before, was_slot, slot) == words(again, was_slot, slot);
    if (!same) {
        fault(step, "cells of slot %d are others after its state was set and taken again", slot);
    }
}

//# check_saved(
// A new context that the state is set in gives the same state.
static void check_saved(int step, int number, llama_seq_id slot, llama_state_seq_flags flags, const llama_context_params & params) {
    llama_context * other = llama_init_from_model(model, params);
    if (!other) {
        unusable("the build made no second context");
    }
    const std::vector<uint8_t> & state = states[number];
    if (llama_state_seq_set_data_ext(other, state.data(), state.size(), slot, flags) == 0) {
        fault(step, "cells of slot %d: a new context with the same settings refused them", slot);
    }
    if (taken(other, slot, flags) != state) {
        fault(step, "cells of slot %d are others after its state was set in a new context and taken again", slot);
    }
    llama_free(other);
}

//# alone alone_rows
static llama_context * alone = nullptr;
static std::vector<Row> alone_rows;

//# alone_open(
static void alone_open(const llama_context_params & params) {
    alone = llama_init_from_model(model, params);
    if (!alone) {
        unusable("the build made no second context");
    }
}

//# alone_rm(
static void alone_rm(llama_pos p0, llama_pos p1) {
    if (!llama_memory_seq_rm(llama_get_memory(alone), 0, p0, p1)) {
        unusable("what the slot went through cannot be done alone: a removal was refused");
    }
}

//# alone_add(
static void alone_add(llama_pos p0, llama_pos p1, llama_pos delta) {
    llama_memory_seq_add(llama_get_memory(alone), 0, p0, p1, delta);
}

//# alone_decode(
// `position`: the one that gets logits, -1 for none.
static void alone_decode(llama_pos start, const std::vector<llama_token> & tokens, llama_pos position) {
    const size_t most = llama_n_ubatch(alone);
    for (size_t first = 0; first < tokens.size() && alone_rows.empty(); first += most) {
        const size_t last = first + most < tokens.size() ? first + most : tokens.size();
        const llama_pos at = start + static_cast<llama_pos>(first);
        Run run = {0, at, {&tokens[first], &tokens[first] + (last - first)}, {}};
        if (position >= at && position < at + static_cast<llama_pos>(last - first)) {
            run.outputs.push_back(position - at);
        }
        if (submit_llama_decode(alone, {run}, alone_rows) != 0) {
            unusable("what the slot went through cannot be done alone: a decode failed");
        }
    }
}

//# check_logits(
#include <cmath>

// Normalized mean squared error between the slot's logits and those it has alone.
static void check_logits(int step, llama_seq_id slot, llama_pos position, double limit) {
    const float * right = alone_rows.empty() ? nullptr : llama_get_logits_ith(alone, alone_rows[0].index);
    const float * found = nullptr;
    for (const Row & row : rows) {
        found = row.slot == slot && row.position == position ? llama_get_logits_ith(context, row.index) : found;
    }
    if (!right || !found) {
        unusable("there are no logits to compare");
    }
    double power = 0, error = 0;
    const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (int token = 0; token < vocabulary; token++) {
        const double one = right[token], other = found[token];
        power += one * one;
        error += (one - other) * (one - other);
    }
    const double distance = power > 0 ? error / power : error;
    if (!(distance <= limit)) {
        fault(step, "logits of slot %d at position %d are %.1e (NMSE) from those it has alone, more than %.1e", slot, position, distance, limit);
    }
}

//# main
$SETTINGS
int main(int argc, char ** argv) {
    if (argc != 2) {
        unusable("give the model file");
    }
    llama_backend_init();
    llama_model_params model_params = llama_model_default_params();
    model_params.n_gpu_layers = $LAYERS;
    // an empty list of devices keeps a build with a GPU backend off it
    ggml_backend_dev_t none[] = {nullptr};
    model_params.devices = model_params.n_gpu_layers > 0 ? nullptr : none;
    model = llama_model_load_from_file(argv[1], model_params);
    if (!model) {
        unusable("the build could not load the model");
    }
$CALLS
    std::printf("no fault\n");
    return 0;
}

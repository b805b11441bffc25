/* Copies and sets: where they may go, and what of them the host can see. What a device would hold is dropped, what is read
 * from it is zeros. */
#include "dry.h"

#include <string.h>

enum side { HOST, PINNED, DEVICE };

static enum side side_of(const struct dry_range *range) {
    if (!range) {
        return HOST;
    }
    return range->kind == DRY_PINNED || range->kind == DRY_REGISTERED ? PINNED : DEVICE;
}

/* The bytes from the first to the last that a copy touches on one side. */
static size_t extent(size_t pitch, size_t width, size_t height) {
    return (height - 1) * pitch + width;
}

static int check_side(const struct dry_copy *copy, uintptr_t address, size_t pitch, bool destination, enum side *side) {
    const char *what = destination ? "the destination" : "the source";
    const struct dry_range *range = dry_range_of(address);
    *side = side_of(range);
    bool on_device = copy->direction == CUDA_COPY_DEVICE_TO_DEVICE ||
                     copy->direction == (destination ? CUDA_COPY_HOST_TO_DEVICE : CUDA_COPY_DEVICE_TO_HOST);
    if (range) {
        /* Pinned memory is both: a device reads and writes it too. Measured: host to host says nothing about device memory. */
        if (*side == DEVICE && !on_device && copy->direction != CUDA_COPY_DEFAULT && copy->direction != CUDA_COPY_HOST_TO_HOST) {
            return dry_refuse(CUDA_ERROR_INVALID_VALUE, "%s: %s, %#zx, is device memory, the direction says host", copy->call, what,
                              (size_t)address);
        }
        return dry_check_span(address, extent(pitch, copy->width, copy->height), copy->call, what);
    }
    if (on_device) {
        char text[256];
        dry_describe_address(address, text, sizeof text);
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "%s: %s, %s", copy->call, what, text);
    }
    return CUDA_SUCCESS;
}

void dry_do_copy(const struct dry_copy *copy) {
    enum side to = side_of(dry_range_of((uintptr_t)copy->destination)), from = side_of(dry_range_of((uintptr_t)copy->source));
    if (to != DEVICE && from == DEVICE && dry_read_sort(copy)) {
        return;
    }
    for (size_t row = 0; row < copy->height && to != DEVICE; row++) {
        char *destination = (char *)copy->destination + row * copy->destination_pitch;
        if (from == DEVICE) {
            memset(destination, 0, copy->width);
        } else {
            memmove(destination, (const char *)copy->source + row * copy->source_pitch, copy->width);
        }
    }
}

int dry_copy(const struct dry_copy *copy, void *handle) {
    struct dry_stream *stream = dry_stream(handle);
    if (!stream) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (copy->width == 0 || copy->height == 0) {
        return CUDA_SUCCESS;
    }
    if (copy->direction < CUDA_COPY_HOST_TO_HOST || copy->direction > CUDA_COPY_DEFAULT) {
        return dry_refuse(21, "%s: there is no direction %d", copy->call, copy->direction);
    }
    if (copy->height > 1 && (copy->width > copy->destination_pitch || copy->width > copy->source_pitch)) {
        return dry_refuse(12, "%s: rows of %zu bytes do not fit in pitches of %zu and %zu", copy->call, copy->width,
                          copy->destination_pitch, copy->source_pitch);
    }
    enum side to, from;
    int code = dry_legacy_conflict(stream, copy->call);
    if (!code) {
        code = check_side(copy, (uintptr_t)copy->destination, copy->destination_pitch, true, &to);
    }
    if (!code) {
        code = check_side(copy, (uintptr_t)copy->source, copy->source_pitch, false, &from);
    }
    if (code) {
        return code;
    }
    code = dry_into_graph(stream, &(struct dry_node){.kind = DRY_NODE_COPY, .copy = *copy}, copy->call);
    if (code != DRY_NOT_CAPTURING) {
        return code;
    }
    /* A copy to pageable memory has arrived when the call returns, so it waits for the device. */
    if (copy->waits || (to == HOST && from == DEVICE)) {
        code = dry_synchronized(stream->device);
        if (code) {
            return code;
        }
    }
    dry_do_copy(copy);
    return CUDA_SUCCESS;
}

int dry_set(const char *call, void *pointer, size_t pitch, int value, size_t width, size_t height, void *handle) {
    struct dry_stream *stream = dry_stream(handle);
    if (!stream) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (width == 0 || height == 0) {
        return CUDA_SUCCESS;
    }
    uintptr_t address = (uintptr_t)pointer;
    const struct dry_range *range = dry_range_of(address);
    int code = dry_legacy_conflict(stream, call);
    if (code) {
        return code;
    }
    code = dry_into_graph(stream, &(struct dry_node){.kind = DRY_NODE_SET}, call);
    if (code != DRY_NOT_CAPTURING) {
        return code; /* measured: a set is not checked while it is captured */
    }
    if (range) {
        code = dry_check_span(address, extent(pitch, width, height), call, "the destination");
    } else {
        char text[256];
        dry_describe_address(address, text, sizeof text);
        code = dry_refuse(CUDA_ERROR_INVALID_VALUE, "%s: the destination, %s", call, text);
    }
    if (code) {
        return code;
    }
    for (size_t row = 0; row < height && side_of(range) == PINNED; row++) {
        memset((char *)pointer + row * pitch, value, width);
    }
    return CUDA_SUCCESS;
}

/* Occupancy: how many blocks of a kernel fit on a multiprocessor at once.
 *
 * The rules are those of cuda_occupancy.h in the CUDA toolkit (13.0): by warps, by registers, by shared memory and by
 * blocks, whichever is least. */
#include "dry.h"

#include <limits.h>

#define WARP 32u
#define REGISTER_UNIT 256u /* registers are given to warps in such pieces */
#define PARTITIONS 4u      /* of a multiprocessor, each with a share of its registers */

static unsigned round_up(unsigned value, unsigned unit) {
    return (value + unit - 1) / unit * unit;
}

static unsigned shared_unit(const struct dry_gpu *gpu) {
    return gpu->capability >= 80 ? 128 : 256;
}

/* Registers that a launch is checked against: those of all warps, spread over the partitions evenly. */
static unsigned block_registers(const struct dry_code *code, unsigned threads) {
    return round_up((unsigned)code->registers * WARP, REGISTER_UNIT) * round_up((threads + WARP - 1) / WARP, PARTITIONS);
}

unsigned dry_most_threads(const struct dry_code *code, const struct dry_gpu *gpu) {
    unsigned most = 1024;
    if (code->max_threads && !code->required.x) {
        most = code->max_threads < most ? code->max_threads : most;
    }
    while (code->registers_known && most > WARP && block_registers(code, most) > (unsigned)gpu->registers_per_block) {
        most -= WARP;
    }
    return most;
}

int dry_occupancy(const struct dry_kernel *kernel, int device, unsigned threads, size_t dynamic, bool count_estimate) {
    const struct dry_gpu *gpu = &dry.gpu[device];
    const struct dry_code *code = kernel->on[device].code;
    unsigned warps = (threads + WARP - 1) / WARP;
    /* Measured: the kernel's own bound does not count here. */
    if (warps == 0 || threads > 1024 || dynamic > kernel->on[device].max_dynamic_shared) {
        return 0;
    }
    unsigned most = (unsigned)gpu->blocks_per_processor, fit = (unsigned)gpu->threads_per_processor / WARP / warps;
    most = fit < most ? fit : most;

    if (code->registers_known || count_estimate) {
        if (block_registers(code, threads) > (unsigned)gpu->registers_per_block) {
            return 0;
        }
        unsigned warp = round_up((unsigned)code->registers * WARP, REGISTER_UNIT);
        fit = (unsigned)gpu->registers_per_processor / PARTITIONS / warp * PARTITIONS / warps;
        most = fit < most ? fit : most;
    }

    size_t shared = code->shared + gpu->shared_reserved + dynamic;
    shared = (shared + shared_unit(gpu) - 1) / shared_unit(gpu) * shared_unit(gpu);
    if (shared > gpu->shared_per_block_optin + gpu->shared_reserved) {
        return 0;
    }
    if (shared) {
        size_t room = gpu->shared_per_processor / shared;
        most = room < most ? (unsigned)room : most;
    }
    return (int)most;
}

int dry_occupancy_of(int *blocks, const void *function, int threads, size_t dynamic) {
    struct dry_kernel *kernel;
    if (!blocks || threads <= 0) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "cudaOccupancyMaxActiveBlocksPerMultiprocessor: %d threads", threads);
    }
    int code = dry_kernel(function, dry_thread.device, &kernel);
    if (code) {
        return code;
    }
    *blocks = dry_occupancy(kernel, dry_thread.device, (unsigned)threads, dynamic, true);
    return CUDA_SUCCESS;
}

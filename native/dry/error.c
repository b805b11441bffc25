/* Errors: a last error a thread, a fault a device that never goes away, and a sentence for each refusal. */
#define _GNU_SOURCE
#include "dry.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* After so many sentences on standard error the rest is counted by the trace alone. */
#define MOST_LINES 50

_Thread_local struct dry_thread dry_thread;
bool dry_initialized;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int pending[DRY_MOST_DEVICES]; /* a kernel failed, nobody waited for it yet */
static int sticky[DRY_MOST_DEVICES];
static void (*reporter)(int code, const char *message);
static unsigned lines;

/* Where the sentences go instead of to standard error. */
DRY_API void isolate_dry_on_message(void (*report)(int code, const char *message)) {
    reporter = report;
}

/* Why the calling thread's last refused call was refused; empty where none was. */
DRY_API const char *isolate_dry_last_message(void) {
    return dry_thread.message;
}

/* What a program is meant to expect and to go on from: said where it is asked for, not printed. */
static bool expected(int code) {
    return code == CUDA_ERROR_GRAPH_EXEC_UPDATE || code == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
}

int dry_refuse(int code, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(dry_thread.message, sizeof dry_thread.message, format, values);
    va_end(values);
    if (reporter) {
        reporter(code, dry_thread.message);
    } else if (!expected(code) && __atomic_fetch_add(&lines, 1, __ATOMIC_RELAXED) < MOST_LINES) {
        dprintf(STDERR_FILENO, "dry device: %s\n", dry_thread.message);
    }
    return code;
}

int dry_enter(void) {
    dry_configured();
    pthread_mutex_lock(&lock);
    return sticky[dry_thread.device];
}

int dry_leave(int code) {
    dry_initialized = true;
    if (code && code != CUDA_ERROR_NOT_READY) {
        dry_thread.last = code;
    }
    return dry_leave_quietly(code);
}

int dry_leave_quietly(int code) {
    pthread_mutex_unlock(&lock);
    dry_run_host_functions();
    return code;
}

int dry_last_error(bool reset) {
    /* Measured: an error that broke the device is given back once, too; the next call has it again. */
    int code = dry_thread.last;
    if (reset) {
        dry_thread.last = CUDA_SUCCESS;
    }
    return code;
}

void dry_device_fault(int device, int code, const char *why) {
    if (!pending[device]) {
        pending[device] = dry_refuse(code, "%s", why);
    }
}

int dry_synchronized(int device) {
    if (!sticky[device]) {
        sticky[device] = pending[device];
    }
    return sticky[device];
}

static const struct {
    int code;
    const char *name, *text;
} known[] = {
    {0, "cudaSuccess", "no error"},
    {1, "cudaErrorInvalidValue", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "out of memory"},
    {3, "cudaErrorInitializationError", "initialization error"},
    {4, "cudaErrorCudartUnloading", "driver shutting down"},
    {9, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {12, "cudaErrorInvalidPitchValue", "invalid pitch argument"},
    {13, "cudaErrorInvalidSymbol", "invalid device symbol"},
    {16, "cudaErrorInvalidHostPointer", "invalid host pointer"},
    {17, "cudaErrorInvalidDevicePointer", "invalid device pointer"},
    {21, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
    {35, "cudaErrorInsufficientDriver", "CUDA driver version is insufficient for CUDA runtime version"},
    {46, "cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable"},
    {98, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {100, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {101, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {200, "cudaErrorInvalidKernelImage", "device kernel image is invalid"},
    {201, "cudaErrorDeviceUninitialized", "invalid device context"},
    {209, "cudaErrorNoKernelImageForDevice", "no kernel image is available for execution on the device"},
    {214, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {215, "cudaErrorUnsupportedLimit", "limit is not supported on this architecture"},
    {217, "cudaErrorPeerAccessUnsupported", "peer access is not supported between these two devices"},
    {218, "cudaErrorInvalidPtx", "a PTX JIT compilation failed"},
    {222, "cudaErrorUnsupportedPtxVersion", "the provided PTX was compiled with an unsupported toolchain."},
    {304, "cudaErrorOperatingSystem", "OS call failed or operation not supported on this OS"},
    {400, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {401, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {500, "cudaErrorSymbolNotFound", "named symbol not found"},
    {600, "cudaErrorNotReady", "device not ready"},
    {700, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {701, "cudaErrorLaunchOutOfResources", "too many resources requested for launch"},
    {702, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"},
    {704, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {705, "cudaErrorPeerAccessNotEnabled", "peer access has not been enabled"},
    {709, "cudaErrorContextIsDestroyed", "context is destroyed"},
    {710, "cudaErrorAssert", "device-side assert triggered"},
    {712, "cudaErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"},
    {713, "cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
    {714, "cudaErrorHardwareStackError", "hardware stack error"},
    {715, "cudaErrorIllegalInstruction", "an illegal instruction was encountered"},
    {716, "cudaErrorMisalignedAddress", "misaligned address"},
    {717, "cudaErrorInvalidAddressSpace", "operation not supported on global/shared address space"},
    {718, "cudaErrorInvalidPc", "invalid program counter"},
    {719, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {720, "cudaErrorCooperativeLaunchTooLarge", "too many blocks in cooperative launch"},
    {800, "cudaErrorNotPermitted", "operation not permitted"},
    {801, "cudaErrorNotSupported", "operation not supported"},
    {900, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {901, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
    {902, "cudaErrorStreamCaptureMerge", "operation would result in a merge of separate capture sequences"},
    {903, "cudaErrorStreamCaptureUnmatched", "capture was not ended in the same stream as it began"},
    {904, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {905, "cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"},
    {906, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {907, "cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"},
    {908, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {910, "cudaErrorGraphExecUpdateFailure",
     "the graph update was not performed because it included changes which violated constraints specific to "
     "instantiated graph update"},
    {912, "cudaErrorInvalidClusterSize", "a kernel launch error has occurred due to cluster misconfiguration"},
    {999, "cudaErrorUnknown", "unknown error"},
};

static int place_of(int code) {
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (known[i].code == code) {
            return (int)i;
        }
    }
    return -1;
}

const char *dry_error_name(int code) {
    int place = place_of(code);
    return place < 0 ? "unrecognized error code" : known[place].name;
}

const char *dry_error_text(int code) {
    int place = place_of(code);
    return place < 0 ? "unrecognized error code" : known[place].text;
}

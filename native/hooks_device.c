/* Hooks of devices, peers and the last error. */
#include "hooks.h"

static void asked(struct isolate_call *call, int64_t first, int64_t second) {
    call->record.detail.words[0] = (uint64_t)first;
    call->record.detail.words[1] = (uint64_t)second;
}

static void set_device(int device, int code) {
    if (!code) {
        isolate_this.device = device;
    }
}

QUIET_HOOK(cudaGetDevice, (int *device), (device), ISOLATE_QUERY, NOTHING)
HOOK(cudaSetDevice, (int device), (device), ISOLATE_QUERY, 0, asked(&call, device, 0), set_device(device, code))
HOOK(cudaSetDeviceFlags, (unsigned flags), (flags), ISOLATE_QUERY, 0, asked(&call, flags, 0), NOTHING)
HOOK(cudaGetDeviceCount, (int *count), (count), ISOLATE_QUERY, 0, NOTHING, NOTHING)
HOOK(cudaGetDeviceProperties, (void *properties, int device), (properties, device), ISOLATE_QUERY, 0,
     asked(&call, device, 0), NOTHING)
HOOK(cudaGetDeviceProperties_v2, (void *properties, int device), (properties, device), ISOLATE_QUERY, 0,
     asked(&call, device, 0), NOTHING)
QUIET_HOOK(cudaDeviceGetAttribute, (int *value, int attribute, int device), (value, attribute, device), ISOLATE_QUERY,
           asked(&call, attribute, device))
HOOK(cudaDeviceGetPCIBusId, (char *text, int length, int device), (text, length, device), ISOLATE_QUERY, 0,
     asked(&call, device, 0), NOTHING)
HOOK(cudaDeviceCanAccessPeer, (int *can, int device, int peer), (can, device, peer), ISOLATE_QUERY, 0,
     asked(&call, device, peer), NOTHING)
HOOK(cudaDeviceEnablePeerAccess, (int peer, unsigned flags), (peer, flags), ISOLATE_QUERY, 0, asked(&call, peer, flags),
     NOTHING)
HOOK(cudaDeviceDisablePeerAccess, (int peer), (peer), ISOLATE_QUERY, 0, asked(&call, peer, 0), NOTHING)

/* The messengers: what they say is never theirs. A record where they say something. */
static int last_error(struct isolate_hook *hook, bool clear) {
    int (*real)(void) = isolate_real(hook);
    int code = real();
    if (isolate_this.inside) {
        return code;
    }
    code = isolate_this.pending ? isolate_this.pending : code;
    if (clear) {
        isolate_this.pending = isolate_this.known = 0;
    }
    if (code) {
        isolate_this.sure = false; /* an error of the device stays */
        struct isolate_call call;
        isolate_enter(&call, hook);
        call.record.code = code;
        isolate_end(isolate_begin(&call.record), &call.record);
        isolate_this.inside = false;
    }
    return code;
}

ISOLATE_API int cudaGetLastError(void) {
    static struct isolate_hook hook = {{"cudaGetLastError", 0}, NULL, ISOLATE_QUERY, 0};
    return last_error(&hook, true);
}

ISOLATE_API int cudaPeekAtLastError(void) {
    static struct isolate_hook hook = {{"cudaPeekAtLastError", 0}, NULL, ISOLATE_QUERY, 0};
    return last_error(&hook, false);
}

// What ctypes alone cannot plant: a C++ exception, thrown from a call and from the graph's eval callback.
#include <stdexcept>

extern "C" {
int throw_at = 0;

// Set by the worker: the step that is computed.
int computing = -1;

int throw_it(void) { throw std::runtime_error("planted"); }

bool throwing_callback(void *, bool, void *) {
    if (computing == throw_at) {
        throw std::runtime_error("planted");
    }
    return true;
}
}

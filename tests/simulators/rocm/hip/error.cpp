// The errors of HIP: the last one of each thread, and their names.
#include "hip.h"

#include <cstdarg>
#include <cstdio>
#include <pthread.h>

namespace {

struct Named {
    Error error;
    const char *name, *text;
};
constexpr Named NAMES[] = {
    {SUCCESS, "hipSuccess", "no error"},
    {INVALID_VALUE, "hipErrorInvalidValue", "invalid argument"},
    {OUT_OF_MEMORY, "hipErrorOutOfMemory", "out of memory"},
    {NOT_INITIALIZED, "hipErrorNotInitialized", "initialization error"},
    {INVALID_CONFIGURATION, "hipErrorInvalidConfiguration", "invalid configuration argument"},
    {INVALID_DEVICE_POINTER, "hipErrorInvalidDevicePointer", "invalid device pointer"},
    {INVALID_MEMCPY_DIRECTION, "hipErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
    {NO_DEVICE, "hipErrorNoDevice", "no ROCm-capable device is detected"},
    {INVALID_DEVICE, "hipErrorInvalidDevice", "invalid device ordinal"},
    {INVALID_IMAGE, "hipErrorInvalidImage", "device kernel image is invalid"},
    {INVALID_CONTEXT, "hipErrorInvalidContext", "invalid device context"},
    {INVALID_HANDLE, "hipErrorInvalidHandle", "invalid resource handle"},
    {ILLEGAL_STATE, "hipErrorIllegalState", "the operation cannot be performed in the present state"},
    {NOT_FOUND, "hipErrorNotFound", "named symbol not found"},
    {NOT_READY, "hipErrorNotReady", "device not ready"},
    {PEER_ACCESS_NOT_ENABLED, "hipErrorPeerAccessNotEnabled", "peer access has not been enabled"},
    {HOST_MEMORY_ALREADY_REGISTERED, "hipErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {HOST_MEMORY_NOT_REGISTERED, "hipErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
    {LAUNCH_FAILURE, "hipErrorLaunchFailure", "unspecified launch failure"},
    {NOT_SUPPORTED, "hipErrorNotSupported", "operation not supported"},
    {CAPTURE_UNSUPPORTED, "hipErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "hipErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {UNKNOWN, "hipErrorUnknown", "unknown error"},
};

thread_local Error last = SUCCESS;
bool used = false, in_child = false;

__attribute__((constructor)) void watch_forks() {
    pthread_atfork(nullptr, nullptr, [] { in_child = used; });
}

const Named *named(int error) {
    for (const Named &entry : NAMES)
        if (entry.error == error) return &entry;
    return nullptr;
}

}  // namespace

Error told(Error error) {
    if (error != SUCCESS) last = error;
    return error;
}

bool forked() {
    used = true;
    return in_child;
}

void complain(const char *format, ...) {
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    fprintf(stderr, "stand-in HIP: %s\n", line);
}

HIP_API const char *hipGetErrorName(int error) {
    const Named *entry = named(error);
    return entry ? entry->name : "hipErrorUnknown";
}
HIP_API const char *hipGetErrorString(int error) {
    const Named *entry = named(error);
    return entry ? entry->text : "unknown error";
}
HIP_API int hipGetLastError() {
    Error error = last;
    last = SUCCESS;
    return error;
}
HIP_API int hipPeekAtLastError() { return last; }

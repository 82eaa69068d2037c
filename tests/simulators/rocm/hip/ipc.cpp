// Memory of a device, in another process. The rules are HIP's: a handle is 64 bytes, names its process and the ordinal
// that its device has there, and cannot be opened by that process; opened twice it is one pointer; a pointer into the
// middle of an allocation comes out as one. The devices cannot reach each other, so a handle opens on its own device
// only; and only while its process lives, which on the real thing hands the memory over itself.
#include "hip.h"

#include <cstring>
#include <fcntl.h>
#include <unistd.h>

namespace {

struct Handle {
    char magic[8];
    int physical;
    int reserved;
    uint64_t started;
    uint64_t sequence;
    // From here on as in HIP's own handle.
    uint64_t bytes;
    uint64_t offset;
    int process;
    int device;
    char reserved_too[8];
};
static_assert(sizeof(Handle) == 64);
constexpr char MAGIC[8] = {'s', 't', 'a', 'n', 'd', '-', 'i', 'n'};
constexpr unsigned LAZY_ENABLE_PEER_ACCESS = 1;

struct OpaqueHandle {
    char reserved[64];
};

// With HIPSTANDIN_FAULT=handles, of more than 35 handles at a time each further one is of the first one's memory: what
// one ROCm stack did.
constexpr int HANDLES = 35;
char *first_opened = nullptr;
int opened = 0;
bool too_many() {
    static const char *fault = getenv("HIPSTANDIN_FAULT");
    return fault && strcmp(fault, "handles") == 0 && opened > HANDLES;
}

Error open_handle(void **pointer, const Handle &handle) {
    if (memcmp(handle.magic, MAGIC, sizeof MAGIC) != 0 || handle.bytes == 0) return INVALID_VALUE;
    if (handle.process == getpid()) return INVALID_CONTEXT;
    if (handle.device < 0 || handle.device >= device_count()) return INVALID_VALUE;
    std::lock_guard<std::recursive_mutex> hold(memory_lock);
    Allocation *allocation = find_imported(&handle);
    if (!allocation) {
        Owner owner = {handle.process, handle.started};
        if (!alive(owner) || handle.physical != physical_device(current_device())) return INVALID_DEVICE_POINTER;
        int file = open(memory_path(owner, handle.physical, handle.sequence).c_str(), O_RDWR | O_CLOEXEC);
        if (file < 0) return INVALID_DEVICE_POINTER;
        size_t mapped = whole_pages(handle.bytes);
        char *base = map_guarded(file, mapped);
        close(file);
        if (!base) return INVALID_DEVICE_POINTER;
        allocation = remember({base, handle.bytes, mapped, Kind::IMPORTED, current_device()});
        memcpy(allocation->handle, &handle, sizeof handle);
    }
    if (allocation->opened++ == 0) opened++;
    if (opened == 1) first_opened = allocation->base;
    *pointer = (too_many() ? first_opened : allocation->base) + handle.offset;
    return SUCCESS;
}

}  // namespace

HIP_API int hipIpcGetMemHandle(Handle *handle, void *pointer) {
    HIP_BEGIN;
    if (!handle || !pointer) return told(INVALID_VALUE);
    std::lock_guard<std::recursive_mutex> hold(memory_lock);
    const Allocation *allocation = find(pointer);
    // HIP writes the current device into the handle, whichever has the memory: another one is refused here.
    if (!allocation || allocation->kind != Kind::DEVICE || allocation->device != current_device())
        return told(INVALID_VALUE);
    *handle = {};
    memcpy(handle->magic, MAGIC, sizeof MAGIC);
    handle->physical = physical_device(allocation->device);
    handle->started = self().started;
    handle->sequence = allocation->sequence;
    handle->bytes = allocation->bytes;
    handle->offset = (uint64_t)((char *)pointer - allocation->base);
    handle->process = getpid();
    handle->device = allocation->device;
    return SUCCESS;
}

HIP_API int hipIpcOpenMemHandle(void **pointer, OpaqueHandle opaque, unsigned flags) {
    HIP_BEGIN;
    if (!pointer || flags != LAZY_ENABLE_PEER_ACCESS) return told(INVALID_VALUE);
    Handle handle;
    memcpy(&handle, &opaque, sizeof handle);
    return told(open_handle(pointer, handle));
}

HIP_API int hipIpcCloseMemHandle(void *pointer) {
    HIP_BEGIN;
    if (!pointer) return told(INVALID_VALUE);
    std::lock_guard<std::recursive_mutex> hold(memory_lock);
    Allocation *allocation = find(pointer);
    if (!allocation || allocation->kind != Kind::IMPORTED) return told(INVALID_VALUE);
    if (--allocation->opened == 0) {
        opened--;
        unmap_guarded(allocation->base, allocation->mapped);
        forget(allocation);
    }
    return SUCCESS;
}

// Memory. What a device has is files in /dev/shm, so that another process can open it, and is filled with 0xCD when it is
// allocated: whoever reads what was never written sees it. A file is named
//     rocmforge-standin.<uid>.<machine>.<process>.<its start time>.<device>.<number>
// and is gone when its process frees it or ends; of a process that was killed, when the next one of that user begins.
#include "hip.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <fstream>
#include <map>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

std::recursive_mutex memory_lock;

namespace {

constexpr char FOLDER[] = "/dev/shm";
constexpr unsigned char POISON = 0xCD;
constexpr size_t PAGE = 4096;
enum MemcpyKind { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, DEFAULT };
enum MemoryType { TYPE_UNREGISTERED = 0, TYPE_HOST = 1, TYPE_DEVICE = 2, TYPE_MANAGED = 3 };

using Table = std::map<uintptr_t, Allocation>;
// Never destroyed: other libraries' destructors still free memory while the process ends.
Table &table() {
    static Table *all = new Table;
    return *all;
}

std::string prefix() { return "rocmforge-standin." + std::to_string(getuid()) + "."; }

std::string machine() {
    const char *name = getenv("HIPSTANDIN_MACHINE");
    return name && *name ? name : "default";
}

// When a process began, in clock ticks after boot; 0 if there is none.
uint64_t start_time(int process) {
    std::ifstream file("/proc/" + std::to_string(process) + "/stat");
    std::string text((std::istreambuf_iterator<char>(file)), {});
    // The name, in brackets, may hold anything.
    size_t at = text.rfind(')');
    if (at == std::string::npos) return 0;
    for (int field = 2; field < 22; field++) {
        at = text.find(' ', at + 1);
        if (at == std::string::npos) return 0;
    }
    return strtoull(text.c_str() + at, nullptr, 10);
}

struct Name {
    std::string machine;
    Owner owner;
    int device;
};

// What the name of a file of this user's tells; false: it is none.
bool parse(const char *name, Name *parsed) {
    std::string begin = prefix();
    if (strncmp(name, begin.c_str(), begin.size()) != 0) return false;
    char machine_name[128];
    unsigned long long started, sequence;
    int process, device, end = 0;
    const char *rest = name + begin.size();
    if (sscanf(rest, "%127[^.].%d.%llu.%d.%llu%n", machine_name, &process, &started, &device, &sequence, &end) != 5)
        return false;
    if (rest[end]) return false;
    *parsed = {machine_name, {process, started}, device};
    return true;
}

template <class Visit> void each_file(Visit visit) {
    DIR *folder = opendir(FOLDER);
    if (!folder) return;
    Name name;
    while (dirent *entry = readdir(folder))
        if (parse(entry->d_name, &name)) visit(name, std::string(FOLDER) + "/" + entry->d_name);
    closedir(folder);
}

// Bytes that all processes have of a device of this machine; what a process had that is gone is free.
size_t in_use(int physical) {
    size_t sum = 0;
    each_file([&](const Name &name, const std::string &path) {
        struct stat status;
        if (name.machine == machine() && name.device == physical && alive(name.owner) && stat(path.c_str(), &status) == 0)
            sum += (size_t)status.st_size;
    });
    return sum;
}

__attribute__((constructor)) void sweep() {
    if (machine().find_first_of("./") != std::string::npos || machine().size() > 100) {
        complain("HIPSTANDIN_MACHINE=%s: a short name without dots and slashes", machine().c_str());
        abort();
    }
    each_file([](const Name &name, const std::string &path) {
        if (!alive(name.owner)) unlink(path.c_str());
    });
}

__attribute__((destructor)) void leave() {
    // A forked child has its parent's table.
    if (forked()) return;
    for (auto &entry : table())
        if (entry.second.kind == Kind::DEVICE)
            unlink(memory_path(self(), physical_device(entry.second.device), entry.second.sequence).c_str());
}

Error allocate_device(void **pointer, size_t bytes) {
    static std::atomic<uint64_t> sequences{1};
    size_t mapped = whole_pages(bytes);
    int device = current_device(), physical = physical_device(device);
    std::lock_guard<std::recursive_mutex> hold(memory_lock);
    if (mapped < bytes || mapped > device_memory() || in_use(physical) > device_memory() - mapped) return OUT_OF_MEMORY;
    uint64_t sequence = sequences++;
    std::string path = memory_path(self(), physical, sequence);
    int file = open(path.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    if (file < 0) return OUT_OF_MEMORY;
    char *base = posix_fallocate(file, 0, (off_t)mapped) == 0 ? map_guarded(file, mapped) : nullptr;
    close(file);
    if (!base) {
        unlink(path.c_str());
        return OUT_OF_MEMORY;
    }
    memset(base, POISON, mapped);
    Allocation allocation = {base, bytes, mapped, Kind::DEVICE, device};
    allocation.sequence = sequence;
    remember(allocation);
    *pointer = base;
    return SUCCESS;
}

Error allocate_host(void **pointer, size_t bytes, Kind kind, unsigned flags) {
    size_t mapped = whole_pages(bytes);
    void *base = mapped < bytes ? MAP_FAILED
                                : mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return OUT_OF_MEMORY;
    memset(base, POISON, mapped);
    Allocation allocation = {(char *)base, bytes, mapped, kind, current_device()};
    allocation.flags = flags;
    remember(allocation);
    *pointer = base;
    return SUCCESS;
}

// Frees what `wanted` says a pointer must be the base of.
template <class Wanted> Error release(void *pointer, Wanted wanted) {
    if (!pointer) return SUCCESS;
    std::lock_guard<std::recursive_mutex> hold(memory_lock);
    Allocation *allocation = find(pointer);
    if (!allocation || allocation->base != pointer || !wanted(allocation->kind)) return INVALID_VALUE;
    if (allocation->kind == Kind::DEVICE) {
        unlink(memory_path(self(), physical_device(allocation->device), allocation->sequence).c_str());
        unmap_guarded(allocation->base, allocation->mapped);
    } else {
        munmap(allocation->base, allocation->mapped);
    }
    forget(allocation);
    return SUCCESS;
}

// Whether `bytes` from `address` on end within the allocation it begins in.
bool fits(const Allocation *allocation, const void *address, size_t bytes) {
    return bytes <= allocation->bytes - (size_t)((const char *)address - allocation->base);
}

// As HIP does: an unknown address is taken for the host's, but a copy that names a device must have one.
Error copy(void *to, const void *from, size_t bytes, int kind) {
    if (bytes == 0) return SUCCESS;
    if (!to || !from) return INVALID_VALUE;
    if (kind < HOST_TO_HOST || kind > DEFAULT) return INVALID_MEMCPY_DIRECTION;
    std::lock_guard<std::recursive_mutex> hold(memory_lock);
    const Allocation *source = find(from), *target = find(to);
    if ((source && !fits(source, from, bytes)) || (target && !fits(target, to, bytes))) {
        complain("memcpy of %zu bytes from %p to %p leaves an allocation", bytes, from, to);
        return INVALID_VALUE;
    }
    if (!source && !target && kind != HOST_TO_HOST && kind != DEFAULT) {
        complain("memcpy of kind %d from %p to %p: neither is memory of a device", kind, from, to);
        return INVALID_VALUE;
    }
    memmove(to, from, bytes);
    return SUCCESS;
}

Error copy_peer(void *to, int to_device, const void *from, int from_device, size_t bytes) {
    for (int device : {to_device, from_device})
        if (device < 0 || device >= device_count()) return INVALID_DEVICE;
    std::lock_guard<std::recursive_mutex> hold(memory_lock);
    const Allocation *source = find(from), *target = find(to);
    if (bytes && (!source || !target || source->device != from_device || target->device != to_device))
        return INVALID_VALUE;
    return copy(to, from, bytes, DEVICE_TO_DEVICE);
}

Error fill(void *to, int value, size_t bytes) {
    if (bytes == 0) return SUCCESS;
    std::lock_guard<std::recursive_mutex> hold(memory_lock);
    const Allocation *target = find(to);
    if (!target || !fits(target, to, bytes)) {
        complain("memset of %zu bytes at %p is not within an allocation", bytes, to);
        return INVALID_VALUE;
    }
    memset(to, value, bytes);
    return SUCCESS;
}

Error usable(void *stream) { return stream_device(stream) < 0 ? INVALID_HANDLE : not_captured(stream); }

// hipPointerAttribute_t.
struct PointerAttributes {
    int type;
    int device;
    void *device_pointer;
    void *host_pointer;
    int is_managed;
    unsigned allocation_flags;
};
static_assert(sizeof(PointerAttributes) == 32);

}  // namespace

size_t whole_pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

char *map_guarded(int file, size_t bytes) {
    char *room = (char *)mmap(nullptr, bytes + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) return nullptr;
    if (mmap(room + PAGE, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) != MAP_FAILED)
        return room + PAGE;
    munmap(room, bytes + 2 * PAGE);
    return nullptr;
}
void unmap_guarded(char *base, size_t bytes) { munmap(base - PAGE, bytes + 2 * PAGE); }

Owner self() {
    static const Owner owner = {getpid(), start_time(getpid())};
    return owner;
}
bool alive(const Owner &owner) { return owner.started && start_time(owner.process) == owner.started; }

std::string memory_path(const Owner &owner, int physical, uint64_t sequence) {
    return std::string(FOLDER) + "/" + prefix() + machine() + "." + std::to_string(owner.process) + "." +
           std::to_string(owner.started) + "." + std::to_string(physical) + "." + std::to_string(sequence);
}

Allocation *find(const void *address) {
    auto next = table().upper_bound((uintptr_t)address);
    if (next == table().begin()) return nullptr;
    Allocation &before = std::prev(next)->second;
    return (const char *)address < before.base + before.bytes ? &before : nullptr;
}
Allocation *find_imported(const void *handle) {
    for (auto &entry : table()) {
        Allocation &allocation = entry.second;
        if (allocation.kind == Kind::IMPORTED && memcmp(allocation.handle, handle, sizeof allocation.handle) == 0)
            return &allocation;
    }
    return nullptr;
}
Allocation *remember(const Allocation &allocation) {
    std::lock_guard<std::recursive_mutex> hold(memory_lock);
    return &(table()[(uintptr_t)allocation.base] = allocation);
}
void forget(Allocation *allocation) { table().erase((uintptr_t)allocation->base); }

bool standin_reaches(const void *address, size_t bytes) {
    std::lock_guard<std::recursive_mutex> hold(memory_lock);
    const Allocation *allocation = find(address);
    return allocation && fits(allocation, address, bytes);
}

HIP_API int hipMalloc(void **pointer, size_t bytes) {
    HIP_BEGIN;
    if (!pointer) return told(INVALID_VALUE);
    *pointer = nullptr;
    if (!device_count()) return told(NO_DEVICE);
    return bytes ? told(allocate_device(pointer, bytes)) : SUCCESS;
}
HIP_API int hipFree(void *pointer) {
    HIP_BEGIN;
    return told(release(pointer, [](Kind kind) { return kind == Kind::DEVICE || kind == Kind::MANAGED; }));
}
HIP_API int hipMallocManaged(void **pointer, size_t bytes, unsigned flags) {
    HIP_BEGIN;
    constexpr unsigned GLOBAL = 1, HOST = 2;
    if (!pointer || !bytes || (flags != GLOBAL && flags != HOST)) return told(INVALID_VALUE);
    return told(allocate_host(pointer, bytes, Kind::MANAGED, flags));
}
HIP_API int hipHostMalloc(void **pointer, size_t bytes, unsigned flags) {
    HIP_BEGIN;
    if (!pointer) return told(INVALID_VALUE);
    *pointer = nullptr;
    return bytes ? told(allocate_host(pointer, bytes, Kind::HOST, flags)) : SUCCESS;
}
HIP_API int hipHostFree(void *pointer) {
    HIP_BEGIN;
    return told(release(pointer, [](Kind kind) { return kind == Kind::HOST; }));
}
// Memory that the process has got elsewhere, a mapped file for one. Nothing is pinned; what overlaps is refused.
HIP_API int hipHostRegister(void *pointer, size_t bytes, unsigned flags) {
    HIP_BEGIN;
    constexpr unsigned KNOWN_FLAGS = 0xF;
    if (!pointer || !bytes || flags & ~KNOWN_FLAGS) return told(INVALID_VALUE);
    std::lock_guard<std::recursive_mutex> hold(memory_lock);
    char *base = (char *)pointer;
    auto next = table().lower_bound((uintptr_t)base);
    if (find(base) || (next != table().end() && next->second.base < base + bytes))
        return told(HOST_MEMORY_ALREADY_REGISTERED);
    Allocation allocation = {base, bytes, bytes, Kind::REGISTERED, current_device()};
    allocation.flags = flags;
    remember(allocation);
    return SUCCESS;
}
HIP_API int hipHostUnregister(void *pointer) {
    HIP_BEGIN;
    if (!pointer) return told(INVALID_VALUE);
    std::lock_guard<std::recursive_mutex> hold(memory_lock);
    Allocation *allocation = find(pointer);
    if (!allocation || allocation->base != pointer || allocation->kind != Kind::REGISTERED)
        return told(HOST_MEMORY_NOT_REGISTERED);
    forget(allocation);
    return SUCCESS;
}
// Free is what no process has: a device is shared.
HIP_API int hipMemGetInfo(size_t *free_bytes, size_t *total) {
    HIP_BEGIN;
    if (!free_bytes || !total) return told(INVALID_VALUE);
    if (!device_count()) return told(NO_DEVICE);
    size_t used = in_use(physical_device(current_device()));
    *total = device_memory();
    *free_bytes = used < *total ? *total - used : 0;
    return SUCCESS;
}

HIP_API int hipMemcpy(void *to, const void *from, size_t bytes, int kind) {
    HIP_BEGIN;
    return told(copy(to, from, bytes, kind));
}
HIP_API int hipMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
    HIP_BEGIN;
    if (Error error = usable(stream)) return told(error);
    return told(copy(to, from, bytes, kind));
}
HIP_API int hipMemcpyPeer(void *to, int to_device, const void *from, int from_device, size_t bytes) {
    HIP_BEGIN;
    return told(copy_peer(to, to_device, from, from_device, bytes));
}
HIP_API int hipMemcpyPeerAsync(
    void *to, int to_device, const void *from, int from_device, size_t bytes, void *stream) {
    HIP_BEGIN;
    if (Error error = usable(stream)) return told(error);
    return told(copy_peer(to, to_device, from, from_device, bytes));
}
HIP_API int hipMemset(void *to, int value, size_t bytes) {
    HIP_BEGIN;
    return told(fill(to, value, bytes));
}
HIP_API int hipMemsetAsync(void *to, int value, size_t bytes, void *stream) {
    HIP_BEGIN;
    if (Error error = usable(stream)) return told(error);
    return told(fill(to, value, bytes));
}

HIP_API int hipPointerGetAttributes(PointerAttributes *attributes, const void *pointer) {
    HIP_BEGIN;
    constexpr int NO_SUCH_DEVICE = -2;
    if (!attributes) return told(INVALID_VALUE);
    std::lock_guard<std::recursive_mutex> hold(memory_lock);
    const Allocation *allocation = find(pointer);
    if (!allocation) {
        *attributes = {TYPE_UNREGISTERED, NO_SUCH_DEVICE, nullptr, nullptr, 0, 0};
        return SUCCESS;
    }
    bool host = allocation->kind == Kind::HOST || allocation->kind == Kind::REGISTERED, managed = allocation->kind == Kind::MANAGED;
    int type = host ? TYPE_HOST : managed ? TYPE_MANAGED : TYPE_DEVICE;
    *attributes = {type, allocation->device, (void *)pointer, host || managed ? (void *)pointer : nullptr, managed,
                   allocation->flags};
    return SUCCESS;
}

// What the sources of the stand-in's libamdhip64 share: HIP's own numbers and structs, as ROCm 7.0 lays them out, and the
// state of this process. Nothing here is asynchronous: every call has done its work when it returns.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#define HIP_API extern "C" __attribute__((visibility("default")))

enum Error : int {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_CONFIGURATION = 9,
    INVALID_DEVICE_POINTER = 17,
    INVALID_MEMCPY_DIRECTION = 21,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    NOT_FOUND = 500,
    NOT_READY = 600,
    PEER_ACCESS_NOT_ENABLED = 705,
    HOST_MEMORY_ALREADY_REGISTERED = 712,
    HOST_MEMORY_NOT_REGISTERED = 713,
    LAUNCH_FAILURE = 719,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    UNKNOWN = 999,
};

// Begins every call: none of them works in a child that a process forked after it had used HIP, as on the real thing.
#define HIP_BEGIN \
    if (forked()) return told(NOT_INITIALIZED)

// Keeps `error` for hipGetLastError, which a success does not clear.
Error told(Error error);
bool forked();
// Says on stderr what HIP's error number cannot.
__attribute__((format(printf, 1, 2))) void complain(const char *format, ...);

// --- devices ---------------------------------------------------------------------------------------------------------

// How many this process sees, the calling thread's current one, and which of the machine's devices an ordinal is:
// HIP_VISIBLE_DEVICES may leave some out and order them anew.
int device_count();
int current_device();
int physical_device(int ordinal);
int wave_size();
size_t device_memory();
// Whether kernels and products are checked, and not run: what is measured then is the host.
extern "C" __attribute__((visibility("default"))) bool standin_idle();
constexpr int MOST_THREADS = 1024;
constexpr int MOST_BLOCKS[] = {0x7fffffff, 65536, 65536};
constexpr int SHARED_BYTES = 64 * 1024;

// --- memory ----------------------------------------------------------------------------------------------------------

enum class Kind { DEVICE, HOST, MANAGED, IMPORTED, REGISTERED };

struct Allocation {
    char *base;
    size_t bytes;   // as asked for
    size_t mapped;  // whole pages
    Kind kind;
    int device;     // ordinal of the device whose memory it is, or that was current
    uint64_t sequence = 0;  // of device memory: part of its file's name
    unsigned flags = 0;
    // Imported only: how often it was opened, and the handle it was opened with.
    int opened = 0;
    unsigned char handle[64] = {};
};

// Guards the table of allocations. `find`: the allocation that holds `address`, `find_imported`: the one that was opened
// with a handle of 64 bytes; or null.
extern std::recursive_mutex memory_lock;
Allocation *find(const void *address);
Allocation *find_imported(const void *handle);
void forget(Allocation *allocation);
Allocation *remember(const Allocation &allocation);
// Whether [address, address + bytes) lies inside one allocation that a device can reach.
extern "C" __attribute__((visibility("default"))) bool standin_reaches(const void *address, size_t bytes);

// Maps `bytes` of a file between two pages that fault, so that a kernel that runs over the end is noticed; null: failed.
char *map_guarded(int file, size_t bytes);
void unmap_guarded(char *base, size_t bytes);
size_t whole_pages(size_t bytes);

// A file of device memory: who owns it, and where. The start time tells a process from a later one with its number.
struct Owner {
    int process;
    uint64_t started;
};
Owner self();
bool alive(const Owner &owner);
std::string memory_path(const Owner &owner, int physical, uint64_t sequence);

// --- streams ---------------------------------------------------------------------------------------------------------

// Device ordinal of a live stream, the current one of a default stream, or -1.
int stream_device(const void *stream);

// Whether a stream is captured: then `work` is kept for its graph, and must not be done now.
__attribute__((visibility("default"))) bool captured(const void *stream, const std::function<int()> &work);
// What cannot be captured invalidates the capture; SUCCESS if there is none. Copies are such, other than on a GPU.
Error not_captured(const void *stream);
// Of a live stream that is no default one. False: it is captured already. The error tells what became of the capture.
bool begin_capture(const void *stream);
Error end_capture(const void *stream, std::vector<std::function<int()>> *work);

// --- functions -------------------------------------------------------------------------------------------------------

// What a live function was compiled from, as code.h has it; false: there is no such function.
struct Origin {
    std::string name, text;
    int wave, most_threads;
};
bool function_origin(const void *function, Origin *origin);

// The devices of the pretended machine, set by the environment: HIPSTANDIN_DEVICES (default 1) of HIPSTANDIN_MEMORY bytes
// (default 1 GiB) each, with waves of HIPSTANDIN_WAVE lanes: 64 is a gfx942, 32 a gfx1100. They cannot reach each other.
#include "hip.h"

#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

constexpr int VERSION = 70051831;

struct Arch {
    unsigned features;
};

// hipDeviceProp_tR0600.
struct Properties {
    char name[256];
    char uuid[16];
    char luid[8];
    unsigned luid_device_node_mask;
    size_t total_global_mem;
    size_t shared_mem_per_block;
    int regs_per_block;
    int warp_size;
    size_t mem_pitch;
    int max_threads_per_block;
    int max_threads_dim[3];
    int max_grid_size[3];
    int clock_rate;
    size_t total_const_mem;
    int major;
    int minor;
    size_t texture_alignment;
    size_t texture_pitch_alignment;
    int device_overlap;
    int multi_processor_count;
    int kernel_exec_timeout_enabled;
    int integrated;
    int can_map_host_memory;
    int compute_mode;
    int textures_and_surfaces[40];
    size_t surface_alignment;
    int concurrent_kernels;
    int ecc_enabled;
    int pci_bus_id;
    int pci_device_id;
    int pci_domain_id;
    int tcc_driver;
    int async_engine_count;
    int unified_addressing;
    int memory_clock_rate;
    int memory_bus_width;
    int l2_cache_size;
    int persisting_l2_cache_max_size;
    int max_threads_per_multi_processor;
    int stream_priorities_supported;
    int global_l1_cache_supported;
    int local_l1_cache_supported;
    size_t shared_mem_per_multiprocessor;
    int regs_per_multiprocessor;
    int managed_memory;
    int rest_of_cuda[10];
    size_t shared_mem_per_block_optin;
    int page_tables[4];
    size_t reserved_shared_mem_per_block;
    int rest_of_cuda_2[13];
    int reserved[63];
    int hip_reserved[32];
    char gcn_arch_name[256];
    size_t max_shared_memory_per_multi_processor;
    int clock_instruction_rate;
    Arch arch;
    unsigned *hdp_mem_flush_cntl;
    unsigned *hdp_reg_flush_cntl;
    int cooperative_multi_device[4];
    int is_large_bar;
    int asic_revision;
};
static_assert(offsetof(Properties, gcn_arch_name) == 1160);
static_assert(sizeof(Properties) == 1472);

// hipDeviceAttribute_t, as far as it is answered.
enum Attribute {
    COMPUTE_CAPABILITY_MAJOR = 23,
    MAX_BLOCK_DIM_X = 26,
    MAX_BLOCK_DIM_Z = 28,
    MAX_GRID_DIM_X = 29,
    MAX_GRID_DIM_Y = 30,
    MAX_GRID_DIM_Z = 31,
    MAX_THREADS_PER_BLOCK = 56,
    MAX_THREADS_PER_MULTIPROCESSOR = 57,
    COMPUTE_CAPABILITY_MINOR = 61,
    MULTIPROCESSOR_COUNT = 63,
    MAX_SHARED_MEMORY_PER_BLOCK = 74,
    UNIFIED_ADDRESSING = 85,
    WARP_SIZE = 87,
};

constexpr int MULTIPROCESSORS = 4;
constexpr int THREADS_PER_MULTIPROCESSOR = 2048;

thread_local int current = 0;

long long setting(const char *name, long long otherwise, long long least, long long most) {
    const char *text = getenv(name);
    if (!text || !*text) return otherwise;
    char *end;
    long long value = strtoll(text, &end, 10);
    if (*end || value < least || value > most) {
        complain("%s=%s is no whole number from %lld to %lld", name, text, least, most);
        abort();
    }
    return value;
}

int machine_devices() {
    static const int count = (int)setting("HIPSTANDIN_DEVICES", 1, 0, 64);
    return count;
}

// As HIP reads HIP_VISIBLE_DEVICES: ordinals separated by commas, up to the first that is none. Never destroyed, as the
// table of memory.
const std::vector<int> &visible() {
    static const auto &devices = *new const std::vector<int>([] {
        std::vector<int> all;
        const char *text = getenv("HIP_VISIBLE_DEVICES");
        if (!text) {
            for (int i = 0; i < machine_devices(); i++) all.push_back(i);
            return all;
        }
        while (*text) {
            char *end;
            long ordinal = strtol(text, &end, 10);
            if (end == text || ordinal < 0 || ordinal >= machine_devices()) break;
            all.push_back((int)ordinal);
            text = *end == ',' ? end + 1 : end;
        }
        return all;
    }());
    return devices;
}

bool valid(int device) { return device >= 0 && device < device_count(); }
bool gfx9() { return wave_size() == 64; }
int major_version() { return gfx9() ? 9 : 11; }
int minor_version() { return gfx9() ? 4 : 0; }

void pci_bus_id(char *text, int length, int device) {
    snprintf(text, (size_t)length, "0000:%02x:00.0", 3 + physical_device(device));
}

}  // namespace

int device_count() { return (int)visible().size(); }
int current_device() { return current; }
int physical_device(int ordinal) { return visible()[(size_t)ordinal]; }

int wave_size() {
    static const int lanes = (int)setting("HIPSTANDIN_WAVE", 64, 32, 64);
    if (lanes != 32 && lanes != 64) {
        complain("HIPSTANDIN_WAVE=%d: a wave has 32 or 64 lanes", lanes);
        abort();
    }
    return lanes;
}

size_t device_memory() {
    static const size_t bytes = (size_t)setting("HIPSTANDIN_MEMORY", 1LL << 30, 4096, 1LL << 40);
    return bytes;
}

bool standin_idle() {
    static const bool idle = setting("HIPSTANDIN_IDLE", 0, 0, 1);
    return idle;
}

HIP_API int hipGetDeviceCount(int *count) {
    HIP_BEGIN;
    if (!count) return told(INVALID_VALUE);
    *count = device_count();
    return told(*count ? SUCCESS : NO_DEVICE);
}
HIP_API int hipGetDevice(int *device) {
    HIP_BEGIN;
    if (!device) return told(INVALID_VALUE);
    *device = current;
    return told(device_count() ? SUCCESS : NO_DEVICE);
}
HIP_API int hipSetDevice(int device) {
    HIP_BEGIN;
    if (!valid(device)) return told(INVALID_DEVICE);
    current = device;
    return SUCCESS;
}
HIP_API int hipDeviceSynchronize() {
    HIP_BEGIN;
    return told(device_count() ? SUCCESS : NO_DEVICE);
}

HIP_API int hipDeviceGetAttribute(int *value, int attribute, int device) {
    HIP_BEGIN;
    if (!value) return told(INVALID_VALUE);
    if (!valid(device)) return told(INVALID_DEVICE);
    if (attribute >= MAX_BLOCK_DIM_X && attribute <= MAX_BLOCK_DIM_Z) attribute = MAX_THREADS_PER_BLOCK;
    switch (attribute) {
        case COMPUTE_CAPABILITY_MAJOR: *value = major_version(); break;
        case COMPUTE_CAPABILITY_MINOR: *value = minor_version(); break;
        case MAX_GRID_DIM_X: *value = MOST_BLOCKS[0]; break;
        case MAX_GRID_DIM_Y: *value = MOST_BLOCKS[1]; break;
        case MAX_GRID_DIM_Z: *value = MOST_BLOCKS[2]; break;
        case MAX_THREADS_PER_BLOCK: *value = MOST_THREADS; break;
        case MAX_THREADS_PER_MULTIPROCESSOR: *value = THREADS_PER_MULTIPROCESSOR; break;
        case MULTIPROCESSOR_COUNT: *value = MULTIPROCESSORS; break;
        case MAX_SHARED_MEMORY_PER_BLOCK: *value = SHARED_BYTES; break;
        case UNIFIED_ADDRESSING: *value = 1; break;
        case WARP_SIZE: *value = wave_size(); break;
        default: return told(INVALID_VALUE);
    }
    return SUCCESS;
}

HIP_API int hipGetDevicePropertiesR0600(Properties *properties, int device) {
    HIP_BEGIN;
    if (!properties) return told(INVALID_VALUE);
    if (!valid(device)) return told(INVALID_DEVICE);
    Properties told_of = {};
    snprintf(told_of.name, sizeof told_of.name, "stand-in for a GPU, on the CPU");
    snprintf(told_of.uuid, sizeof told_of.uuid, "standin-%07d", physical_device(device));
    told_of.total_global_mem = device_memory();
    told_of.shared_mem_per_block = told_of.shared_mem_per_multiprocessor = SHARED_BYTES;
    told_of.shared_mem_per_block_optin = told_of.max_shared_memory_per_multi_processor = SHARED_BYTES;
    told_of.regs_per_block = told_of.regs_per_multiprocessor = 65536;
    told_of.warp_size = wave_size();
    told_of.mem_pitch = INT_MAX;
    told_of.max_threads_per_block = MOST_THREADS;
    for (int i = 0; i < 3; i++) {
        told_of.max_threads_dim[i] = MOST_THREADS;
        told_of.max_grid_size[i] = MOST_BLOCKS[i];
    }
    told_of.clock_rate = told_of.clock_instruction_rate = told_of.memory_clock_rate = 1000000;
    told_of.total_const_mem = INT_MAX;
    told_of.major = major_version();
    told_of.minor = minor_version();
    told_of.multi_processor_count = MULTIPROCESSORS;
    told_of.can_map_host_memory = told_of.unified_addressing = told_of.managed_memory = 1;
    told_of.concurrent_kernels = told_of.async_engine_count = told_of.stream_priorities_supported = 1;
    told_of.pci_bus_id = 3 + physical_device(device);
    told_of.l2_cache_size = 4 << 20;
    told_of.max_threads_per_multi_processor = THREADS_PER_MULTIPROCESSOR;
    strcpy(told_of.gcn_arch_name, gfx9() ? "gfx942:sramecc+:xnack-" : "gfx1100");
    *properties = told_of;
    return SUCCESS;
}

HIP_API int hipDeviceGetLimit(size_t *value, int limit) {
    HIP_BEGIN;
    constexpr int STACK_SIZE = 0, MALLOC_HEAP_SIZE = 2;
    if (!value) return told(INVALID_VALUE);
    if (limit == STACK_SIZE) *value = 1024;
    else if (limit == MALLOC_HEAP_SIZE) *value = 8 << 20;
    else return told(NOT_SUPPORTED);
    return SUCCESS;
}

HIP_API int hipDeviceCanAccessPeer(int *can, int device, int peer) {
    HIP_BEGIN;
    if (!can) return told(INVALID_VALUE);
    if (!valid(device) || !valid(peer)) return told(INVALID_DEVICE);
    *can = 0;
    return SUCCESS;
}
HIP_API int hipDeviceEnablePeerAccess(int peer, unsigned flags) {
    HIP_BEGIN;
    if (flags) return told(INVALID_VALUE);
    return told(valid(peer) && peer != current ? NOT_SUPPORTED : INVALID_DEVICE);
}
HIP_API int hipDeviceDisablePeerAccess(int peer) {
    HIP_BEGIN;
    return told(valid(peer) ? PEER_ACCESS_NOT_ENABLED : INVALID_DEVICE);
}

HIP_API int hipDeviceGetPCIBusId(char *text, int length, int device) {
    HIP_BEGIN;
    if (!text || length <= 0) return told(INVALID_VALUE);
    if (!valid(device)) return told(INVALID_DEVICE);
    pci_bus_id(text, length, device);
    return SUCCESS;
}
HIP_API int hipDeviceGetByPCIBusId(int *device, const char *text) {
    HIP_BEGIN;
    if (!device || !text) return told(INVALID_VALUE);
    for (int i = 0; i < device_count(); i++) {
        char own[16];
        pci_bus_id(own, sizeof own, i);
        if (strcmp(own, text) == 0) {
            *device = i;
            return SUCCESS;
        }
    }
    return told(INVALID_DEVICE);
}

HIP_API int hipDriverGetVersion(int *version) {
    if (!version) return told(INVALID_VALUE);
    *version = VERSION;
    return SUCCESS;
}
HIP_API int hipRuntimeGetVersion(int *version) { return hipDriverGetVersion(version); }

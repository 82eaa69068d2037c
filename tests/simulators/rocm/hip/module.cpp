// Modules and launches. A code object holds a library of the CPU executor, which runs a kernel's threads one after
// another, in the call that launches it.
#include "hip.h"

#include <csignal>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

#include "block.h"
#include "code.h"

namespace {

struct Function {
    const executor::Entry *entry;
    int wave;
    int device;
    bool asks_waves;
    std::shared_ptr<std::string> origin;  // as code.h has it
};
struct Module {
    void *library;
    int file;  // open as long as the library is: the loader takes one path for one library
    int device;
    std::map<std::string, Function *> functions;
};

// As with streams: what is gone leaves the sets, and keeps its memory.
std::mutex lock;
std::set<const void *> &modules() {
    static auto *live = new std::set<const void *>;
    return *live;
}
std::set<const void *> &functions() {
    static auto *live = new std::set<const void *>;
    return *live;
}

Error load(Module **module, const char *image, size_t most) {
    CodeHeader header;
    if (most < sizeof header) return INVALID_IMAGE;
    memcpy(&header, image, sizeof header);
    if (memcmp(header.magic, CODE_MAGIC, sizeof CODE_MAGIC) != 0 || header.bytes > most - sizeof header ||
        header.origin_bytes > most - sizeof header - header.bytes) {
        complain("a code object that is not the stand-in compiler's");
        return INVALID_IMAGE;
    }
    image += sizeof header;
    int file = memfd_create("module", MFD_CLOEXEC);
    if (file < 0) return OUT_OF_MEMORY;
    bool written = write(file, image, header.bytes) == (ssize_t)header.bytes;
    void *library =
        written ? dlopen(("/proc/self/fd/" + std::to_string(file)).c_str(), RTLD_NOW | RTLD_LOCAL) : nullptr;
    auto *entry = library ? (const executor::Entry *)dlsym(library, "executor_entries") : nullptr;
    auto *wave = library ? (const int *)dlsym(library, "executor_wave") : nullptr;
    if (!entry || !wave) {
        complain("cannot load a module: %s", library ? "it has no kernels" : dlerror());
        if (library) dlclose(library);
        close(file);
        return INVALID_IMAGE;
    }
    constexpr char WAVE_OPERATION[] = "wait_wave";
    bool asks = memmem(image, header.bytes, WAVE_OPERATION, sizeof WAVE_OPERATION - 1);
    *module = new Module{library, file, current_device(), {}};
    auto origin = std::make_shared<std::string>(image + header.bytes, header.origin_bytes);
    std::lock_guard<std::mutex> hold(lock);
    for (; entry->name; entry++) {
        auto *function = new Function{entry, *wave, current_device(), asks, origin};
        (*module)->functions[entry->name] = function;
        functions().insert(function);
    }
    modules().insert(*module);
    return SUCCESS;
}

// --- launches --------------------------------------------------------------------------------------------------------

std::mutex launch_lock;
const char *launching;
thread_local bool in_kernel = false;
struct sigaction before[2];
constexpr int FAULTS[] = {SIGSEGV, SIGBUS};

// As a GPU: an address that is no memory ends the process.
void fault(int signal, siginfo_t *, void *) {
    if (in_kernel) {
        complain("memory access fault: kernel %s, %s", launching, executor::the_block.where().c_str());
        std::signal(SIGABRT, SIG_DFL);
        abort();
    }
    for (int i = 0; i < 2; i++) sigaction(FAULTS[i], &before[i], nullptr);
    raise(signal);
}

struct FaultWatch {
    FaultWatch() {
        struct sigaction action = {};
        action.sa_sigaction = fault;
        action.sa_flags = SA_SIGINFO;
        for (int i = 0; i < 2; i++) sigaction(FAULTS[i], &action, &before[i]);
        in_kernel = true;
    }
    ~FaultWatch() {
        in_kernel = false;
        for (int i = 0; i < 2; i++) sigaction(FAULTS[i], &before[i], nullptr);
    }
};

Error run(const Function &function, executor::Index grid, executor::Index block, unsigned shared, void **arguments) {
    std::lock_guard<std::mutex> hold(launch_lock);
    static std::vector<unsigned char> memory;
    memory.resize(shared + 16);
    size_t aligned = (16 - (uintptr_t)memory.data() % 16) % 16;
    executor::dynamic_shared = memory.data() + aligned;
    executor::grid_size = grid;
    executor::block_size = block;
    executor::the_block.call = function.entry->call;
    executor::the_block.arguments = arguments;
    launching = function.entry->name;
    int threads = (int)(block.x * block.y * block.z);
    // CuPy's own kernels do not ask a wave anything, and may have blocks that are not whole waves.
    int wave = threads % function.wave && !function.asks_waves ? 1 : function.wave;
    executor::Order order;
    FaultWatch watch;
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                executor::block = {x, y, z};
                // NaN, in every floating-point type.
                memset(executor::dynamic_shared, 0xff, shared);
                std::string problem = executor::the_block.run(threads, wave, order);
                if (!problem.empty()) {
                    complain("kernel %s, block (%u,%u,%u): %s", launching, x, y, z, problem.c_str());
                    return LAUNCH_FAILURE;
                }
            }
    return SUCCESS;
}

// A launch's arguments, which the caller may change once it has returned.
struct Kept {
    std::vector<std::vector<unsigned char>> values;
    Kept(const executor::Entry &entry, void **arguments) {
        for (int i = 0; i < entry.count; i++) {
            auto *from = (const unsigned char *)arguments[i];
            values.emplace_back(from, from + entry.parameters[i].size);
        }
    }
    std::vector<void *> places() const {
        std::vector<void *> found;
        for (const auto &value : values) found.push_back((void *)value.data());
        return found;
    }
};

Error check(const Function &function, executor::Index grid, executor::Index block, unsigned shared) {
    const unsigned most_threads = (unsigned)MOST_THREADS;
    if (!grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z) return INVALID_CONFIGURATION;
    if (block.x > most_threads || block.y > most_threads || block.z > most_threads ||
        block.x * block.y * block.z > (unsigned)function.entry->most_threads)
        return INVALID_CONFIGURATION;
    if (grid.x > (unsigned)MOST_BLOCKS[0] || grid.y > (unsigned)MOST_BLOCKS[1] || grid.z > (unsigned)MOST_BLOCKS[2])
        return INVALID_CONFIGURATION;
    // What AMD's devices count with is threads, in 32 bits.
    if ((uint64_t)grid.x * block.x > UINT32_MAX || (uint64_t)grid.y * block.y > UINT32_MAX) return INVALID_CONFIGURATION;
    if (block.x * block.y * block.z % (unsigned)function.wave && function.asks_waves) {
        complain("kernel %s: %u threads are not whole waves of %d", function.entry->name,
                 block.x * block.y * block.z, function.wave);
        return INVALID_CONFIGURATION;
    }
    return shared > (unsigned)SHARED_BYTES ? INVALID_VALUE : SUCCESS;
}

}  // namespace

bool function_origin(const void *function, Origin *origin) {
    std::lock_guard<std::mutex> hold(lock);
    if (!functions().count(function)) return false;
    auto *found = (const Function *)function;
    *origin = {found->entry->name, *found->origin, found->wave, found->entry->most_threads};
    return true;
}

HIP_API int hipModuleLoadData(Module **module, const void *image) {
    HIP_BEGIN;
    if (!module || !image) return told(INVALID_VALUE);
    if (!device_count()) return told(NO_DEVICE);
    return told(load(module, (const char *)image, SIZE_MAX));
}
HIP_API int hipModuleLoad(Module **module, const char *path) {
    HIP_BEGIN;
    if (!module || !path) return told(INVALID_VALUE);
    std::ifstream file(path, std::ios::binary);
    if (!file) return told(NOT_FOUND);
    std::string image((std::istreambuf_iterator<char>(file)), {});
    return told(load(module, image.data(), image.size()));
}
HIP_API int hipModuleUnload(Module *module) {
    HIP_BEGIN;
    std::lock_guard<std::mutex> hold(lock);
    if (!modules().erase(module)) return told(INVALID_HANDLE);
    for (auto &entry : module->functions) functions().erase(entry.second);
    dlclose(module->library);
    close(module->file);
    return SUCCESS;
}
HIP_API int hipModuleGetFunction(Function **function, Module *module, const char *name) {
    HIP_BEGIN;
    if (!function || !name) return told(INVALID_VALUE);
    std::lock_guard<std::mutex> hold(lock);
    if (!modules().count(module)) return told(INVALID_HANDLE);
    auto found = module->functions.find(name);
    if (found == module->functions.end()) return told(NOT_FOUND);
    *function = found->second;
    return SUCCESS;
}
HIP_API int hipFuncGetAttribute(int *value, int attribute, Function *function) {
    HIP_BEGIN;
    constexpr int MAX_THREADS_PER_BLOCK = 0, MAX_DYNAMIC_SHARED_SIZE_BYTES = 8;
    if (!value) return told(INVALID_VALUE);
    std::lock_guard<std::mutex> hold(lock);
    if (!functions().count(function)) return told(INVALID_HANDLE);
    if (attribute == MAX_THREADS_PER_BLOCK) *value = function->entry->most_threads;
    else if (attribute == MAX_DYNAMIC_SHARED_SIZE_BYTES) *value = SHARED_BYTES;
    else return told(NOT_SUPPORTED);
    return SUCCESS;
}

HIP_API int hipModuleLaunchKernel(
    Function *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
    unsigned block_z, unsigned shared, void *stream, void **arguments, void **extra) {
    HIP_BEGIN;
    {
        std::lock_guard<std::mutex> hold(lock);
        if (!functions().count(function)) return told(INVALID_HANDLE);
    }
    // A module is its device's, and so is a stream.
    if (function->device != current_device()) return told(INVALID_CONTEXT);
    if (stream_device(stream) != function->device) return told(INVALID_HANDLE);
    if (extra || (!arguments && function->entry->count)) return told(INVALID_VALUE);
    executor::Index grid = {grid_x, grid_y, grid_z}, block = {block_x, block_y, block_z};
    if (Error error = check(*function, grid, block, shared)) return told(error);
    const Kept kept(*function->entry, arguments);
    const auto work = [=] { return standin_idle() ? SUCCESS : run(*function, grid, block, shared, kept.places().data()); };
    if (captured(stream, work)) return SUCCESS;
    return standin_idle() ? SUCCESS : told(run(*function, grid, block, shared, arguments));
}

// CuPy's extensions register the device code that was compiled into them as they are loaded. It is AMD's machine code:
// nothing here can run it, and launching it (hipLaunchKernel) is one of the functions that are not there.
HIP_API void **__hipRegisterFatBinary(const void *) {
    static void *registered;
    return &registered;
}
HIP_API void __hipUnregisterFatBinary(void **) {}
HIP_API void __hipRegisterFunction(
    void **, const void *, char *, const char *, unsigned, void *, void *, void *, void *, int *) {}

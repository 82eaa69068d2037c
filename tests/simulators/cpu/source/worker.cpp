// The CPU executor's other half: a process that holds device memory, loads kernels and launches them as told on its
// standard input, so that a kernel that crashes takes no test with it. Requests are a line of words, with raw bytes
// behind it where it says so; each is answered by "ok" and a line's rest, with raw bytes behind it, or by "error N" and
// N bytes of text. A fault of memory is told on standard error, and ends the process.
//
//   load PATH WORDS...            the module, then OFFSET,SIZE of each shared variable in it         -> number
//   new BYTES ALIGNMENT           memory, with what it is aligned to; not initialised                -> number
//   free NUMBER
//   write NUMBER BYTES            and the bytes
//   read NUMBER                   -> the bytes
//   launch MODULE KERNEL GX GY GZ BX BY BZ SHARED SEED ARGUMENTS...
//       SEED: 0 for threads and blocks in order, else a permutation's. Arguments: pNUMBER for memory, or i or f and the
//       value's bytes in hexadecimal, lowest first.
#include <algorithm>
#include <climits>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <link.h>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <sys/mman.h>

#include "block.h"

using namespace executor;

namespace {

constexpr size_t MOST_SHARED = 48 * 1024;
constexpr unsigned MOST_THREADS = 1024;
constexpr size_t SLACK_MARK = 0xA5;

#if defined(__SANITIZE_ADDRESS__)
#define UNCHECKED __attribute__((no_sanitize("address")))
#else
#define UNCHECKED
#endif

// NaN as f32, f16 and bf16, and as an integer too large for any index.
UNCHECKED void poison(volatile unsigned char *at, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) at[i] = i % 2 ? 0x7f : 0xff;
}
UNCHECKED bool poisoned(const volatile unsigned char *at, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if (at[i] != (i % 2 ? 0x7f : 0xff)) return false;
    return true;
}

// --- memory ------------------------------------------------------------------------------------------------------------

// Of exactly the size asked for: the sanitizer sees the first byte past it. Without a sanitizer it ends where GUARD bytes
// that fault begin, but for what the alignment leaves, which is marked and looked at after every launch. As many are
// before it, so that an access that is off by some megabytes does not find other memory; they are addresses alone.
struct Memory {
    size_t bytes;
    unsigned char *start;

    Memory(size_t bytes, size_t alignment) : bytes(bytes) {
#if defined(__SANITIZE_ADDRESS__)
        void *memory = nullptr;
        if (posix_memalign(&memory, alignment, bytes) != 0)
            throw std::runtime_error("out of memory: " + std::to_string(bytes) + " bytes");
        start = (unsigned char *)memory;
#else
        size_t page = (size_t)sysconf(_SC_PAGESIZE);
        whole_ = (bytes + alignment + page - 1) / page * page;
        void *map = mmap(nullptr, GUARD + whole_ + GUARD, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (map == MAP_FAILED) throw std::runtime_error("out of memory: " + std::to_string(bytes) + " bytes");
        first_ = (unsigned char *)map + GUARD;
        if (mprotect(first_, whole_, PROT_READ | PROT_WRITE) != 0) {
            munmap(map, GUARD + whole_ + GUARD);
            throw std::runtime_error("out of memory: " + std::to_string(bytes) + " bytes");
        }
        start = first_ + whole_ - (bytes + alignment - 1) / alignment * alignment;
        memset(start + bytes, SLACK_MARK, (size_t)(first_ + whole_ - (start + bytes)));
        memset(first_, SLACK_MARK, (size_t)(start - first_));
#endif
    }
    Memory(const Memory &) = delete;
    ~Memory() {
#if defined(__SANITIZE_ADDRESS__)
        free(start);
#else
        munmap(first_ - GUARD, GUARD + whole_ + GUARD);
#endif
    }
    // Whether something was written beside it.
    bool overrun() const {
#if !defined(__SANITIZE_ADDRESS__)
        for (unsigned char *at = first_; at < first_ + whole_; at++) {
            if (at == start) at += bytes;
            if (at < first_ + whole_ && *at != SLACK_MARK) return true;
        }
#endif
        return false;
    }
    // How far past the end, or before the start, an address near it is.
    bool near(const unsigned char *address, long &past, long &before) const {
        past = address - (start + bytes);
        before = start - address;
        return address >= start - 65536 && address < start + bytes + 65536;
    }

#if !defined(__SANITIZE_ADDRESS__)
  private:
    static const size_t GUARD = 16 << 20;
    unsigned char *first_;  // of whole_ bytes that do not fault
    size_t whole_;
#endif
};

// --- modules -----------------------------------------------------------------------------------------------------------

struct Shared {
    unsigned char *start;
    size_t bytes;
};

struct Module {
    int wave;
    std::map<std::string, const Entry *> entries;
    std::vector<Shared> shared;  // every `__shared__` variable of its kernels and of what they call
};

std::vector<std::unique_ptr<Module>> modules;
std::map<int, std::unique_ptr<Memory>> memories;
int next_memory = 1;
std::vector<int> of_arguments;  // per argument of the launch, the number of its memory or 0
std::string launching;

int load(std::istream &words) {
    std::string path, word;
    words >> path;
    void *handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) throw std::runtime_error(dlerror());
    struct link_map *map = nullptr;
    const Entry *entry = (const Entry *)dlsym(handle, "executor_entries");
    const int *wave = (const int *)dlsym(handle, "executor_wave");
    if (!entry || !wave || dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0) throw std::runtime_error("no module: " + path);
    auto module = std::make_unique<Module>();
    module->wave = *wave;
    for (; entry->name; entry++) module->entries[entry->name] = entry;
    while (words >> word) {
        size_t offset, bytes;
        if (sscanf(word.c_str(), "%zu,%zu", &offset, &bytes) != 2) throw std::runtime_error("not OFFSET,SIZE: " + word);
        module->shared.push_back({(unsigned char *)map->l_addr + offset, bytes});
    }
    modules.push_back(std::move(module));
    return (int)modules.size() - 1;
}

Memory &memory_of(int number) {
    auto found = memories.find(number);
    if (found == memories.end()) throw std::runtime_error("no memory " + std::to_string(number));
    return *found->second;
}

// --- launches ----------------------------------------------------------------------------------------------------------

std::string parameter_name(Parameter parameter) {
    if (parameter.kind == 'p') return "a pointer";
    return std::string(parameter.kind == 'f' ? "a float of " : "an integer of ") + std::to_string(parameter.size) + " bytes";
}

struct Arguments {
    std::vector<unsigned long long> values;
    std::vector<void *> pointers;

    Arguments(const Entry &entry, std::istream &words) {
        std::vector<std::string> given_words;
        for (std::string word; words >> word;) given_words.push_back(word);
        if (given_words.size() != (size_t)entry.count)
            throw std::runtime_error("the kernel takes " + std::to_string(entry.count) + " arguments, " +
                                     std::to_string(given_words.size()) + " given");
        of_arguments.clear();
        for (const std::string &word : given_words) {
            size_t number = values.size();
            unsigned long long value = 0;
            Parameter given = {word[0], (int)sizeof(void *)};
            int memory = 0;
            if (given.kind == 'p') {
                memory = std::stoi(word.substr(1));
                if (memory) value = (unsigned long long)memory_of(memory).start;
            } else {
                given.size = (int)(word.size() / 2);
                for (int i = given.size; i-- > 0;)
                    value = value << 8 | std::stoul(word.substr((size_t)(1 + 2 * i), 2), nullptr, 16);
            }
            Parameter wanted = entry.parameters[number];
            if (wanted.kind != given.kind || wanted.size != given.size)
                throw std::runtime_error("argument " + std::to_string(number) + " is " + parameter_name(given) +
                                         ", the kernel takes " + parameter_name(wanted));
            values.push_back(value);
            of_arguments.push_back(memory);
        }
        for (unsigned long long &value : values) pointers.push_back(&value);
    }
};

void launch(std::istream &words) {
    size_t number, shared_bytes;
    Order order;
    if (!(words >> number >> launching >> grid_size.x >> grid_size.y >> grid_size.z >> block_size.x >> block_size.y >>
          block_size.z >> shared_bytes >> order.state))
        throw std::runtime_error("not a launch");
    order.permuted = order.state != 0;
    if (number >= modules.size()) throw std::runtime_error("no module " + std::to_string(number));
    Module &module = *modules[number];
    auto found = module.entries.find(launching);
    if (found == module.entries.end()) throw std::runtime_error("no such kernel");
    const Entry &entry = *found->second;
    Arguments arguments(entry, words);

    unsigned threads = block_size.x * block_size.y * block_size.z;
    if (threads == 0 || threads > MOST_THREADS || threads > (unsigned)entry.most_threads)
        throw std::runtime_error("a block of " + std::to_string(threads) + " threads: 1 to " +
                                 std::to_string(std::min(MOST_THREADS, (unsigned)entry.most_threads)) + " are allowed");
    if (threads % (unsigned)module.wave)
        throw std::runtime_error("a block of " + std::to_string(threads) + " threads is not a whole number of waves of " +
                                 std::to_string(module.wave));
    if (!grid_size.x || !grid_size.y || !grid_size.z || grid_size.y > 65535 || grid_size.z > 65535)
        throw std::runtime_error("a grid is at least 1 and, in y and z, at most 65535");

    Memory dynamic(shared_bytes, 16);
    dynamic_shared = dynamic.start;
    the_block.call = entry.call;
    the_block.arguments = arguments.pointers.data();
    unsigned long long blocks = (unsigned long long)grid_size.x * grid_size.y * grid_size.z;
    std::vector<int> numbers;
    if (blocks > INT_MAX) throw std::runtime_error("more blocks than a CPU can run");
    order.fill(numbers, (int)blocks);
    for (Shared &one : module.shared) poison(one.start, one.bytes);
    std::vector<bool> used(module.shared.size());
    size_t used_bytes = 0;
    for (int at : numbers) {
        unsigned i = (unsigned)at;
        block = {i % grid_size.x, i / grid_size.x % grid_size.y, i / grid_size.x / grid_size.y};
        poison(dynamic.start, shared_bytes);
        std::string problem = the_block.run((int)threads, module.wave, order);
        if (!problem.empty())
            throw std::runtime_error("block (" + std::to_string(block.x) + "," + std::to_string(block.y) + "," +
                                     std::to_string(block.z) + "): " + problem);
        if (dynamic.overrun()) throw std::runtime_error("wrote outside its dynamic shared memory");
        for (size_t n = 0; n < used.size(); n++) {
            Shared &one = module.shared[n];
            if (!used[n] && !poisoned(one.start, one.bytes)) {
                used[n] = true;
                used_bytes += one.bytes;
            }
            if (used[n]) poison(one.start, one.bytes);
        }
        if (used_bytes + shared_bytes > MOST_SHARED)
            throw std::runtime_error("uses " + std::to_string(used_bytes) + " bytes of static and " +
                                     std::to_string(shared_bytes) + " of dynamic shared memory, together at most " +
                                     std::to_string(MOST_SHARED));
    }
    for (size_t n = 0; n < of_arguments.size(); n++)
        if (of_arguments[n] && memory_of(of_arguments[n]).overrun())
            throw std::runtime_error("wrote outside the memory of argument " + std::to_string(n));
}

// --- faults ------------------------------------------------------------------------------------------------------------

#if !defined(__SANITIZE_ADDRESS__)
// Nothing can be saved here; what is told is read from static memory, and the process ends.
void fault(int signal, siginfo_t *info, void *) {
    std::string text = launching + ": " + the_block.where() + ": ";
    const unsigned char *address = (const unsigned char *)info->si_addr;
    long past, before;
    if (signal == SIGFPE) {
        text += "an integer was divided by zero";
    } else if (the_block.holds(address)) {
        text += "the stack of a thread overflowed";
    } else {
        text += "an access out of bounds or misaligned";
        for (size_t n = 0; n < of_arguments.size(); n++)
            if (of_arguments[n] && memory_of(of_arguments[n]).near(address, past, before))
                text += past >= 0 ? ", " + std::to_string(past) + " bytes past the end of argument " + std::to_string(n)
                                  : ", " + std::to_string(before) + " bytes before argument " + std::to_string(n);
    }
    text += "\n";
    if (write(2, text.data(), text.size()) < 0) _exit(4);
    _exit(3);
}

void catch_faults() {
    static unsigned char alternate[65536];
    stack_t stack = {};
    stack.ss_sp = alternate;
    stack.ss_size = sizeof alternate;
    sigaltstack(&stack, nullptr);
    struct sigaction action = {};
    action.sa_sigaction = fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int signal : {SIGSEGV, SIGBUS, SIGFPE}) sigaction(signal, &action, nullptr);
}
#else
void catch_faults() {}
#endif

// --- requests ----------------------------------------------------------------------------------------------------------

bool read_line(std::string &line) {
    line.clear();
    for (int c; (c = getchar()) != EOF;) {
        if (c == '\n') return true;
        line += (char)c;
    }
    return false;
}

void answer(const std::string &line) {
    fwrite(line.data(), 1, line.size(), stdout);
    fputc('\n', stdout);
}

void serve(const std::string &request) {
    std::istringstream words(request);
    std::string verb;
    words >> verb;
    int number = 0;
    if (verb == "load") {
        answer("ok " + std::to_string(load(words)));
    } else if (verb == "new") {
        size_t bytes, alignment;
        words >> bytes >> alignment;
        memories[next_memory] = std::make_unique<Memory>(bytes, alignment);
        answer("ok " + std::to_string(next_memory++));
    } else if (verb == "free") {
        words >> number;
        memories.erase(number);
        answer("ok");
    } else if (verb == "write") {
        size_t bytes;
        words >> number >> bytes;
        Memory &memory = memory_of(number);
        if (bytes != memory.bytes || fread(memory.start, 1, bytes, stdin) != bytes) exit(2);
        answer("ok");
    } else if (verb == "read") {
        words >> number;
        Memory &memory = memory_of(number);
        answer("ok");
        fwrite(memory.start, 1, memory.bytes, stdout);
    } else if (verb == "launch") {
        launch(words);
        answer("ok");
    } else {
        throw std::runtime_error("no such request: " + verb);
    }
}

}  // namespace

int main() {
    catch_faults();
    for (std::string request; read_line(request);) {
        try {
            serve(request);
        } catch (const std::exception &problem) {
            std::string text = problem.what();
            answer("error " + std::to_string(text.size()));
            fwrite(text.data(), 1, text.size(), stdout);
        }
        fflush(stdout);
    }
    return 0;
}

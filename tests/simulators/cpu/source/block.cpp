#include "block.h"

#include <algorithm>
#include <cstring>
#include <map>

namespace executor {

Index thread, block, block_size, grid_size;
unsigned char *dynamic_shared;
int lane;
Block the_block;

void wait_block(const char *file, int line) { the_block.wait(BARRIER, 0, file, line); }
const unsigned long long *wait_wave(Operation operation, unsigned long long value, const char *file, int line) {
    the_block.wait(operation, value, file, line);
    return the_block.gathered();
}

namespace {

const char *NAMES[] = {"",           "__syncthreads", "shuffle", "shuffle_xor",
                       "shuffle_up", "shuffle_down",  "ballot",  "sync_wave"};

std::string coordinates(Index index) {
    return "(" + std::to_string(index.x) + "," + std::to_string(index.y) + "," + std::to_string(index.z) + ")";
}

std::string doing(const Thread &thread) {
    if (thread.state == ENDED) return "has ended";
    const char *slash = strrchr(thread.file, '/');
    return std::string("is at ") + NAMES[thread.operation] + " in " + (slash ? slash + 1 : thread.file) + ":" +
           std::to_string(thread.line);
}

bool together(const Thread &a, const Thread &b) {
    return a.state == WAITING && b.state == WAITING && a.operation == b.operation && a.line == b.line &&
           (a.file == b.file || strcmp(a.file, b.file) == 0);
}

}  // namespace

void Block::body() {
    arrive(the_block.scheduler_);
    the_block.call(the_block.arguments);
    Thread &self = the_block.threads_[(size_t)the_block.current_];
    self.state = ENDED;
    switch_context(self.context, the_block.scheduler_, true);
    abort();
}

void Block::wait(Operation operation, unsigned long long value, const char *file, int line) {
    Thread &self = threads_[(size_t)current_];
    self.state = WAITING;
    self.operation = operation;
    self.file = file;
    self.line = line;
    self.value = value;
    switch_context(self.context, scheduler_);
}

void Block::enter(int number) {
    Thread &next = threads_[(size_t)number];
    current_ = number;
    thread = next.index;
    lane = number % wave_;
    switch_context(scheduler_, next.context);
}

// All threads of a wave that can run have: its lanes wait together, or all have ended, or something is wrong.
std::string Block::run_wave(int first, Order &order) {
    order.fill(lanes_, wave_);
    for (int lane : lanes_)
        if (threads_[(size_t)(first + lane)].state == READY) enter(first + lane);
    const Thread &one = threads_[(size_t)first];
    for (int i = 1; i < wave_; i++) {
        const Thread &other = threads_[(size_t)(first + i)];
        if (!(one.state == ENDED && other.state == ENDED) && !together(one, other)) return diverged(first, wave_);
    }
    if (one.state == ENDED || one.operation == BARRIER) return "";
    for (int i = 0; i < wave_; i++) gathered_[(size_t)(first + i)] = threads_[(size_t)(first + i)].value;
    for (int i = 0; i < wave_; i++) threads_[(size_t)(first + i)].state = READY;
    return "";
}

// No wave can run: all threads are at one barrier, or something is wrong.
std::string Block::meet() {
    for (int i = 1; i < count_; i++)
        if (!together(threads_[0], threads_[(size_t)i])) return diverged(0, count_);
    for (int i = 0; i < count_; i++) threads_[(size_t)i].state = READY;
    return "";
}

std::string Block::diverged(int first, int count) const {
    std::map<std::string, std::pair<int, Index>> groups;  // what they do: how many, and one of them
    bool of_wave = false;
    for (int i = first; i < first + count; i++) {
        const Thread &thread = threads_[(size_t)i];
        of_wave = of_wave || (thread.state == WAITING && thread.operation != BARRIER);
        groups.emplace(doing(thread), std::make_pair(0, thread.index)).first->second.first++;
    }
    std::string message = of_wave ? "divergent wave operation" : "divergent barrier";
    const char *separator = ": ";
    for (const auto &[what, who] : groups) {
        message += separator + std::to_string(who.first) + " of " + std::to_string(count) + " threads, " +
                   coordinates(who.second) + " among them: each " + what;
        separator = "; ";
    }
    return message;
}

std::string Block::run(int threads, int wave, Order &order) {
    while ((int)threads_.size() < threads) {
        threads_.emplace_back();
        allocate_stack(threads_.back().context);
    }
    count_ = threads;
    wave_ = wave;
    gathered_.resize((size_t)threads);
    for (unsigned i = 0; i < (unsigned)threads; i++) {
        Thread &one = threads_[i];
        one.index = {i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y};
        one.state = READY;
        prepare(one.context, body);
    }
    std::string problem;
    std::vector<int> waves;
    while (problem.empty()) {
        waves.clear();
        // Lanes of a wave are in the same state between its turns.
        for (int first = 0; first < threads; first += wave)
            if (threads_[(size_t)first].state == READY) waves.push_back(first);
        if (waves.empty()) {
            auto ended = [](const Thread &one) { return one.state == ENDED; };
            if (std::all_of(threads_.begin(), threads_.begin() + threads, ended)) return "";
            problem = meet();
        } else if (order.permuted) {
            problem = run_wave(waves[order.draw((unsigned)waves.size())], order);
        } else {
            int first = waves[0];
            while (problem.empty() && threads_[(size_t)first].state == READY) problem = run_wave(first, order);
        }
    }
    for (Thread &one : threads_) clean_stack(one.context);
    return problem;
}

std::string Block::where() const {
    return "in block " + coordinates(block) + ", thread " + coordinates(thread);
}

bool Block::holds(const void *address) const {
    for (const Thread &one : threads_)
        if (address < one.context.stack && address >= one.context.stack - sysconf(_SC_PAGESIZE)) return true;
    return false;
}

}  // namespace executor

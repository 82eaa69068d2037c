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
    if (thread.ended) return "has ended";
    const char *slash = strrchr(thread.file, '/');
    return std::string("is at ") + NAMES[thread.operation] + " in " + (slash ? slash + 1 : thread.file) + ":" +
           std::to_string(thread.line);
}

bool together(const Thread &a, const Thread &b) {
    return !a.ended && !b.ended && a.operation == b.operation && a.line == b.line &&
           (a.file == b.file || strcmp(a.file, b.file) == 0);
}

}  // namespace

void Block::body() {
    // The first lane of a turn comes from the scheduler, every other from the lane before it.
    arrive(the_block.turn_ ? nullptr : &the_block.scheduler_);
    the_block.call(the_block.arguments);
    Thread &self = the_block.threads_[(size_t)the_block.current_];
    self.ended = true;
    switch_context(self.context, the_block.next(), true);
    abort();
}

void Block::wait(Operation operation, unsigned long long value, const char *file, int line) {
    Thread &self = threads_[(size_t)current_];
    self.operation = operation;
    self.file = file;
    self.line = line;
    values_[waves_[(size_t)(first_ / wave_)].filling][(size_t)current_] = value;
    Context &to = next();
    if (&to != &self.context) switch_context(self.context, to);
}

// Make the lane whose turn it is the one that runs, but for the switch to it.
Context &Block::take_up(int turn) {
    turn_ = turn;
    int lane_number = lanes_[(size_t)turn];
    current_ = first_ + lane_number;
    Thread &taken = threads_[(size_t)current_];
    thread = taken.index;
    lane = lane_number;
    return taken.context;
}

// Where execution goes from the thread that runs, which waits now or has ended: to its wave's next lane. Behind the last,
// all of them are together, or something is wrong; the scheduler finds out what, and takes the next wave.
Context &Block::next() {
    const Thread &one = threads_[(size_t)(first_ + lanes_[0])], &self = threads_[(size_t)current_];
    if (turn_ && !together(one, self) && !(one.ended && self.ended)) apart_ = true;
    if (turn_ + 1 < wave_) return take_up(turn_ + 1);
    Wave &wave = waves_[(size_t)(first_ / wave_)];
    wave.state = one.ended ? ENDED : WAITING;
    if (apart_ || one.ended || one.operation == BARRIER) return scheduler_;
    wave.state = READY;
    wave.filling = !wave.filling;
    // In order, a wave goes on as far as it can.
    return permuted_ ? scheduler_ : take_up(0);
}

// Give a wave its turn: its lanes run, in the order of `lanes_`.
std::string Block::run_wave(int first) {
    first_ = first;
    apart_ = false;
    switch_context(scheduler_, take_up(0));
    return apart_ ? diverged(first, wave_) : "";
}

// No wave can run: all threads are at one barrier, or something is wrong.
std::string Block::meet() {
    for (int i = 1; i < count_; i++)
        if (!together(threads_[0], threads_[(size_t)i])) return diverged(0, count_);
    for (Wave &wave : waves_) wave.state = READY;
    return "";
}

std::string Block::diverged(int first, int count) const {
    std::map<std::string, std::pair<int, Index>> groups;  // what they do: how many, and one of them
    bool of_wave = false;
    for (int i = first; i < first + count; i++) {
        const Thread &thread = threads_[(size_t)i];
        of_wave = of_wave || (!thread.ended && thread.operation != BARRIER);
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
        allocate_stack(threads_.back().context, threads_.size());
    }
    count_ = threads;
    wave_ = wave;
    permuted_ = order.permuted;
    waves_.assign((size_t)(threads / wave), Wave{READY, 0});
    for (std::vector<unsigned long long> &values : values_) values.resize((size_t)threads);
    for (unsigned i = 0; i < (unsigned)threads; i++) {
        Thread &one = threads_[i];
        one.index = {i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y};
        one.ended = false;
        prepare(one.context, body);
    }
    Order in_order;
    in_order.fill(lanes_, wave);
    std::string problem;
    while (problem.empty()) {
        ready_.clear();
        bool ended = true;
        for (int i = 0; i < threads / wave; i++) {
            if (waves_[(size_t)i].state == READY) ready_.push_back(i * wave);
            ended = ended && waves_[(size_t)i].state == ENDED;
        }
        if (ended) return "";
        if (ready_.empty()) {
            problem = meet();
        } else if (order.permuted) {
            int first = ready_[order.draw((unsigned)ready_.size())];
            order.fill(lanes_, wave_);
            problem = run_wave(first);
        } else {
            for (size_t i = 0; i < ready_.size() && problem.empty(); i++) problem = run_wave(ready_[i]);
        }
    }
    for (Thread &one : threads_) clean_stack(one.context, one.context.bytes);
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

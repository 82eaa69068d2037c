// Runs the threads of one block to their ends: every thread until it waits or ends, wave by wave.
#pragma once
#include <string>
#include <vector>

#include "calls.h"
#include "fiber.h"

namespace executor {

struct Thread {
    Context context;
    Index index;
    bool ended;
    Operation operation;  // what it waits for, and where
    const char *file;
    int line;
};

// Of a wave between its turns, when all of its lanes are in the same state.
enum State { READY, WAITING, ENDED };
struct Wave {
    State state;
    unsigned char filling;  // of its lanes' two lists of values, the one that the operation they come to next fills
};

struct Order {
    bool permuted = false;
    unsigned long long state = 0;

    // A number below `bound`, by a linear congruential generator.
    unsigned draw(unsigned bound) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        return (unsigned)((state >> 33) % bound);
    }
    // Numbers 0 to n - 1, as they come or shuffled.
    void fill(std::vector<int> &numbers, int n) {
        numbers.resize((size_t)n);
        for (int i = 0; i < n; i++) numbers[(size_t)i] = i;
        if (!permuted) return;
        for (int i = n - 1; i > 0; i--) std::swap(numbers[(size_t)i], numbers[draw((unsigned)i + 1)]);
    }
};

class Block {
  public:
    // Run all threads of a block; returns what went wrong, or nothing. The globals of gpu.h but `thread` and `lane` are
    // set, and so is `kernel`.
    std::string run(int threads, int wave, Order &order);

    // The thread that runs, or ran last, for a message.
    std::string where() const;

    void (*call)(void **) = nullptr;
    void **arguments = nullptr;

    void wait(Operation operation, unsigned long long value, const char *file, int line);
    // What the lanes of this thread's wave gave to the operation that it has just waited for.
    const unsigned long long *gathered() const {
        return &values_[!waves_[(size_t)(first_ / wave_)].filling][(size_t)first_];
    }
    bool holds(const void *address) const;  // whether it is in the page below a stack

  private:
    static void body();
    Context &take_up(int turn);
    Context &next();
    std::string run_wave(int first);
    std::string meet();
    std::string diverged(int first, int count) const;

    std::vector<Thread> threads_;
    std::vector<Wave> waves_;
    // Two, because a lane may come to its next operation before another has read what came of the last.
    std::vector<unsigned long long> values_[2];
    std::vector<int> lanes_, ready_;
    Context scheduler_;
    int current_ = 0, count_ = 0, wave_ = 1;
    // The wave that has its turn: its first thread, how many of its lanes ran before the one that runs, and whether one
    // of them waits for something else than the first.
    int first_ = 0, turn_ = 0;
    bool apart_ = false, permuted_ = false;
};

extern Block the_block;

}  // namespace executor

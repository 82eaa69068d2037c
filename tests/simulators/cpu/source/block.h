// Runs the threads of one block to their ends: every thread until it waits or ends, wave by wave.
#pragma once
#include <string>
#include <vector>

#include "calls.h"
#include "fiber.h"

namespace executor {

enum State { READY, WAITING, ENDED };

struct Thread {
    Context context;
    Index index;
    State state;
    Operation operation;  // what it waits for, and where
    const char *file;
    int line;
    unsigned long long value;
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
    const unsigned long long *gathered() const { return &gathered_[(size_t)(current_ / wave_ * wave_)]; }
    bool holds(const void *address) const;  // whether it is in the page below a stack

  private:
    static void body();
    void enter(int number);
    std::string run_wave(int first, Order &order);
    std::string meet();
    std::string diverged(int first, int count) const;

    std::vector<Thread> threads_;
    std::vector<unsigned long long> gathered_;
    std::vector<int> lanes_, ready_;
    Context scheduler_;
    int current_ = 0, count_ = 0, wave_ = 1;
};

extern Block the_block;

}  // namespace executor

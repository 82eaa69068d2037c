// Between a kernel and the worker that runs it: what the worker, `block.cpp`, offers it, and how it calls it.
#pragma once

namespace executor {

struct Index {
    unsigned x, y, z;
};
enum Operation { NONE, BARRIER, SHUFFLE, SHUFFLE_XOR, SHUFFLE_UP, SHUFFLE_DOWN, BALLOT, SYNC_WAVE };

extern Index thread, block, block_size, grid_size;
extern unsigned char *dynamic_shared;
extern int lane;

// Wait for all threads of the block.
void wait_block(const char *file, int line);
// Wait for all lanes of the wave; returns what each of them gave, valid until this thread's next operation.
const unsigned long long *wait_wave(Operation operation, unsigned long long value, const char *file, int line);

// A module has `executor_entries`, ended by one without a name, and `executor_wave`, the lanes of its waves.
struct Parameter {
    char kind;  // 'p' pointer, 'i' integer, 'f' float
    int size;
};
struct Entry {
    const char *name;
    void (*call)(void **arguments);
    const Parameter *parameters;
    int count;
    int most_threads;
};

}  // namespace executor

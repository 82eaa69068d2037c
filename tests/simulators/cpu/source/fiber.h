// A stack of its own to run a function on, entered and left by name. Switching costs some 10 ns on x86-64; elsewhere, or
// with EXECUTOR_UCONTEXT, the C library does it, which takes two system calls.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <sys/mman.h>
#include <unistd.h>

#if !defined(__x86_64__) && !defined(EXECUTOR_UCONTEXT)
#define EXECUTOR_UCONTEXT 1
#endif
#if defined(EXECUTOR_UCONTEXT)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace executor {

#if !defined(EXECUTOR_UCONTEXT)
// Saves the registers that a call must keep, and the stack pointer to *from; takes up `to` the same way.
extern "C" void executor_switch(void **from, void *to);

#endif

// Where execution was left: of a fiber, or of the scheduler that entered it.
struct Context {
#if defined(EXECUTOR_UCONTEXT)
    ucontext_t registers;
#else
    void *stack_pointer = nullptr;
#endif
    unsigned char *stack = nullptr;
    size_t bytes = 0;
    void *fake_stack = nullptr;
};

// `ends`: the context that is left is never entered again.
inline void switch_context(Context &from, Context &to, bool ends = false) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(ends ? nullptr : &from.fake_stack, to.stack, to.bytes);
#endif
#if defined(EXECUTOR_UCONTEXT)
    swapcontext(&from.registers, &to.registers);
#else
    executor_switch(&from.stack_pointer, to.stack_pointer);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
    (void)ends;
}

// Call first on a fiber; `from` is the context that was left for it, where its stack is not known yet.
inline void arrive(Context *from) {
#if defined(__SANITIZE_ADDRESS__)
    const void *stack;
    size_t bytes;
    __sanitizer_finish_switch_fiber(nullptr, &stack, &bytes);
    if (from) {
        from->stack = (unsigned char *)stack;
        from->bytes = bytes;
    }
#endif
    (void)from;
}

// Room for local arrays, and for the sanitizer's red zones around them. Below it lies a page that faults.
constexpr size_t STACK_BYTES = 256 * 1024;

// The stacks of fibers with different numbers end at different lines of a page: at the same ones they would share a few
// lines of the processor's cache.
inline void allocate_stack(Context &fiber, size_t number) {
    constexpr size_t LINE = 64, LINES = 64;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    void *memory = mmap(nullptr, page + STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE) != 0) abort();
    fiber.stack = (unsigned char *)memory + page;
    fiber.bytes = STACK_BYTES - number * 5 % LINES * LINE;
}

// Forget the red zones that a run which did not return has left in the topmost bytes of the stack.
inline void clean_stack(Context &fiber, size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
    ASAN_UNPOISON_MEMORY_REGION(fiber.stack + fiber.bytes - bytes, bytes);
#endif
    (void)fiber, (void)bytes;
}

// Make the next switch to `fiber` call `function`, which must not return, and leaves nothing but its own frame there.
inline void prepare(Context &fiber, void (*function)()) {
    clean_stack(fiber, 1024);
    fiber.fake_stack = nullptr;
#if defined(EXECUTOR_UCONTEXT)
    getcontext(&fiber.registers);
    fiber.registers.uc_stack.ss_sp = fiber.stack;
    fiber.registers.uc_stack.ss_size = fiber.bytes;
    fiber.registers.uc_link = nullptr;
    makecontext(&fiber.registers, function, 0);
#else
    void **top = (void **)(fiber.stack + fiber.bytes);
    // No return address: the stack is aligned as after a call, and a trace ends here.
    *--top = nullptr;
    *--top = (void *)function;
    for (int i = 0; i < 6; i++) *--top = nullptr;
    fiber.stack_pointer = top;
#endif
}

}  // namespace executor

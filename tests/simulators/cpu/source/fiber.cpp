#include "fiber.h"

#if !defined(EXECUTOR_UCONTEXT)
asm(R"(
    .text
    .globl executor_switch
    .type executor_switch, @function
executor_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
    .size executor_switch, .-executor_switch
)");
#endif

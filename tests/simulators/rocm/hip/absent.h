// A function that the wheel is linked against and the stand-in does not have: a call of it says so and ends the process.
#include <cstdio>
#include <cstdlib>

namespace {
[[noreturn]] void absent(const char *name) {
    fprintf(stderr, "stand-in HIP: %s is not there\n", name);
    abort();
}
}  // namespace

#define ABSENT(name) \
    extern "C" __attribute__((visibility("default"))) void name() { absent(#name); }
// A library may have none.
[[maybe_unused]] static void (*const absent_is_used)(const char *) = absent;

// A code object as the stand-in's compiler writes it and its runtime loads it: this, and a shared library for the CPU.
#pragma once
#include <cstdint>

struct CodeHeader {
    char magic[16];
    uint64_t bytes;         // of the library behind it
    uint64_t origin_bytes;  // behind that: the options, one a line, an empty line, and the source
};
constexpr char CODE_MAGIC[16] = "HIP STAND-IN 02";

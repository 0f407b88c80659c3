// An instruction set: inner loops, compiled on their own for it, and what the host code calls of them.

#pragma once

#include "types.h"

// GCC's pragmas set the target; other compilers and processors have the baseline alone.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define KV_FAST_GCC_X86
#endif

namespace {

struct InstructionSet {
  const char* name;
  Attend* attend;
  Multiply* (*choose_multiply)(at::ScalarType weight);
  MultiplyTiles* (*choose_multiply_tiles)(at::ScalarType codes, at::ScalarType scales);
  MultiplyTiles* (*choose_make_dense)(at::ScalarType codes, at::ScalarType scales);
  bool reads_fours;  // of caches of codes, which are tiled for products of integers
};

}  // namespace

// The InstructionSet of this library.
extern "C" const void* kv_fast_instruction_set();

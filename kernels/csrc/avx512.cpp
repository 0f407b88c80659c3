// The inner loops for AVX512.

#include "instruction_set.h"

#ifdef KV_FAST_GCC_X86
#include "avx512.inc"

extern "C" const void* kv_fast_instruction_set() {
  static constexpr InstructionSet SET = {"avx512",
                                         avx512::attend<avx512::keys_of,
                                                        avx512::values_of>,
                                         avx512::choose_multiply,
                                         avx512::choose_multiply_tiles<avx512::PlainDots>,
                                         avx512::choose_make_dense, false};
  return &SET;
}

#else
#include "baseline.cpp"
#endif

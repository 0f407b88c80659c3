// The inner loops for AVX512 with its dot products of bytes, AVX512-VNNI.

#include "instruction_set.h"

#ifdef KV_FAST_GCC_X86
#include "avx512.inc"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,prefer-vector-width=512")
namespace {

namespace avx512vnni {
using namespace avx512;
#include "digits.inc"
#include "codes.inc"
#include "codes_vnni.inc"
#include "quantized.inc"
#include "quantized_vnni.inc"
}  // namespace avx512vnni

}  // namespace
#pragma GCC pop_options

extern "C" const void* kv_fast_instruction_set() {
  static constexpr InstructionSet SET = {"avx512vnni",
                                         avx512::attend<avx512vnni::keys_in_fours,
                                                        avx512vnni::values_in_fours>,
                                         avx512::choose_multiply,
                                         avx512vnni::choose_multiply_tiles<avx512vnni::DigitDots>,
                                         avx512::choose_make_dense, true};
  return &SET;
}

#else
#include "baseline.cpp"
#endif

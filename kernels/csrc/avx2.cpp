// The inner loops for AVX2.

#include "instruction_set.h"

#ifdef KV_FAST_GCC_X86
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace {

namespace avx2 {
constexpr size_t LANES = 8;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
inline Floats load_vector(const float* from) { return _mm256_loadu_ps(from); }
inline Floats load_vector(const Half* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128((__m128i*)from));
}
inline Floats load_vector(const BFloat16* from) {
  return Floats(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((__m128i*)from)), 16));
}
inline Ints load_ints(const void* from) {
  return Ints(_mm256_cvtepi8_epi32(_mm_loadl_epi64((__m128i*)from)));
}
#include "vectors.inc"
#include "attention.inc"
#include "linear.inc"
#include "quantized.inc"
#include "dense.inc"
#include "shorts.inc"
#include "codes.inc"
#include "codes_shorts.inc"
#include "quantized_shorts.inc"
}  // namespace avx2

}  // namespace
#pragma GCC pop_options

extern "C" const void* kv_fast_instruction_set() {
  static constexpr InstructionSet SET = {"avx2",
                                         avx2::attend<avx2::keys_in_fours,
                                                      avx2::values_in_fours>,
                                         avx2::choose_multiply,
                                         avx2::choose_multiply_tiles<avx2::ShortDots>,
                                         avx2::choose_make_dense, true};
  return &SET;
}

#else
#include "baseline.cpp"
#endif

// The inner loops, compiled once per instruction set, and the choice of one at run time.

#pragma once

#include "types.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define KV_FAST_X86
#include <immintrin.h>
#endif

namespace {

// GCC's pragmas set the target; other compilers and processors have the baseline alone.
namespace baseline {
constexpr size_t LANES = 4;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
template <class T>
Floats load_vector(const T* from) {
  return Floats{widen(from[0]), widen(from[1]), widen(from[2]), widen(from[3])};
}
#include "vectors.inc"
#include "attention.inc"
#include "linear.inc"
#include "quantized.inc"
#include "dense.inc"
}  // namespace baseline

#ifdef KV_FAST_X86
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
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
inline Floats load_vector(const int8_t* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((__m128i*)from)));
}
#include "vectors.inc"
#include "attention.inc"
#include "linear.inc"
#include "quantized.inc"
#include "dense.inc"
#include "shorts.inc"
#include "int8_shorts.inc"
#include "quantized_shorts.inc"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")
namespace avx512 {
constexpr size_t LANES = 16;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
inline Floats load_vector(const float* from) { return _mm512_loadu_ps(from); }
inline Floats load_vector(const Half* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((__m256i*)from));
}
inline Floats load_vector(const BFloat16* from) {
  const __m256i bits = _mm256_loadu_si256((__m256i*)from);
  return Floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline Floats load_vector(const int8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((__m128i*)from)));
}
#include "vectors.inc"
#include "attention.inc"
#include "linear.inc"
#include "quantized.inc"
#include "dense.inc"
}  // namespace avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,prefer-vector-width=512")
namespace avx512vnni {
using namespace avx512;
#include "digits.inc"
#include "int8_vnni.inc"
#include "quantized.inc"
#include "quantized_vnni.inc"
}  // namespace avx512vnni
#pragma GCC pop_options
#endif

struct InstructionSet {
  std::string name;
  Attend* (*choose_attend)(const at::Tensor& k, const at::Tensor& v);
  Multiply* (*choose_multiply)(at::ScalarType weight);
  MultiplyTiles* (*choose_multiply_tiles)(at::ScalarType codes, at::ScalarType scales);
  MultiplyTiles* (*choose_make_dense)(at::ScalarType codes, at::ScalarType scales);
  bool reads_fours;  // of int8 caches, which are tiled for products of integers
};

// What this processor can run, best first.
inline const std::vector<InstructionSet>& available() {
  static const auto sets = [] {
    std::vector<InstructionSet> found;
#ifdef KV_FAST_X86
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512 && __builtin_cpu_supports("avx512vnni"))
      found.push_back({"avx512vnni", avx512vnni::choose_attend, avx512::choose_multiply,
                       avx512vnni::choose_multiply_tiles<avx512vnni::DigitDots>,
                       avx512::choose_make_dense, true});
    if (avx512)
      found.push_back({"avx512", avx512::choose_attend, avx512::choose_multiply,
                       avx512::choose_multiply_tiles<avx512::PlainDots>, avx512::choose_make_dense,
                       false});
    if (avx2)
      found.push_back({"avx2", avx2::choose_attend_of_fours, avx2::choose_multiply,
                       avx2::choose_multiply_tiles<avx2::ShortDots>, avx2::choose_make_dense,
                       true});
#endif
    found.push_back({"baseline", baseline::choose_attend, baseline::choose_multiply,
                     baseline::choose_multiply_tiles<baseline::PlainDots>, baseline::choose_make_dense,
                       false});
    return found;
  }();
  return sets;
}

inline const InstructionSet* current = &available().front();

}  // namespace

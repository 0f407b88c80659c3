// What the host code of the CPU kernels hands to their inner loops.

#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Half.h>
#include <c10/util/bit_cast.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

// Inline all calls: loops over constants then keep their arrays in registers.
#define FLATTEN __attribute__((flatten))

// GCC drops calls of functions that do nothing else, unless they are inlined at once.
#define PREFETCHES __attribute__((always_inline))

namespace {

using c10::BFloat16;
using Float8 = c10::Float8_e4m3fn;
using c10::Half;

constexpr int64_t TILE = 64;  // slots per step: scores and decoded values stay in the L1 cache
constexpr int ZERO_NIBBLE = 8;  // is subtracted from 4-bit codes before they are multiplied
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

// Two 4-bit codes, the even element in the low half.
struct Nibbles {
  uint8_t both;
};

// Where element i of a row lies; i is even for nibbles.
template <class T>
const T* element(const T* row, int64_t i) {
  return row + i / (std::is_same_v<T, Nibbles> ? 2 : 1);
}

// Bytes of `count` elements.
template <class T>
constexpr int64_t bytes_of(int64_t count) {
  return count * sizeof(T) / (std::is_same_v<T, Nibbles> ? 2 : 1);
}

// Elements per row of scratch: whole vectors of the widest registers.
constexpr int64_t padded(int64_t width, int64_t multiple = 16) {
  return (width + multiple - 1) / multiple * multiple;
}

inline float widen(float x) { return x; }
inline float widen(int8_t x) { return x; }
inline float widen(Half x) { return x; }
inline float widen(BFloat16 x) { return c10::bit_cast<float>(uint32_t(x.x) << 16); }
// NaN, which is never stored, as 480.
inline float widen(Float8 x) {
  return c10::bit_cast<float>((x.x & 0x7fu) << 20 | (x.x & 0x80u) << 24) * 0x1p120f;
}

// x rounded to T, as fp32.
template <class T>
float rounded_to(float x) {
  return widen(T(x));
}
// Without branches, so that loops of it become vectors.
template <>
inline float rounded_to<BFloat16>(float x) {
  const uint32_t bits = c10::bit_cast<uint32_t>(x), nearest = bits + 0x7fff + (bits >> 16 & 1);
  return c10::bit_cast<float>((x == x ? nearest : 0x7fc00000) & 0xffff0000);
}

// Once, not in each of the many kernels that take scratch.
[[noreturn]] __attribute__((noinline, cold)) inline void refuse_scratch() {
  TORCH_CHECK_WITH(OutOfMemoryError, false, "no memory for kernel scratch");
}

// Scratch, aligned to 64 bytes. Not a tensor: a kernel needs a dozen, at a microsecond each. Nor
// from aligned_alloc, which keeps no freed memory at hand as malloc does.
template <class T>
struct Scratch {
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory;
  T* data;

  explicit Scratch(int64_t count) : memory(std::malloc(count * sizeof(T) + 64)) {
    if (!memory) refuse_scratch();
    data = reinterpret_cast<T*>(padded(reinterpret_cast<intptr_t>(memory.get()), 64));
  }
};

// body(T{}) for the C++ type of a floating dtype.
template <class Body>
auto by_type(at::ScalarType type, Body body) {
  switch (type) {
    case at::kFloat: return body(float{});
    case at::kHalf: return body(Half{});
    case at::kBFloat16: return body(BFloat16{});
    default: TORCH_CHECK_VALUE(false, "no CPU kernel for ", type);
  }
}

// K or V of one sequence and KV head: payload of S slots, scale [S] and zero [S] or none.
struct Side {
  at::ScalarType type;
  bool is_tiled;
  const void* payload;
  const BFloat16* scale;
  const BFloat16* zero;
};

// One KV head of one sequence with its query rows, row = g * T + t, scaled by sm_scale * log2(e).
struct Head {
  const float* q;  // [rows, padded(D)], zero past head_dim
  Side k, v;
  int64_t num_rows, head_dim, num_queries, filled;

  int64_t bound(int64_t row) const { return filled + row % num_queries; }
  int64_t num_slots() const { return filled + num_queries - 1; }
};

// Online softmax of one row, to base 2: its sums are relative to exp2(top).
struct RowState {
  float top = MINUS_INFINITY;
  alignas(64) float totals[16] = {};  // the sum of the weights is the sum of these

  float total() const { return std::accumulate(totals, totals + 16, 0.0f); }

  // Nothing was visible. Where all scores were NaN the total is, and `top` says nothing.
  bool is_empty() const { return top == MINUS_INFINITY && total() == 0; }
};

// Attention of a head's rows over slots lo .. hi - 1, added to state and sums [rows, padded(D)].
using Attend = void(const Head&, int64_t lo, int64_t hi, RowState* state, float* sums);

// A matrix product of few rows with what surrounds it; see kernels/linear.py.
struct Product {
  const void* weight;  // [out_features or twice as many, in_features]
  const float* x;      // [rows, padded(in_features)], zero past in_features
  const void* residual;  // [rows, out_features] or none
  void* out;             // [rows, out_features]
  int64_t num_rows, in_features, out_features;
  bool swiglu;
  at::ScalarType dtype;  // of residual and out
};

// Output features lo .. hi - 1 of all rows.
using Multiply = void(const Product&, int64_t lo, int64_t hi);

constexpr int64_t TILE_ROWS = 16;  // of a quantised weight, whose words lie side by side
constexpr int64_t STEP = 8;        // channels of a tile that are multiplied at a time
constexpr int64_t DENSE_CHANNELS = 512;  // that are made dense at a time

// With a weight of codes in tiles; see kernels/quantized.py.
struct QuantizedProduct : Product {
  const uint8_t* codes;  // [tiles, words, 16, 4]
  const void* scales;    // [tiles, groups, 16]
  const void* mins;      // likewise, or none
  int64_t group;         // channels that share a scale

  int64_t num_groups() const { return in_features / group; }
  int zero(int64_t bits) const { return bits == 8 || mins ? 0 : 8; }  // the code of value 0
};

// Output tiles lo .. hi - 1 of all rows.
using MultiplyTiles = void(const QuantizedProduct&, int64_t lo, int64_t hi);

}  // namespace

// New keys and values stored in a cache, as kv_formats.py encodes and kernels/slots.py places them.

#pragma once

#include "types.h"

namespace {

// Where channel d of a slot lies in the payload of a pair.
inline int64_t place(const at::Tensor& payload, int64_t head_dim, int64_t slot, int64_t d) {
  switch (payload.dim()) {
    case 4: return slot * head_dim + d;
    case 6: return (slot / 16 * (head_dim / 4) + d / 4) * 64 + slot % 16 * 4 + d % 4;
    default:
      return ((slot / 64 * (head_dim / 16) + d / 16) * 16 + slot % 64 / 4) * 64 + d % 16 * 4 +
             slot % 4;
  }
}

// The smallest bf16 >= x, for x >= 0; NaN stays.
inline BFloat16 round_up_to_bf16(float x) {
  if (x != x) return BFloat16(x);
  const uint32_t bits = c10::bit_cast<uint32_t>(x) + 0xffff;
  return BFloat16(uint16_t(bits >> 16), BFloat16::from_bits());
}

// The nearest integer, to even; NaN and what fits no code give some code.
inline int8_t rounded(float x) {
  constexpr float MAGIC = 12582912;  // 1.5 * 2^23: its neighbours are one apart
  return int8_t(c10::bit_cast<int32_t>(x + MAGIC));
}

inline void append_int8(at::TensorList parts, int64_t pair, int64_t slot, const float* x,
                        int64_t head_dim) {
  float largest = 1e-8f;
  bool is_nan = false;
  for (int64_t d = 0; d < head_dim; ++d) {
    largest = std::max(largest, std::abs(x[d]));
    is_nan |= x[d] != x[d];
  }
  const BFloat16 scale = round_up_to_bf16(is_nan ? NAN : largest / 127);
  parts[1].mutable_data_ptr<BFloat16>()[pair * parts[1].size(2) + slot] = scale;
  const auto& codes = parts[0];
  int8_t* to = codes.mutable_data_ptr<int8_t>() + pair * codes.stride(1);
  for (int64_t d = 0; d < head_dim; ++d)
    to[place(codes, head_dim, slot, d)] = rounded(x[d] / widen(scale));
}

// One vector x [D] into a slot of a pair of (sequence, KV head).
inline void append(at::TensorList parts, int64_t pair, int64_t slot, const float* x,
                   int64_t head_dim) {
  if (parts[0].scalar_type() == at::kChar) return append_int8(parts, pair, slot, x, head_dim);
  by_type(parts[0].scalar_type(), [&](auto type) {
    using T = decltype(type);
    T* to = parts[0].mutable_data_ptr<T>() + pair * parts[0].stride(1) + slot * head_dim;
    std::transform(x, x + head_dim, to, [](float each) { return T(each); });
  });
}

}  // namespace

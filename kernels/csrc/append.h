// New keys and values stored in a cache, as kv_formats.py encodes and kernels/slots.py places them.

#pragma once

#include "tensors.h"

namespace {

// body(element, channel, count) for the runs of memory of a slot in the payload of a pair: a row, or
// in tiles of keys or of values.
template <class Body>
void for_runs(const at::Tensor& payload, int64_t slot, int64_t head_dim, Body body) {
  if (payload.dim() == 4) {
    body(slot * head_dim, 0, head_dim);
  } else if (payload.dim() == 6) {
    const int64_t first = slot / 16 * 16 * head_dim + slot % 16 * 4;
    for (int64_t d = 0; d < head_dim; d += 4) body(first + d * 16, d, 4);
  } else {
    const int64_t first = slot / 64 * 64 * head_dim + slot % 64 / 4 * 64 + slot % 4;
    for (int64_t d = 0; d < head_dim; ++d) body(first + d / 16 * 1024 + d % 16 * 4, d, 1);
  }
}

// Ask for the memory of a slot, some time before it is written.
inline void ask_for_slot(at::TensorList parts, int64_t pair, int64_t slot, int64_t head_dim) {
  const auto& payload = parts[0];
  const int64_t size = payload.element_size();
  const char* first = static_cast<const char*>(payload.const_data_ptr());
  first += pair * payload.stride(1) * size;
  for_runs(payload, slot, head_dim, [&](int64_t element, int64_t, int64_t count) {
    for (int64_t i = 0; i < count * size; i += 64)
      __builtin_prefetch(first + element * size + i, 1, 3);
  });
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
  Scratch<int8_t> codes(head_dim);
  for (int64_t d = 0; d < head_dim; ++d) codes.data[d] = rounded(x[d] / widen(scale));
  const auto& payload = parts[0];
  int8_t* to = payload.mutable_data_ptr<int8_t>() + pair * payload.stride(1);
  for_runs(payload, slot, head_dim, [&](int64_t element, int64_t channel, int64_t count) {
    std::copy_n(codes.data + channel, count, to + element);
  });
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

// New keys and values stored in a cache, as kv_formats.py encodes and kernels/slots.py places them.

#pragma once

#include "tensors.h"

namespace {

// body(element, i, count) for the runs of memory of a slot in the payload of a pair, its stored
// elements from i on: a row, or in tiles of keys or of values.
template <class Body>
void for_runs(const at::Tensor& payload, int64_t slot, int64_t width, Body body) {
  if (payload.dim() == 4) {
    body(slot * width, 0, width);
  } else if (payload.dim() == 6) {
    const int64_t first = slot / 16 * 16 * width + slot % 16 * 4;
    for (int64_t i = 0; i < width; i += 4) body(first + i * 16, i, 4);
  } else {
    const int64_t first = slot / 64 * 64 * width + slot % 64 / 4 * 64 + slot % 4;
    for (int64_t i = 0; i < width; ++i) body(first + i / 16 * 1024 + i % 16 * 4, i, 1);
  }
}

// Ask for the memory of a slot, some time before it is written.
inline void ask_for_slot(at::TensorList parts, int64_t pair, int64_t slot, int64_t head_dim) {
  const auto& payload = parts[0];
  const int64_t size = payload.element_size(), width = payload_width(payload, head_dim);
  const char* first = static_cast<const char*>(payload.const_data_ptr());
  first += pair * payload.stride(1) * size;
  for_runs(payload, slot, width, [&](int64_t element, int64_t, int64_t count) {
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

// The largest bf16 <= x; NaN stays.
inline BFloat16 round_down_to_bf16(float x) {
  if (!(x >= 0)) return -round_up_to_bf16(-x);
  return BFloat16(uint16_t(c10::bit_cast<uint32_t>(std::abs(x)) >> 16), BFloat16::from_bits());
}

// Of codes 0 .. levels that reach `extent` >= 0.
inline BFloat16 scale_of(float extent, int levels) {
  return round_up_to_bf16((extent < 1e-8f ? 1e-8f : extent) / levels);
}

// The nearest integer, to even; NaN and what fits no code give some code.
inline int8_t rounded(float x) {
  constexpr float MAGIC = 12582912;  // 1.5 * 2^23: its neighbours are one apart
  return int8_t(c10::bit_cast<int32_t>(x + MAGIC));
}

// The largest of(x[d]); NaN if one is.
template <class Of>
float largest(const float* x, int64_t head_dim, Of of) {
  float top = MINUS_INFINITY;
  bool is_nan = false;
  for (int64_t d = 0; d < head_dim; ++d) {
    const float y = of(x[d]);
    top = std::max(top, y);
    is_nan |= y != y;
  }
  return is_nan ? NAN : top;
}

// One slot of a pair in a cache of codes.
struct CodeSlot {
  at::TensorList parts;
  int64_t pair, slot, head_dim;

  void set_scale(size_t part, BFloat16 value) const {
    parts[part].mutable_data_ptr<BFloat16>()[pair * parts[part].size(2) + slot] = value;
  }

  // code(i) for the stored elements i.
  template <class T, class Code>
  void set_codes(Code code) const {
    const auto& payload = parts[0];
    const int64_t width = payload_width(payload, head_dim);
    T* to = payload.mutable_data_ptr<T>() + pair * payload.stride(1);
    for_runs(payload, slot, width, [&](int64_t element, int64_t first, int64_t count) {
      for (int64_t i = 0; i < count; ++i) to[element + i] = code(first + i);
    });
  }
};

// As kv_formats.Symmetric: T from x / scale, which is at most `top`.
template <class T, class Rounded>
void append_symmetric(const CodeSlot& slot, const float* x, int top, Rounded rounded) {
  const float extent = largest(x, slot.head_dim, [](float y) { return std::abs(y); });
  const BFloat16 scale = scale_of(extent, top);
  slot.set_scale(1, scale);
  slot.set_codes<T>([&](int64_t d) { return T(rounded(x[d] / widen(scale))); });
}

// As kv_formats.Int4.
inline void append_int4(const CodeSlot& slot, const float* x) {
  const float lowest = -largest(x, slot.head_dim, [](float y) { return -y; });
  const BFloat16 zero = round_down_to_bf16(lowest);
  const auto above = [zero](float y) { return y - widen(zero); };
  const BFloat16 scale = scale_of(largest(x, slot.head_dim, above), 15);
  slot.set_scale(1, scale), slot.set_scale(2, zero);
  const auto code = [&](int64_t d) { return rounded(above(x[d]) / widen(scale)) & 15; };
  slot.set_codes<uint8_t>([&](int64_t i) { return code(2 * i) | code(2 * i + 1) << 4; });
}

// One vector x [D] into a slot of a pair of (sequence, KV head).
inline void append(at::TensorList parts, int64_t pair, int64_t slot, const float* x,
                   int64_t head_dim) {
  const CodeSlot of_codes = {parts, pair, slot, head_dim};
  const auto or_zero = [](float y) { return y == y ? y : 0.0f; };  // its scale is not finite then
  switch (parts[0].scalar_type()) {
    case at::kChar: return append_symmetric<int8_t>(of_codes, x, 127, rounded);
    case at::kFloat8_e4m3fn: return append_symmetric<Float8>(of_codes, x, 448, or_zero);
    case at::kByte: return append_int4(of_codes, x);
    default: break;
  }
  by_type(parts[0].scalar_type(), [&](auto type) {
    using T = decltype(type);
    T* to = parts[0].mutable_data_ptr<T>() + pair * parts[0].stride(1) + slot * head_dim;
    std::transform(x, x + head_dim, to, [](float each) { return T(each); });
  });
}

}  // namespace

// Tensors as the host code hands them to the inner loops.

#pragma once

// Not ATen/ATen.h, which declares all ops and takes longer to read than the rest to compile.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <omp.h>

#include <exception>

#include "types.h"

namespace {

// Rows of x [..., width] times factor, as fp32 [rows, padded(width)], zero past width.
inline Scratch<float> padded_rows(const at::Tensor& x, float factor) {
  const auto rows = x.contiguous();
  const int64_t width = rows.size(-1), stride = padded(width), num_rows = rows.numel() / width;
  Scratch<float> all(num_rows * stride);
  by_type(rows.scalar_type(), [&](auto type) {
    const auto* from = rows.const_data_ptr<decltype(type)>();
    for (int64_t r = 0; r < num_rows; ++r, from += width) {
      float* to = all.data + r * stride;
      for (int64_t i = 0; i < width; ++i) to[i] = widen(from[i]) * factor;
      std::fill(to + width, to + stride, 0.0f);
    }
  });
  return all;
}

// Stored elements of a vector of a cache: two codes of int4 are one.
inline int64_t payload_width(const at::Tensor& payload, int64_t head_dim) {
  return payload.scalar_type() == at::kByte ? head_dim / 2 : head_dim;
}

// A payload is [B, Hkv, S, width], or tiled for the integer dot products; see kernels/slots.py.
inline bool is_tiled(const at::Tensor& payload) { return payload.dim() != 4; }

}  // namespace

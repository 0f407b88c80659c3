// kv_fast::quantized_linear on the CPU: kv_fast::linear with a weight of codes in tiles. See
// kernels/quantized.py for the contract.

#pragma once

#include "linear.h"

namespace {

// Parts in tiles of a weight [num_features, in_features] of `product`.
void set_weight(QuantizedProduct& product, const at::Tensor& codes, const at::Tensor& scales,
                const std::optional<at::Tensor>& mins, int64_t num_features) {
  const auto type = codes.scalar_type();
  TORCH_CHECK_VALUE(type == at::kChar || type == at::kByte, "codes of ", type,
                    ", not int8 or nibbles in uint8");
  const int64_t width = product.in_features, num_tiles = codes.size(0);
  TORCH_CHECK_VALUE(codes.is_contiguous() && codes.dim() == 4 && codes.size(2) == TILE_ROWS &&
                        codes.size(3) == 4 && codes.size(1) * (type == at::kChar ? 4 : 8) == width,
                    "codes ", codes.sizes(), " for rows of ", width);
  TORCH_CHECK_VALUE(padded(num_features) == num_tiles * TILE_ROWS, num_features, " features in ",
                    num_tiles, " tiles");
  const int64_t num_groups = scales.dim() > 1 ? scales.size(1) : 0;
  TORCH_CHECK_VALUE(num_groups && width % (num_groups * STEP) == 0 &&
                        (num_groups == 1 || width / num_groups % 16 == 0),
                    num_groups, " groups in rows of ", width);
  const std::vector<int64_t> sizes = {num_tiles, num_groups, TILE_ROWS, 1};
  for (const auto& part : {scales, mins.value_or(scales)})
    TORCH_CHECK_VALUE(part.is_contiguous() && part.sizes() == sizes &&
                          part.scalar_type() == scales.scalar_type() &&
                          (part.scalar_type() == at::kHalf || part.scalar_type() == at::kFloat),
                      "scales or mins ", part.scalar_type(), part.sizes(), ", not ", sizes);
  product.codes = static_cast<const uint8_t*>(codes.const_data_ptr());
  product.scales = scales.const_data_ptr();
  product.mins = mins ? mins->const_data_ptr() : nullptr;
  product.group = width / num_groups;
}

at::Tensor quantized_linear(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scales,
                            const std::optional<at::Tensor>& mins, int64_t out_features,
                            const std::optional<at::Tensor>& norm, double eps,
                            const std::optional<at::Tensor>& residual, bool swiglu) {
  TORCH_CHECK_VALUE(!swiglu || out_features % TILE_ROWS == 0, "gates of ", out_features,
                    " features end inside a tile");
  const Surroundings around(x, norm, eps, residual, out_features);
  QuantizedProduct product = {around.product(nullptr, swiglu)};
  set_weight(product, codes, scales, mins, out_features * (swiglu ? 2 : 1));
  auto* multiply = current->choose_multiply_tiles(codes.scalar_type(), scales.scalar_type());
  at::parallel_for(0, padded(out_features) / TILE_ROWS, 1,
                   [&](int64_t lo, int64_t hi) { multiply(product, lo, hi); });
  return around.out;
}

at::Tensor dequantize(const at::Tensor& codes, const at::Tensor& scales,
                      const std::optional<at::Tensor>& mins, int64_t num_features,
                      int64_t in_features, at::ScalarType dtype) {
  auto out = at::empty({num_features, in_features}, codes.options().dtype(dtype));
  QuantizedProduct weight = {};
  weight.out = out.mutable_data_ptr();
  weight.out_features = num_features, weight.in_features = in_features;
  weight.dtype = dtype;
  set_weight(weight, codes, scales, mins, num_features);
  auto* make_dense = current->choose_make_dense(codes.scalar_type(), scales.scalar_type());
  at::parallel_for(0, codes.size(0), 1,
                   [&](int64_t lo, int64_t hi) { make_dense(weight, lo, hi); });
  return out;
}

}  // namespace

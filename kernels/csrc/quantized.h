// kv_fast::quantized_linear on the CPU: kv_fast::linear with a weight of codes in tiles. See
// kernels/quantized.py for the contract.

#pragma once

#include "linear.h"

namespace {

void check_codes(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scales,
                 const std::optional<at::Tensor>& mins, int64_t num_features, bool swiglu) {
  const int64_t num_tiles = codes.size(0), num_groups = scales.dim() > 1 ? scales.size(1) : 0;
  const int64_t per_word = codes.scalar_type() == at::kChar ? 4 : 8;
  TORCH_CHECK_VALUE(codes.scalar_type() == at::kChar || codes.scalar_type() == at::kByte,
                    "codes of ", codes.scalar_type(), ", not int8 or nibbles in uint8");
  TORCH_CHECK_VALUE(codes.is_contiguous() && codes.dim() == 4 && codes.size(2) == TILE_ROWS &&
                        codes.size(3) == 4 && codes.size(1) * per_word == x.size(-1),
                    "codes ", codes.sizes(), " for rows of ", x.size(-1));
  TORCH_CHECK_VALUE(num_groups && x.size(-1) % (num_groups * STEP) == 0 &&
                        (num_groups == 1 || x.size(-1) / num_groups % 16 == 0),
                    num_groups, " groups in rows of ", x.size(-1));
  TORCH_CHECK_VALUE(num_features > (num_tiles - 1) * TILE_ROWS &&
                        num_features <= num_tiles * TILE_ROWS &&
                        (!swiglu || num_features % (2 * TILE_ROWS) == 0),
                    num_features, " features in ", num_tiles, " tiles");
  const std::vector<int64_t> sizes = {num_tiles, num_groups, TILE_ROWS, 1};
  for (const auto& part : {scales, mins.value_or(scales)})
    TORCH_CHECK_VALUE(part.is_contiguous() && part.sizes() == sizes &&
                          part.scalar_type() == scales.scalar_type() &&
                          (part.scalar_type() == at::kHalf || part.scalar_type() == at::kFloat),
                      "scales or mins ", part.scalar_type(), part.sizes(), ", not ", sizes);
}

at::Tensor quantized_linear(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scales,
                            const std::optional<at::Tensor>& mins, int64_t out_features,
                            const std::optional<at::Tensor>& norm, double eps,
                            const std::optional<at::Tensor>& residual, bool swiglu) {
  check_codes(x, codes, scales, mins, out_features * (swiglu ? 2 : 1), swiglu);
  const Surroundings around(x, norm, eps, residual, out_features);
  QuantizedProduct product = {around.product(nullptr, swiglu)};
  product.codes = static_cast<const uint8_t*>(codes.const_data_ptr());
  product.scales = scales.const_data_ptr();
  product.mins = mins ? mins->const_data_ptr() : nullptr;
  product.group = x.size(-1) / scales.size(1);
  auto* multiply = current->choose_multiply_tiles(codes.scalar_type(), scales.scalar_type());
  at::parallel_for(0, codes.size(0) / (swiglu ? 2 : 1), 1,
                   [&](int64_t lo, int64_t hi) { multiply(product, lo, hi); });
  return around.out;
}

}  // namespace

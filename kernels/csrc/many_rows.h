// Matrix products of many rows on the CPU: blocks of the weight are made dense, as the processor
// multiplies fastest, and the library multiplies. See kernels/many_rows.py for the contract.

#pragma once

#include "linear.h"

namespace {

// Parts in tiles of a weight, as a dense matrix `out`.
void make_dense(const at::Tensor& codes, const at::Tensor& scales, const Optional& mins,
                const at::Tensor& out) {
  QuantizedProduct weight = {};
  weight.out = out.mutable_data_ptr();
  weight.out_features = out.size(0), weight.in_features = out.size(1);
  weight.dtype = out.scalar_type();
  set_weight(weight, codes, scales, mins, out.size(0));
  auto* make = current->choose_make_dense(codes.scalar_type(), scales.scalar_type());
  at::parallel_for(0, codes.size(0), 1, [&](int64_t lo, int64_t hi) { make(weight, lo, hi); });
}

at::Tensor dequantize(const at::Tensor& codes, const at::Tensor& scales, const Optional& mins,
                      int64_t num_features, int64_t in_features, at::ScalarType dtype) {
  auto out = at::empty({num_features, in_features}, codes.options().dtype(dtype));
  make_dense(codes, scales, mins, out);
  return out;
}

// Features first .. of a weight, as many as `out` has rows; in tiles `first` is a multiple of 16.
void make_block_dense(Parts weight, int64_t first, const at::Tensor& out) {
  if (weight.size() == 1) {
    out.copy_(weight[0].narrow(0, first, out.size(0)));
    return;
  }
  const auto of = [&](const at::Tensor& part) {
    return part.narrow(0, first / TILE_ROWS, padded(out.size(0)) / TILE_ROWS);
  };
  make_dense(of(weight[0]), of(weight[1]),
             weight.size() == 3 ? std::optional(of(weight[2])) : std::nullopt, out);
}

// Refuse what has not the rows of a weight [out_features, width], dense or in tiles.
void check_rows(Parts weight, int64_t out_features, int64_t width) {
  TORCH_CHECK_VALUE(weight.size() >= 1 && weight.size() <= 3, weight.size(), " parts of a weight");
  const auto& first = weight[0];
  const bool fits = weight.size() == 1
                        ? first.sizes() == at::IntArrayRef({out_features, width})
                        : first.dim() && first.size(0) * TILE_ROWS == padded(out_features);
  TORCH_CHECK_VALUE(fits, "weight ", first.sizes(), " for ", out_features, " features of ", width);
}

at::Tensor many_rows(const at::Tensor& x, Parts weight, int64_t out_features, at::ScalarType dtype,
                     int64_t block_bytes) {
  const auto out = empty_rows(x, out_features);
  const int64_t width = x.size(-1);
  check_rows(weight, out_features, width);
  const auto rows = x.reshape({-1, width}).to(dtype), results = out.view({-1, out_features});
  const int64_t bytes = width * rows.element_size() * TILE_ROWS;
  const int64_t count = std::max<int64_t>(1, block_bytes / bytes) * TILE_ROWS;
  const auto block = at::empty({std::min(count, out_features), width}, rows.options());
  auto sums = at::empty({rows.size(0), block.size(0)}, rows.options());
  for (int64_t first = 0; first < out_features; first += count) {
    const int64_t num = std::min(count, out_features - first);
    const auto dense = block.narrow(0, 0, num);
    make_block_dense(weight, first, dense);
    if (num < sums.size(1)) sums = at::empty({rows.size(0), num}, rows.options());
    at::mm_out(sums, rows, dense.t());
    results.narrow(1, first, num).copy_(sums);
  }
  return out;
}

}  // namespace

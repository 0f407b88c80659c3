// kv_fast::linear on the CPU: a matrix product of few rows, with the norm before and the SwiGLU and
// the residual after it in the same parallel region. See kernels/linear.py for the contract.

#pragma once

#include "instruction_sets.h"

namespace {

// Features per part at least: waking a thread costs more.
constexpr int64_t FEATURES = 16;

// Rows of x [..., C] as fp32 [rows, padded(C)], zero past C; divided by their root mean square and
// multiplied by `norm` [C], if there is one.
Scratch<float> normed_rows(const at::Tensor& x, const std::optional<at::Tensor>& norm, double eps) {
  auto all = padded_rows(x, 1.0f);
  if (!norm) return all;
  const int64_t width = x.size(-1), stride = padded(width), num_rows = x.numel() / width;
  const auto weight = padded_rows(*norm, 1);
  for (int64_t r = 0; r < num_rows; ++r) {
    float* row = all.data + r * stride;
    float squares[16] = {};  // sums that do not wait for each other
    for (int64_t i = 0; i < stride; ++i) squares[i % 16] += row[i] * row[i];
    const float mean = std::accumulate(squares, squares + 16, 0.0f) / width;
    const float factor = 1 / std::sqrt(mean + float(eps));
    for (int64_t i = 0; i < stride; ++i) row[i] *= factor * weight.data[i];
  }
  return all;
}

// What surrounds a product, ready for its inner loops.
struct Surroundings {
  const at::Tensor& x;
  Scratch<float> rows;  // normed
  at::Tensor added, out;

  Surroundings(const at::Tensor& x, const std::optional<at::Tensor>& norm, double eps,
               const std::optional<at::Tensor>& residual, int64_t out_features)
      : x(x), rows(normed_rows(x, norm, eps)) {
    auto shape = x.sizes().vec();
    shape.back() = out_features;
    out = at::empty(shape, x.options());
    if (!residual) return;
    TORCH_CHECK_VALUE(residual->sizes() == shape, "residual ", residual->sizes(), " for ", shape);
    added = residual->to(x.scalar_type()).contiguous();
  }

  Product product(const void* weight, bool swiglu) const {
    return {weight,
            rows.data,
            added.defined() ? added.const_data_ptr() : nullptr,
            out.mutable_data_ptr(),
            x.numel() / x.size(-1),
            x.size(-1),
            out.size(-1),
            swiglu,
            x.scalar_type()};
  }
};

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight,
                  const std::optional<at::Tensor>& norm, double eps,
                  const std::optional<at::Tensor>& residual, bool swiglu) {
  TORCH_CHECK_VALUE(weight.is_contiguous() && weight.size(1) == x.size(-1) &&
                        weight.scalar_type() == x.scalar_type(),
                    "weight ", weight.sizes(), " of ", weight.scalar_type(), " for rows of ",
                    x.size(-1), " of ", x.scalar_type());
  const Surroundings around(x, norm, eps, residual, weight.size(0) / (swiglu ? 2 : 1));
  const Product product = around.product(weight.const_data_ptr(), swiglu);
  Multiply* multiply = current->choose_multiply(weight.scalar_type());
  at::parallel_for(0, product.out_features, FEATURES,
                   [&](int64_t lo, int64_t hi) { multiply(product, lo, hi); });
  return around.out;
}

}  // namespace

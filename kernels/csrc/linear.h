// Matrix products of few rows on the CPU, with the norm before and the SwiGLU and the residual after
// them in the same parallel region: of a dense weight, or of a weight of codes. See kernels/linear.py
// and quantized.py for the contracts.

#pragma once

#include "instruction_sets.h"
#include "tensors.h"

namespace {

using Parts = at::TensorList;  // of a weight: itself, or codes, scales and perhaps mins
using Optional = std::optional<at::Tensor>;

// Rows of x [..., C] as fp32 [rows, padded(C)], zero past C; divided by their root mean square and
// multiplied by `norm` [C], if there is one.
Scratch<float> normed_rows(const at::Tensor& x, const Optional& norm, double eps) {
  auto all = padded_rows(x, 1.0f);
  if (!norm) return all;
  const int64_t width = x.size(-1), stride = padded(width), num_rows = x.numel() / width;
  TORCH_CHECK_VALUE(norm->numel() == width, "norm ", norm->sizes(), " for rows of ", width);
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

// A weight [out_features or twice as many, in_features] of `product`.
void set_weight(QuantizedProduct& product, const at::Tensor& weight) {
  const std::vector<int64_t> sizes = {product.out_features * (product.swiglu ? 2 : 1),
                                      product.in_features};
  TORCH_CHECK_VALUE(weight.is_contiguous() && weight.sizes() == sizes &&
                        weight.scalar_type() == product.dtype,
                    "weight ", weight.sizes(), " of ", weight.scalar_type(), " for rows of ",
                    product.in_features, " of ", product.dtype);
  product.weight = weight.const_data_ptr();
}

// Parts in tiles of a weight [num_features, in_features] of `product`.
void set_weight(QuantizedProduct& product, const at::Tensor& codes, const at::Tensor& scales,
                const Optional& mins, int64_t num_features) {
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

// A product, ready for its rows. It is cut into parts of 16 features: waking a thread costs more.
struct Stage {
  QuantizedProduct product = {};
  Multiply* multiply = nullptr;  // of a dense weight, or
  MultiplyTiles* multiply_tiles = nullptr;
  at::Tensor added, out, bias;

  // Of rows x [..., C] into out [..., N], both contiguous.
  Stage(const at::Tensor& x, Parts weight, at::Tensor to, const Optional& residual, bool swiglu,
        const Optional& with_bias = {})
      : out(std::move(to)) {
    if (residual) {
      TORCH_CHECK_VALUE(residual->sizes() == out.sizes(), "residual ", residual->sizes(), " for ",
                        out.sizes());
      added = residual->to(x.scalar_type()).contiguous();
      product.residual = added.const_data_ptr();
    }
    product.out = out.mutable_data_ptr();
    product.num_rows = x.numel() / x.size(-1);
    product.in_features = x.size(-1), product.out_features = out.size(-1);
    product.swiglu = swiglu, product.dtype = x.scalar_type();
    choose(weight);
    if (!with_bias) return;
    TORCH_CHECK_VALUE(with_bias->numel() == product.out_features, "bias ", with_bias->sizes(),
                      " for ", product.out_features, " features");
    bias = with_bias->to(x.scalar_type()).contiguous();
  }

  void choose(Parts weight) {
    if (weight.size() == 1) {
      set_weight(product, weight[0]);
      multiply = current->choose_multiply(product.dtype);
      return;
    }
    TORCH_CHECK_VALUE(weight.size() == 2 || weight.size() == 3, weight.size(), " parts of a weight");
    TORCH_CHECK_VALUE(!product.swiglu || product.out_features % TILE_ROWS == 0, "gates of ",
                      product.out_features, " features end inside a tile");
    set_weight(product, weight[0], weight[1],
               weight.size() == 3 ? std::optional(weight[2]) : std::nullopt,
               product.out_features * (product.swiglu ? 2 : 1));
    multiply_tiles =
        current->choose_multiply_tiles(weight[0].scalar_type(), weight[1].scalar_type());
  }

  int64_t num_parts() const { return padded(product.out_features) / TILE_ROWS; }

  // Parts lo .. hi - 1, of rows [num_rows, padded(in_features)].
  void run(const Scratch<float>& rows, int64_t lo, int64_t hi) const {
    auto ready = product;
    ready.x = rows.data;
    const int64_t first = lo * TILE_ROWS, end = std::min(hi * TILE_ROWS, product.out_features);
    if (multiply_tiles) multiply_tiles(ready, lo, hi);
    else multiply(ready, first, end);
    if (bias.defined()) add_bias(first, end);
  }

  // Rounded once more, as a sum of its own.
  void add_bias(int64_t first, int64_t end) const {
    by_type(product.dtype, [&](auto type) {
      using T = decltype(type);
      const T* values = bias.const_data_ptr<T>();
      for (int64_t r = 0; r < product.num_rows; ++r) {
        T* row = static_cast<T*>(product.out) + r * product.out_features;
        for (int64_t n = first; n < end; ++n) row[n] = T(widen(row[n]) + widen(values[n]));
      }
    });
  }
};

// For a result with the rows of x [..., C].
at::Tensor empty_rows(const at::Tensor& x, int64_t out_features) {
  TORCH_CHECK_VALUE(x.dim() && x.size(-1), "no channels in x ", x.sizes());
  auto shape = x.sizes().vec();
  shape.back() = out_features;
  return at::empty(shape, x.options());
}

at::Tensor product_of(const at::Tensor& x, Parts weight, int64_t out_features,
                      const Optional& norm, double eps,
                      const Optional& residual, bool swiglu) {
  const Stage stage(x, weight, empty_rows(x, out_features), residual, swiglu);
  const auto rows = normed_rows(x, norm, eps);
  at::parallel_for(0, stage.num_parts(), 1,
                   [&](int64_t lo, int64_t hi) { stage.run(rows, lo, hi); });
  return stage.out;
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight,
                  const Optional& norm, double eps,
                  const Optional& residual, bool swiglu) {
  TORCH_CHECK_VALUE(weight.dim() == 2, "weight ", weight.sizes());
  return product_of(x, weight, weight.size(0) / (swiglu ? 2 : 1), norm, eps, residual, swiglu);
}

at::Tensor quantized_linear(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scales,
                            const Optional& mins, int64_t out_features,
                            const Optional& norm, double eps,
                            const Optional& residual, bool swiglu) {
  std::vector<at::Tensor> parts = {codes, scales};
  if (mins) parts.push_back(*mins);
  return product_of(x, parts, out_features, norm, eps, residual, swiglu);
}

}  // namespace

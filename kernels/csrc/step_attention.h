// What lies between the products of a layer, see layers.h: rotated queries and keys, new K and V
// stored, attention over what was stored before, and the merge with the own tokens.

#pragma once

#include "append.h"
#include "attention.h"
#include "layer.h"

namespace {

// A head of q or k as fp32: divided by its root mean square where there is a norm, then rotated;
// rounded to T after each. Source: kernels.linear.rms_norm, rope.apply_rope.
template <class T>
void norm_and_rotate(const T* from, const Optional& norm, double eps, const float* cos,
                     const float* sin, int64_t head_dim, float* to) {
  for (int64_t d = 0; d < head_dim; ++d) to[d] = widen(from[d]);
  if (norm) {
    const float squares = std::inner_product(to, to + head_dim, to, 0.0f);
    const float factor = 1 / std::sqrt(squares / head_dim + float(eps));
    const T* weight = norm->const_data_ptr<T>();
    for (int64_t d = 0; d < head_dim; ++d)
      to[d] = rounded_to<T>(rounded_to<T>(to[d] * factor) * widen(weight[d]));
  }
  for (int64_t d = 0; d < head_dim / 2; ++d) {
    const float first = to[d], second = to[d + head_dim / 2];
    to[d] = rounded_to<T>(first * cos[d] - second * sin[d]);
    to[d + head_dim / 2] = rounded_to<T>(second * cos[d] + first * sin[d]);
  }
}

// A vector times a Hadamard matrix over the root of its size. Source: kv_formats.rotated, whose order
// of additions this is.
inline void rotate_all(float* x, int64_t width) {
  const int64_t size = width & -width;
  const float factor = std::pow(double(size), -0.5);
  for (int64_t step = 1; step < size; step *= 2)
    for (int64_t i = 0; i < width; i += 2 * step)
      for (int64_t d = i; d < i + step; ++d) {
        const float first = x[d], second = x[d + step];
        x[d] = first + second, x[d + step] = first - second;
      }
  for (int64_t d = 0; d < width; ++d) x[d] *= factor;
}

// Attention of all layers in turn, in one set of scratch.
struct StepAttention {
  Shape shape;
  at::Tensor cos, sin;  // [B, T, D / 2]
  double eps;
  bool rotates_v;
  float sm_scale;
  Scratch<float> q, own_k, own_v;  // padded rows of q (scaled), and of the new K and V
  Work work;

  StepAttention(const Shape& shape, const at::Tensor& like_q, const Layer& first,
                const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& start_pos,
                double eps, bool rotates_v)
      : shape(shape), cos(cos), sin(sin), eps(eps), rotates_v(rotates_v),
        sm_scale(1 / std::sqrt(double(shape.head_dim)) * M_LOG2E),
        q(zeros(like_q.numel())), own_k(zeros(like_q.numel())), own_v(zeros(like_q.numel())),
        work(make_work(like_q, q.data, first.k, first.v, start_pos, true)) {}

  Scratch<float> zeros(int64_t num_elements) const {
    const int64_t count = num_elements / shape.head_dim * padded(shape.head_dim);
    Scratch<float> all(count);
    std::fill_n(all.data, count, 0.0f);
    return all;
  }

  // That the new tokens have slots.
  void check_room(int64_t num_slots) const {
    for (const auto& head : work.heads)
      TORCH_CHECK_VALUE(head.filled + shape.num_queries <= num_slots, "start_pos ", head.filled,
                        " and ", shape.num_queries, " tokens in a cache of ", num_slots, " slots");
  }

  int64_t num_pairs() const { return work.heads.size(); }
  int64_t num_vectors() const { return work.heads.size() * shape.num_queries * (shape.group() + 2); }

  // Ask for the slots of the new tokens.
  void ask_for_slots(const Layer& layer, int64_t pair) const {
    for (int64_t t = 0; t < shape.num_queries; ++t) {
      ask_for_slot(layer.k, pair, work.heads[pair].filled + t, shape.head_dim);
      ask_for_slot(layer.v, pair, work.heads[pair].filled + t, shape.head_dim);
    }
  }

  // One vector of a layer's q, k, v: a query ready for its scores, a new K or V stored.
  template <class T>
  void prepare(const Layer& layer, int64_t i) {
    const int64_t num_heads = shape.num_heads, num_kv_heads = shape.num_kv_heads;
    const int64_t vectors = num_heads + 2 * num_kv_heads, token = i / vectors, head = i % vectors;
    const int64_t first_pair = token / shape.num_queries * num_kv_heads;
    const T* from = layer.qkv.out.const_data_ptr<T>() + i * shape.head_dim;
    if (head < num_heads)
      add_query(layer, token, first_pair + head / shape.group(), head % shape.group(), from);
    else if (head < num_heads + num_kv_heads)
      add_key(layer, token, first_pair + head - num_heads, from);
    else
      add_value(layer, token, first_pair + head - num_heads - num_kv_heads, from);
  }

  template <class T>
  void rotate(const T* from, const Optional& norm, int64_t token, float* to) const {
    const int64_t first = token * shape.head_dim / 2;
    norm_and_rotate(from, norm, eps, cos.const_data_ptr<float>() + first,
                    sin.const_data_ptr<float>() + first, shape.head_dim, to);
  }

  // The scales of a KV head's channels, or none; powers of two, so nothing is rounded.
  const float* channels_of(const Layer& layer, int64_t pair) const {
    if (!layer.k_channels) return nullptr;
    return layer.k_channels->const_data_ptr<float>() + pair % shape.num_kv_heads * shape.head_dim;
  }

  template <class T>
  void add_query(const Layer& layer, int64_t token, int64_t pair, int64_t g, const T* from) {
    const int64_t r = g * shape.num_queries + token % shape.num_queries;
    float* row = q.data + (pair * work.num_rows + r) * work.stride;
    rotate(from, layer.q_norm, token, row);
    if (const float* scales = channels_of(layer, pair))
      for (int64_t d = 0; d < shape.head_dim; ++d) row[d] *= scales[d];
    for (int64_t d = 0; d < shape.head_dim; ++d) row[d] *= sm_scale;
    for (int64_t part = 0; part < work.num_results; ++part)
      work.states[work.row(pair, part) + r] = RowState{};
  }

  template <class T>
  void add_key(const Layer& layer, int64_t token, int64_t pair, const T* from) {
    const int64_t t = token % shape.num_queries;
    float* key = own_k.data + (pair * shape.num_queries + t) * work.stride;
    rotate(from, layer.k_norm, token, key);
    if (const float* scales = channels_of(layer, pair))
      for (int64_t d = 0; d < shape.head_dim; ++d) key[d] /= scales[d];
    append(layer.k, pair, work.heads[pair].filled + t, key, shape.head_dim);
    if (t == 0) work.heads[pair].k = side_of(layer.k, pair);
  }

  template <class T>
  void add_value(const Layer& layer, int64_t token, int64_t pair, const T* from) {
    const int64_t t = token % shape.num_queries;
    float* value = own_v.data + (pair * shape.num_queries + t) * work.stride;
    std::transform(from, from + shape.head_dim, value, [](T x) { return widen(x); });
    if (rotates_v) rotate_all(value, shape.head_dim);
    append(layer.v, pair, work.heads[pair].filled + t, value, shape.head_dim);
    if (t == 0) work.heads[pair].v = side_of(layer.v, pair);
  }

  // One row of one pair, into attended [B, T, Hq * D].
  template <class T>
  void merge(int64_t pair, int64_t row, T* attended) {
    const int64_t head = pair % shape.num_kv_heads * shape.group() + row / shape.num_queries;
    const int64_t token = pair / shape.num_kv_heads * shape.num_queries + row % shape.num_queries;
    add_own_token(work, pair, row, own_k.data, own_v.data);
    std::vector<float> merged(shape.head_dim);
    merge_parts(work, pair, row, merged.data());
    if (rotates_v) rotate_all(merged.data(), shape.head_dim);
    T* to = attended + (token * shape.num_heads + head) * shape.head_dim;
    std::transform(merged.begin(), merged.end(), to, [](float x) { return T(x); });
  }
};

}  // namespace

// All layers of a decode step on the CPU in one call and one parallel region:
// kv_fast::decode_layers. A small model spends a third of a token on calls and on waking threads.
//
// Threads take their shares of a stage and wait for each other before the next. Between stages
// values are rounded to the model's dtype, as if each were an operation of its own: the bits are
// those of the layers one by one. See kernels/decode_layers.py for the contract.

#pragma once

#include "append.h"
#include "attention.h"
#include "linear.h"

namespace {

// The heads of a step and what they need between qkv and attention.
struct Shape {
  int64_t num_queries, num_heads, num_kv_heads, head_dim;

  int64_t group() const { return num_heads / num_kv_heads; }
  int64_t width() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
};

// What passes from stage to stage, of each layer in turn: [B, T, ..].
struct Buffers {
  at::Tensor qkv, attended, h, gates, y;
};

// What a call has for all layers, one after the other. Biases and norms of heads may be none.
struct Lists {
  at::TensorList weights;
  at::IntArrayRef num_parts;  // of each weight
  at::TensorList norms, qkv_biases, o_biases, head_norms, k, v;
  size_t num_taken = 0, first_part = 0;

  int64_t num_layers() const { return norms.size() / 2; }

  // Of the next weight.
  Parts next_weight() {
    const size_t count = num_parts[num_taken++];
    TORCH_CHECK_VALUE(count <= weights.size() - first_part, weights.size(), " parts of weights, not ",
                      num_parts);
    first_part += count;
    return weights.slice(first_part - count, count);
  }

  void check() const {
    const size_t count = num_layers();
    TORCH_CHECK_VALUE(count && norms.size() % 2 == 0 && num_parts.size() == 4 * count &&
                          !k.empty() && k.size() % count == 0 && !v.empty() && v.size() % count == 0,
                      norms.size(), " norms, ", num_parts.size(), " weights and caches of ", k.size(),
                      " and ", v.size(), " parts are of no number of layers");
    for (const size_t size : {qkv_biases.size(), o_biases.size(), head_norms.size() / 2})
      TORCH_CHECK_VALUE(size == 0 || size == count, size, " of a list for ", count, " layers");
  }
};

// The tensor of a layer, where there are any.
Optional one_of(at::TensorList all, int64_t i) {
  return all.empty() ? Optional{} : Optional(all[i]);
}

// One layer: its products, and what is between them.
struct Layer {
  at::Tensor x;
  Stage qkv, o, gate_up, down;
  Optional attention_norm, mlp_norm, q_norm, k_norm;
  Parts k, v;

  Layer(int64_t i, const at::Tensor& from, const Buffers& to, Lists& lists)
      : x(from),
        qkv(x, lists.next_weight(), to.qkv, {}, false, one_of(lists.qkv_biases, i)),
        o(to.attended, lists.next_weight(), to.h, x, false, one_of(lists.o_biases, i)),
        gate_up(to.h, lists.next_weight(), to.gates, {}, true),
        down(to.gates, lists.next_weight(), to.y, to.h, false),
        attention_norm(lists.norms[2 * i]), mlp_norm(lists.norms[2 * i + 1]),
        q_norm(one_of(lists.head_norms, 2 * i)), k_norm(one_of(lists.head_norms, 2 * i + 1)),
        k(of_layer(lists.k, i, lists)), v(of_layer(lists.v, i, lists)) {}

  static Parts of_layer(at::TensorList all, int64_t i, const Lists& lists) {
    const int64_t count = all.size() / lists.num_layers();
    return all.slice(i * count, count);
  }
};

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
      to[d] = widen(T(widen(T(to[d] * factor)) * widen(weight[d])));
  }
  for (int64_t d = 0; d < head_dim / 2; ++d) {
    const float first = to[d], second = to[d + head_dim / 2];
    to[d] = widen(T(first * cos[d] - second * sin[d]));
    to[d + head_dim / 2] = widen(T(second * cos[d] + first * sin[d]));
  }
}

// Attention of all layers in turn, in one set of scratch.
struct StepAttention {
  Shape shape;
  at::Tensor cos, sin;  // [B, T, D / 2]
  double eps;
  float sm_scale;
  Scratch<float> q, own_k, own_v;  // padded rows of q (scaled), and of the new K and V
  Work work;

  StepAttention(const Shape& shape, const at::Tensor& like_q, const Layer& first,
                const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& start_pos,
                double eps)
      : shape(shape), cos(cos), sin(sin), eps(eps),
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

  // From a layer's q, k, v: K and V of one pair stored, its queries ready.
  template <class T>
  void prepare(const Layer& layer, int64_t pair) {
    const int64_t head = pair % shape.num_kv_heads, sequence = pair / shape.num_kv_heads;
    const int64_t head_dim = shape.head_dim, num_rows = work.num_rows, stride = work.stride;
    work.heads[pair].k = side_of(layer.k, pair);
    work.heads[pair].v = side_of(layer.v, pair);
    std::fill_n(&work.states[work.row(pair, 0)], work.num_results * num_rows, RowState{});
    for (int64_t t = 0; t < shape.num_queries; ++t) {
      const int64_t token = sequence * shape.num_queries + t;
      const T* from = layer.qkv.out.const_data_ptr<T>() + token * shape.width();
      const float* cosines = cos.const_data_ptr<float>() + token * head_dim / 2;
      const float* sines = sin.const_data_ptr<float>() + token * head_dim / 2;
      const auto ready = [&](int64_t source, const Optional& norm, float* to) {
        norm_and_rotate(from + source * head_dim, norm, eps, cosines, sines, head_dim, to);
      };
      for (int64_t g = 0; g < shape.group(); ++g) {
        float* row = q.data + (pair * num_rows + g * shape.num_queries + t) * stride;
        ready(head * shape.group() + g, layer.q_norm, row);
        for (int64_t d = 0; d < head_dim; ++d) row[d] *= sm_scale;
      }
      float* key = own_k.data + (pair * shape.num_queries + t) * stride;
      float* value = own_v.data + (pair * shape.num_queries + t) * stride;
      ready(shape.num_heads + head, layer.k_norm, key);
      const T* new_v = from + (shape.num_heads + shape.num_kv_heads + head) * head_dim;
      std::transform(new_v, new_v + head_dim, value, [](T x) { return widen(x); });
      append(layer.k, pair, work.heads[pair].filled + t, key, head_dim);
      append(layer.v, pair, work.heads[pair].filled + t, value, head_dim);
    }
    add_own_tokens(work, pair, own_k.data, own_v.data);
  }

  // One row of one pair, into attended [B, T, Hq * D].
  template <class T>
  void merge(int64_t pair, int64_t row, T* attended) const {
    const int64_t head = pair % shape.num_kv_heads * shape.group() + row / shape.num_queries;
    const int64_t token = pair / shape.num_kv_heads * shape.num_queries + row % shape.num_queries;
    std::vector<float> merged(shape.head_dim);
    merge_parts(work, pair, row, merged.data());
    T* to = attended + (token * shape.num_heads + head) * shape.head_dim;
    std::transform(merged.begin(), merged.end(), to, [](float x) { return T(x); });
  }
};

// The threads of a parallel region, which take the stages of a step together.
struct Team {
  std::exception_ptr error;  // one that left the region would end the process

  // body(lo, hi) for this thread's share of `count`; then all wait.
  template <class Body>
  void share(int64_t count, Body body) {
    const int64_t thread = omp_get_thread_num(), num_threads = omp_get_num_threads();
    try {
      body(count * thread / num_threads, count * (thread + 1) / num_threads);
    } catch (...) {
#pragma omp critical(kv_fast_error)
      error = std::current_exception();
    }
#pragma omp barrier
  }
};

void run_layer(Team& team, const Layer& layer, StepAttention& attention, at::Tensor& attended) {
  const auto product = [&](const Stage& stage, auto rows_of) {
    team.share(stage.num_parts(), [&](int64_t lo, int64_t hi) {
      if (lo < hi) stage.run(rows_of(), lo, hi);
    });
  };
  const double eps = attention.eps;
  product(layer.qkv, [&] { return normed_rows(layer.x, layer.attention_norm, eps); });
  by_type(attended.scalar_type(), [&](auto type) {
    using T = decltype(type);
    team.share(attention.num_pairs(), [&](int64_t lo, int64_t hi) {
      for (int64_t pair = lo; pair < hi; ++pair) attention.prepare<T>(layer, pair);
    });
    Work& work = attention.work;
    Attend* attend = current->choose_attend(layer.k[0], layer.v[0]);
    team.share(work.num_parts, [&](int64_t lo, int64_t hi) {
      for (int64_t part = lo; part < hi; ++part) run_part(work, attend, part);
    });
    team.share(attention.num_pairs() * work.num_rows, [&](int64_t lo, int64_t hi) {
      T* to = attended.mutable_data_ptr<T>();
      for (int64_t i = lo; i < hi; ++i) attention.merge(i / work.num_rows, i % work.num_rows, to);
    });
  });
  product(layer.o, [&] { return padded_rows(attended, 1); });
  product(layer.gate_up, [&] { return normed_rows(layer.o.out, layer.mlp_norm, eps); });
  product(layer.down, [&] { return padded_rows(layer.gate_up.out, 1); });
}

// That a layer's tensors fit the step, so that no thread can read outside of them.
void check_layer(const Layer& layer, const at::Tensor& like_q, const at::Tensor& start_pos,
                 const Layer& first) {
  check(like_q, layer.k, layer.v, start_pos);
  const int64_t head_dim = like_q.size(3);
  TORCH_CHECK_VALUE(num_slots(layer.k[0], head_dim) == num_slots(first.k[0], head_dim) &&
                        layer.k[0].size(1) == first.k[0].size(1),
                    "caches ", layer.k[0].sizes(), " and ", first.k[0].sizes());
  for (const auto& norm : {layer.q_norm, layer.k_norm})
    TORCH_CHECK_VALUE(!norm || (norm->numel() == head_dim && norm->is_contiguous() &&
                                norm->scalar_type() == layer.x.scalar_type()),
                      "the norm of a head of ", head_dim, " is ", norm->scalar_type(),
                      norm->sizes());
}

// cos or sin [B, T, D / 2] fp32 of x [B, T, C].
at::Tensor checked_angles(const at::Tensor& angles, const at::Tensor& x) {
  TORCH_CHECK_VALUE(angles.dim() == 3 && angles.sizes().slice(0, 2).equals(x.sizes().slice(0, 2)) &&
                        angles.scalar_type() == at::kFloat,
                    "angles ", angles.sizes(), " of ", angles.scalar_type(), " for x ", x.sizes());
  return angles.contiguous();
}

at::Tensor decode_layers(const at::Tensor& input, const at::Tensor& cos, const at::Tensor& sin,
                         const at::Tensor& start_pos, at::TensorList weights,
                         at::IntArrayRef num_parts, at::TensorList norms, double eps,
                         at::TensorList qkv_biases, at::TensorList o_biases,
                         at::TensorList head_norms, at::TensorList k, at::TensorList v,
                         int64_t num_heads, int64_t intermediate_size) {
  TORCH_CHECK_VALUE(input.dim() == 3 && input.numel(), "x ", input.sizes(), " is not [B, T, C]");
  TORCH_CHECK_VALUE(num_heads > 0 && intermediate_size > 0, num_heads, " heads and ",
                    intermediate_size, " gates");
  Lists lists = {weights, num_parts, norms, qkv_biases, o_biases, head_norms, k, v};
  lists.check();
  const auto x = input.contiguous();
  const auto cosines = checked_angles(cos, x), sines = checked_angles(sin, x);
  TORCH_CHECK_VALUE(cos.sizes() == sin.sizes() && k[0].dim() >= 4, "angles ", cos.sizes(), " and ",
                    sin.sizes(), " for a cache ", k[0].sizes());
  const Shape shape = {x.size(1), num_heads, k[0].size(1), 2 * cos.size(2)};
  const auto like_q = at::empty({x.size(0), num_heads, shape.num_queries, shape.head_dim});
  Buffers buffers = {empty_rows(x, shape.width()), empty_rows(x, num_heads * shape.head_dim),
                     empty_rows(x, x.size(2)), empty_rows(x, intermediate_size),
                     empty_rows(x, x.size(2))};
  std::vector<Layer> layers;
  for (int64_t i = 0; i < lists.num_layers(); ++i) {
    layers.emplace_back(i, i ? buffers.y : x, buffers, lists);
    check_layer(layers.back(), like_q, start_pos, layers.front());
  }
  StepAttention attention(shape, like_q, layers.front(), cosines, sines, start_pos, eps);
  attention.check_room(num_slots(k[0], shape.head_dim));
  Team team;
#pragma omp parallel num_threads(at::get_num_threads()) if (!at::in_parallel_region())
  for (const auto& layer : layers) run_layer(team, layer, attention, buffers.attended);
  if (team.error) std::rethrow_exception(team.error);
  return buffers.y;
}

}  // namespace

// All layers of a decode step on the CPU in one call and one parallel region:
// kv_fast::decode_layers. A small model spends a third of a token on calls and on waking threads.
//
// Threads take their shares of a stage and wait for each other before the next. Between stages
// values are rounded to the model's dtype, as if each were an operation of its own: the bits are
// those of the layers one by one. See kernels/decode_layers.py for the contract.

#pragma once

#include "step_attention.h"

namespace {

// The threads of a parallel region, which take the stages of a step together.
struct Team {
  std::exception_ptr error;  // one that left the region would end the process

  // body(lo, hi) for this thread's share of `count`; then all wait.
  template <class Body>
  void share(int64_t count, Body body) {
    const int64_t thread = omp_get_thread_num(), num_threads = omp_get_num_threads();
    together([&] { body(count * thread / num_threads, count * (thread + 1) / num_threads); });
  }

  // body(i) for every so many of `count`, where neighbours cost alike; then all wait.
  template <class Body>
  void deal(int64_t count, Body body) {
    together([&] {
      for (int64_t i = omp_get_thread_num(); i < count; i += omp_get_num_threads()) body(i);
    });
  }

  template <class Body>
  void together(Body body) {
    try {
      body();
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
  const int64_t num_pairs = attention.num_pairs();
  for (int64_t pair = omp_get_thread_num(); pair < num_pairs; pair += omp_get_num_threads())
    attention.ask_for_slots(layer, pair);  // while the product is computed
  product(layer.qkv, [&] { return normed_rows(layer.x, layer.attention_norm, eps); });
  by_type(attended.scalar_type(), [&](auto type) {
    using T = decltype(type);
    team.deal(attention.num_vectors(), [&](int64_t i) { attention.prepare<T>(layer, i); });
    Work& work = attention.work;
    team.share(work.num_parts, [&](int64_t lo, int64_t hi) {
      for (int64_t part = lo; part < hi; ++part) run_part(work, part);
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
  const auto& scales = layer.k_channels;
  const int64_t sizes[] = {layer.k[0].size(1), head_dim};
  TORCH_CHECK_VALUE(!scales || (scales->sizes().equals(sizes) && scales->is_contiguous() &&
                                scales->scalar_type() == at::kFloat),
                    "scales of channels ", scales->scalar_type(), scales->sizes(), " for ",
                    layer.k[0].sizes());
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
                         at::TensorList head_norms, at::TensorList k_channels, bool rotates_v,
                         at::TensorList k, at::TensorList v, int64_t num_heads, int64_t intermediate_size) {
  TORCH_CHECK_VALUE(input.dim() == 3 && input.numel(), "x ", input.sizes(), " is not [B, T, C]");
  by_type(input.scalar_type(), [](auto) {});  // here, where what is thrown ends no process
  TORCH_CHECK_VALUE(num_heads > 0 && intermediate_size > 0, num_heads, " heads and ",
                    intermediate_size, " gates");
  Lists lists = {weights, num_parts, norms, qkv_biases, o_biases, head_norms, k_channels, k, v};
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
  StepAttention attention(shape, like_q, layers.front(), cosines, sines, start_pos, eps,
                          rotates_v);
  attention.check_room(num_slots(k[0], shape.head_dim));
  Team team;
#pragma omp parallel num_threads(at::get_num_threads()) if (!at::in_parallel_region())
  for (const auto& layer : layers) run_layer(team, layer, attention, buffers.attended);
  if (team.error) std::rethrow_exception(team.error);
  return buffers.y;
}

}  // namespace

// A layer of a decode step, as layers.h runs it: its tensors, and what passes between its stages.

#pragma once

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

// What a call has for all layers, one after the other. Biases, norms of heads and scales of K's
// channels may be none.
struct Lists {
  at::TensorList weights;
  at::IntArrayRef num_parts;  // of each weight
  at::TensorList norms, qkv_biases, o_biases, head_norms, k_channels, k, v;
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
    for (const size_t size :
         {qkv_biases.size(), o_biases.size(), head_norms.size() / 2, k_channels.size()})
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
  Optional attention_norm, mlp_norm, q_norm, k_norm, k_channels;
  Parts k, v;

  Layer(int64_t i, const at::Tensor& from, const Buffers& to, Lists& lists)
      : x(from),
        qkv(x, lists.next_weight(), to.qkv, {}, false, one_of(lists.qkv_biases, i)),
        o(to.attended, lists.next_weight(), to.h, x, false, one_of(lists.o_biases, i)),
        gate_up(to.h, lists.next_weight(), to.gates, {}, true),
        down(to.gates, lists.next_weight(), to.y, to.h, false),
        attention_norm(lists.norms[2 * i]), mlp_norm(lists.norms[2 * i + 1]),
        q_norm(one_of(lists.head_norms, 2 * i)), k_norm(one_of(lists.head_norms, 2 * i + 1)),
        k_channels(one_of(lists.k_channels, i)),
        k(of_layer(lists.k, i, lists)), v(of_layer(lists.v, i, lists)) {}

  static Parts of_layer(at::TensorList all, int64_t i, const Lists& lists) {
    const int64_t count = all.size() / lists.num_layers();
    return all.slice(i * count, count);
  }
};

}  // namespace

// Decode attention on the CPU, over the cache as it is stored: kv_fast::stored_attention, and what
// layers.h needs of it.
//
// The filled tiles of all (sequence, KV head) pairs are one line that is cut into equal parts, one
// per thread, so that all cores are busy at batch 1 with any number of heads. K and V are read
// once for the whole query group. Partial results are merged by log-sum-exp in a fixed order, so
// the same threads give the same bits. See kernels/ops.py for the contract.

#pragma once

#include "instruction_sets.h"
#include "tensors.h"

namespace {

constexpr int64_t GRAIN = 1;  // tiles per part at least: waking a thread costs more

// The slots of a payload, however it is tiled.
int64_t num_slots(const at::Tensor& payload, int64_t head_dim) {
  return payload.numel() / (payload.size(0) * payload.size(1) * payload_width(payload, head_dim));
}

// Payload, scale and zero of a format, by the type of its payload; 0 of an unknown one.
size_t num_parts(at::ScalarType type) {
  switch (type) {
    case at::kFloat: case at::kHalf: case at::kBFloat16: return 1;
    case at::kChar: case at::kFloat8_e4m3fn: return 2;
    case at::kByte: return 3;
    default: return 0;
  }
}

// A payload is [B, Hkv, S, width] or, for dot products of bytes, [B, Hkv, S / .., *tile].
void check_payload(const at::Tensor& payload, const at::Tensor& q, bool of_keys) {
  const auto type = payload.scalar_type();
  const auto sizes = payload.sizes();
  const auto inner = sizes.slice(std::min<size_t>(sizes.size(), 3));
  const int64_t head_dim = q.size(3), width = payload_width(payload, head_dim);
  const int64_t of_fours[] = {width / 16, 16, 16, 4};
  const bool may_be_tiled =
      (type == at::kChar || type == at::kByte) && current->reads_fours && width % 16 == 0;
  const bool is_tile = of_keys ? inner.equals({width / 4, 16, 4}) : inner.equals(of_fours);
  TORCH_CHECK_VALUE((inner.equals(width) || (may_be_tiled && is_tile)) &&
                        head_dim % (type == at::kByte ? 2 : 1) == 0,
                    "no CPU kernel for a cache ", sizes, " of ", type, ", D = ", head_dim);
  TORCH_CHECK_VALUE(sizes[0] == q.size(0) && sizes[1] > 0 && q.size(1) % sizes[1] == 0,
                    "a cache ", sizes, " for q ", q.sizes());
}

// Behind a payload come scale and zero [B, Hkv, S, 1], as far as its format has them.
void check_parts(at::TensorList parts, const at::Tensor& q, bool of_keys) {
  TORCH_CHECK_VALUE(!parts.empty(), "a cache of no parts");
  for (const auto& part : parts)
    TORCH_CHECK_VALUE(part.is_contiguous(), "the cache is strided");
  const auto type = parts[0].scalar_type();
  TORCH_CHECK_VALUE(num_parts(type), "no CPU kernel for a cache of ", type);
  check_payload(parts[0], q, of_keys);
  TORCH_CHECK_VALUE(parts.size() == num_parts(type), "a cache of ", type, " in ", parts.size(),
                    " parts");
  const auto sizes = parts[0].sizes();
  const int64_t scale_sizes[] = {sizes[0], sizes[1], num_slots(parts[0], q.size(3)), 1};
  for (const auto& scale : parts.slice(1))
    TORCH_CHECK_VALUE(scale.sizes().equals(scale_sizes) && scale.scalar_type() == at::kBFloat16,
                      "the scale or zero of a cache ", sizes, " is ", scale.scalar_type(), " ",
                      scale.sizes());
}

// Of all arguments, that none lets another be read outside of it.
void check(const at::Tensor& q, at::TensorList k, at::TensorList v, const at::Tensor& start_pos) {
  TORCH_CHECK_VALUE(q.dim() == 4 && q.numel() > 0, "q ", q.sizes(), " is not [B, Hq, T, D]");
  check_parts(k, q, true);
  check_parts(v, q, false);
  const int64_t slots = num_slots(k[0], q.size(3));
  TORCH_CHECK_VALUE(k[0].size(1) == v[0].size(1) && slots == num_slots(v[0], q.size(3)), "K ",
                    k[0].sizes(), " and V ", v[0].sizes(), " are not of one cache");
  TORCH_CHECK_VALUE(start_pos.dim() == 1 && start_pos.size(0) == q.size(0), "start_pos ",
                    start_pos.sizes(), " is not [B] of q ", q.sizes());
  const auto type = start_pos.scalar_type();
  TORCH_CHECK_VALUE(type == at::kInt || type == at::kLong, "start_pos of ", type,
                    " are not integers");
}

// The filled slots of each sequence, of which all that is asked for are there.
std::vector<int64_t> filled_slots(const at::Tensor& start_pos, int64_t num_queries, int64_t slots) {
  const auto filled = start_pos.to(at::kLong).contiguous();
  const auto* first = filled.const_data_ptr<int64_t>();
  std::vector<int64_t> all(first, first + filled.numel());
  for (const int64_t start : all)
    TORCH_CHECK_VALUE(0 <= start && start <= slots - (num_queries - 1), "start_pos ", start,
                      " and ", num_queries, " queries in a cache of ", slots, " slots");
  return all;
}

Side side_of(at::TensorList parts, int64_t pair) {
  const auto& payload = parts[0];  // contiguous per pair, however it is tiled
  const int64_t pair_bytes = payload.stride(1) * payload.element_size();
  const auto scale = [&](size_t i) {
    return i < parts.size() ? parts[i].const_data_ptr<BFloat16>() + pair * parts[i].size(2)
                            : nullptr;
  };
  return {payload.scalar_type(), is_tiled(payload),
          static_cast<const char*>(payload.const_data_ptr()) + pair * pair_bytes, scale(1),
          scale(2)};
}

// All pairs of a call. Their tiles form one line, cut into `num_parts` with results of their own;
// each query's own token is one part more, where it is asked for.
struct Work {
  std::vector<Head> heads;
  std::vector<int64_t> first_tile;  // [pairs + 1], on the line
  int64_t num_rows, stride, num_parts, num_results;
  std::vector<RowState> states;  // [pairs, results, rows]
  Scratch<float> sums;           // [pairs, results, rows, stride]

  Work(std::vector<Head> all, std::vector<int64_t> tiles, bool with_own)
      : heads(std::move(all)),
        first_tile(std::move(tiles)),
        num_rows(heads[0].num_rows),
        stride(padded(heads[0].head_dim)),
        num_parts(std::clamp<int64_t>(first_tile.back() / GRAIN, 1, at::get_num_threads())),
        num_results(num_parts + with_own),
        states(row(heads.size(), 0)),
        sums(row(heads.size(), 0) * stride) {}

  int64_t row(int64_t pair, int64_t part) const { return (pair * num_results + part) * num_rows; }
};

// One part of the line, pair by pair.
void run_part(Work& work, int64_t part) {
  const int64_t num_tiles = work.first_tile.back();
  const int64_t begin = num_tiles * part / work.num_parts;
  const int64_t end = num_tiles * (part + 1) / work.num_parts;
  for (size_t pair = 0; pair < work.heads.size(); ++pair) {
    const int64_t origin = work.first_tile[pair];
    const int64_t lo = std::max(begin, origin), hi = std::min(end, work.first_tile[pair + 1]);
    if (lo >= hi) continue;
    const int64_t row = work.row(pair, part);
    float* sums = work.sums.data + row * work.stride;
    current->attend(work.heads[pair], (lo - origin) * TILE,
                    std::min((hi - origin) * TILE, work.heads[pair].num_slots()),
                    &work.states[row], sums);
  }
}

// One row of one pair over all results: out [D] and its natural log-sum-exp.
float merge_parts(const Work& work, int64_t pair, int64_t r, float* out) {
  const int64_t head_dim = work.heads[pair].head_dim;
  float top = MINUS_INFINITY, total = 0;
  for (int64_t part = 0; part < work.num_results; ++part)
    top = std::max(top, work.states[work.row(pair, part) + r].top);
  std::fill_n(out, head_dim, 0.0f);
  for (int64_t part = 0; part < work.num_results; ++part) {
    const int64_t row = work.row(pair, part) + r;
    const RowState& state = work.states[row];
    if (state.is_empty()) continue;
    const float weight = std::exp2(state.top - top);
    const float* sums = work.sums.data + row * work.stride;
    total += weight * state.total();
    for (int64_t d = 0; d < head_dim; ++d) out[d] += weight * sums[d];
  }
  if (total != 0)  // NaN included: it spoils the row
    for (int64_t d = 0; d < head_dim; ++d) out[d] /= total;
  return (top + std::log2(total)) * float(M_LN2);
}

// The pairs of q [B, Hq, T, D] over K and V, with the padded rows of q; nothing is computed yet.
Work make_work(const at::Tensor& q, const float* q_rows, at::TensorList k, at::TensorList v,
               const at::Tensor& start_pos, bool with_own) {
  const int64_t num_queries = q.size(2), head_dim = q.size(3), num_kv_heads = k[0].size(1);
  const int64_t num_rows = q.size(1) / num_kv_heads * num_queries;
  const auto filled = filled_slots(start_pos, num_queries, num_slots(k[0], head_dim));
  std::vector<Head> heads;
  std::vector<int64_t> first_tile = {0};
  for (int64_t pair = 0; pair < q.size(0) * num_kv_heads; ++pair) {
    heads.push_back({q_rows + pair * num_rows * padded(head_dim), side_of(k, pair),
                     side_of(v, pair), num_rows, head_dim, num_queries,
                     filled[pair / num_kv_heads]});
    first_tile.push_back(first_tile.back() + (heads.back().num_slots() + TILE - 1) / TILE);
  }
  return Work(std::move(heads), std::move(first_tile), with_own);
}

void run(Work& work) {
  at::parallel_for(0, work.num_parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) run_part(work, part);
  });
}

std::tuple<at::Tensor, at::Tensor> stored_attention(
    const at::Tensor& q, at::TensorList k, at::TensorList v, const at::Tensor& start_pos,
    c10::string_view /*k_format*/, c10::string_view /*v_format*/, double sm_scale) {
  check(q, k, v, start_pos);
  const auto q_rows = padded_rows(q, sm_scale * M_LOG2E);
  Work work = make_work(q, q_rows.data, k, v, start_pos, false);
  run(work);

  auto out = at::empty(q.sizes(), q.options().dtype(at::kFloat));
  auto lse = at::empty(q.sizes().slice(0, 3), q.options().dtype(at::kFloat));
  float* to = out.mutable_data_ptr<float>();
  float* lse_to = lse.mutable_data_ptr<float>();
  for (size_t pair = 0; pair < work.heads.size(); ++pair)
    for (int64_t r = 0; r < work.num_rows; ++r, to += q.size(3))
      *lse_to++ = merge_parts(work, pair, r, to);
  return {out, lse};
}

// A query row's own token in full precision as the last result of a pair: out = v, lse = q . k.
void add_own_token(Work& work, int64_t pair, int64_t r, const float* k, const float* v) {
  const Head& head = work.heads[pair];
  const int64_t row = work.row(pair, work.num_parts) + r;
  const int64_t token = pair * head.num_queries + r % head.num_queries;
  const float* q = head.q + r * work.stride;
  const float* key = k + token * work.stride;
  work.states[row] = {std::inner_product(q, q + head.head_dim, key, 0.0f), {1.0f}};
  std::copy_n(v + token * work.stride, head.head_dim, work.sums.data + row * work.stride);
}

}  // namespace

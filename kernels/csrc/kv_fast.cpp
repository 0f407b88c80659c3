// kv_fast::stored_attention on the CPU: decode attention over the cache as it is stored.
//
// The filled tiles of all (sequence, KV head) pairs are one line that is cut into equal parts, one
// per thread, so that all cores are busy at batch 1 with any number of heads. K and V are read
// once for the whole query group. Partial results are merged by log-sum-exp in a fixed order, so
// the same threads give the same bits. See kernels/ops.py for the contract.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/bit_cast.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace {

using c10::BFloat16;
using c10::Half;

constexpr int64_t TILE = 32;  // slots per step: K and V widened to fp32 stay in the L1 cache
constexpr int64_t GRAIN = 4;  // tiles per part at least: waking a thread costs more
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

// Floats per row of scratch: whole vectors of the widest registers.
constexpr int64_t padded(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }

inline float widen(float x) { return x; }
inline float widen(int8_t x) { return x; }
inline float widen(Half x) { return x; }
inline float widen(BFloat16 x) { return c10::bit_cast<float>(uint32_t(x.x) << 16); }

// Zeroed scratch, aligned to 64 bytes as all memory of ATen.
struct Scratch {
  at::Tensor memory;
  float* data;

  explicit Scratch(int64_t count)
      : memory(at::zeros({count}, at::kFloat)), data(memory.mutable_data_ptr<float>()) {}
};

// K or V of one sequence and KV head: payload [S, D], scale [S] or none.
struct Side {
  const void* payload;
  const BFloat16* scale;
};

// One KV head of one sequence with its query rows, row = g * T + t, scaled by sm_scale * log2(e).
struct Head {
  const float* q;  // [rows, stride], zero past head_dim
  Side k, v;
  int64_t num_rows, head_dim, num_queries, filled;

  int64_t bound(int64_t row) const { return filled + row % num_queries; }
  int64_t num_slots() const { return filled + num_queries - 1; }
};

// Online softmax of one row, to base 2: its sums are relative to exp2(top).
struct RowState {
  float top = MINUS_INFINITY;
  float total = 0;
};

struct Tile {
  int64_t stride;
  Scratch vectors;  // [TILE, stride]
  float scale[TILE];

  explicit Tile(int64_t stride) : stride(stride), vectors(TILE * stride) {}
};

using Attend = void(const Head&, int64_t lo, int64_t hi, RowState*, float* sums);

// The same loops for each instruction set; GCC's pragmas, elsewhere only the compiler's default.
namespace baseline {
constexpr size_t LANES = 4;
#include "loops.inc"
}
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define KV_FAST_X86
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
constexpr size_t LANES = 8;
#include "loops.inc"
}
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")
namespace avx512 {
constexpr size_t LANES = 16;
#include "loops.inc"
}
#pragma GCC pop_options
#endif

struct InstructionSet {
  std::string name;
  Attend* (*choose_attend)(at::ScalarType k, at::ScalarType v);
};

// What this processor can run, best first.
const std::vector<InstructionSet>& available() {
  static const auto sets = [] {
    std::vector<InstructionSet> found;
#ifdef KV_FAST_X86
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
      found.push_back({"avx512", avx512::choose_attend});
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
      found.push_back({"avx2", avx2::choose_attend});
#endif
    found.push_back({"baseline", baseline::choose_attend});
    return found;
  }();
  return sets;
}

const InstructionSet* current = &available().front();

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const auto& set : available()) names.push_back(set.name);
  return names;
}

void use_instruction_set(std::string name) {
  for (const auto& set : available())
    if (set.name == name) {
      current = &set;
      return;
    }
  TORCH_CHECK_VALUE(false, "instruction set ", name, " is not available");
}

Side side_of(at::TensorList parts, int64_t pair) {
  const auto& payload = parts[0];
  const int64_t num_slots = payload.size(2), pair_bytes = payload.stride(1) * payload.element_size();
  return {static_cast<const char*>(payload.data_ptr()) + pair * pair_bytes,
          parts.size() > 1 ? parts[1].const_data_ptr<BFloat16>() + pair * num_slots : nullptr};
}

void check_parts(at::TensorList parts) {
  for (const auto& part : parts) TORCH_CHECK_VALUE(part.is_contiguous(), "the cache is strided");
  const auto type = parts[0].scalar_type();
  TORCH_CHECK_VALUE(type == at::kFloat || type == at::kHalf || type == at::kBFloat16 ||
                        type == at::kChar,
                    "no CPU kernel for a cache of ", type);
}

// Query rows of all pairs: [B * Hq * T, stride].
Scratch padded_queries(const at::Tensor& q, double factor) {
  const auto rows = q.to(at::kFloat).mul(factor).reshape({-1, q.size(3)}).contiguous();
  const int64_t head_dim = rows.size(1), stride = padded(head_dim);
  Scratch queries(rows.size(0) * stride);
  for (int64_t r = 0; r < rows.size(0); ++r)
    std::copy_n(rows.const_data_ptr<float>() + r * head_dim, head_dim, queries.data + r * stride);
  return queries;
}

// All pairs of a call. Their tiles form one line, cut into `num_parts` with results of their own.
struct Work {
  std::vector<Head> heads;
  std::vector<int64_t> first_tile;  // [pairs + 1], on the line
  int64_t num_rows, stride, num_parts;
  std::vector<RowState> states;  // [pairs, parts, rows]
  Scratch sums;                  // [pairs, parts, rows, stride]

  Work(std::vector<Head> all, std::vector<int64_t> tiles)
      : heads(std::move(all)),
        first_tile(std::move(tiles)),
        num_rows(heads[0].num_rows),
        stride(padded(heads[0].head_dim)),
        num_parts(std::clamp<int64_t>(first_tile.back() / GRAIN, 1, at::get_num_threads())),
        states(row(heads.size(), 0)),
        sums(row(heads.size(), 0) * stride) {}

  int64_t row(int64_t pair, int64_t part) const { return (pair * num_parts + part) * num_rows; }
};

// One part of the line, pair by pair.
void run_part(Work& work, Attend* attend, int64_t part) {
  const int64_t num_tiles = work.first_tile.back();
  const int64_t begin = num_tiles * part / work.num_parts;
  const int64_t end = num_tiles * (part + 1) / work.num_parts;
  for (size_t pair = 0; pair < work.heads.size(); ++pair) {
    const int64_t origin = work.first_tile[pair];
    const int64_t lo = std::max(begin, origin), hi = std::min(end, work.first_tile[pair + 1]);
    if (lo >= hi) continue;
    const int64_t row = work.row(pair, part);
    attend(work.heads[pair], (lo - origin) * TILE,
           std::min((hi - origin) * TILE, work.heads[pair].num_slots()), &work.states[row],
           work.sums.data + row * work.stride);
  }
}

// One row of one pair over all parts: out [D] and its natural log-sum-exp.
float merge_parts(const Work& work, int64_t pair, int64_t r, float* out) {
  const int64_t head_dim = work.heads[pair].head_dim;
  float top = MINUS_INFINITY, total = 0;
  for (int64_t part = 0; part < work.num_parts; ++part)
    top = std::max(top, work.states[work.row(pair, part) + r].top);
  std::fill_n(out, head_dim, 0.0f);
  for (int64_t part = 0; part < work.num_parts; ++part) {
    const int64_t row = work.row(pair, part) + r;
    const RowState& state = work.states[row];
    if (state.total == 0) continue;
    const float weight = std::exp2(state.top - top);
    const float* sums = work.sums.data + row * work.stride;
    total += weight * state.total;
    for (int64_t d = 0; d < head_dim; ++d) out[d] += weight * sums[d];
  }
  if (total > 0)
    for (int64_t d = 0; d < head_dim; ++d) out[d] /= total;
  return (top + std::log2(total)) * float(M_LN2);
}

std::tuple<at::Tensor, at::Tensor> stored_attention(
    const at::Tensor& q, at::TensorList k, at::TensorList v, const at::Tensor& start_pos,
    c10::string_view /*k_format*/, c10::string_view /*v_format*/, double sm_scale) {
  check_parts(k), check_parts(v);
  const int64_t num_queries = q.size(2), head_dim = q.size(3), num_kv_heads = k[0].size(1);
  const int64_t num_pairs = q.size(0) * num_kv_heads;
  const int64_t num_rows = q.size(1) / num_kv_heads * num_queries;
  const auto queries = padded_queries(q, sm_scale * M_LOG2E);
  const auto filled = start_pos.to(at::kLong).contiguous();

  std::vector<Head> heads;
  std::vector<int64_t> first_tile = {0};
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    heads.push_back({queries.data + pair * num_rows * padded(head_dim), side_of(k, pair),
                     side_of(v, pair), num_rows, head_dim, num_queries,
                     filled.const_data_ptr<int64_t>()[pair / num_kv_heads]});
    first_tile.push_back(first_tile.back() + (heads.back().num_slots() + TILE - 1) / TILE);
  }
  Work work(std::move(heads), std::move(first_tile));
  Attend* attend = current->choose_attend(k[0].scalar_type(), v[0].scalar_type());
  at::parallel_for(0, work.num_parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) run_part(work, attend, part);
  });

  auto out = at::empty(q.sizes(), q.options().dtype(at::kFloat));
  auto lse = at::empty(q.sizes().slice(0, 3), q.options().dtype(at::kFloat));
  float* to = out.mutable_data_ptr<float>();
  float* lse_to = lse.mutable_data_ptr<float>();
  for (int64_t pair = 0; pair < num_pairs; ++pair)
    for (int64_t r = 0; r < num_rows; ++r, to += head_dim)
      *lse_to++ = merge_parts(work, pair, r, to);
  return {out, lse};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(kv_fast, m) {
  m.def("instruction_sets() -> str[]", instruction_sets);
  m.def("use_instruction_set(str name) -> ()", use_instruction_set);
}

TORCH_LIBRARY_IMPL(kv_fast, CPU, m) { m.impl("stored_attention", stored_attention); }

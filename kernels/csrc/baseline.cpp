// The inner loops as every processor can run them.

#include "instruction_set.h"

namespace {

namespace baseline {
constexpr size_t LANES = 4;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
template <class T>
Floats load_vector(const T* from) {
  return Floats{widen(from[0]), widen(from[1]), widen(from[2]), widen(from[3])};
}
inline Ints load_ints(const void* from) {
  const auto* bytes = static_cast<const int8_t*>(from);
  return Ints{bytes[0], bytes[1], bytes[2], bytes[3]};
}
#include "vectors.inc"
#include "attention.inc"
#include "linear.inc"
#include "quantized.inc"
#include "dense.inc"
}  // namespace baseline

}  // namespace

extern "C" const void* kv_fast_instruction_set() {
  static constexpr InstructionSet SET = {"baseline",
                                         baseline::attend<baseline::keys_of,
                                                          baseline::values_of>,
                                         baseline::choose_multiply,
                                         baseline::choose_multiply_tiles<baseline::PlainDots>,
                                         baseline::choose_make_dense, false};
  return &SET;
}

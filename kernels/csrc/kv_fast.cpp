// The host code of the CPU kernels: registration of the ops.

#include <torch/library.h>

#include "layers.h"
#include "many_rows.h"

TORCH_LIBRARY_FRAGMENT(kv_fast, m) {
  m.def("instruction_sets() -> str[]", instruction_sets);
  m.def("reads_fours() -> bool", reads_fours);
  m.def("add_instruction_set(str library) -> ()", add_instruction_set);
  m.def("use_instruction_set(str name) -> ()", use_instruction_set);
}

TORCH_LIBRARY_IMPL(kv_fast, CPU, m) {
  m.impl("stored_attention", stored_attention);
  m.impl("linear", linear);
  m.impl("quantized_linear", quantized_linear);
  m.impl("decode_layers", decode_layers);
  m.impl("dequantize", dequantize);
  m.impl("many_rows", many_rows);
}

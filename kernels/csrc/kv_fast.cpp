// The CPU kernels, one translation unit: registration of the ops.

#include <torch/library.h>

#include "layers.h"
#include "many_rows.h"

namespace {

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

bool reads_fours() { return current->reads_fours; }

}  // namespace

TORCH_LIBRARY_FRAGMENT(kv_fast, m) {
  m.def("instruction_sets() -> str[]", instruction_sets);
  m.def("reads_fours() -> bool", reads_fours);
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

// The instruction sets that are loaded, and the choice of one at run time.

#pragma once

#include <dlfcn.h>

#include <string>
#include <vector>

#include "instruction_set.h"

namespace {

// The one that answers: that of this library, until another is asked for.
inline auto* current = static_cast<const InstructionSet*>(kv_fast_instruction_set());

inline std::vector<const InstructionSet*> loaded = {current};

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const auto* set : loaded) names.push_back(set->name);
  return names;
}

// Load that of another library, which stays open.
void add_instruction_set(std::string library) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  TORCH_CHECK(handle, dlerror());
  const auto get = reinterpret_cast<decltype(&kv_fast_instruction_set)>(
      dlsym(handle, "kv_fast_instruction_set"));
  TORCH_CHECK(get, dlerror());
  loaded.push_back(static_cast<const InstructionSet*>(get()));
}

void use_instruction_set(std::string name) {
  for (const auto* set : loaded)
    if (set->name == name) {
      current = set;
      return;
    }
  TORCH_CHECK_VALUE(false, "instruction set ", name, " is not available");
}

bool reads_fours() { return current->reads_fours; }

}  // namespace

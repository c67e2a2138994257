// The ways through this library, one for each kind of processor, and which of them can run here.
#pragma once

#include <string>
#include <vector>

#include "kernel.h"

namespace cinetile {

struct Path {
  const char* name;
  const Kernel* float32;   // takes float32 arrays, and float16 ones, which it widens
  const Kernel* bfloat16;  // takes bfloat16 arrays
  bool automatic;          // false for one that only tests ask for by name

  const Kernel& kernel(DataType type) const {
    return type == DataType::kBFloat16 ? *bfloat16 : *float32;
  }
};

// Those that this processor and operating system can run, the fastest first.
const std::vector<Path>& available_paths();

// The available path of that name, or null.
const Path* find_path(const std::string& name);

}  // namespace cinetile

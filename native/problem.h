// What one call of attention is: arrays, plans and routes, as the entry points hand them over.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace cinetile {

// Functions in headers are static, so that no kernel shares one with code for weaker machines.

// Numbered as in direct.py.
enum class DataType { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

static inline int64_t byte_size(DataType type) { return type == DataType::kFloat32 ? 4 : 2; }

// A tile plan by its tables, none of which is owned; see cinetile.plans.TilePlan.
struct PlanTables {
  int32_t block_q = 0;
  int32_t block_kv = 0;
  int32_t num_q_tiles = 0;
  int64_t num_tiles = 0;
  // Whether masked tiles may be narrowed to the keys that their rows keep; a naive plan's may not.
  bool refine = false;
  const int32_t* row_starts = nullptr;  // [num_q_tiles + 1]
  const int32_t* tile_kv = nullptr;     // [num_tiles]
  const uint8_t* tile_kind = nullptr;   // [num_tiles]; 0 needs no mask
  // A row keeps key k of a masked tile if k < prefix or low <= k < high; null keeps every key.
  const int32_t* prefix = nullptr;  // [num_tokens], like the next two
  const int32_t* low = nullptr;
  const int32_t* high = nullptr;
  // Frame-major position of the token at each position of the plan; null where they agree.
  const int32_t* query_order = nullptr;  // [num_tokens]
  const int32_t* key_order = nullptr;    // [num_tokens]
  // Where the text stands among the keys; how much of it exists is known at run time alone.
  int32_t text_start = 0;
  int32_t text_stop = 0;
};

// Elements from one batch row, token or head of an array to the next; features are adjacent.
struct Strides {
  int64_t batch = 0;
  int64_t token = 0;
  int64_t head = 0;
};

// An array [batch, tokens, heads, head_dim] without gaps.
inline Strides adjacent(int64_t num_tokens, int64_t heads, int64_t head_dim) {
  return {num_tokens * heads * head_dim, heads * head_dim, head_dim};
}

struct Problem {
  DataType type = DataType::kFloat32;
  int64_t batch = 0;
  int64_t num_tokens = 0;
  int64_t heads = 0;
  int64_t head_dim = 0;
  float scale = 1.0f;
  const void* query = nullptr;
  const void* key = nullptr;
  const void* value = nullptr;
  const int32_t* routes = nullptr;      // [batch, heads]: the plan of each head
  const int32_t* valid_text = nullptr;  // [batch]: text tokens that exist; null where all do
  void* output = nullptr;
  Strides query_strides;
  Strides key_strides;
  Strides value_strides;
  Strides output_strides;
  float* lse = nullptr;  // [batch, tokens, heads]
  std::vector<PlanTables> plans;
};

// Why a problem must not be run: what its tables name and its arrays do not hold. Empty if sound.
std::string find_fault(const Problem& problem);

}  // namespace cinetile

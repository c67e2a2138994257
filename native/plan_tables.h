// Reading tile plans out of the flat tables in which Python hands them over.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "problem.h"

namespace cinetile {

struct FlatTables {
  const int32_t* header = nullptr;  // [num_plans, kHeaderColumns]
  int64_t num_plans = 0;
  const int32_t* row_starts = nullptr;  // of all plans, one after the other
  int64_t num_row_starts = 0;
  const int32_t* tile_kv = nullptr;  // likewise
  const uint8_t* tile_kind = nullptr;
  int64_t num_tiles = 0;
  const int32_t* edges = nullptr;  // [num_edges, 3, num_tokens]: prefix, low, high
  int64_t num_edges = 0;
  const int32_t* orders = nullptr;  // [num_orders, num_tokens]
  int64_t num_orders = 0;
};

// Columns of a header row; cinetile/kernels/cpu/tables.py writes them in this order.
enum HeaderColumn {
  kBlockQ,
  kBlockKv,
  kRefine,
  kRowStartsOffset,
  kNumQTiles,
  kTilesOffset,
  kNumTiles,
  kEdges,       // index into edges, or -1
  kQueryOrder,  // index into orders, or -1
  kKeyOrder,    // likewise
  kTextStart,
  kTextStop,
  kHeaderColumns,
};

// Appends the plans, each within its table; returns why that cannot be, or an empty string.
std::string read_plans(const FlatTables& tables, int64_t num_tokens,
                       std::vector<PlanTables>& plans);

}  // namespace cinetile

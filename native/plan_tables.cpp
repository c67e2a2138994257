#include "plan_tables.h"

namespace cinetile {
namespace {

bool inside(int64_t offset, int64_t count, int64_t size) {
  return offset >= 0 && count >= 0 && offset <= size && count <= size - offset;
}

bool is_index_or_none(int64_t index, int64_t size) { return index >= -1 && index < size; }

}  // namespace

std::string read_plans(const FlatTables& tables, int64_t num_tokens,
                       std::vector<PlanTables>& plans) {
  for (int64_t i = 0; i < tables.num_plans; ++i) {
    const int32_t* header = tables.header + i * kHeaderColumns;
    const std::string which = "plan " + std::to_string(i) + ": ";
    if (header[kNumQTiles] < 1 ||
        !inside(header[kRowStartsOffset], int64_t{header[kNumQTiles]} + 1, tables.num_row_starts))
      return which + "its query tiles lie outside row_starts";
    if (!inside(header[kTilesOffset], header[kNumTiles], tables.num_tiles))
      return which + "its tiles lie outside the tables";
    if (!is_index_or_none(header[kEdges], tables.num_edges))
      return which + "its edges are not there";
    if (!is_index_or_none(header[kQueryOrder], tables.num_orders) ||
        !is_index_or_none(header[kKeyOrder], tables.num_orders))
      return which + "its token order is not there";
    const auto order = [&](int64_t index) {
      return index < 0 ? nullptr : tables.orders + index * num_tokens;
    };
    PlanTables plan;
    plan.block_q = header[kBlockQ];
    plan.block_kv = header[kBlockKv];
    plan.num_q_tiles = header[kNumQTiles];
    plan.num_tiles = header[kNumTiles];
    plan.refine = header[kRefine] != 0;
    plan.row_starts = tables.row_starts + header[kRowStartsOffset];
    plan.tile_kv = tables.tile_kv + header[kTilesOffset];
    plan.tile_kind = tables.tile_kind + header[kTilesOffset];
    if (header[kEdges] >= 0) {
      plan.prefix = tables.edges + int64_t{header[kEdges]} * 3 * num_tokens;
      plan.low = plan.prefix + num_tokens;
      plan.high = plan.low + num_tokens;
    }
    plan.query_order = order(header[kQueryOrder]);
    plan.key_order = order(header[kKeyOrder]);
    plan.text_start = header[kTextStart];
    plan.text_stop = header[kTextStop];
    plans.push_back(plan);
  }
  return "";
}

}  // namespace cinetile

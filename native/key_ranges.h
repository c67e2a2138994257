// The keys that a query tile visits, cut along the blocks in which they are packed.
#pragma once

#include <cstdint>

#include "kernel.h"
#include "simd.h"

namespace cinetile {
namespace {

// Keys first to stop - 1, all in one packed block; masked keys are compared with the rows' edges.
struct KeyRange {
  int64_t first;
  int64_t stop;
  bool masked;
};

// Calls visit(range) for keys first to stop - 1, cut along the packed blocks.
template <class Visit>
CINETILE_INLINE void for_each_block(int64_t first, int64_t stop, bool masked, int64_t key_block,
                                    const Visit& visit) {
  while (first < stop) {
    const int64_t block_stop = (first / key_block + 1) * key_block;
    const int64_t range_stop = stop < block_stop ? stop : block_stop;
    visit(KeyRange{first, range_stop, masked});
    first = range_stop;
  }
}

// Calls visit(range) for the keys of a task's query tile in ascending order, without those that do
// not exist. Neighbouring tiles that are both full or both masked join.
template <class Visit>
CINETILE_INLINE void for_each_key_range(const AttendTask& task, int64_t key_block,
                                        const Visit& visit) {
  const PlanTables& plan = *task.plan;
  const int64_t q_tile = task.first_query / plan.block_q;
  const int32_t end = plan.row_starts[q_tile + 1];
  for (int32_t index = plan.row_starts[q_tile]; index < end;) {
    const bool masked = plan.tile_kind[index] != 0;
    const int64_t first = static_cast<int64_t>(plan.tile_kv[index]) * plan.block_kv;
    int64_t stop = first + plan.block_kv;
    ++index;
    while (index < end && (plan.tile_kind[index] != 0) == masked &&
           static_cast<int64_t>(plan.tile_kv[index]) * plan.block_kv == stop) {
      stop += plan.block_kv;
      ++index;
    }
    stop = stop < task.num_tokens ? stop : task.num_tokens;
    const int64_t stop_before = stop < task.absent_first ? stop : task.absent_first;
    const int64_t first_after = first > task.absent_stop ? first : task.absent_stop;
    if (task.absent_first == task.absent_stop) {
      for_each_block(first, stop, masked, key_block, visit);
    } else {
      for_each_block(first, stop_before, masked, key_block, visit);
      for_each_block(first_after, stop, masked, key_block, visit);
    }
  }
}

}  // namespace
}  // namespace cinetile

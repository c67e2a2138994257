// How the queries of a tile are spread over tasks, and those of a task over blocks side by side.
#pragma once

#include <cstdint>

#include "kernel.h"

namespace cinetile {

// Some queries cut into parts that are whole multiples of a number, but for the last one.
struct QuerySplit {
  int64_t queries;
  int64_t multiple;
  int64_t parts;

  // Where a part begins; that of the number of parts is the end.
  int64_t start(int64_t part) const {
    const int64_t start = multiples() * part / parts * multiple;
    return start < queries ? start : queries;
  }
  // Queries of a part that are computed: its last vectors may hold fewer than they can.
  int64_t computed(int64_t part) const { return round_up(start(part + 1) - start(part), multiple); }

 private:
  int64_t multiples() const { return (queries + multiple - 1) / multiple; }
};

// As few parts of at most `most` queries as can be. They differ by one multiple at most, so that
// no part is mostly empty. `most` is a multiple itself.
static inline QuerySplit split_queries(int64_t queries, int64_t most, int64_t multiple) {
  return {queries, multiple, (queries + most - 1) / most};
}

// The tasks of a query tile.
static inline QuerySplit split_tile(const Kernel& kernel, int64_t queries) {
  return split_queries(queries, kernel.query_block * kQueryBlocksPerTask, kernel.query_multiple);
}

// Queries that a kernel computes for a tile of so many, which is more where vectors stay unfilled.
static inline int64_t computed_queries(const Kernel& kernel, int64_t queries) {
  const QuerySplit tasks = split_tile(kernel, queries);
  int64_t sum = 0;
  for (int64_t task = 0; task < tasks.parts; ++task) {
    const QuerySplit blocks = split_queries(tasks.start(task + 1) - tasks.start(task),
                                            kernel.query_block, kernel.query_multiple);
    for (int64_t block = 0; block < blocks.parts; ++block) sum += blocks.computed(block);
  }
  return sum;
}

}  // namespace cinetile

#include "attention.h"

#include <algorithm>
#include <memory>

#include "interrupts.h"
#include "memory.h"
#include "query_split.h"

namespace cinetile {
namespace {

int64_t queries_per_task(const Kernel& kernel) { return kernel.query_block * kQueryBlocksPerTask; }

// One head of one batch row.
struct Head {
  int64_t row;
  int64_t head;
  const PlanTables* plan;
  PackedHead packed;
};

// Heads that are packed and computed together: one, unless its tasks are too few for the threads.
int64_t heads_at_a_time(const Problem& problem, const Kernel& kernel, int64_t num_threads) {
  constexpr int64_t kTasksPerThread = 8;
  const int64_t most = kernel.query_block * kQueryBlocksPerTask;
  const int64_t tasks_per_head = (problem.num_tokens + most - 1) / most;
  const int64_t wanted = (kTasksPerThread * num_threads + tasks_per_head - 1) / tasks_per_head;
  const int64_t limit =
      std::max<int64_t>(1, std::min(problem.batch * problem.heads, 2 * num_threads));
  return std::clamp<int64_t>(wanted, 1, limit);
}

struct QueryRange {
  const Head* head;
  int64_t first;
  int64_t stop;
};

void append_query_ranges(const Problem& problem, const Head& head, const Kernel& kernel,
                         std::vector<QueryRange>& ranges) {
  const int64_t block_q = head.plan->block_q;
  for (int64_t tile = 0; tile < head.plan->num_q_tiles; ++tile) {
    const int64_t start = tile * block_q;
    const QuerySplit tasks =
        split_tile(kernel, std::min(start + block_q, problem.num_tokens) - start);
    for (int64_t task = 0; task < tasks.parts; ++task)
      ranges.push_back({&head, start + tasks.start(task), start + tasks.start(task + 1)});
  }
}

// Where an array's head begins, at token 0.
const void* start_of(const void* array, const Strides& strides, const Head& head, DataType type) {
  const int64_t elements = head.row * strides.batch + head.head * strides.head;
  return static_cast<const char*>(array) + elements * byte_size(type);
}

}  // namespace

void run_attention(const Problem& problem, const Kernel& kernel, Threads& threads) {
  const PackedLayout layout = packed_layout(kernel, problem.num_tokens, problem.head_dim);
  const int64_t key_words = layout.num_blocks * kernel.key_block * layout.key_words;
  const int64_t head_words = key_words + layout.num_blocks * layout.value_words;
  const int64_t num_heads = problem.batch * problem.heads;
  const int64_t group = heads_at_a_time(problem, kernel, threads.count());
  const RunningCall call;
  const AlignedBuffer packed(group * head_words * sizeof(int32_t));
  std::vector<uint8_t> not_finite(group * layout.num_blocks);

  std::vector<Head> heads;
  std::vector<QueryRange> ranges;
  for (int64_t first = 0; first < num_heads; first += group) {
    const int64_t count = std::min(group, num_heads - first);
    heads.clear();
    ranges.clear();
    for (int64_t i = 0; i < count; ++i) {
      const int64_t index = first + i;
      int32_t* words = packed.as<int32_t>() + i * head_words;
      heads.push_back({index / problem.heads,
                       index % problem.heads,
                       &problem.plans[problem.routes[index]],
                       {words, words + key_words, not_finite.data() + i * layout.num_blocks}});
    }
    for (const Head& head : heads) append_query_ranges(problem, head, kernel, ranges);

    parallel_for(threads, count * layout.num_blocks, [&](int64_t index) {
      call.throw_if_interrupted();
      const Head& head = heads[index / layout.num_blocks];
      const AlignedBuffer rows(kernel.key_block * layout.key_words * sizeof(int32_t));
      kernel.pack({problem.type, start_of(problem.key, problem.key_strides, head, problem.type),
                   start_of(problem.value, problem.value_strides, head, problem.type),
                   problem.key_strides.token, problem.value_strides.token, head.plan->key_order,
                   problem.num_tokens, problem.head_dim, index % layout.num_blocks,
                   rows.as<int32_t>(), head.packed});
    });
    parallel_for(threads, static_cast<int64_t>(ranges.size()), [&](int64_t index) {
      const QueryRange& range = ranges[index];
      const Head& head = *range.head;
      const AlignedBuffer workspace(kernel.workspace_bytes(problem.head_dim));
      AttendTask task;
      task.type = problem.type;
      task.query = start_of(problem.query, problem.query_strides, head, problem.type);
      task.value = start_of(problem.value, problem.value_strides, head, problem.type);
      task.output =
          const_cast<void*>(start_of(problem.output, problem.output_strides, head, problem.type));
      task.lse = problem.lse + head.row * problem.num_tokens * problem.heads + head.head;
      task.query_stride = problem.query_strides.token;
      task.value_stride = problem.value_strides.token;
      task.output_stride = problem.output_strides.token;
      task.lse_stride = problem.heads;
      task.num_tokens = problem.num_tokens;
      task.head_dim = problem.head_dim;
      task.absent_stop = head.plan->text_stop;
      task.absent_first =
          problem.valid_text == nullptr
              ? task.absent_stop
              : std::min<int64_t>(head.plan->text_start + problem.valid_text[head.row],
                                  task.absent_stop);
      task.scale = problem.scale;
      task.plan = head.plan;
      task.first_query = range.first;
      task.stop_query = range.stop;
      task.packed = head.packed;
      task.last_ended_call = last_ended_call();
      task.call = call.number();
      kernel.attend(task, workspace.as<void>());
      call.throw_if_interrupted();
    });
  }
}

}  // namespace cinetile

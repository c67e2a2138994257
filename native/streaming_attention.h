// The loop of FlashAttention (arXiv:2205.14135) over the live tiles of a plan, for any unit that
// scores keys and sums up values. Instantiated by each kernel source for its instruction set.
#pragma once

#include <cstdint>

#include "kernel.h"
#include "key_ranges.h"
#include "query_block.h"
#include "query_split.h"
#include "vector_products.h"

namespace cinetile {
namespace {

template <class Unit>
struct StreamingAttention {
  using Block = typename Unit::Block;
  using Float = typename Block::Float;
  using Lanes = typename Block::Lanes;
  static constexpr int kLanes = Lanes::kWidth;

  // Weights reach up to two to this power before a row's reference is raised: far from overflow,
  // and seldom enough to cost nothing.
  static constexpr float kHeadroom = 16.0f;

  struct Workspace {
    Workspace(void* base, int64_t head_dim) {
      Arena arena(base);
      features = round_up(head_dim, Unit::kFeatureMultiple);
      for (Block& block : blocks) block = Block::allocate(arena, features, Unit::kMaxVectors);
      scratch = Unit::allocate(arena);
      row = arena.take<int32_t>(features);
      finite_values = arena.take<int32_t>(features / Unit::kPack * Unit::kKeyBlock);
      bytes = arena.used();
    }
    int64_t features;
    Block blocks[kQueryBlocksPerTask];
    int64_t num_blocks = 0;
    typename Unit::Scratch scratch;
    int32_t* row;            // words of a single token
    int32_t* finite_values;  // a packed block, touched only where values are not finite
    int64_t bytes;
  };

  static size_t workspace_bytes(int64_t head_dim) {
    return static_cast<size_t>(Workspace(nullptr, head_dim).bytes);
  }

  static void pack(const PackTask& task) {
    const int64_t words = round_up(task.head_dim, Unit::kFeatureMultiple) / Unit::kPack;
    const int64_t first = task.block * Unit::kKeyBlock;
    read_rows(task, task.key, task.key_stride, first, words);
    Unit::pack_keys(task.target.keys + first * words, task.rows, words);
    read_rows(task, task.value, task.value_stride, first, words);
    Unit::pack_values(task.target.values + first * words, task.rows, words);
    bool not_finite = false;
    for (int64_t i = 0; i < Unit::kKeyBlock * words; ++i)
      not_finite |= finite_part(task.rows[i]) != task.rows[i];
    task.target.not_finite[task.block] = not_finite;
  }

  static void attend(const AttendTask& task, void* memory) {
    [[maybe_unused]] const typename Unit::Session session;
    Workspace workspace(memory, task.head_dim);
    const PlanTables& plan = *task.plan;
    const int64_t words = workspace.features / Unit::kPack;
    start_blocks(task, workspace);
    for_each_key_range(task, Unit::kKeyBlock, [&](const KeyRange& range) {
      if (__atomic_load_n(task.last_ended_call, __ATOMIC_RELAXED) >= task.call) return;
      const int64_t block_start = range.first / Unit::kKeyBlock * Unit::kKeyBlock;
      for (int64_t i = 0; i < workspace.num_blocks; ++i) {
        Block& block = workspace.blocks[i];
        KeySpan span{task.packed.keys + block_start * words,
                     task.packed.values + block_start * words,
                     block_start,
                     range.first,
                     range.stop,
                     range.masked,
                     plan.refine};
        if (range.masked && plan.refine) {
          if (!block.may_keep(span.first, span.stop)) continue;
          block.narrow(span.first, span.stop);
        }
        attend_span<Unit::kMinVectors>(task, workspace, block, span);
      }
    });
    for (int64_t i = 0; i < workspace.num_blocks; ++i) workspace.blocks[i].finish(task);
  }

 private:
  // A word with zeros for the numbers that are infinite or NaN.
  static CINETILE_INLINE int32_t finite_part(int32_t word) {
    if constexpr (Unit::kPack == 1) return is_not_finite(word) ? 0 : word;
    const uint32_t halves = static_cast<uint32_t>(word);
    const uint32_t low = is_not_finite(static_cast<int32_t>(halves << 16)) ? 0 : halves & 0xffffu;
    return static_cast<int32_t>((is_not_finite(word) ? 0 : halves & 0xffff0000u) | low);
  }

  static void read_rows(const PackTask& task, const void* source, int64_t stride, int64_t first,
                        int64_t words) {
    int32_t* row = task.rows;
    for (int64_t i = 0; i < Unit::kKeyBlock; ++i, row += words) {
      if (first + i < task.num_tokens)
        read_words<Unit::kPack>(row, token(source, first + i, task.order, stride, task.type),
                                task.type, task.head_dim, words);
      else
        std::memset(row, 0, words * sizeof(int32_t));
    }
  }

  static void start_blocks(const AttendTask& task, Workspace& workspace) {
    const QuerySplit split = split_queries(task.stop_query - task.first_query,
                                           kLanes * Unit::kMaxVectors, kLanes * Unit::kMinVectors);
    for (int64_t i = 0; i < split.parts; ++i)
      workspace.blocks[i].start(
          task, task.first_query + split.start(i), task.first_query + split.start(i + 1),
          static_cast<int>(split.computed(i) / kLanes), workspace.features, workspace.row);
    workspace.num_blocks = split.parts;
  }

  // Calls the code for the width of the block.
  template <int kVectors>
  static void attend_span(const AttendTask& task, Workspace& workspace, Block& block,
                          const KeySpan& span) {
    if constexpr (kVectors < Unit::kMaxVectors)
      if (block.vectors != kVectors) return attend_span<kVectors + 1>(task, workspace, block, span);
    attend_span_of_width<kVectors>(task, workspace, block, span);
  }

  // One step of the softmax. A row's reference stands in for its running maximum: it is the highest
  // score of some keys that the row has seen, and no score exceeds it by more than the headroom, or
  // else it is raised and the span weighed again. So no weight overflows, and the sum of weights
  // is at least one.
  template <int kVectors>
  static __attribute__((noinline)) void attend_span_of_width(const AttendTask& task,
                                                             Workspace& workspace, Block& block,
                                                             const KeySpan& span) {
    const typename Unit::Scratch& scratch = workspace.scratch;
    const int64_t features = workspace.features;
    const float scale = task.scale * 1.44269504089f;  // of logits in base two
    Float maxima[kVectors];
    Float sums[kVectors];
    if (!block.seen_keys) {
      // A look at a few keys spares most blocks from weighing their first span twice.
      KeySpan few = span;
      few.stop = few.first + Unit::kKeyStep < few.stop ? few.first + Unit::kKeyStep : few.stop;
      Unit::template weigh<kVectors>(block, scratch, few, features, scale, maxima, sums);
      block.raise_references(maxima, scale, features);
      block.seen_keys = true;
    }
    Unit::template weigh<kVectors>(block, scratch, span, features, scale, maxima, sums);
    if (exceeds_headroom(block, maxima, scale)) {
      block.raise_references(maxima, scale, features);
      Unit::template weigh<kVectors>(block, scratch, span, features, scale, maxima, sums);
    }
    for (int v = 0; v < kVectors; ++v) {
      float* total = block.total + v * kLanes;
      Lanes::store(total, Lanes::load(total) + sums[v]);
    }
    if (task.packed.not_finite[span.block_start / Unit::kKeyBlock])
      add_values_apart<kVectors>(task, workspace, block, span);
    else
      Unit::template add_values<kVectors>(block, scratch, span, features);
  }

  // Adds values some of which are infinite or NaN, each to the rows that keep its key only: as a
  // product its weight of zero would spoil the others.
  template <int kVectors>
  static __attribute__((noinline)) void add_values_apart(const AttendTask& task,
                                                         Workspace& workspace, Block& block,
                                                         const KeySpan& span) {
    const int64_t features = workspace.features;
    const int64_t words = features / Unit::kPack * Unit::kKeyBlock;
    for (int64_t i = 0; i < words; ++i) workspace.finite_values[i] = finite_part(span.values[i]);
    KeySpan finite = span;
    finite.values = workspace.finite_values;
    Unit::template add_values<kVectors>(block, workspace.scratch, finite, features);
    for (int64_t key = span.first; key < span.stop; ++key) {
      read_words<1>(workspace.row,
                    token(task.value, key, task.plan->key_order, task.value_stride, task.type),
                    task.type, task.head_dim, features);
      for (int64_t feature = 0; feature < task.head_dim; ++feature) {
        if (!is_not_finite(workspace.row[feature])) continue;
        float* output = block.output + feature * block.queries;
        for (int64_t lane = 0; lane < block.queries; ++lane)
          if (!span.masked || block.keeps(lane, key))
            output[lane] += float_of(workspace.row[feature]);
      }
    }
  }

  template <int kVectors>
  static bool exceeds_headroom(const Block& block, const Float (&maxima)[kVectors], float scale) {
    bool exceeds = false;
    for (int v = 0; v < kVectors; ++v) {
      const Float reference = Lanes::load(block.reference + v * kLanes);
      exceeds |= Lanes::any((maxima[v] - reference) * scale > Lanes::splat(kHeadroom));
    }
    return exceeds;
  }
};

template <class Unit>
constexpr Kernel make_kernel() {
  using Attention = StreamingAttention<Unit>;
  constexpr int kLanes = Attention::kLanes;
  return {kLanes * Unit::kMaxVectors,
          kLanes * Unit::kMinVectors,
          Unit::kKeyBlock,
          Unit::kPack,
          Unit::kFeatureMultiple,
          &Attention::pack,
          &Attention::workspace_bytes,
          &Attention::attend};
}

}  // namespace
}  // namespace cinetile

// The loop of FlashAttention (arXiv:2205.14135) over the live tiles of a plan, for any unit that
// scores keys and sums up values. Instantiated by each kernel source for its instruction set.
#pragma once

#include <cstdint>

#include "kernel.h"
#include "key_ranges.h"
#include "query_block.h"
#include "vector_products.h"

namespace cinetile {
namespace {

template <class Unit>
struct StreamingAttention {
  using Block = typename Unit::Block;
  using Float = typename Block::Float;
  using Lanes = typename Block::Lanes;
  static constexpr int kVectors = Unit::kVectors;

  // Weights reach up to two to this power before a row's reference is raised: far from overflow,
  // and seldom enough to cost nothing.
  static constexpr float kHeadroom = 16.0f;

  struct Workspace {
    Workspace(void* base, int64_t head_dim) {
      Arena arena(base);
      features = round_up(head_dim, Unit::kFeatureMultiple);
      for (Block& block : blocks) block = Block::allocate(arena, features);
      scratch = Unit::allocate(arena);
      row = arena.take<int32_t>(features);
      bytes = arena.used();
    }
    int64_t features;
    Block blocks[kQueryBlocksPerTask];
    typename Unit::Scratch scratch;
    int32_t* row;
    int64_t bytes;
  };

  static size_t workspace_bytes(int64_t head_dim) {
    return static_cast<size_t>(Workspace(nullptr, head_dim).bytes);
  }

  static void pack(const PackTask& task) {
    const int64_t words = round_up(task.head_dim, Unit::kFeatureMultiple) / Unit::kPack;
    const int64_t first = task.block * Unit::kKeyBlock;
    int32_t* keys = task.target.keys + first * words;
    pack_rows(task, task.key, task.key_stride, first, words, keys);
    pack_rows(task, task.value, task.value_stride, first, words, task.value_rows);
    Unit::pack_values(task.target.values + first * words, task.value_rows, words);
  }

  static void attend(const AttendTask& task, void* memory) {
    [[maybe_unused]] const typename Unit::Session session;
    Workspace workspace(memory, task.head_dim);
    const PlanTables& plan = *task.plan;
    const int64_t features = workspace.features;
    const int64_t words = features / Unit::kPack;
    int64_t num_blocks = 0;
    for (int64_t first = task.first_query; first < task.stop_query; first += Block::kQueries) {
      const int64_t stop = first + Block::kQueries;
      workspace.blocks[num_blocks++].start(
          task, first, stop < task.stop_query ? stop : task.stop_query, features, workspace.row);
    }
    const float scale = task.scale * 1.44269504089f;  // scores in base two
    for_each_key_range(task, Unit::kKeyBlock, [&](const KeyRange& range) {
      if (__atomic_load_n(task.last_ended_call, __ATOMIC_RELAXED) >= task.call) return;
      const int64_t block_start = range.first / Unit::kKeyBlock * Unit::kKeyBlock;
      for (int64_t i = 0; i < num_blocks; ++i) {
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
        attend_span(block, workspace.scratch, span, features, scale);
      }
    });
    for (int64_t i = 0; i < num_blocks; ++i) workspace.blocks[i].finish(task);
  }

 private:
  static void pack_rows(const PackTask& task, const void* source, int64_t stride, int64_t first,
                        int64_t words, int32_t* rows) {
    for (int64_t i = 0; i < Unit::kKeyBlock; ++i, rows += words) {
      if (first + i < task.num_tokens)
        read_words<Unit::kPack>(rows, token(source, first + i, task.order, stride, task.type),
                                task.type, task.head_dim, words);
      else
        std::memset(rows, 0, words * sizeof(int32_t));
    }
  }

  // One step of the softmax. A row's reference stands in for its running maximum: it is the highest
  // score of some keys that the row has seen, and no score exceeds it by more than the headroom, or
  // else it is raised and the span weighed again. So no weight overflows, and the sum of weights
  // is at least one.
  static __attribute__((noinline)) void attend_span(Block& block,
                                                    const typename Unit::Scratch& scratch,
                                                    const KeySpan& span, int64_t features,
                                                    float scale) {
    Float maxima[kVectors];
    Float sums[kVectors];
    if (!block.seen_keys) {
      // A look at a few keys spares most blocks from weighing their first span twice.
      KeySpan few = span;
      few.stop = few.first + Unit::kKeyStep < few.stop ? few.first + Unit::kKeyStep : few.stop;
      Unit::weigh(block, scratch, few, features, scale, maxima, sums);
      block.raise_references(maxima, features);
      block.seen_keys = true;
    }
    Unit::weigh(block, scratch, span, features, scale, maxima, sums);
    if (exceeds_headroom(block, maxima)) {
      block.raise_references(maxima, features);
      Unit::weigh(block, scratch, span, features, scale, maxima, sums);
    }
    for (int v = 0; v < kVectors; ++v) {
      float* total = block.total + v * Block::Lanes::kWidth;
      Lanes::store(total, Lanes::load(total) + sums[v]);
    }
    Unit::add_values(block, scratch, span, features);
  }

  static bool exceeds_headroom(const Block& block, const Float (&maxima)[kVectors]) {
    bool exceeds = false;
    for (int v = 0; v < kVectors; ++v) {
      const Float limit =
          Lanes::load(block.reference + v * Lanes::kWidth) + Lanes::splat(kHeadroom);
      exceeds |= Lanes::any(maxima[v] > limit);
    }
    return exceeds;
  }
};

template <class Unit>
constexpr Kernel make_kernel() {
  using Attention = StreamingAttention<Unit>;
  return {Unit::kQueries,         Unit::kKeyBlock,  Unit::kPack,
          Unit::kFeatureMultiple, &Attention::pack, &Attention::workspace_bytes,
          &Attention::attend};
}

}  // namespace
}  // namespace cinetile

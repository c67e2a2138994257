// What a kernel for one instruction set offers, and what it is given.
#pragma once

#include <cstddef>
#include <cstdint>

#include "problem.h"

namespace cinetile {

constexpr size_t kAlignment = 64;

static inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Sizes of one head's keys and values in the layout that a kernel reads.
struct PackedLayout {
  int64_t key_words;    // 32-bit words of a key: its features, one or two a word
  int64_t value_words;  // 32-bit words of the values of one block of keys
  int64_t num_blocks;   // blocks of keys
};

// One head's keys and values, packed block by block in the layout that its kernel reads.
struct PackedHead {
  int32_t* keys = nullptr;
  int32_t* values = nullptr;
  uint8_t* not_finite = nullptr;  // [block]: whether some value of the block is infinite or NaN
};

struct PackTask {
  DataType type;
  const void* key;  // of the head, at token 0
  const void* value;
  int64_t key_stride;  // elements from one token to the next
  int64_t value_stride;
  const int32_t* order;  // null for frame-major
  int64_t num_tokens;
  int64_t head_dim;
  int64_t block;  // which block of keys to pack
  int32_t* rows;  // scratch for the unpacked rows of a block
  PackedHead target;
};

struct AttendTask {
  DataType type;
  const void* query;  // of the head, at token 0
  const void* value;
  void* output;
  float* lse;
  int64_t query_stride;  // elements from one token to the next
  int64_t value_stride;
  int64_t output_stride;
  int64_t lse_stride;
  int64_t num_tokens;
  int64_t head_dim;
  int64_t absent_first;  // keys absent_first to absent_stop - 1 do not exist
  int64_t absent_stop;
  float scale;
  const PlanTables* plan;
  int64_t first_query;  // the task's queries, all of one query tile
  int64_t stop_query;
  PackedHead packed;
  // The output may stay incomplete once *last_ended_call reaches the number of the task's call.
  const int64_t* last_ended_call;
  int64_t call;
};

// A kernel is a table of functions compiled for one instruction set. Nothing else of such a source
// file may be visible to the linker, lest a weaker machine gets code that it cannot run.
struct Kernel {
  int64_t query_block;        // queries that are computed side by side, at most
  int64_t query_multiple;     // fewer are whole multiples of this
  int64_t key_block;          // keys whose values are packed together
  int64_t features_per_word;  // 2 where two bfloat16 numbers share a word, else 1
  int64_t feature_multiple;   // features are padded to whole multiples of this, with zeros
  void (*pack)(const PackTask& task);
  size_t (*workspace_bytes)(int64_t head_dim);
  void (*attend)(const AttendTask& task, void* workspace);
};

// Query blocks that share one pass over the keys, so that a block of keys is read from the nearest
// cache for all but the first of them.
constexpr int64_t kQueryBlocksPerTask = 4;

static inline PackedLayout packed_layout(const Kernel& kernel, int64_t num_tokens,
                                         int64_t head_dim) {
  const int64_t words = round_up(head_dim, kernel.feature_multiple) / kernel.features_per_word;
  return {words, words * kernel.key_block, (num_tokens + kernel.key_block - 1) / kernel.key_block};
}

extern const Kernel kPortableKernel;
extern const Kernel kNeonKernel;
extern const Kernel kNeonBf16Kernel;
extern const Kernel kAvx2Kernel;
extern const Kernel kAvx512Kernel;
extern const Kernel kAvx512Bf16Kernel;
extern const Kernel kAmxKernel;
extern const Kernel kAmxEmulatedKernel;

}  // namespace cinetile

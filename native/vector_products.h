// Scores and weighted sums on vector units: outer products of queries and broadcast keys or values.
#pragma once

#include <cstdint>

#include "query_block.h"

namespace cinetile {
namespace {

// Keys of one packed block that a block of queries attends to.
struct KeySpan {
  const int32_t* keys;    // the packed block's
  const int32_t* values;  // the packed block's
  int64_t block_start;    // position of the block's first key
  int64_t first;          // keys first to stop - 1 take part, by their positions
  int64_t stop;
  bool masked;  // compare with the edges of each row
  bool refine;  // unless no row's edge crosses the keys at hand
};

// The scores of one key, minus infinity where the span or a row's edges leave the key out.
template <class Block>
CINETILE_INLINE typename Block::Float mask_score(const Block& block, typename Block::Float score,
                                                 int64_t key, int v, const KeySpan& span) {
  using Lanes = typename Block::Lanes;
  using Int = typename Lanes::Int;
  using Unsigned = typename Lanes::Unsigned;
  if (key < span.first || key >= span.stop) return Lanes::splat(-INFINITY);
  if (!span.masked) return score;
  const Int position = Lanes::splat(static_cast<int32_t>(key));
  const Int low = Lanes::load(block.low + v * Lanes::kWidth);
  const Unsigned width = reinterpret_cast<Unsigned>(Lanes::load(block.span + v * Lanes::kWidth));
  const Int kept = (position < Lanes::load(block.prefix + v * Lanes::kWidth)) |
                   (reinterpret_cast<Unsigned>(position - low) < width);
  return kept ? score : Lanes::splat(-INFINITY);
}

// Copies groups of kGroup rows so that the same column of a group's rows is adjacent:
// [row / kGroup][column][row % kGroup].
template <int kGroup>
void interleave_rows(int32_t* target, const int32_t* rows, int64_t num_rows, int64_t columns) {
  for (int64_t first = 0; first < num_rows; first += kGroup, rows += kGroup * columns)
    for (int64_t column = 0; column < columns; ++column)
      for (int r = 0; r < kGroup; ++r) *target++ = rows[r * columns + column];
}

// `Products` gives kLanes numbers a vector, at most kVectors vectors of queries by kRows keys or
// features, kPack numbers a word, kKeyBlock keys packed together, add(sum, vector, word), which
// broadcasts the word, and weights(first, second), which makes words of kPack weights.
template <class Products>
struct VectorUnit {
  static constexpr int kLanes = Products::kLanes;
  static constexpr int kMinVectors = 1;
  static constexpr int kMaxVectors = Products::kVectors;
  static constexpr int kPack = Products::kPack;
  static constexpr int kKeyBlock = Products::kKeyBlock;
  static constexpr int kRows = Products::kRows;
  static constexpr int kKeyStep = kRows;  // keys that are scored together
  static constexpr int kFeatureMultiple = 16;
  static_assert(kFeatureMultiple % kRows == 0 && kRows % 4 == 0 && kKeyBlock % kRows == 0, "");
  using Block = QueryBlock<kLanes, kPack>;
  using Lanes = typename Block::Lanes;
  using Float = typename Lanes::Float;
  using Int = typename Lanes::Int;
  static constexpr int kDegree = kPack == 2 ? 3 : 5;

  struct Scratch {
    int32_t* weights;  // [key / kPack][query]
  };
  static Scratch allocate(Arena& arena) {
    return {arena.take<int32_t>(kKeyBlock / kPack * kLanes * kMaxVectors)};
  }

  // What a thread has to hold while it computes: nothing here.
  struct Session {};

  // Packed keys of a block: [key / kRows][word][kRows keys].
  static void pack_keys(int32_t* target, const int32_t* rows, int64_t words) {
    interleave_rows<kRows>(target, rows, kKeyBlock, words);
  }

  // Packed values of a block: [feature / kRows][key / kPack][kRows features].
  static void pack_values(int32_t* target, const int32_t* rows, int64_t words) {
    if constexpr (kPack == 1) {
      for (int64_t feature = 0; feature < words; feature += kRows)
        for (int64_t key = 0; key < kKeyBlock; ++key, target += kRows)
          std::memcpy(target, rows + key * words + feature, kRows * sizeof(int32_t));
    } else {
      const uint16_t* halves = reinterpret_cast<const uint16_t*>(rows);
      const int64_t features = words * 2;
      for (int64_t feature = 0; feature < features; feature += kRows)
        for (int64_t key = 0; key < kKeyBlock; key += 2, target += kRows) {
          const uint16_t* even = halves + key * features + feature;
          const uint16_t* odd = even + features;
          for (int i = 0; i < kRows; ++i)
            target[i] = static_cast<int32_t>(even[i] | static_cast<uint32_t>(odd[i]) << 16);
        }
    }
  }

  // sums[r][v] += words[step][r] * vectors[step][v] over the steps. All the time goes here.
  template <int kVectors>
  static CINETILE_INLINE void add_products(Float (&sums)[kRows][kVectors], const int32_t* words,
                                           const int32_t* vectors, int64_t steps) {
    for (; steps > 0; --steps, words += kRows, vectors += kVectors * kLanes) {
      Int columns[kVectors];
      for (int v = 0; v < kVectors; ++v) columns[v] = Lanes::load(vectors + v * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) Products::add(sums[r][v], columns[v], words[r]);
    }
  }

  // Weights of the span's keys into scratch, their sums, and the rows' highest scores.
  template <int kVectors>
  static __attribute__((noinline)) void weigh(const Block& block, const Scratch& scratch,
                                              const KeySpan& span, int64_t features, float scale,
                                              Float (&maxima)[kVectors], Float (&sums)[kVectors]) {
    Float top[kVectors], total[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      top[v] = Lanes::splat(-INFINITY);
      total[v] = Float{};
    }
    const int64_t words = features / kPack;
    for (int64_t key = span.first / kKeyStep * kKeyStep; key < span.stop; key += kKeyStep) {
      const int64_t offset = key - span.block_start;
      const int32_t* keys = span.keys + offset * words;
      int32_t* weights = scratch.weights + offset / kPack * (kVectors * kLanes);
      Float scores[kRows][kVectors];
      for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v) scores[r][v] = Float{};
      add_products<kVectors>(scores, keys, block.query, words);
      const bool cut = key < span.first || key + kKeyStep > span.stop;
      const bool crossed = span.masked && !(span.refine && block.keeps_all(key, key + kKeyStep));
      if (cut || crossed) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v)
            scores[r][v] = mask_score(block, scores[r][v], key + r, v, span);
      }
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const Float reference = Lanes::load(block.reference + v * kLanes);
        Float weight[kRows];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          top[v] = Lanes::maximum(scores[r][v], top[v]);
          weight[r] = Lanes::template exp2<kDegree>((scores[r][v] - reference) * scale);
        }
        for (int r = 0; r < kRows; r += 4)
          total[v] += (weight[r] + weight[r + 1]) + (weight[r + 2] + weight[r + 3]);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; r += kPack)
          Lanes::store(weights + r / kPack * (kVectors * kLanes) + v * kLanes,
                       Products::weights(weight[r], weight[r + kPack - 1]));
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      maxima[v] = top[v];
      sums[v] = total[v];
    }
  }

  // Adds the span's values by their weights to the block's output.
  template <int kVectors>
  static __attribute__((noinline)) void add_values(const Block& block, const Scratch& scratch,
                                                   const KeySpan& span, int64_t features) {
    constexpr int kQueries = kVectors * kLanes;
    const int64_t start = (span.first / kKeyStep * kKeyStep - span.block_start) / kPack;
    const int64_t stop = (round_up(span.stop, kKeyStep) - span.block_start) / kPack;
    for (int64_t feature = 0; feature < features; feature += kRows) {
      const int32_t* values = span.values + feature * (kKeyBlock / kPack);
      float* output = block.output + feature * kQueries;
      Float sums[kRows][kVectors];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v)
          sums[r][v] = Lanes::load(output + r * kQueries + v * kLanes);
      add_products<kVectors>(sums, values + start * kRows, scratch.weights + start * kQueries,
                             stop - start);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v)
          Lanes::store(output + r * kQueries + v * kLanes, sums[r][v]);
    }
  }
};

// Products of float32 numbers.
template <int kLanes_, int kVectors_, int kRows_>
struct Float32Products {
  static constexpr int kLanes = kLanes_;
  static constexpr int kVectors = kVectors_;
  static constexpr int kRows = kRows_;
  static constexpr int kPack = 1;
  static constexpr int kKeyBlock = 64;
  using Lanes = Simd<kLanes>;

  static CINETILE_INLINE void add(typename Lanes::Float& sum, typename Lanes::Int vector,
                                  int32_t word) {
    sum += reinterpret_cast<typename Lanes::Float>(vector) * Lanes::splat(float_of(word));
  }
  static CINETILE_INLINE typename Lanes::Int weights(typename Lanes::Float first,
                                                     typename Lanes::Float) {
    return reinterpret_cast<typename Lanes::Int>(first);
  }
};

}  // namespace
}  // namespace cinetile

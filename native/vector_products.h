// Scores and weighted sums on vector units: outer products of queries and broadcast keys or values.
#pragma once

#include <cstdint>

#include "query_block.h"

namespace cinetile {
namespace {

// Keys of one packed block that a block of queries attends to.
struct KeySpan {
  const int32_t* keys;    // first row of the packed block
  const int32_t* values;  // of the packed block
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

template <class Products>
struct VectorUnit {
  static constexpr int kLanes = Products::kLanes;
  static constexpr int kVectors = Products::kVectors;
  static constexpr int kPack = Products::kPack;
  static constexpr int kKeyBlock = Products::kKeyBlock;
  static constexpr int kFeatureMultiple = kFeatureBlock;
  static constexpr int kKeyStep = Products::kRows;  // keys that are scored together
  static constexpr int kFeatureStep = Products::kRows;
  using Block = QueryBlock<kLanes, kVectors, kPack>;
  using Lanes = typename Block::Lanes;
  using Float = typename Lanes::Float;
  using Int = typename Lanes::Int;
  static constexpr int kQueries = Block::kQueries;
  static constexpr int kDegree = kPack == 2 ? 3 : 5;

  struct Scratch {
    int32_t* weights;  // [key / kPack][query]
  };
  static Scratch allocate(Arena& arena) {
    return {arena.take<int32_t>(kKeyBlock / kPack * kQueries)};
  }

  // What a thread has to hold while it computes: nothing here.
  struct Session {};

  // Packed values of a block: [feature / 16][key / kPack][16 features].
  static void pack_values(int32_t* target, const int32_t* rows, int64_t words) {
    if constexpr (kPack == 1) {
      for (int64_t group = 0; group < words / kFeatureBlock; ++group)
        for (int64_t key = 0; key < kKeyBlock; ++key, target += kFeatureBlock)
          std::memcpy(target, rows + key * words + group * kFeatureBlock, kFeatureBlock * 4);
    } else {
      const uint16_t* halves = reinterpret_cast<const uint16_t*>(rows);
      const int64_t features = words * 2;
      for (int64_t group = 0; group < features / kFeatureBlock; ++group)
        for (int64_t key = 0; key < kKeyBlock; key += 2, target += kFeatureBlock) {
          const uint16_t* even = halves + key * features + group * kFeatureBlock;
          const uint16_t* odd = even + features;
          for (int64_t i = 0; i < kFeatureBlock; ++i)
            target[i] = static_cast<int32_t>(even[i] | static_cast<uint32_t>(odd[i]) << 16);
        }
    }
  }

  // Weights of the span's keys into scratch, their sums, and the rows' highest scores in base two.
  static CINETILE_INLINE void weigh(const Block& block, const Scratch& scratch, const KeySpan& span,
                                    int64_t features, float scale, Float (&maxima)[kVectors],
                                    Float (&sums)[kVectors]) {
    Float top[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      top[v] = Lanes::splat(-INFINITY);
      sums[v] = Float{};
    }
    const int64_t words = features / kPack;
    for (int64_t key = span.first / kKeyStep * kKeyStep; key < span.stop; key += kKeyStep) {
      const int64_t offset = key - span.block_start;
      const int32_t* keys = span.keys + offset * words;
      int32_t* weights = scratch.weights + offset / kPack * kQueries;
      const bool cut = key < span.first || key + kKeyStep > span.stop;
      const bool crossed = span.masked && !(span.refine && block.keeps_all(key, key + kKeyStep));
      if (cut || crossed)
        weigh_step<true>(block, keys, words, scale, weights, top, sums, key, span);
      else
        weigh_step<false>(block, keys, words, scale, weights, top, sums, key, span);
    }
    for (int v = 0; v < kVectors; ++v) maxima[v] = top[v] * scale;
  }

  template <bool kMasked>
  static CINETILE_INLINE void weigh_step(const Block& block, const int32_t* keys, int64_t words,
                                         float scale, int32_t* weights, Float (&top)[kVectors],
                                         Float (&sums)[kVectors], int64_t key,
                                         const KeySpan& span) {
    Float scores[kKeyStep][kVectors];
    for (int r = 0; r < kKeyStep; ++r)
      for (int v = 0; v < kVectors; ++v) scores[r][v] = Float{};
    const int32_t* query = block.query;
    for (int64_t word = 0; word < words; ++word, query += kQueries) {
      Int features[kVectors];
      for (int v = 0; v < kVectors; ++v) features[v] = Lanes::load(query + v * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kKeyStep; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v)
          Products::add(scores[r][v], features[v], keys[r * words + word]);
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const Float reference = Lanes::load(block.reference + v * kLanes);
      Float weight[kKeyStep];
#pragma GCC unroll 8
      for (int r = 0; r < kKeyStep; ++r) {
        Float score = scores[r][v];
        if constexpr (kMasked) score = mask_score(block, score, key + r, v, span);
        top[v] = Lanes::maximum(score, top[v]);
        weight[r] = Lanes::template exp2<kDegree>(score * scale - reference);
      }
      for (int r = 0; r < kKeyStep; r += 4)
        sums[v] += (weight[r] + weight[r + 1]) + (weight[r + 2] + weight[r + 3]);
#pragma GCC unroll 8
      for (int r = 0; r < kKeyStep; r += kPack)
        Lanes::store(weights + r / kPack * kQueries + v * kLanes,
                     Products::weights(weight[r], weight[r + kPack - 1]));
    }
  }

  // Adds the span's values by their weights to the block's output.
  static CINETILE_INLINE void add_values(const Block& block, const Scratch& scratch,
                                         const KeySpan& span, int64_t features) {
    const int64_t start = (span.first / kKeyStep * kKeyStep - span.block_start) / kPack;
    const int64_t stop = (round_up(span.stop, kKeyStep) - span.block_start) / kPack;
    for (int64_t feature = 0; feature < features; feature += kFeatureStep) {
      const int32_t* values = span.values +
                              feature / kFeatureBlock * (kKeyBlock / kPack * kFeatureBlock) +
                              feature % kFeatureBlock;
      float* output = block.output + feature * kQueries;
      Float sums[kFeatureStep][kVectors];
      for (int r = 0; r < kFeatureStep; ++r)
        for (int v = 0; v < kVectors; ++v)
          sums[r][v] = Lanes::load(output + r * kQueries + v * kLanes);
      for (int64_t step = start; step < stop; ++step) {
        Int weights[kVectors];
        for (int v = 0; v < kVectors; ++v)
          weights[v] = Lanes::load(scratch.weights + step * kQueries + v * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kFeatureStep; ++r)
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v)
            Products::add(sums[r][v], weights[v], values[step * kFeatureBlock + r]);
      }
      for (int r = 0; r < kFeatureStep; ++r)
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

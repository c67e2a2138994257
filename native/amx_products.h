// Scores and weighted sums on a matrix unit of eight tiles of 16 rows by 64 bytes (Intel AMX).
#pragma once

#include <cstdint>

#include "bfloat16_weights.h"
#include "query_block.h"
#include "vector_products.h"

namespace cinetile {
namespace {

// `Tiles` is the unit itself or a stand-in for it: static load<tile>, store<tile>, zero<tile> and
// multiply_add<sum, left, right>, its Session, and exp2 of a vector of 16.
template <class Tiles>
struct AmxUnit {
  static constexpr int kLanes = 16;
  static constexpr int kMinVectors = 2;  // two tiles of queries, always
  static constexpr int kMaxVectors = 2;
  static constexpr int kPack = 2;
  static constexpr int kKeyBlock = 256;
  static constexpr int kKeyStep = 32;  // two tiles of keys by two of queries fill four sums
  static constexpr int kFeatureMultiple = 32;
  using Block = QueryBlock<kLanes, kPack>;
  using Lanes = typename Block::Lanes;
  using Float = typename Lanes::Float;
  using Session = typename Tiles::Session;
  static constexpr int kQueries = kLanes * kMaxVectors;
  static constexpr int kTile = 16;
  static constexpr int64_t kRowBytes = kQueries * sizeof(int32_t);

  struct Scratch {
    float* scores;     // two turns of [key][query], one being filled while the other is read
    int32_t* weights;  // [key / 2][query]
  };
  static Scratch allocate(Arena& arena) {
    return {arena.take<float>(2 * kKeyStep * kQueries),
            arena.take<int32_t>(kKeyBlock / kPack * kQueries)};
  }

  // Packed keys of a block: their rows as they are.
  static void pack_keys(int32_t* target, const int32_t* rows, int64_t words) {
    std::memcpy(target, rows, kKeyBlock * words * sizeof(int32_t));
  }

  // Packed values of a block: [feature / 16][key / 32] tiles of [16 features][16 pairs of keys].
  static void pack_values(int32_t* target, const int32_t* rows, int64_t words) {
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(rows);
    const int64_t features = words * kPack;
    for (int64_t group = 0; group < features; group += kTile)
      for (int64_t step = 0; step < kKeyBlock; step += kKeyStep)
        for (int64_t feature = group; feature < group + kTile; ++feature)
          for (int64_t key = step; key < step + kKeyStep; key += 2)
            *target++ = static_cast<int32_t>(
                halves[key * features + feature] |
                static_cast<uint32_t>(halves[(key + 1) * features + feature]) << 16);
  }

  // As VectorUnit::weigh. While the matrix unit scores one step of keys, the vector unit turns the
  // scores of the step before into weights; the two are written interleaved to run side by side.
  template <int kVectors>
  static CINETILE_INLINE void weigh(const Block& block, const Scratch& scratch, const KeySpan& span,
                                    int64_t features, float scale, Float (&maxima)[kVectors],
                                    Float (&sums)[kVectors]) {
    Weighing state{block, scratch, span, scale, {}, {}};
    for (int v = 0; v < kVectors; ++v) {
      state.top[v] = Lanes::splat(-INFINITY);
      state.sums[v] = Float{};
    }
    const int64_t words = features / kPack;
    const int64_t first = span.first / kKeyStep * kKeyStep;
    score_step(state, first, words, 0, [](int64_t, int64_t) {});
    int turn = 0;
    for (int64_t key = first; key < span.stop; key += kKeyStep, turn ^= 1) {
      const int64_t next = key + kKeyStep;
      const bool cut = key < span.first || next > span.stop;
      const bool crossed = span.masked && !(span.refine && block.keeps_all(key, next));
      const auto weigh_pairs = [&](int64_t start, int64_t stop) {
        if (cut || crossed)
          weigh_key_pairs<true>(state, key, turn, start, stop);
        else
          weigh_key_pairs<false>(state, key, turn, start, stop);
      };
      if (next < span.stop)
        score_step(state, next, words, turn ^ 1, weigh_pairs);
      else
        weigh_pairs(0, kKeyStep / 2);
    }
    for (int v = 0; v < kVectors; ++v) {
      maxima[v] = state.top[v];
      sums[v] = state.sums[v];
    }
  }

  template <int kVectors>
  static CINETILE_INLINE void add_values(const Block& block, const Scratch& scratch,
                                         const KeySpan& span, int64_t features) {
    const int64_t start = (span.first - span.block_start) / kKeyStep;
    const int64_t stop = (span.stop - span.block_start + kKeyStep - 1) / kKeyStep;
    constexpr int64_t kStepWords = kTile * kTile;
    constexpr int64_t kGroupWords = kKeyBlock / kKeyStep * kStepWords;
    for (int64_t group = 0; group < features / kTile; group += 2) {
      float* output = block.output + group * kTile * kQueries;
      float* next_output = output + kTile * kQueries;
      const int32_t* values = span.values + group * kGroupWords;
      Tiles::template load<0>(output, kRowBytes);
      Tiles::template load<1>(output + kTile, kRowBytes);
      Tiles::template load<2>(next_output, kRowBytes);
      Tiles::template load<3>(next_output + kTile, kRowBytes);
      for (int64_t step = start; step < stop; ++step) {
        const int32_t* weights = scratch.weights + step * kTile * kQueries;
        Tiles::template load<4>(values + step * kStepWords, 64);
        Tiles::template load<6>(weights, kRowBytes);
        Tiles::template multiply_add<0, 4, 6>();
        Tiles::template load<7>(weights + kTile, kRowBytes);
        Tiles::template multiply_add<1, 4, 7>();
        Tiles::template load<5>(values + kGroupWords + step * kStepWords, 64);
        Tiles::template multiply_add<2, 5, 6>();
        Tiles::template multiply_add<3, 5, 7>();
      }
      Tiles::template store<0>(output, kRowBytes);
      Tiles::template store<1>(output + kTile, kRowBytes);
      Tiles::template store<2>(next_output, kRowBytes);
      Tiles::template store<3>(next_output + kTile, kRowBytes);
    }
  }

 private:
  struct Weighing {
    const Block& block;
    const Scratch& scratch;
    const KeySpan& span;
    float scale;
    Float top[kMaxVectors];
    Float sums[kMaxVectors];
  };

  // Scores keys key to key + 31 into a turn of the scratch; along the way calls
  // meanwhile(start, stop) for consecutive parts of 16 pairs of keys.
  template <class Meanwhile>
  static CINETILE_INLINE void score_step(const Weighing& state, int64_t key, int64_t words,
                                         int turn, const Meanwhile& meanwhile) {
    const int32_t* keys = state.span.keys + (key - state.span.block_start) * words;
    const int32_t* query = state.block.query;
    const int64_t key_bytes = words * static_cast<int64_t>(sizeof(int32_t));
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    Tiles::template zero<2>();
    Tiles::template zero<3>();
    constexpr int64_t kPairs = kKeyStep / 2;
    const int64_t parts = words / kTile;
    for (int64_t part = 0; part < parts; ++part) {
      Tiles::template load<4>(keys + part * kTile, key_bytes);
      Tiles::template load<6>(query + part * kTile * kQueries, kRowBytes);
      Tiles::template multiply_add<0, 4, 6>();
      Tiles::template load<7>(query + part * kTile * kQueries + kTile, kRowBytes);
      Tiles::template multiply_add<1, 4, 7>();
      Tiles::template load<5>(keys + kTile * words + part * kTile, key_bytes);
      Tiles::template multiply_add<2, 5, 6>();
      Tiles::template multiply_add<3, 5, 7>();
      meanwhile(part * kPairs / parts, (part + 1) * kPairs / parts);
    }
    float* scores = state.scratch.scores + turn * kKeyStep * kQueries;
    Tiles::template store<0>(scores, kRowBytes);
    Tiles::template store<1>(scores + kTile, kRowBytes);
    Tiles::template store<2>(scores + kTile * kQueries, kRowBytes);
    Tiles::template store<3>(scores + kTile * kQueries + kTile, kRowBytes);
  }

  // Turns the scores of pairs start to stop - 1 of the step at `key` into weights.
  template <bool kMasked>
  static CINETILE_INLINE void weigh_key_pairs(Weighing& state, int64_t key, int turn, int64_t start,
                                              int64_t stop) {
    const float* scores = state.scratch.scores + turn * kKeyStep * kQueries;
    int32_t* weights = state.scratch.weights + (key - state.span.block_start) / kPack * kQueries;
    for (int64_t pair = start; pair < stop; ++pair)
      for (int v = 0; v < kMaxVectors; ++v) {
        const Float reference = Lanes::load(state.block.reference + v * kLanes);
        Float weight[2];
        for (int half = 0; half < 2; ++half) {
          const int64_t row = 2 * pair + half;
          Float score = Lanes::load(scores + row * kQueries + v * kLanes);
          if constexpr (kMasked) score = mask_score(state.block, score, key + row, v, state.span);
          state.top[v] = Lanes::maximum(score, state.top[v]);
          weight[half] = Tiles::exp2((score - reference) * state.scale);
        }
        state.sums[v] += weight[0] + weight[1];
        Lanes::store(weights + pair * kQueries + v * kLanes,
                     join_bfloat16<Lanes>(weight[0], weight[1]));
      }
  }
};

}  // namespace
}  // namespace cinetile

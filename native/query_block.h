// A block of queries on its way through the keys: the state of its softmax and its output.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernel.h"
#include "numbers.h"
#include "simd.h"

namespace cinetile {
namespace {

// Bump allocation inside a workspace whose size was worked out by the same calls with a null base.
class Arena {
 public:
  explicit Arena(void* base) : base_(reinterpret_cast<uintptr_t>(base)) {}

  template <class T>
  T* take(int64_t count) {
    T* start = reinterpret_cast<T*>(base_ + used_);
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), kAlignment);
    return start;
  }
  int64_t used() const { return used_; }

 private:
  uintptr_t base_;
  int64_t used_ = 0;
};

// Some vectors of kLanes queries side by side. Arrays are [feature or word][query], so that a
// vector holds the same feature of neighbouring queries. Weights are exp2((score - reference) *
// scale), where the scale is that of logits in base two: the difference is exact where it matters,
// and no compiler can contract it with the product, so that logits may have any size.
template <int kLanes, int kPack>
struct QueryBlock {
  using Lanes = Simd<kLanes>;
  using Float = typename Lanes::Float;
  using Int = typename Lanes::Int;

  // Far under any score, yet finite, so that it never makes a NaN.
  static constexpr float kNoReference = -1e38f;

  static QueryBlock allocate(Arena& arena, int64_t features, int max_vectors) {
    const int64_t most = int64_t{kLanes} * max_vectors;
    QueryBlock block;
    block.query = arena.take<int32_t>(features / kPack * most);
    block.output = arena.take<float>(features * most);
    block.reference = arena.take<float>(most);
    block.total = arena.take<float>(most);
    block.prefix = arena.take<int32_t>(most);
    block.low = arena.take<int32_t>(most);
    block.span = arena.take<int32_t>(most);
    return block;
  }

  // Takes over queries first to stop - 1 in so many vectors; further lanes repeat the last of
  // them. `row` is scratch for the words of a single query.
  void start(const AttendTask& task, int64_t first, int64_t stop, int num_vectors, int64_t features,
             int32_t* row) {
    vectors = num_vectors;
    queries = int64_t{kLanes} * num_vectors;
    first_query = first;
    stop_query = stop;
    seen_keys = false;
    const int64_t words = features / kPack;
    const PlanTables& plan = *task.plan;
    for (int64_t lane = 0; lane < queries; ++lane) {
      const int64_t position = first + lane < stop ? first + lane : stop - 1;
      read_words<kPack>(row,
                        token(task.query, position, plan.query_order, task.query_stride, task.type),
                        task.type, task.head_dim, words);
      for (int64_t word = 0; word < words; ++word) query[word * queries + lane] = row[word];
      const bool every_key = plan.prefix == nullptr;
      const int32_t all = static_cast<int32_t>(task.num_tokens);
      prefix[lane] = every_key ? all : plan.prefix[position];
      low[lane] = every_key ? all : plan.low[position];
      const int32_t high = every_key ? all : plan.high[position];
      // An empty band may be given with its edges crossed.
      span[lane] =
          high > low[lane]
              ? static_cast<int32_t>(static_cast<uint32_t>(high) - static_cast<uint32_t>(low[lane]))
              : 0;
      reference[lane] = kNoReference;
      total[lane] = 0.0f;
    }
    std::memset(output, 0, features * queries * sizeof(float));
    find_bounds();
  }

  // Some key of [first, stop) is kept by some query.
  bool may_keep(int64_t first, int64_t stop) const {
    return first < max_prefix || (stop > min_low && first < max_high);
  }
  // Every key of [first, stop) is kept by every query.
  bool keeps_all(int64_t first, int64_t stop) const {
    return stop <= min_prefix || (first >= max_low && stop <= min_high);
  }
  // Cuts off keys at both ends that no query keeps.
  void narrow(int64_t& first, int64_t& stop) const {
    const bool prefix_inside = first < max_prefix;
    const bool band_inside = stop > min_low && first < max_high;
    const int64_t prefix_stop = stop < max_prefix ? stop : max_prefix;
    const int64_t band_first = first > min_low ? first : min_low;
    const int64_t band_stop = stop < max_high ? stop : max_high;
    if (prefix_inside && !band_inside) stop = prefix_stop;
    if (!prefix_inside) {
      first = band_first;
      stop = band_stop;
    }
    if (prefix_inside && band_inside) stop = prefix_stop > band_stop ? prefix_stop : band_stop;
  }

  // Whether the row of a lane keeps the key at a position, if the key's tile is masked.
  bool keeps(int64_t lane, int64_t key) const {
    return key < prefix[lane] ||
           static_cast<uint32_t>(key - low[lane]) < static_cast<uint32_t>(span[lane]);
  }

  // Raises the references of all rows to new maxima of their scores, and scales what has been
  // summed up. Scores only rise, so nothing overflows here.
  template <int kVectors>
  void raise_references(const Float (&maxima)[kVectors], float scale, int64_t features) {
    constexpr int kQueries = kVectors * kLanes;
    Float shrink[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const Float old = Lanes::load(reference + v * kLanes);
      const Float raised = Lanes::maximum(maxima[v], old);
      shrink[v] = Lanes::template exp2<5>((old - raised) * scale);
      Lanes::store(reference + v * kLanes, raised);
      Lanes::store(total + v * kLanes, Lanes::load(total + v * kLanes) * shrink[v]);
    }
    for (int64_t feature = 0; feature < features; ++feature)
      for (int v = 0; v < kVectors; ++v) {
        float* row = output + feature * kQueries + v * kLanes;
        Lanes::store(row, Lanes::load(row) * shrink[v]);
      }
  }

  void finish(const AttendTask& task) const {
    const int64_t rows = stop_query - first_query;
    for (int64_t lane = 0; lane < rows; ++lane) {
      const int64_t position = first_query + lane;
      const int64_t index =
          task.plan->query_order == nullptr ? position : task.plan->query_order[position];
      // A row without any key has the output zero and the log-sum-exp minus infinity.
      const float factor = total[lane] == 0.0f ? 0.0f : 1.0f / total[lane];
      task.lse[index * task.lse_stride] =
          total[lane] == 0.0f ? -INFINITY
                              : reference[lane] * task.scale + __builtin_logf(total[lane]);
      void* target =
          static_cast<char*>(task.output) + index * task.output_stride * byte_size(task.type);
      write_numbers(target, task.type, output + lane, queries, task.head_dim, factor);
    }
  }

  int32_t* query;
  float* output;
  float* reference;
  float* total;
  int32_t* prefix;
  int32_t* low;
  int32_t* span;
  int vectors = 0;
  int64_t queries = 0;  // lanes of these vectors
  int64_t first_query = 0;
  int64_t stop_query = 0;
  bool seen_keys = false;
  // Bounds of the edges over all queries of the block.
  int64_t min_prefix = 0, max_prefix = 0, min_low = 0, max_low = 0, min_high = 0, max_high = 0;

 private:
  void find_bounds() {
    min_prefix = max_prefix = prefix[0];
    min_low = max_low = low[0];
    min_high = max_high = low[0] + span[0];
    for (int lane = 1; lane < queries; ++lane) {
      const int64_t high = low[lane] + span[lane];
      min_prefix = prefix[lane] < min_prefix ? prefix[lane] : min_prefix;
      max_prefix = prefix[lane] > max_prefix ? prefix[lane] : max_prefix;
      min_low = low[lane] < min_low ? low[lane] : min_low;
      max_low = low[lane] > max_low ? low[lane] : max_low;
      min_high = high < min_high ? high : min_high;
      max_high = high > max_high ? high : max_high;
    }
  }
};

}  // namespace
}  // namespace cinetile

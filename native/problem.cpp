#include "problem.h"

#include <limits>

namespace cinetile {
namespace {

bool all_below(const int32_t* values, int64_t count, int64_t bound) {
  uint32_t largest = 0;  // negative values become large ones
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t value = static_cast<uint32_t>(values[i]);
    largest = value > largest ? value : largest;
  }
  return count == 0 || static_cast<int64_t>(largest) < bound;
}

// Whether values below count are all different.
bool all_differ(const int32_t* values, int64_t count) {
  std::vector<bool> seen(static_cast<size_t>(count), false);
  for (int64_t i = 0; i < count; ++i) {
    if (seen[values[i]]) return false;
    seen[values[i]] = true;
  }
  return true;
}

std::string find_fault(const PlanTables& plan, int64_t num_tokens) {
  if (plan.block_q < 1 || plan.block_kv < 1) return "a block size is below 1";
  if (plan.num_q_tiles != (num_tokens + plan.block_q - 1) / plan.block_q)
    return "the number of query tiles does not fit the tokens";
  if (plan.row_starts[0] != 0 || plan.row_starts[plan.num_q_tiles] != plan.num_tiles)
    return "row_starts does not span the tiles";
  for (int32_t row = 0; row < plan.num_q_tiles; ++row)
    if (plan.row_starts[row] > plan.row_starts[row + 1]) return "row_starts is not ascending";
  const int64_t num_kv_tiles = (num_tokens + plan.block_kv - 1) / plan.block_kv;
  if (!all_below(plan.tile_kv, plan.num_tiles, num_kv_tiles))
    return "tile_kv names a tile beyond the keys";
  for (int32_t row = 0; row < plan.num_q_tiles; ++row)
    for (int32_t i = plan.row_starts[row] + 1; i < plan.row_starts[row + 1]; ++i)
      if (plan.tile_kv[i - 1] >= plan.tile_kv[i]) return "tile_kv is not ascending";
  if (plan.text_start < 0 || plan.text_start > plan.text_stop || plan.text_stop > num_tokens)
    return "the text lies beyond the sequence";
  for (const int32_t* order : {plan.query_order, plan.key_order})
    if (order != nullptr && !all_below(order, num_tokens, num_tokens))
      return "a token order names a token beyond the sequence";
  if (plan.query_order != nullptr && !all_differ(plan.query_order, num_tokens))
    return "a token order names a token twice";
  return "";
}

}  // namespace

std::string find_fault(const Problem& problem) {
  if (problem.batch < 0 || problem.num_tokens < 1 || problem.heads < 1 || problem.head_dim < 1)
    return "an array is empty";
  if (problem.num_tokens > std::numeric_limits<int32_t>::max() / 2) return "too many tokens";
  const int64_t num_plans = static_cast<int64_t>(problem.plans.size());
  if (!all_below(problem.routes, problem.batch * problem.heads, num_plans))
    return "routes name a plan that is not there";
  if (problem.valid_text != nullptr &&
      !all_below(problem.valid_text, problem.batch, problem.num_tokens + 1))
    return "prompt_lengths is more than the sequence holds";
  for (int64_t i = 0; i < num_plans; ++i) {
    const std::string fault = find_fault(problem.plans[i], problem.num_tokens);
    if (!fault.empty()) return "plan " + std::to_string(i) + ": " + fault;
  }
  return "";
}

}  // namespace cinetile

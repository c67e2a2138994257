// Calls of attention from several threads on one pool, to be run under ThreadSanitizer; see
// docs/how-the-cpu-kernel-works.md for the commands. Exits with 0 if every call gives the same.
#include <cstdio>
#include <thread>
#include <vector>

#include "attention.h"
#include "paths.h"
#include "thread_pool.h"

namespace {

using cinetile::Problem;
using Pool = cinetile::ThreadPool;

// Dense attention of two heads in ragged tiles, on arrays of small whole numbers.
struct Call {
  static constexpr int kTokens = 333, kHeads = 2, kHeadDim = 32, kBlock = 64;

  explicit Call(int seed) : output(kTokens * kHeads * kHeadDim), lse(kTokens * kHeads) {
    for (int i = 0; i < kTokens * kHeads * kHeadDim; ++i) {
      query.push_back(static_cast<float>((i * 7 + seed) % 13 - 6));
      key.push_back(static_cast<float>((i * 5 + seed) % 11 - 5));
      value.push_back(static_cast<float>((i * 3 + seed) % 17 - 8));
    }
    const int tiles = (kTokens + kBlock - 1) / kBlock;
    for (int row = 0; row < tiles; ++row) {
      row_starts.push_back(row * tiles);
      for (int tile = 0; tile < tiles; ++tile) {
        tile_kv.push_back(tile);
        tile_kind.push_back(tile == tiles - 1);
      }
    }
    row_starts.push_back(tiles * tiles);
  }

  bool run(const cinetile::Kernel& kernel, Pool& pool) {
    cinetile::PlanTables plan;
    plan.block_q = plan.block_kv = kBlock;
    plan.num_q_tiles = static_cast<int32_t>(row_starts.size()) - 1;
    plan.num_tiles = static_cast<int64_t>(tile_kv.size());
    plan.row_starts = row_starts.data();
    plan.tile_kv = tile_kv.data();
    plan.tile_kind = tile_kind.data();
    Problem problem;
    problem.batch = 1;
    problem.num_tokens = kTokens;
    problem.heads = kHeads;
    problem.head_dim = kHeadDim;
    problem.scale = 0.1f;
    problem.query = query.data();
    problem.key = key.data();
    problem.value = value.data();
    problem.routes = routes;
    problem.output = output.data();
    const cinetile::Strides strides = cinetile::adjacent(kTokens, kHeads, kHeadDim);
    problem.query_strides = problem.key_strides = strides;
    problem.value_strides = problem.output_strides = strides;
    problem.lse = lse.data();
    problem.plans = {plan};
    if (!cinetile::find_fault(problem).empty()) return false;
    cinetile::run_attention(problem, kernel, pool);
    return true;
  }

  std::vector<float> query, key, value, output, lse;
  std::vector<int32_t> row_starts, tile_kv;
  std::vector<uint8_t> tile_kind;
  int32_t routes[kHeads] = {0, 0};
};

}  // namespace

int main() {
  constexpr int kCallers = 4, kRounds = 10;
  Pool pool(4);
  int wrong = 0;
  for (const cinetile::Path& path : cinetile::available_paths()) {
    std::vector<Call> calls;
    for (int i = 0; i < kCallers; ++i) calls.emplace_back(i);
    std::vector<std::vector<float>> expected;
    for (Call& call : calls) {
      if (!call.run(*path.float32, pool)) return 1;
      expected.push_back(call.output);
    }
    std::vector<int> differs(kCallers, 0);
    std::vector<std::thread> callers;
    for (int i = 0; i < kCallers; ++i)
      callers.emplace_back([&, i] {
        for (int round = 0; round < kRounds; ++round) {
          calls[i].run(*path.float32, pool);
          differs[i] += calls[i].output != expected[i];
        }
      });
    for (std::thread& caller : callers) caller.join();
    for (const int one : differs) wrong += one;
    std::printf("%s: %d calls from %d threads\n", path.name, kCallers * kRounds, kCallers);
  }
  std::printf("%d wrong\n", wrong);
  return wrong != 0;
}

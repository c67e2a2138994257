// The entry point for callers that hold plain pointers, and what Python asks about the library.
#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "attention.h"
#include "export.h"
#include "interrupts.h"
#include "paths.h"
#include "plan_tables.h"
#include "query_split.h"
#include "thread_pool.h"

extern "C" {

// cinetile/kernels/cpu/direct.py has the same structures. No array is owned or kept.
struct CinetileArray {
  void* data;
  int64_t batch_stride;  // in elements, like the next two; features are adjacent
  int64_t token_stride;
  int64_t head_stride;
};

struct CinetileCall {
  int64_t size;       // of this structure, by which a library of another version is found out
  int64_t data_type;  // as DataType numbers them
  int64_t batch;
  int64_t num_tokens;
  int64_t heads;
  int64_t head_dim;
  CinetileArray query;
  CinetileArray key;
  CinetileArray value;
  CinetileArray output;
  float* lse;                 // [batch, tokens, heads]
  const int32_t* routes;      // [batch, heads]
  const int32_t* valid_text;  // [batch], or null
  const int32_t* header;      // the tables are those of FlatTables
  int64_t num_plans;
  const int32_t* row_starts;
  int64_t num_row_starts;
  const int32_t* tile_kv;
  const uint8_t* tile_kind;
  int64_t num_tiles;
  const int32_t* edges;
  int64_t num_edges;
  const int32_t* orders;
  int64_t num_orders;
  const char* path;
  int64_t num_threads;
  double scale;
};
}

namespace cinetile {
namespace {

Strides strides_of(const CinetileArray& array) {
  return {array.batch_stride, array.token_stride, array.head_stride};
}

// Why the call was not run; empty if it was.
std::string attend(const CinetileCall& call) {
  if (call.size != sizeof(CinetileCall)) return "the library is of another version of cinetile";
  if (call.data_type < 0 || call.data_type > 2) return "no data type has that number";
  if (call.num_threads < 1) return "num_threads is below 1";
  const Path* path = find_path(call.path);
  if (path == nullptr) return "this processor has no path '" + std::string(call.path) + "'";
  Problem problem;
  problem.type = static_cast<DataType>(call.data_type);
  problem.batch = call.batch;
  problem.num_tokens = call.num_tokens;
  problem.heads = call.heads;
  problem.head_dim = call.head_dim;
  problem.scale = static_cast<float>(call.scale);
  problem.query = call.query.data;
  problem.key = call.key.data;
  problem.value = call.value.data;
  problem.output = call.output.data;
  problem.query_strides = strides_of(call.query);
  problem.key_strides = strides_of(call.key);
  problem.value_strides = strides_of(call.value);
  problem.output_strides = strides_of(call.output);
  problem.lse = call.lse;
  problem.routes = call.routes;
  problem.valid_text = call.valid_text;
  FlatTables tables;
  tables.header = call.header;
  tables.num_plans = call.num_plans;
  tables.row_starts = call.row_starts;
  tables.num_row_starts = call.num_row_starts;
  tables.tile_kv = call.tile_kv;
  tables.tile_kind = call.tile_kind;
  tables.num_tiles = call.num_tiles;
  tables.edges = call.edges;
  tables.num_edges = call.num_edges;
  tables.orders = call.orders;
  tables.num_orders = call.num_orders;
  std::string fault = read_plans(tables, problem.num_tokens, problem.plans);
  if (fault.empty()) fault = find_fault(problem);
  if (!fault.empty()) return fault;
  ThreadPool threads(call.num_threads);
  run_attention(problem, path->kernel(problem.type), threads);
  return "";
}

}  // namespace
}  // namespace cinetile

extern "C" {

// Returns 0; or 1 and the reason why the call failed; or 2 if it was interrupted. Threads are
// started for each call, so that callers from several threads never wait for each other.
CINETILE_EXPORT int cinetile_attend(const CinetileCall* call, char* reason, int64_t reason_size) {
  std::string fault;
  try {
    fault = cinetile::attend(*call);
  } catch (const cinetile::Interrupted&) {
    return 2;
  } catch (const std::bad_alloc&) {
    fault = "no memory for packed keys and values";
  } catch (const std::exception& error) {
    fault = error.what();
  }
  if (fault.empty()) return 0;
  const int64_t length = std::min(reason_size - 1, static_cast<int64_t>(fault.size()));
  std::memcpy(reason, fault.data(), static_cast<size_t>(length));
  reason[length] = '\0';
  return 1;
}

// See interrupts.h.
CINETILE_EXPORT int cinetile_watch_interrupts() { return cinetile::watch_interrupts(); }
CINETILE_EXPORT void cinetile_end_calls(int64_t last) { cinetile::end_calls(last); }

// Queries that a path computes for a query tile of so many, by the number of the data type; 0 where
// the processor has no such path.
CINETILE_EXPORT int64_t cinetile_computed_queries(const char* path_name, int64_t data_type,
                                                  int64_t queries) {
  const cinetile::Path* path = cinetile::find_path(path_name);
  if (path == nullptr) return 0;
  return cinetile::computed_queries(path->kernel(static_cast<cinetile::DataType>(data_type)),
                                    queries);
}

// Names of the paths that can run here, the fastest first, separated by commas; those in
// parentheses are for tests.
CINETILE_EXPORT const char* cinetile_paths() {
  static const std::string names = [] {
    std::string joined;
    for (const cinetile::Path& path : cinetile::available_paths()) {
      if (!joined.empty()) joined += ",";
      joined += path.automatic ? path.name : "(" + std::string(path.name) + ")";
    }
    return joined;
  }();
  return names.c_str();
}

}  // extern "C"

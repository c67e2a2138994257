#include "c_api.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "attention.h"
#include "interrupts.h"
#include "paths.h"
#include "query_split.h"
#include "thread_pool.h"

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

CINETILE_EXPORT int cinetile_watch_interrupts() { return cinetile::watch_interrupts(); }
CINETILE_EXPORT void cinetile_end_calls(int64_t last) { cinetile::end_calls(last); }

CINETILE_EXPORT int64_t cinetile_computed_queries(const char* path_name, int64_t data_type,
                                                  int64_t queries) {
  const cinetile::Path* path = cinetile::find_path(path_name);
  if (path == nullptr) return 0;
  return cinetile::computed_queries(path->kernel(static_cast<cinetile::DataType>(data_type)),
                                    queries);
}

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

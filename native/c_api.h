// The entry point for callers that hold plain pointers, and what Python asks about the library.
#pragma once

#include <cstdint>

#include "export.h"
#include "plan_tables.h"

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

// Returns 0; or 1 and the reason why the call failed; or 2 if it was interrupted. Threads are
// started for each call, so that callers from several threads never wait for each other.
CINETILE_EXPORT int cinetile_attend(const CinetileCall* call, char* reason, int64_t reason_size);

// Names of the paths that can run here, the fastest first, separated by commas; those in
// parentheses are for tests.
CINETILE_EXPORT const char* cinetile_paths();

// Queries that a path computes for a query tile of so many, by the number of the data type; 0 where
// the processor has no such path.
CINETILE_EXPORT int64_t cinetile_computed_queries(const char* path_name, int64_t data_type,
                                                  int64_t queries);

// See interrupts.h.
CINETILE_EXPORT int cinetile_watch_interrupts();
CINETILE_EXPORT void cinetile_end_calls(int64_t last);

}  // extern "C"

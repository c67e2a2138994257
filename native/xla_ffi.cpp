// The entry point for XLA.
#include <exception>
#include <new>
#include <string>
#include <string_view>

#include "attention.h"
#include "export.h"
#include "interrupts.h"
#include "paths.h"
#include "plan_tables.h"
#include "xla/ffi/api/ffi.h"

namespace cinetile {
namespace {

namespace ffi = xla::ffi;

class XlaThreads : public Threads {
 public:
  explicit XlaThreads(ffi::ThreadPool pool) : pool_(pool) {}
  int64_t count() const override { return pool_.num_threads(); }
  void schedule(std::function<void()> work) override { pool_.Schedule(std::move(work)); }

 private:
  ffi::ThreadPool pool_;
};

ffi::Error attend(ffi::ThreadPool pool, ffi::AnyBuffer query, ffi::AnyBuffer key,
                  ffi::AnyBuffer value, ffi::Buffer<ffi::S32> routes,
                  ffi::Buffer<ffi::S32> valid_text, ffi::Buffer<ffi::S32> header,
                  ffi::Buffer<ffi::S32> row_starts, ffi::Buffer<ffi::S32> tile_kv,
                  ffi::Buffer<ffi::U8> tile_kind, ffi::Buffer<ffi::S32> edges,
                  ffi::Buffer<ffi::S32> orders, ffi::Result<ffi::AnyBuffer> output,
                  ffi::Result<ffi::Buffer<ffi::F32>> lse, float scale,
                  std::string_view path_name) try {
  const auto invalid = [](const std::string& why) {
    return ffi::Error::InvalidArgument("cinetile's cpu kernel: " + why);
  };
  const Path* path = find_path(std::string(path_name));
  if (path == nullptr)
    return invalid("this processor has no path '" + std::string(path_name) + "'");
  const auto shape = query.dimensions();
  if (shape.size() != 4) return invalid("query must have four axes");
  const auto type = query.element_type();
  if (type != ffi::F32 && type != ffi::BF16 && type != ffi::F16)
    return invalid("query is none of float32, bfloat16 and float16");
  for (const ffi::AnyBuffer& other : {key, value, *output})
    if (!(other.dimensions() == shape) || other.element_type() != type)
      return invalid("query, key, value and output differ in shape or type");

  Problem problem;
  problem.type = type == ffi::F32    ? DataType::kFloat32
                 : type == ffi::BF16 ? DataType::kBFloat16
                                     : DataType::kFloat16;
  problem.batch = shape[0];
  problem.num_tokens = shape[1];
  problem.heads = shape[2];
  problem.head_dim = shape[3];
  problem.scale = scale;
  problem.query = query.untyped_data();
  problem.key = key.untyped_data();
  problem.value = value.untyped_data();
  problem.output = output->untyped_data();
  const Strides strides = adjacent(problem.num_tokens, problem.heads, problem.head_dim);
  problem.query_strides = problem.key_strides = strides;
  problem.value_strides = problem.output_strides = strides;
  problem.lse = lse->typed_data();
  problem.routes = routes.typed_data();
  problem.valid_text = valid_text.typed_data();
  const int64_t tokens = problem.num_tokens;
  if (static_cast<int64_t>(routes.element_count()) != problem.batch * problem.heads)
    return invalid("routes must be [batch, heads]");
  if (static_cast<int64_t>(valid_text.element_count()) != problem.batch)
    return invalid("prompt_lengths must be [batch]");
  if (static_cast<int64_t>(lse->element_count()) != problem.batch * tokens * problem.heads)
    return invalid("lse must be [batch, tokens, heads]");
  if (header.dimensions().size() != 2 || header.dimensions()[1] != kHeaderColumns)
    return invalid("the header of the plans has the wrong shape");
  if (tile_kv.element_count() != tile_kind.element_count())
    return invalid("tile_kv and tile_kind differ in length");

  FlatTables tables;
  tables.header = header.typed_data();
  tables.num_plans = header.dimensions()[0];
  tables.row_starts = row_starts.typed_data();
  tables.num_row_starts = static_cast<int64_t>(row_starts.element_count());
  tables.tile_kv = tile_kv.typed_data();
  tables.tile_kind = tile_kind.typed_data();
  tables.num_tiles = static_cast<int64_t>(tile_kv.element_count());
  tables.edges = edges.typed_data();
  tables.num_edges = tokens > 0 ? static_cast<int64_t>(edges.element_count()) / (3 * tokens) : 0;
  tables.orders = orders.typed_data();
  tables.num_orders = tokens > 0 ? static_cast<int64_t>(orders.element_count()) / tokens : 0;
  std::string fault = read_plans(tables, tokens, problem.plans);
  if (fault.empty()) fault = find_fault(problem);
  if (!fault.empty()) return invalid(fault);

  XlaThreads threads(pool);
  run_attention(problem, path->kernel(problem.type), threads);
  return ffi::Error::Success();
} catch (const Interrupted& interrupt) {
  return ffi::Error(ffi::ErrorCode::kCancelled,
                    std::string("cinetile's cpu kernel: ") + interrupt.what());
} catch (const std::bad_alloc&) {  // no exception may reach XLA
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "cinetile's cpu kernel: no memory left");
} catch (const std::exception& error) {
  return ffi::Error(ffi::ErrorCode::kInternal,
                    std::string("cinetile's cpu kernel: ") + error.what());
}

}  // namespace
}  // namespace cinetile

extern "C" {

CINETILE_EXPORT XLA_FFI_Error* cinetile_attention(XLA_FFI_CallFrame* call_frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(cinetile_attention, cinetile::attend,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<std::string_view>("path"));

}  // extern "C"

// Answers calls of attention that come through a pipe, so that tests on one machine can run this
// library as it was compiled for another, under emulation. tests/emulated_arm.py has the other end.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "c_api.h"

namespace {

// Ends the program where the pipe ends.
struct Pipe {
  template <class T>
  std::vector<T> read(int64_t count) {
    std::vector<T> numbers(static_cast<size_t>(count));
    if (std::fread(numbers.data(), sizeof(T), numbers.size(), stdin) != numbers.size())
      std::exit(1);
    return numbers;
  }
  template <class T>
  void write(const std::vector<T>& numbers) {
    if (std::fwrite(numbers.data(), sizeof(T), numbers.size(), stdout) != numbers.size())
      std::exit(1);
  }
};

// The sizes of a call, in the order in which they come.
enum Size {
  kPathLength,
  kDataType,
  kBatch,
  kTokens,
  kHeads,
  kHeadDim,
  kNumPlans,
  kNumRowStarts,
  kNumTiles,
  kNumEdges,
  kNumOrders,
  kNumThreads,
  kNumSizes,
};

void answer(Pipe& pipe, const std::vector<int64_t>& sizes) {
  const auto type = static_cast<cinetile::DataType>(sizes[kDataType]);
  const int64_t rows = sizes[kBatch] * sizes[kTokens] * sizes[kHeads];
  const int64_t bytes = rows * sizes[kHeadDim] * cinetile::byte_size(type);
  const std::vector<char> path = pipe.read<char>(sizes[kPathLength]);
  const std::string name(path.begin(), path.end());
  const std::vector<double> scale = pipe.read<double>(1);
  std::vector<uint8_t> query = pipe.read<uint8_t>(bytes), key = pipe.read<uint8_t>(bytes),
                       value = pipe.read<uint8_t>(bytes), output(static_cast<size_t>(bytes));
  const std::vector<int32_t> routes = pipe.read<int32_t>(sizes[kBatch] * sizes[kHeads]);
  const std::vector<int32_t> valid_text = pipe.read<int32_t>(sizes[kBatch]);
  const std::vector<int32_t> header =
      pipe.read<int32_t>(sizes[kNumPlans] * cinetile::kHeaderColumns);
  const std::vector<int32_t> row_starts = pipe.read<int32_t>(sizes[kNumRowStarts]);
  const std::vector<int32_t> tile_kv = pipe.read<int32_t>(sizes[kNumTiles]);
  const std::vector<uint8_t> tile_kind = pipe.read<uint8_t>(sizes[kNumTiles]);
  const std::vector<int32_t> edges = pipe.read<int32_t>(sizes[kNumEdges] * 3 * sizes[kTokens]);
  const std::vector<int32_t> orders = pipe.read<int32_t>(sizes[kNumOrders] * sizes[kTokens]);
  std::vector<float> lse(static_cast<size_t>(rows));

  CinetileCall call{};
  call.size = sizeof(call);
  call.data_type = sizes[kDataType];
  call.batch = sizes[kBatch];
  call.num_tokens = sizes[kTokens];
  call.heads = sizes[kHeads];
  call.head_dim = sizes[kHeadDim];
  const int64_t token_stride = call.heads * call.head_dim;
  const auto array = [&](std::vector<uint8_t>& data) {
    return CinetileArray{data.data(), call.num_tokens * token_stride, token_stride, call.head_dim};
  };
  call.query = array(query);
  call.key = array(key);
  call.value = array(value);
  call.output = array(output);
  call.lse = lse.data();
  call.routes = routes.data();
  call.valid_text = valid_text.data();
  call.header = header.data();
  call.num_plans = sizes[kNumPlans];
  call.row_starts = row_starts.data();
  call.num_row_starts = sizes[kNumRowStarts];
  call.tile_kv = tile_kv.data();
  call.tile_kind = tile_kind.data();
  call.num_tiles = sizes[kNumTiles];
  call.edges = edges.data();
  call.num_edges = sizes[kNumEdges];
  call.orders = orders.data();
  call.num_orders = sizes[kNumOrders];
  call.path = name.c_str();
  call.num_threads = sizes[kNumThreads];
  call.scale = scale[0];
  std::vector<char> reason(512, '\0');
  const int status = cinetile_attend(&call, reason.data(), static_cast<int64_t>(reason.size()));
  pipe.write(std::vector<int64_t>{status});
  if (status != 0) {
    pipe.write(reason);
    return;
  }
  pipe.write(output);
  pipe.write(lse);
}

}  // namespace

int main() {
  std::printf("%s\n", cinetile_paths());
  std::fflush(stdout);
  Pipe pipe;
  for (;;) {
    answer(pipe, pipe.read<int64_t>(kNumSizes));
    std::fflush(stdout);
  }
}

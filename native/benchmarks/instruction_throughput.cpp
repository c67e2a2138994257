// How many vector instructions of each kind a core begins in a cycle, which bounds any kernel.
// The cycle is that of a chain of dependent additions. Needs AVX2; AVX-512 and bfloat16 products
// too if the processor has them. `python -m benchmarks.cpu_kernel peak` builds and runs it.
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

namespace {

constexpr long kRounds = 3000000;
constexpr int kUnroll = 12;

template <class Loop>
double best_nanoseconds(const Loop& loop) {
  double best = 1e30;
  for (int repeat = 0; repeat < 9; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    loop();
    const std::chrono::duration<double, std::nano> passed =
        std::chrono::steady_clock::now() - start;
    best = passed.count() < best ? passed.count() : best;
  }
  return best;
}

}  // namespace

// Twelve independent instructions a round, on registers 0 to 11; sources are registers 14 and 15.
#define CLOBBERS \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11"
#define TWELVE(op)                                                                           \
  op "0\n\t" op "1\n\t" op "2\n\t" op "3\n\t" op "4\n\t" op "5\n\t" op "6\n\t" op "7\n\t" op \
     "8\n\t" op "9\n\t" op "10\n\t" op "11\n\t"
#define MEASURE(name, op)                                                                          \
  std::printf("%-24s %5.2f a cycle\n", name, kRounds* kUnroll / cycle_rate / best_nanoseconds([] { \
                                               long rounds = kRounds;                              \
                                               asm volatile("1:\n\t" TWELVE(op) "dec %0\n\tjnz 1b" \
                                                            : "+r"(rounds)::CLOBBERS, "cc");       \
                                             }))

namespace {

template <class Loop>
void measure_on_threads(const char* name, int count, double flops, const Loop& loop) {
  const double nanoseconds = best_nanoseconds([&] {
    std::vector<std::thread> threads;
    for (int i = 1; i < count; ++i) threads.emplace_back(loop);
    loop();
    for (std::thread& thread : threads) thread.join();
  });
  std::printf("%-24s %6.1f GFLOP/s on %d thread%s\n", name, count * flops / nanoseconds, count,
              count == 1 ? "" : "s");
}

// The peak of float32 multiply-adds, two operations each, on one thread and on all of them.
void measure_peaks() {
  const int all = static_cast<int>(std::thread::hardware_concurrency());
  constexpr double kInstructions = static_cast<double>(kRounds) * kUnroll;
  for (const int count : {1, all}) {
    if (__builtin_cpu_supports("avx512f"))
      measure_on_threads("float32 peak, 512 bit", count, kInstructions * 32, [] {
        long rounds = kRounds;
        asm volatile("1:\n\t" TWELVE("vfmadd231ps %%zmm14, %%zmm15, %%zmm") "dec %0\n\tjnz 1b"
                     : "+r"(rounds)::CLOBBERS, "cc");
      });
    measure_on_threads("float32 peak, 256 bit", count, kInstructions * 16, [] {
      long rounds = kRounds;
      asm volatile("1:\n\t" TWELVE("vfmadd231ps %%ymm14, %%ymm15, %%ymm") "dec %0\n\tjnz 1b"
                   : "+r"(rounds)::CLOBBERS, "cc");
    });
  }
}

}  // namespace

int main() {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
    std::printf("this processor has no AVX2 with FMA\n");
    return 1;
  }
  const double cycle_rate =
      kRounds * kUnroll / best_nanoseconds([] {
        long rounds = kRounds * kUnroll / 4, sum = 0;
        asm volatile(
            "1:\n\tadd $1, %1\n\tadd $1, %1\n\tadd $1, %1\n\tadd $1, %1\n\tdec %0\n\tjnz 1b"
            : "+r"(rounds), "+r"(sum)::"cc");
      });
  std::printf("%-24s %5.2f GHz\n", "clock", cycle_rate);
  MEASURE("float32 fma, 256 bit", "vfmadd231ps %%ymm14, %%ymm15, %%ymm");
  MEASURE("float32 add, 256 bit", "vaddps %%ymm14, %%ymm15, %%ymm");
  measure_peaks();
  if (!__builtin_cpu_supports("avx512f")) return 0;
  MEASURE("float32 fma, 512 bit", "vfmadd231ps %%zmm14, %%zmm15, %%zmm");
  if (__builtin_cpu_supports("avx512bf16"))
    MEASURE("bfloat16 dot, 512 bit", "vdpbf16ps %%zmm14, %%zmm15, %%zmm");
  MEASURE("float32 add, 512 bit", "vaddps %%zmm14, %%zmm15, %%zmm");
  MEASURE("float32 max, 512 bit", "vmaxps %%zmm14, %%zmm15, %%zmm");
  MEASURE("int32 add, 512 bit", "vpaddd %%zmm14, %%zmm15, %%zmm");
  MEASURE("scale, 512 bit", "vscalefps %%zmm14, %%zmm15, %%zmm");
  MEASURE("reduce, 512 bit", "vreduceps $0, %%zmm15, %%zmm");
  return 0;
}

#include "paths.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace cinetile {
namespace {

#if defined(__x86_64__)

// Asks the operating system for the state of AMX tiles, which it grants to a whole process.
bool allow_amx_tiles() {
#ifdef __linux__
  constexpr long kRequestPermission = 0x1023;
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool has_amx_bf16() {
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  constexpr unsigned int kAmxBf16 = 1u << 22;
  constexpr unsigned int kAmxTile = 1u << 24;
  return (edx & kAmxBf16) != 0 && (edx & kAmxTile) != 0 && allow_amx_tiles();
}

// Conversions of float16 numbers, which every processor with AVX2 has though no rule says so.
bool has_f16c() {
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

// AMD's cores begin a dot product of bfloat16 pairs as often as a float32 product, Intel's far more
// seldom: 18.9 cycles a pair of query and key against 10.5 were measured on Sapphire Rapids.
bool has_fast_bfloat16_pairs() {
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_is("amd");
}

std::vector<Path> find_available_paths() {
  std::vector<Path> paths;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      has_f16c();
  const Path bfloat16_pairs{"avx512_bf16", &kAvx512Kernel, &kAvx512Bf16Kernel, true};
  if (avx512 && has_amx_bf16()) paths.push_back({"amx", &kAvx512Kernel, &kAmxKernel, true});
  if (avx512 && has_fast_bfloat16_pairs()) paths.push_back(bfloat16_pairs);
  if (avx512) paths.push_back({"avx512", &kAvx512Kernel, &kAvx512Kernel, true});
  if (avx512 && __builtin_cpu_supports("avx512bf16") && !has_fast_bfloat16_pairs())
    paths.push_back(bfloat16_pairs);
  if (avx512) paths.push_back({"amx_emulated", &kAvx512Kernel, &kAmxEmulatedKernel, false});
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c())
    paths.push_back({"avx2", &kAvx2Kernel, &kAvx2Kernel, true});
  paths.push_back({"portable", &kPortableKernel, &kPortableKernel, true});
  return paths;
}

#elif defined(__aarch64__)

// Whether the processor has products of bfloat16 pairs (FEAT_BF16).
[[maybe_unused]] bool has_bfloat16_products() {
#if defined(__linux__)
  constexpr unsigned long kBFloat16 = 1ul << 14;  // HWCAP2_BF16, which old headers lack
  return (getauxval(AT_HWCAP2) & kBFloat16) != 0;
#elif defined(__APPLE__)
  int present = 0;
  size_t size = sizeof(present);
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &present, &size, nullptr, 0) == 0 &&
         present != 0;
#else
  return false;
#endif
}

std::vector<Path> find_available_paths() {
  std::vector<Path> paths;
#ifdef CINETILE_NEON_BF16
  if (has_bfloat16_products()) paths.push_back({"neon_bf16", &kNeonKernel, &kNeonBf16Kernel, true});
#endif
  paths.push_back({"neon", &kNeonKernel, &kNeonKernel, true});
  paths.push_back({"portable", &kPortableKernel, &kPortableKernel, true});
  return paths;
}

#else

std::vector<Path> find_available_paths() {
  return {{"portable", &kPortableKernel, &kPortableKernel, true}};
}

#endif

}  // namespace

const std::vector<Path>& available_paths() {
  static const std::vector<Path> paths = find_available_paths();
  return paths;
}

const Path* find_path(const std::string& name) {
  for (const Path& path : available_paths())
    if (name == path.name) return &path;
  return nullptr;
}

}  // namespace cinetile

// Reading and writing float32 and bfloat16 numbers one by one.
#pragma once

#include <cstdint>
#include <cstring>

#include "problem.h"
#include "simd.h"

namespace cinetile {
namespace {

CINETILE_INLINE int32_t bits_of(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

CINETILE_INLINE float float_of(int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// To the nearest, ties to even; a NaN stays one.
CINETILE_INLINE uint16_t round_to_bfloat16(float value) {
  const uint32_t bits = static_cast<uint32_t>(bits_of(value));
  if (value != value) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Features of one token as 32-bit words: a float32 each, or two bfloat16 numbers each (kPack 2).
// Words past the last feature are zero. kPack 2 takes bfloat16 sources only.
template <int kPack>
CINETILE_INLINE void read_words(int32_t* __restrict target, const void* source, DataType type,
                                int64_t head_dim, int64_t words) {
  if constexpr (kPack == 2) {
    std::memcpy(target, source, head_dim * 2);
    std::memset(reinterpret_cast<char*>(target) + head_dim * 2, 0, words * 4 - head_dim * 2);
  } else {
    if (type == DataType::kFloat32) {
      std::memcpy(target, source, head_dim * 4);
    } else {
      const uint16_t* halves = static_cast<const uint16_t*>(source);
      for (int64_t i = 0; i < head_dim; ++i)
        target[i] = static_cast<int32_t>(static_cast<uint32_t>(halves[i]) << 16);
    }
    std::memset(target + head_dim, 0, (words - head_dim) * 4);
  }
}

CINETILE_INLINE const void* token(const void* base, int64_t position, const int32_t* order,
                                  int64_t stride, DataType type) {
  const int64_t index = order == nullptr ? position : order[position];
  return static_cast<const char*>(base) + index * stride * (type == DataType::kFloat32 ? 4 : 2);
}

}  // namespace
}  // namespace cinetile

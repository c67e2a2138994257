// Reading and writing float32, bfloat16 and float16 numbers.
#pragma once

#include <cstdint>
#include <cstring>

#include "problem.h"
#include "simd.h"

#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

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

// Exact; a NaN stays one.
CINETILE_INLINE float widen_float16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  uint32_t bits = (magnitude << 13) + (112u << 23);  // the exponents' biases differ by 112
  if (magnitude >= 0x7c00)
    bits += 112u << 23;  // infinite or no number
  else if (magnitude < 0x0400)
    bits = static_cast<uint32_t>(bits_of(static_cast<float>(magnitude) * 0x1p-24f));  // subnormal
  return float_of(static_cast<int32_t>(sign | bits));
}

// To the nearest, ties to even; a NaN stays one.
CINETILE_INLINE uint16_t round_to_float16(float value) {
  const uint32_t bits = static_cast<uint32_t>(bits_of(value));
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (value != value) {
    half = 0x7e00;
  } else if (magnitude >= 0x47800000) {  // 65,536 and more are infinite
    half = 0x7c00;
  } else if (magnitude < 0x38800000) {
    // Subnormal: added to a half, a number is rounded to the steps of 2^-24 that they have.
    const float sum = float_of(static_cast<int32_t>(magnitude)) + 0.5f;
    half = static_cast<uint32_t>(bits_of(sum)) - 0x3f000000u;
  } else {
    half = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  }
  return static_cast<uint16_t>(sign | half);
}

// Whether the exponent says that a number is infinite or a NaN.
CINETILE_INLINE bool is_not_finite(int32_t bits) { return (bits & 0x7f800000) == 0x7f800000; }

CINETILE_INLINE void widen_float16s(int32_t* __restrict target, const uint16_t* halves,
                                    int64_t count) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(
        reinterpret_cast<float*>(target + i),
        _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + i))));
#elif defined(__aarch64__)
  for (; i + 4 <= count; i += 4)
    vst1q_f32(reinterpret_cast<float*>(target + i),
              vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves + i))));
#endif
  for (; i < count; ++i) target[i] = bits_of(widen_float16(halves[i]));
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
    const uint16_t* halves = static_cast<const uint16_t*>(source);
    switch (type) {
      case DataType::kFloat32:
        std::memcpy(target, source, head_dim * 4);
        break;
      case DataType::kBFloat16:
        for (int64_t i = 0; i < head_dim; ++i)
          target[i] = static_cast<int32_t>(static_cast<uint32_t>(halves[i]) << 16);
        break;
      case DataType::kFloat16:
        widen_float16s(target, halves, head_dim);
        break;
    }
    std::memset(target + head_dim, 0, (words - head_dim) * 4);
  }
}

// Writes every stride-th of some numbers, multiplied by a factor, side by side.
CINETILE_INLINE void write_numbers(void* target, DataType type, const float* numbers,
                                   int64_t stride, int64_t count, float factor) {
  uint16_t* halves = static_cast<uint16_t*>(target);
  switch (type) {
    case DataType::kFloat32:
      for (int64_t i = 0; i < count; ++i)
        static_cast<float*>(target)[i] = numbers[i * stride] * factor;
      break;
    case DataType::kBFloat16:
      for (int64_t i = 0; i < count; ++i)
        halves[i] = round_to_bfloat16(numbers[i * stride] * factor);
      break;
    case DataType::kFloat16:
      for (int64_t i = 0; i < count; ++i)
        halves[i] = round_to_float16(numbers[i * stride] * factor);
      break;
  }
}

CINETILE_INLINE const void* token(const void* base, int64_t position, const int32_t* order,
                                  int64_t stride, DataType type) {
  const int64_t index = order == nullptr ? position : order[position];
  return static_cast<const char*>(base) + index * stride * byte_size(type);
}

}  // namespace
}  // namespace cinetile

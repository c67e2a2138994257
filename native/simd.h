// Vectors of kLanes numbers, in the compiler's own vector types: one source for every machine.
// Included once by each kernel source; internal linkage keeps their machine code apart.
#pragma once

#include <cstdint>
#include <cstring>

#define CINETILE_INLINE inline __attribute__((always_inline))

namespace cinetile {
namespace {

template <int kLanes>
struct Simd {
  typedef float Float __attribute__((vector_size(kLanes * 4)));
  typedef int32_t Int __attribute__((vector_size(kLanes * 4)));
  typedef uint32_t Unsigned __attribute__((vector_size(kLanes * 4)));
  static constexpr int kWidth = kLanes;

  // Less zero, which is an identity that compilers fold: a number in memory takes one load that
  // broadcasts it. Plus zero is none (minus zero becomes zero), and would stay as an addition.
  static CINETILE_INLINE Float splat(float value) { return value - Float{}; }
  static CINETILE_INLINE Int splat(int32_t value) { return value - Int{}; }

  static CINETILE_INLINE Float load(const float* source) {
    return *reinterpret_cast<const Float*>(__builtin_assume_aligned(source, sizeof(Float)));
  }
  static CINETILE_INLINE Int load(const int32_t* source) {
    return *reinterpret_cast<const Int*>(__builtin_assume_aligned(source, sizeof(Int)));
  }
  static CINETILE_INLINE void store(float* target, Float value) {
    *reinterpret_cast<Float*>(__builtin_assume_aligned(target, sizeof(Float))) = value;
  }
  static CINETILE_INLINE void store(int32_t* target, Int value) {
    *reinterpret_cast<Int*>(__builtin_assume_aligned(target, sizeof(Int))) = value;
  }

  static CINETILE_INLINE bool any(Int condition) {
    int32_t lanes[kLanes];
    std::memcpy(lanes, &condition, sizeof(lanes));
    int32_t bits = 0;
    for (const int32_t lane : lanes) bits |= lane;
    return bits != 0;
  }

  // As x86's maxps: the second one where either is not a number.
  static CINETILE_INLINE Float maximum(Float first, Float second) {
    return first > second ? first : second;
  }

  // Two to the power of x, for x up to 127; zero for x below -126; a NaN stays one.
  // Minimax polynomials of relative error on [-0.5, 0.5], fitted by Remez' exchange: 7.5e-5 for the
  // third degree (weights that bfloat16 will round to 3.9e-3), 7.5e-8 for the fifth.
  template <int kDegree>
  static CINETILE_INLINE Float exp2(Float x) {
    static_assert(kDegree == 3 || kDegree == 5, "");
    // Adding this leaves the nearest integer and an exponent's bias in the low bits of the sum.
    const Float magic = splat(12582912.0f + 127.0f);
    const Float shifted = x + magic;
    const Float fraction = x - (shifted - magic);
    Float result;
    if constexpr (kDegree == 3) {
      result = splat(5.5171669058e-02f) * fraction + splat(2.4261112219e-01f);
      result = result * fraction + splat(6.9326098546e-01f);
      result = result * fraction + splat(9.9992807354e-01f);
    } else {
      result = splat(1.3276471993e-03f) * fraction + splat(9.6755413345e-03f);
      result = result * fraction + splat(5.5507132735e-02f);
      result = result * fraction + splat(2.4022119724e-01f);
      result = result * fraction + splat(6.9314696706e-01f);
      result = result * fraction + splat(1.0000000717e+00f);
    }
    // A product, and not a sum of exponents, which would turn some NaNs into numbers.
    const Float power = reinterpret_cast<Float>(reinterpret_cast<Unsigned>(shifted) << 23);
    return x < splat(-126.0f) ? Float{} : result * power;
  }
};

}  // namespace
}  // namespace cinetile

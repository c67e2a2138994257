// Two to the power of x by AVX-512's own splitting and scaling of floating point numbers.
#pragma once

#include <immintrin.h>

#include "simd.h"

namespace cinetile {
namespace {

// The polynomial is minimax in relative error on [0, 1): 7.5e-5, fitted by Remez' exchange. Needs
// no clamping: scaling goes to zero and to infinity by itself. Few operations on Intel's cores,
// where reducing and scaling cost one each; on AMD's they cost four, so Simd::exp2 serves there.
CINETILE_INLINE Simd<16>::Float avx512_exp2(Simd<16>::Float x) {
  constexpr int kDownToInteger = 9;
  const __m512 power = reinterpret_cast<__m512>(x);
  const __m512 fraction = _mm512_reduce_ps(power, kDownToInteger);
  __m512 result = _mm512_set1_ps(7.8024522640e-02f);
  result = _mm512_fmadd_ps(result, fraction, _mm512_set1_ps(2.2606715543e-01f));
  result = _mm512_fmadd_ps(result, fraction, _mm512_set1_ps(6.9583354049e-01f));
  result = _mm512_fmadd_ps(result, fraction, _mm512_set1_ps(9.9992521856e-01f));
  return reinterpret_cast<Simd<16>::Float>(_mm512_scalef_ps(result, power));
}

}  // namespace
}  // namespace cinetile

// Pairs of weights as bfloat16 numbers.
#pragma once

#include "simd.h"

namespace cinetile {
namespace {

// Rounded to the nearest (weights are never NaN-sensitive to the last bit, so ties go up), the
// first weight in the low half of each word.
template <class Lanes>
CINETILE_INLINE typename Lanes::Int join_bfloat16(typename Lanes::Float first,
                                                  typename Lanes::Float second) {
  using Unsigned = typename Lanes::Unsigned;
  const Unsigned half = Unsigned{} + 0x8000u;
  const Unsigned low = (reinterpret_cast<Unsigned>(first) + half) >> 16;
  const Unsigned high = (reinterpret_cast<Unsigned>(second) + half) & (Unsigned{} + 0xffff0000u);
  return reinterpret_cast<typename Lanes::Int>(low | high);
}

}  // namespace
}  // namespace cinetile

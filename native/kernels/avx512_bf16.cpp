// x86 with AVX512_BF16: products of bfloat16 pairs.
#include <immintrin.h>

#include "bfloat16_weights.h"
#include "streaming_attention.h"

namespace cinetile {
namespace {

struct BFloat16Products {
  static constexpr int kLanes = 16;
  static constexpr int kVectors = 3;
  static constexpr int kRows = 8;
  static constexpr int kPack = 2;
  static constexpr int kKeyBlock = 128;
  using Lanes = Simd<kLanes>;

  static CINETILE_INLINE void add(Lanes::Float& sum, Lanes::Int vector, int32_t word) {
    sum = reinterpret_cast<Lanes::Float>(
        _mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(vector),
                         reinterpret_cast<__m512bh>(Lanes::splat(word))));
  }
  static CINETILE_INLINE Lanes::Int weights(Lanes::Float first, Lanes::Float second) {
    return join_bfloat16<Lanes>(first, second);
  }
};

}  // namespace

const Kernel kAvx512Bf16Kernel = make_kernel<VectorUnit<BFloat16Products>>();

}  // namespace cinetile

// Arm with FEAT_BF16: products of bfloat16 pairs (BFDOT).
#include <arm_neon.h>

#include "bfloat16_weights.h"
#include "streaming_attention.h"

namespace cinetile {
namespace {

struct NeonBFloat16Products {
  static constexpr int kLanes = 4;
  static constexpr int kVectors = 3;
  static constexpr int kRows = 8;
  static constexpr int kPack = 2;
  static constexpr int kKeyBlock = 128;
  using Lanes = Simd<kLanes>;

  static CINETILE_INLINE void add(Lanes::Float& sum, Lanes::Int vector, int32_t word) {
    sum = reinterpret_cast<Lanes::Float>(
        vbfdotq_f32(reinterpret_cast<float32x4_t>(sum), reinterpret_cast<bfloat16x8_t>(vector),
                    reinterpret_cast<bfloat16x8_t>(Lanes::splat(word))));
  }
  static CINETILE_INLINE Lanes::Int weights(Lanes::Float first, Lanes::Float second) {
    return join_bfloat16<Lanes>(first, second);
  }
};

}  // namespace

const Kernel kNeonBf16Kernel = make_kernel<VectorUnit<NeonBFloat16Products>>();

}  // namespace cinetile

// Arm with Advanced SIMD, which every 64-bit Arm processor has.
#include "streaming_attention.h"

namespace cinetile {

// Three vectors by eight rows are 24 sums, which leaves eight of the 32 registers.
const Kernel kNeonKernel = make_kernel<VectorUnit<Float32Products<4, 3, 8>>>();

}  // namespace cinetile

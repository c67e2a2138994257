// x86 with AVX-512 F, BW, DQ and VL; bfloat16 inputs are widened when they are packed.
#include "streaming_attention.h"

namespace cinetile {

const Kernel kAvx512Kernel = make_kernel<VectorUnit<Float32Products<16, 4, 4>>>();

}  // namespace cinetile

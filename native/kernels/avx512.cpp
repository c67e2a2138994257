// x86 with AVX-512 F, BW, DQ and VL; bfloat16 and float16 inputs are widened when they are packed.
#include "streaming_attention.h"

namespace cinetile {

// Eight rows by three vectors are 24 sums of the 32 registers, and 11 loads for 24 products: cores
// that begin two products a cycle begin two loads of this width.
const Kernel kAvx512Kernel = make_kernel<VectorUnit<Float32Products<16, 3, 8>>>();

}  // namespace cinetile

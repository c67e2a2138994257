// x86 with AVX2, FMA and F16C.
#include "streaming_attention.h"

namespace cinetile {

// Three vectors by four rows are twelve sums, which leaves four of the sixteen registers.
const Kernel kAvx2Kernel = make_kernel<VectorUnit<Float32Products<8, 3, 4>>>();

}  // namespace cinetile

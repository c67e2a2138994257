// Any machine: the compiler lowers the vectors to what its baseline has.
#include "streaming_attention.h"

namespace cinetile {

const Kernel kPortableKernel = make_kernel<VectorUnit<Float32Products<4, 2, 4>>>();

}  // namespace cinetile

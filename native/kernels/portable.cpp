// Any machine: the compiler lowers the vectors to what its baseline has.
#include "streaming_attention.h"

namespace cinetile {

#ifdef __aarch64__
constexpr int kVectors = 4;  // 32 registers of four numbers
#else
constexpr int kVectors = 2;
#endif

const Kernel kPortableKernel = make_kernel<VectorUnit<Float32Products<4, kVectors, 4>>>();

}  // namespace cinetile

// x86 with AMX tiles for bfloat16, and AVX-512 beside them.
#include "amx_products.h"
#include "kernels/avx512_exp2.h"
#include "streaming_attention.h"

namespace cinetile {
namespace {

struct HardwareTiles {
  // Gives the thread eight tiles of 16 rows by 64 bytes, and lets go of them again.
  class Session {
   public:
    Session() {
      struct alignas(kAlignment) {
        uint8_t palette = 1;
        uint8_t start_row = 0;
        uint8_t reserved[14] = {};
        uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
      } configuration;
      asm volatile("ldtilecfg %0" ::"m"(configuration) : "memory");
    }
    ~Session() { asm volatile("tilerelease" ::: "memory"); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  // Written as assembly because the compiler's own intrinsics tell it nothing of the memory that
  // tiles are read from and written to.
  template <int kTile>
  static CINETILE_INLINE void load(const void* source, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(source), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  static CINETILE_INLINE void store(void* target, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(target), "r"(stride), "i"(kTile)
                 : "memory");
  }
  template <int kTile>
  static CINETILE_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
  }
  template <int kSum, int kLeft, int kRight>
  static CINETILE_INLINE void multiply_add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
  }
  static CINETILE_INLINE Simd<16>::Float exp2(Simd<16>::Float x) { return avx512_exp2(x); }
};

}  // namespace

const Kernel kAmxKernel = make_kernel<AmxUnit<HardwareTiles>>();

}  // namespace cinetile

// The AMX kernel on tiles that are kept in memory: slow, to test it where there is no such unit.
#include "amx_products.h"
#include "kernels/avx512_exp2.h"
#include "numbers.h"
#include "streaming_attention.h"

namespace cinetile {
namespace {

struct EmulatedTiles {
  struct Tile {
    int32_t words[16][16];
  };
  // Like the registers that they stand for, the tiles belong to the thread.
  static thread_local Tile tiles[8];

  struct Session {};

  template <int kTile>
  static void load(const void* source, int64_t stride) {
    for (int row = 0; row < 16; ++row)
      std::memcpy(tiles[kTile].words[row], static_cast<const char*>(source) + row * stride, 64);
  }
  template <int kTile>
  static void store(void* target, int64_t stride) {
    for (int row = 0; row < 16; ++row)
      std::memcpy(static_cast<char*>(target) + row * stride, tiles[kTile].words[row], 64);
  }
  template <int kTile>
  static void zero() {
    std::memset(&tiles[kTile], 0, sizeof(Tile));
  }
  template <int kSum, int kLeft, int kRight>
  static void multiply_add() {
    for (int row = 0; row < 16; ++row)
      for (int column = 0; column < 16; ++column) {
        float sum = float_of(tiles[kSum].words[row][column]);
        for (int word = 0; word < 16; ++word) {
          const uint32_t left = static_cast<uint32_t>(tiles[kLeft].words[row][word]);
          const uint32_t right = static_cast<uint32_t>(tiles[kRight].words[word][column]);
          sum += value(left << 16) * value(right << 16);
          sum += value(left & 0xffff0000u) * value(right & 0xffff0000u);
        }
        tiles[kSum].words[row][column] = bits_of(sum);
      }
  }
  static CINETILE_INLINE Simd<16>::Float exp2(Simd<16>::Float x) { return avx512_exp2(x); }

 private:
  static float value(uint32_t bits) { return float_of(static_cast<int32_t>(bits)); }
};

thread_local EmulatedTiles::Tile EmulatedTiles::tiles[8];

}  // namespace

const Kernel kAmxEmulatedKernel = make_kernel<AmxUnit<EmulatedTiles>>();

}  // namespace cinetile

// Stand-in for hpc/mma.cuh: fp16 products of a warp, by all of its lanes' registers.
#pragma once

#include "emulation.hpp"

namespace hpc {

enum class Half { kFp16, kBf16 };

inline float half_value(uint32_t pair, int at) {
  return __half2float(__half(__half_raw{static_cast<unsigned short>(pair >> 16 * at)}));
}

template <Half kType>
void mma_m16n8k16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  static_assert(kType == Half::kFp16);
  static uint32_t of[2][32][32][6];  // registers of a warp's lanes, in blocks side by side
  auto& warp = of[blockIdx.x % 2][threadIdx.x / 32];
  const int lane = emulation::lane(), g = lane / 4, t = lane % 4;
  const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
  std::memcpy(warp[lane], mine, sizeof(mine));
  emulation::exchange(0, 0);
  for (int i = 0; i < 4; ++i) {
    for (int k = 0; k < 16; ++k) {  // registers of k in A and B, and the lane of the row's or column's four
      const int from = k % 8 / 2, second = k / 8;
      c[i] += half_value(warp[4 * g + from][i / 2 + 2 * second], k % 2) *
              half_value(warp[4 * (2 * t + i % 2) + from][4 + second], k % 2);
    }
  }
  emulation::exchange(0, 0);
}

}  // namespace hpc

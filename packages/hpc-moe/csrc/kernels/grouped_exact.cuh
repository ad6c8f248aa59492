// Gate-up's products of a stage with fp32 sums, for calls in which the tensor core's e4m3 sums are not near enough
// (Config::exact); grouped_gemm.cuh has the plan.
//
// e4m3 becomes fp16, exactly, and goes through m16n8k16, whose accumulator has wgmma's layout. Both operands come from
// the stage as it is: of each 64 bytes of a row a lane (g, t) takes 16, and word i of them is step i of both.
#pragma once

#include "hpc/fp8.cuh"
#include "hpc/mma.cuh"
#include "kernels/grouped_gemm.cuh"

namespace hpc::moe {

// acc[m] += 128 of K, for kTiles m64 tiles from m = first on. `a`: the warpgroup's unit, two m64 tiles; `b`: rows of B;
// scales of both (block): of B's by scale_place.
template <class T, int kTiles, int N>
__device__ __forceinline__ void multiply_exact(const uint8_t* a, const uint8_t* b, const float* row_scales,
                                               const float* weight_scales, int first, float (&acc)[2][N / 2]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x % 128 / 32;
  // Of 16 bytes of a row: pairs of step i in registers 2 i and 2 i + 1.
  const auto load = [&](const uint8_t* rows, int row, int half, uint32_t (&pairs)[8]) {
    const uint4 raw = *reinterpret_cast<const uint4*>(rows + (row + g) * 128 + ((4 * half + t) ^ g) * 16);
    e4m3x4_to_half2x2(raw.x, pairs[0], pairs[1]);
    e4m3x4_to_half2x2(raw.y, pairs[2], pairs[3]);
    e4m3x4_to_half2x2(raw.z, pairs[4], pairs[5]);
    e4m3x4_to_half2x2(raw.w, pairs[6], pairs[7]);
  };
#pragma unroll(N > 64 ? 1 : 2)  // registers are few
  for (int half = 0; half < 2; ++half) {
    uint32_t low[kTiles][8], high[kTiles][8];  // weight rows g and g + 8 of the warp's 16
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      load(a + (first + m) * (kUnitBytes / 2), 16 * warp, half, low[m]);
      load(a + (first + m) * (kUnitBytes / 2), 16 * warp + 8, half, high[m]);
    }
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      uint32_t rows[8];
      load(b, 8 * j, half, rows);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        float part[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) part[i] = T::kBlock ? 0.0f : acc[first + m][4 * j + i];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          mma_m16n8k16<Half::kFp16>(part, low[m][2 * i], high[m][2 * i], low[m][2 * i + 1], high[m][2 * i + 1],
                                    rows[2 * i], rows[2 * i + 1]);
        }
        const float2 scale =
            T::kBlock ? *reinterpret_cast<const float2*>(row_scales + 4 * t + 8 * (j & ~1) + 2 * (j & 1)) : float2{};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& to = acc[first + m][4 * j + i];
          to = T::kBlock ? fmaf(part[i], (i % 2 ? scale.y : scale.x) * weight_scales[first + m], to) : part[i];
        }
      }
    }
  }
}

}  // namespace hpc::moe

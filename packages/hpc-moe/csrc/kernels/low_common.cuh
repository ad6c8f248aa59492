// What both kernels of the low regime do in a warp: rows of B from the lane's ring as fp16 fragments, quantised on the
// way where they are bf16.
//
// Orders (hpc/mma.cuh): a lane g, t = lane / 4, lane % 4 takes bytes 16 t of each 64 of K, of row g; word i of them is
// step i of m16n8k16. A (weights) and B (tokens) are loaded in the same order.
#pragma once

#include "hpc/fifo.cuh"
#include "hpc/fp8.cuh"
#include "hpc/mma.cuh"
#include "hpc/pdl.cuh"
#include "kernels/low_route.cuh"

namespace hpc::moe {

// One 64 of K of 8 rows: B fragments of four steps.
struct LowFragment {
  uint32_t b[4][2];

  __device__ __forceinline__ void set(const uint32_t (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) e4m3x4_to_half2x2(words[i], b[i][0], b[i][1]);
  }
};

// A scale group (kChunks x 64 of K) of 8 bf16 rows from the ring's vectors from `first` on, quantised: dynamically
// (kBlock, returns the scale of the lane's row g) or with the factor `inverse`.
template <Quant kQuant, int kChunks, class Ring>
__device__ __forceinline__ float quantise_fragments(const Ring& ring, int first, float inverse,
                                                    LowFragment (&fragment)[kChunks]) {
  uint32_t raw[kChunks][8];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 v = lds128(ring.at(first + 2 * c + half));
      raw[c][4 * half] = v.x, raw[c][4 * half + 1] = v.y, raw[c][4 * half + 2] = v.z, raw[c][4 * half + 3] = v.w;
    }
  }
  const auto pair = [](uint32_t word) { return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&word)); };
  float scale = 0.0f;
  if constexpr (kQuant == Quant::kBlock) {
    float amax = 0.0f;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float2 v = pair(raw[c][i]);
        amax = fmaxf(amax, fmaxf(fabsf(v.x), fabsf(v.y)));
      }
    }
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
    const GroupScale found = group_scale(amax);
    scale = found.scale;
    inverse = found.inverse;
  }
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 low = pair(raw[c][2 * i]), high = pair(raw[c][2 * i + 1]);
      words[i] = to_e4m3x2(low.x * inverse, low.y * inverse) |
                 static_cast<uint32_t>(to_e4m3x2(high.x * inverse, high.y * inverse)) << 16;
    }
    fragment[c].set(words);
  }
  return scale;
}

template <int kChunks, class Ring>
__device__ __forceinline__ void load_fragments(const Ring& ring, int first, LowFragment (&fragment)[kChunks]) {
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const uint4 v = lds128(ring.at(first + c));
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    fragment[c].set(words);
  }
}

// d += the 16 weight rows of vectors `at` (rows g) and `at` + 1 (rows g + 8) times a fragment: 64 of K.
template <class Ring>
__device__ __forceinline__ void multiply_rows(const Ring& ring, int at, const LowFragment& fragment, float (&d)[4]) {
  const uint4 x = lds128(ring.at(at)), y = lds128(ring.at(at + 1));
  const uint32_t low[4] = {x.x, x.y, x.z, x.w}, high[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t a0, a1, a2, a3;
    e4m3x4_to_half2x2(low[i], a0, a2);
    e4m3x4_to_half2x2(high[i], a1, a3);
    mma_m16n8k16<Half::kFp16>(d, a0, a1, a2, a3, fragment.b[i][0], fragment.b[i][1]);
  }
}

__device__ __forceinline__ float lds_float(uint32_t shared) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(shared) : "memory");
  return v;
}

}  // namespace hpc::moe

// A pair of fp32 weights as sums of bf16 terms, largest first, packed for the tensor cores (lower k in the lower half).
// Every term is rounded to the nearest; all but the last saturate, so that a weight near the largest finite keeps a
// finite first term with an exact residual. An infinite weight has infinite terms last: the score is what fp32 gives.
// Six instructions a pair for two terms: pack, shift, mask, two subtractions, pack.
#pragma once

#include <cstdint>

namespace hpc::router {

__device__ __forceinline__ uint32_t pack_bf16_saturated(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.satfinite.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// The largest finite bf16 where a finite weight would round to infinity.
__device__ __forceinline__ float saturate_finite(float v) {
  constexpr float kMax = 0x1.FEp127f;
  return fabsf(v) < INFINITY ? fminf(fmaxf(v, -kMax), kMax) : v;
}

template <int Terms>
__device__ __forceinline__ void split_pair(float low, float high, uint32_t (&terms)[Terms]) {
  if constexpr (Terms == 1) {
    terms[0] = pack_bf16(saturate_finite(low), saturate_finite(high));
  } else {
#pragma unroll
    for (int i = 0; i < Terms; ++i) {
      terms[i] = i + 1 < Terms ? pack_bf16_saturated(low, high) : pack_bf16(low, high);
      low -= __uint_as_float(terms[i] << 16);
      high -= __uint_as_float(terms[i] & 0xFFFF0000u);
    }
  }
}

}  // namespace hpc::router

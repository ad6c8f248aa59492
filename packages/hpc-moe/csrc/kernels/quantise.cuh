// The activation between the GEMMs, and e4m3 quantisation: static per tensor, or dynamic per group with the group's
// largest magnitude on 448. In one place, for all kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "kernels/params.hpp"

namespace hpc::moe {

constexpr float kE4m3Max = 448.0f;

// silu(min(gate, limit)) * clamp(up, -limit, limit); a negative limit is none.
__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
  if (limit >= 0.0f) {  // comparisons that keep a NaN, unlike fminf
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : (up < -limit ? -limit : up);
  }
  return gate / (1.0f + __expf(-gate)) * up;
}

// Scale of a quantised group and the factor that quantises it; the same arithmetic as the reference's.
struct GroupScale {
  float scale;    // stored value times scale is the value
  float inverse;  // value times inverse is what is rounded
};

// From a group's largest magnitude. Below 2^-117 a group counts as zero: both numbers stay normal fp32.
__device__ __forceinline__ GroupScale group_scale(float amax) {
  if (amax < 0x1p-117f) return {0.0f, 0.0f};
  return {amax / kE4m3Max, kE4m3Max / amax};
}

// Factor that quantises with a static scale; below fp32's normal range everything is zero.
__device__ __forceinline__ float static_inverse(float scale) {
  return scale < 0x1p-126f ? 0.0f : 1.0f / scale;
}

// Two values as e4m3, saturating at +-448 (NaN stays NaN); `low` in bits 0 to 7.
__device__ __forceinline__ uint16_t to_e4m3x2(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

// Quantises rows: kGroup / 8 lanes take a group of kGroup elements, 8 to a lane. Call it with whole warps; `group` is
// the one of the calling lanes, those of a warp are neighbours and take part in every step.
template <Quant kQuant, int kGroup = 128>
__device__ void quantise_rows(const QuantiseParams& q, int64_t group, int64_t step) {
  constexpr int kLanes = kGroup / 8, kPerWarp = 32 / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int groups = q.hidden / kGroup;
  const int64_t total = static_cast<int64_t>(q.num_tokens) * groups;
  // Asked for before anything waits for the static scale.
  const auto load = [&](int64_t g) {
    if (g >= total) return make_uint4(0, 0, 0, 0);
    const int64_t token = g / groups;
    const int column = static_cast<int>(g - token * groups) * kGroup + lane * 8;
    return *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(q.x) + token * q.x_stride + column);
  };
  const int64_t first = group / kPerWarp * kPerWarp;
  uint4 raw = load(first + group % kPerWarp);
  float inverse = kQuant == Quant::kTensor ? static_inverse(*q.x_scale) : 0.0f;
  for (int64_t base = first; base < total; base += step) {
    const int64_t g = base + group % kPerWarp;
    const bool live = g < total;
    if (base != first) raw = load(g);
    const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&raw);
    float2 v[4];
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = __bfloat1622float2(pairs[i]);
      amax = fmaxf(amax, fmaxf(fabsf(v[i].x), fabsf(v[i].y)));
    }
    if constexpr (kQuant == Quant::kBlock) {
#pragma unroll
      for (int mask = kLanes / 2; mask; mask /= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, mask));
      const GroupScale scale = group_scale(amax);
      inverse = scale.inverse;
      if (live && lane == 0) q.x_quant_scale[g] = scale.scale;
    }
    if (live) {
      uint32_t words[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        words[i] = to_e4m3x2(v[2 * i].x * inverse, v[2 * i].y * inverse) |
                   static_cast<uint32_t>(to_e4m3x2(v[2 * i + 1].x * inverse, v[2 * i + 1].y * inverse)) << 16;
      }
      *reinterpret_cast<uint2*>(static_cast<uint8_t*>(q.x_quant) + g * kGroup + lane * 8) =
          make_uint2(words[0], words[1]);
    }
  }
}

}  // namespace hpc::moe

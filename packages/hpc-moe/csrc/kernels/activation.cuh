// The activation between the GEMMs without a correctly rounded quotient, whose branches took a sixth of a large gate-up
// kernel's time; its approximations are off by 2^-21.
#pragma once

#include "kernels/quantise.cuh"

namespace hpc::moe {

// Minimum and maximum that keep a NaN, unlike fminf and fmaxf.
__device__ __forceinline__ float min_nan(float a, float b) {
  float v;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
  return v;
}

__device__ __forceinline__ float max_nan(float a, float b) {
  float v;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
  return v;
}

// The limit of fast_swiglu() as a number to compare with: a negative one is none.
__device__ __forceinline__ float swiglu_bound(float limit) {
  return limit < 0.0f ? __int_as_float(0x7F800000) : limit;
}

// silu(min(gate, bound)) * clamp(up, -bound, bound), to 2^-21: a reciprocal and a power of two by approximation,
// without the branches of a correctly rounded quotient (which took a sixth of a large gate-up kernel).
__device__ __forceinline__ float fast_swiglu(float gate, float up, float bound) {
  gate = min_nan(gate, bound);
  up = max_nan(min_nan(up, bound), -bound);
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(gate * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
  return gate * inverse * up;
}

}  // namespace hpc::moe

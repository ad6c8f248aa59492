// Warp-level matrix products of 16-bit values with fp32 accumulators, and the layout of their fragments.
//
// m16n8k16, lane = 4 g + t (g 0..7, t 0..3); a register holds two neighbours, the lower one in its low half:
//   A (16 x 16): a0 = rows g,   k 2t 2t+1    a1 = row g+8, k 2t 2t+1    a2 = row g, k 2t+8 2t+9    a3 = row g+8, k 2t+8
//   2t+9 B (16 x 8):  b0 = k 2t 2t+1, column g    b1 = k 2t+8 2t+9, column g C (16 x 8):  c0 c1 = row g, columns 2t
//   2t+1                         c2 c3 = row g+8, columns 2t 2t+1
//
// The order of k is free as long as A and B use the same one. So a lane may take 16 contiguous bytes of "its" row of A
// (bytes 16 t of every 64) and use them, word by word, as k 2t.. and 2t+8..: a row-major matrix goes straight from
// memory to fragments, no ldmatrix and no shared layout, if the other operand is loaded in the same order.
#pragma once

#include <cstdint>

namespace hpc {

enum class Half { kFp16, kBf16 };  // which 16-bit type a register pair holds

template <Half kType>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1) {
  if constexpr (kType == Half::kFp16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// Two fp32 values as one register, `low` in the low half, rounded to nearest even (fp16 overflows to infinity).
template <Half kType>
__device__ __forceinline__ uint32_t pack_half2(float low, float high) {
  uint32_t r;
  if constexpr (kType == Half::kFp16) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  }
  return r;
}

// Of two pairs of bf16 values the larger magnitudes, with signs that mean nothing. A NaN gives way to a number.
__device__ __forceinline__ uint32_t larger_bf16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// Products of two pairs of bf16 values, each rounded.
__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// Transposes an 8 x 8 matrix of 16-bit values held by a warp: lane 4 g + t gives row g, columns 2t 2t+1 and receives
// row g, columns 2t 2t+1 of the transpose. Turns half an accumulator (packed) into half a B fragment of its transpose.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t value) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(value));
  return r;
}

// 2^x by the special function unit (relative error about 2^-22; denormal results flush to zero).
__device__ __forceinline__ float exp2_approx(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

__device__ __forceinline__ float log2_approx(float x) {
  float r;
  asm("lg2.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float r;
  asm("rcp.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

}  // namespace hpc

// e4m3 values on their way to 16-bit matrix products. sm_90a converts e4m3 to fp16 only (exactly, subnormals and NaN
// included; one F2FP for two values), never to bf16, and its mma.sync on e4m3 is the same conversion in disguise:
// convert once and multiply in fp16.
#pragma once

#include <cstdint>

namespace hpc {

// Four e4m3 values (byte 0 first) as two registers of fp16 pairs: bytes 0 1, bytes 2 3.
__device__ __forceinline__ void e4m3x4_to_half2x2(uint32_t bytes, uint32_t& low, uint32_t& high) {
  asm("{\n"
      ".reg .b16 l, h;\n"
      "mov.b32 {l, h}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, l;\n"
      "cvt.rn.f16x2.e4m3x2 %1, h;\n"
      "}"
      : "=r"(low), "=r"(high)
      : "r"(bytes));
}

// The same as bf16 pairs (exact too).
__device__ __forceinline__ void e4m3x4_to_bf16x2x2(uint32_t bytes, uint32_t& low, uint32_t& high) {
  asm("{\n"
      ".reg .b16 l, h, a, b, c, d;\n"
      ".reg .b32 x, y;\n"
      ".reg .f32 p, q, r, s;\n"
      "mov.b32 {l, h}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 x, l;\n"
      "cvt.rn.f16x2.e4m3x2 y, h;\n"
      "mov.b32 {a, b}, x;\n"
      "mov.b32 {c, d}, y;\n"
      "cvt.f32.f16 p, a;\n"
      "cvt.f32.f16 q, b;\n"
      "cvt.f32.f16 r, c;\n"
      "cvt.f32.f16 s, d;\n"
      "cvt.rn.bf16x2.f32 %0, q, p;\n"
      "cvt.rn.bf16x2.f32 %1, s, r;\n"
      "}"
      : "=r"(low), "=r"(high)
      : "r"(bytes));
}

// Bytes 0 1 of `a` and `b` as a0 b0 a1 b1: pairs of the same column of two rows.
__device__ __forceinline__ uint32_t interleave_bytes_low(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, 0x5140);
}
// Bytes 2 3 of `a` and `b` as a2 b2 a3 b3.
__device__ __forceinline__ uint32_t interleave_bytes_high(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, 0x7362);
}
// The same for 16-bit values: low halves of `a` and `b`, high halves of `a` and `b`.
__device__ __forceinline__ uint32_t interleave_halves_low(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, 0x5410);
}
__device__ __forceinline__ uint32_t interleave_halves_high(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, 0x7632);
}

}  // namespace hpc

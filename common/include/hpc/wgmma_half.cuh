// Warpgroup matrix multiply of 16-bit values with few columns, the first operand in registers, the second in shared
// memory as plain blocks without a swizzle: d[64, 8 n] (+)= a[64, 16] b[16, 8 n], fp32 accumulators, n = 2 or 4.
//
// A: thread (warp w, lane 4 g + t) holds rows 16 w + g and + 8 as in mma.cuh; d[j] is what c is there, of columns 8 j
// on. B: blocks of 128 bytes, 8 rows of 16 bytes. kByColumns: a row is a column of b, its bytes are 8 of k; else a row
// is one of k, its bytes are 8 columns. See WgmmaBlocks.
//
// Order of use: fence_proxy_async() by those who wrote b, and a barrier; wgmma_registers(d); wgmma_arrive();
// wgmma_half...; wgmma_commit(); wgmma_wait<0>(); wgmma_registers(d). Registers of A and d are not touched between.
#pragma once

#include "hpc/mma.cuh"
#include "hpc/wgmma_ss.cuh"

namespace hpc {

// b's blocks: from the first one, so many bytes on lies that of the next 8 of k, and that of the next 8 columns. (Two
// words, for what follows the first block is then found by one addition.)
struct WgmmaBlocks {
  uint32_t low, high;

  __device__ __forceinline__ WgmmaBlocks(uint32_t shared, uint32_t next_k, uint32_t next_columns)
      : low((next_k >> 4 << 16) | ((shared >> 4) & 0x3fff)), high(next_columns >> 4) {}
  // Descriptor of the block so many bytes behind the first one.
  __device__ __forceinline__ uint64_t at(uint32_t bytes) const { return (uint64_t{high} << 32) | (low + bytes / 16); }
};

// Descriptors are taken from uniform registers: made of warp_uniform() numbers they are there from the start, else each
// instruction waits for moves. Where the compiler can tell that a number is a constant of the kernel it drops that and
// keeps ordinary registers all the same, so lane_zero(), which it takes for a number of the lane, is added to it.
__device__ __forceinline__ uint32_t warp_uniform(uint32_t value) {
  return __shfl_sync(~0u, value, 0);
}
__device__ __forceinline__ uint32_t lane_zero() {
  uint32_t lanes_before;
  asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(lanes_before));
  return lanes_before >> 31;
}

// Keeps the compiler from moving accesses to accumulators across this point.
template <int kTiles>
__device__ __forceinline__ void wgmma_registers(float (&d)[kTiles][4]) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) asm volatile("" : "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3]));
}

// One instruction. `accumulate` false overwrites d.
template <Half kType, bool kByColumns>
__device__ __forceinline__ void wgmma_half(float (&d)[2][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
#define HPC_WGMMA_N16(TYPE)                                                                                 \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\nwgmma.mma_async.sync.aligned.m64n16k16.f32." TYPE \
               " {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, p, 1, 1, %14;\n}\n"             \
               : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),  \
                 "+f"(d[1][2]), "+f"(d[1][3])                                                               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),     \
                 "n"(kByColumns ? 0 : 1))
  if constexpr (kType == Half::kFp16) {
    HPC_WGMMA_N16("f16.f16");
  } else {
    HPC_WGMMA_N16("bf16.bf16");
  }
#undef HPC_WGMMA_N16
}

template <Half kType, bool kByColumns>
__device__ __forceinline__ void wgmma_half(float (&d)[4][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
#define HPC_WGMMA_N32(TYPE)                                                                                           \
  asm volatile(                                                                                                       \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE                    \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, p, 1, 1, " \
      "%22;\n}\n"                                                                                                     \
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),      \
        "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),      \
        "+f"(d[3][2]), "+f"(d[3][3])                                                                                  \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),                        \
        "n"(kByColumns ? 0 : 1))
  if constexpr (kType == Half::kFp16) {
    HPC_WGMMA_N32("f16.f16");
  } else {
    HPC_WGMMA_N32("bf16.bf16");
  }
#undef HPC_WGMMA_N32
}

}  // namespace hpc

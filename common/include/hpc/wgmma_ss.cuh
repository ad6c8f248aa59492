// Warpgroup matrix multiply with both operands in shared memory (wgmma "SS"), for a 64 x N tile:
//   d[64, N] (+)= a[64, K] * b[N, K]^T, K = 32 bytes an instruction (32 e4m3 or 16 bf16 values), fp32 accumulators.
// Both operands are K-major rows of 128 bytes in the 128-byte swizzle, 1,024-byte aligned: 16-byte chunk c of row r
// lies at r * 128 + ((c ^ (r & 7)) << 4). Step k of a row is 32 bytes further: add 2 to the descriptor. Accumulator
// element d[4 j + 2 h + c] of a thread is row 16 * warp + lane / 4 + 8 h, column 8 j + 2 (lane % 4) + c.
//
// Order of use: wgmma_fence(d); wgmma_arrive(); wgmma_ss...; wgmma_commit(); wgmma_wait<0>(); wgmma_fence(d). Between,
// nothing may touch d: the compiler would serialise the instructions (and says so).
#pragma once

#include <cstdint>

namespace hpc {

enum class WgmmaType { kE4m3, kBf16 };

// Keeps the compiler from moving accesses to accumulators across this point.
template <int Count>
__device__ __forceinline__ void wgmma_fence(float (&d)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Orders earlier register accesses before the wgmma that follow.
__device__ __forceinline__ void wgmma_arrive() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `Pending` committed groups are still running.
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Descriptor of a K-major operand in the 128-byte swizzle (8 rows are 1,024 bytes apart).
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t smem) {
  return (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 16) | ((smem >> 4) & 0x3FFF);
}

// One instruction. `accumulate` false overwrites d.
template <WgmmaType Type, int N>
__device__ __forceinline__ void wgmma_ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate);

// The register lists, eight at a time: an instruction of width N = 16 n uses the first n of each, one of 16 n + 8 also
// the half list that follows.
#define HPC_WGMMA_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define HPC_WGMMA_R1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define HPC_WGMMA_R2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define HPC_WGMMA_R3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define HPC_WGMMA_R4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define HPC_WGMMA_R5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define HPC_WGMMA_R6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define HPC_WGMMA_R7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define HPC_WGMMA_D0 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define HPC_WGMMA_D1 \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define HPC_WGMMA_D2 \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define HPC_WGMMA_D3 \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define HPC_WGMMA_D4 \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define HPC_WGMMA_D5 \
  "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define HPC_WGMMA_D6 \
  "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define HPC_WGMMA_D7 \
  "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])

#define HPC_WGMMA_HALF_R4 "%32, %33, %34, %35"
#define HPC_WGMMA_HALF_D4 "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define HPC_WGMMA_HALF_R5 "%40, %41, %42, %43"
#define HPC_WGMMA_HALF_D5 "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define HPC_WGMMA_HALF_R6 "%48, %49, %50, %51"
#define HPC_WGMMA_HALF_D6 "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define HPC_WGMMA_HALF_R7 "%56, %57, %58, %59"
#define HPC_WGMMA_HALF_D7 "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])

// A, B and P are the operand numbers that follow the N / 2 accumulators.
#define HPC_WGMMA(TYPE, K, TEXT, TAIL, N, A, B, P, REGS, ...)                                                        \
  template <>                                                                                                        \
  __device__ __forceinline__ void wgmma_ss<WgmmaType::TYPE, N>(float (&d)[N / 2], uint64_t a, uint64_t b,            \
                                                               bool accumulate) {                                    \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P                                                             \
                 ", 0;\n"                                                                                            \
                 "wgmma.mma_async.sync.aligned.m64n" #N K ".f32." TEXT " {" REGS "}, %" #A ", %" #B ", p, 1, 1" TAIL \
                 ";\n}\n"                                                                                            \
                 : __VA_ARGS__                                                                                       \
                 : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                                               \
  }
#define HPC_WGMMA_BOTH(...)                             \
  HPC_WGMMA(kE4m3, "k32", "e4m3.e4m3", "", __VA_ARGS__) \
  HPC_WGMMA(kBf16, "k16", "bf16.bf16", ", 0, 0", __VA_ARGS__)

HPC_WGMMA_BOTH(16, 8, 9, 10, HPC_WGMMA_R0, HPC_WGMMA_D0)
HPC_WGMMA_BOTH(32, 16, 17, 18, HPC_WGMMA_R0 ", " HPC_WGMMA_R1, HPC_WGMMA_D0, HPC_WGMMA_D1)
HPC_WGMMA_BOTH(48, 24, 25, 26, HPC_WGMMA_R0 ", " HPC_WGMMA_R1 ", " HPC_WGMMA_R2, HPC_WGMMA_D0, HPC_WGMMA_D1,
               HPC_WGMMA_D2)
HPC_WGMMA_BOTH(64, 32, 33, 34, HPC_WGMMA_R0 ", " HPC_WGMMA_R1 ", " HPC_WGMMA_R2 ", " HPC_WGMMA_R3, HPC_WGMMA_D0,
               HPC_WGMMA_D1, HPC_WGMMA_D2, HPC_WGMMA_D3)
HPC_WGMMA_BOTH(80, 40, 41, 42, HPC_WGMMA_R0 ", " HPC_WGMMA_R1 ", " HPC_WGMMA_R2 ", " HPC_WGMMA_R3 ", " HPC_WGMMA_R4,
               HPC_WGMMA_D0, HPC_WGMMA_D1, HPC_WGMMA_D2, HPC_WGMMA_D3, HPC_WGMMA_D4)
HPC_WGMMA_BOTH(96, 48, 49, 50,
               HPC_WGMMA_R0 ", " HPC_WGMMA_R1 ", " HPC_WGMMA_R2 ", " HPC_WGMMA_R3 ", " HPC_WGMMA_R4 ", " HPC_WGMMA_R5,
               HPC_WGMMA_D0, HPC_WGMMA_D1, HPC_WGMMA_D2, HPC_WGMMA_D3, HPC_WGMMA_D4, HPC_WGMMA_D5)
HPC_WGMMA_BOTH(112, 56, 57, 58,
               HPC_WGMMA_R0 ", " HPC_WGMMA_R1 ", " HPC_WGMMA_R2 ", " HPC_WGMMA_R3 ", " HPC_WGMMA_R4 ", " HPC_WGMMA_R5
                            ", " HPC_WGMMA_R6,
               HPC_WGMMA_D0, HPC_WGMMA_D1, HPC_WGMMA_D2, HPC_WGMMA_D3, HPC_WGMMA_D4, HPC_WGMMA_D5, HPC_WGMMA_D6)
HPC_WGMMA_BOTH(128, 64, 65, 66,
               HPC_WGMMA_R0 ", " HPC_WGMMA_R1 ", " HPC_WGMMA_R2 ", " HPC_WGMMA_R3 ", " HPC_WGMMA_R4 ", " HPC_WGMMA_R5
                            ", " HPC_WGMMA_R6 ", " HPC_WGMMA_R7,
               HPC_WGMMA_D0, HPC_WGMMA_D1, HPC_WGMMA_D2, HPC_WGMMA_D3, HPC_WGMMA_D4, HPC_WGMMA_D5, HPC_WGMMA_D6,
               HPC_WGMMA_D7)

HPC_WGMMA_BOTH(72, 36, 37, 38,
               HPC_WGMMA_R0 ", " HPC_WGMMA_R1 ", " HPC_WGMMA_R2 ", " HPC_WGMMA_R3 ", " HPC_WGMMA_HALF_R4, HPC_WGMMA_D0,
               HPC_WGMMA_D1, HPC_WGMMA_D2, HPC_WGMMA_D3, HPC_WGMMA_HALF_D4)
HPC_WGMMA_BOTH(88, 44, 45, 46,
               HPC_WGMMA_R0 ", " HPC_WGMMA_R1 ", " HPC_WGMMA_R2 ", " HPC_WGMMA_R3 ", " HPC_WGMMA_R4
                            ", " HPC_WGMMA_HALF_R5,
               HPC_WGMMA_D0, HPC_WGMMA_D1, HPC_WGMMA_D2, HPC_WGMMA_D3, HPC_WGMMA_D4, HPC_WGMMA_HALF_D5)
HPC_WGMMA_BOTH(104, 52, 53, 54,
               HPC_WGMMA_R0 ", " HPC_WGMMA_R1 ", " HPC_WGMMA_R2 ", " HPC_WGMMA_R3 ", " HPC_WGMMA_R4 ", " HPC_WGMMA_R5
                            ", " HPC_WGMMA_HALF_R6,
               HPC_WGMMA_D0, HPC_WGMMA_D1, HPC_WGMMA_D2, HPC_WGMMA_D3, HPC_WGMMA_D4, HPC_WGMMA_D5, HPC_WGMMA_HALF_D6)
HPC_WGMMA_BOTH(120, 60, 61, 62,
               HPC_WGMMA_R0 ", " HPC_WGMMA_R1 ", " HPC_WGMMA_R2 ", " HPC_WGMMA_R3 ", " HPC_WGMMA_R4 ", " HPC_WGMMA_R5
                            ", " HPC_WGMMA_R6 ", " HPC_WGMMA_HALF_R7,
               HPC_WGMMA_D0, HPC_WGMMA_D1, HPC_WGMMA_D2, HPC_WGMMA_D3, HPC_WGMMA_D4, HPC_WGMMA_D5, HPC_WGMMA_D6,
               HPC_WGMMA_HALF_D7)

#undef HPC_WGMMA_HALF_R4
#undef HPC_WGMMA_HALF_D4
#undef HPC_WGMMA_HALF_R5
#undef HPC_WGMMA_HALF_D5
#undef HPC_WGMMA_HALF_R6
#undef HPC_WGMMA_HALF_D6
#undef HPC_WGMMA_HALF_R7
#undef HPC_WGMMA_HALF_D7
#undef HPC_WGMMA_R0
#undef HPC_WGMMA_D0
#undef HPC_WGMMA_R1
#undef HPC_WGMMA_D1
#undef HPC_WGMMA_R2
#undef HPC_WGMMA_D2
#undef HPC_WGMMA_R3
#undef HPC_WGMMA_D3
#undef HPC_WGMMA_R4
#undef HPC_WGMMA_D4
#undef HPC_WGMMA_R5
#undef HPC_WGMMA_D5
#undef HPC_WGMMA_R6
#undef HPC_WGMMA_D6
#undef HPC_WGMMA_R7
#undef HPC_WGMMA_D7
#undef HPC_WGMMA
#undef HPC_WGMMA_BOTH

}  // namespace hpc

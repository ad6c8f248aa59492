// Warpgroup matrix multiply with A in registers and B in shared memory (wgmma "RS"), for a 64 x N tile of bf16:
//   d[64, N] (+)= a[64, 16] * b[N, 16]^T, fp32 accumulators.
// A: thread (warp w, lane 4 g + t) holds {row 16 w + g, k 2t..2t+1}, {row + 8, same k}, {row, k + 8}, {row + 8, k + 8}.
// B, the accumulators' layout and the order of use: wgmma_ss.cuh. The registers of A may not change before the group
// has been waited for. Reading A from registers costs nothing against shared memory, and is faster below N = 64.
#pragma once

#include "hpc/wgmma_ss.cuh"

namespace hpc {

// One instruction. `accumulate` false overwrites d.
template <int N>
__device__ __forceinline__ void wgmma_rs_bf16(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate);

// The first N / 2 register names and operands, each list made from the one before.
#define HPC_WGMMA_R4 "%0, %1, %2, %3"
#define HPC_WGMMA_D4 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define HPC_WGMMA_R8 HPC_WGMMA_R4 ", %4, %5, %6, %7"
#define HPC_WGMMA_D8 HPC_WGMMA_D4, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define HPC_WGMMA_R12 HPC_WGMMA_R8 ", %8, %9, %10, %11"
#define HPC_WGMMA_D12 HPC_WGMMA_D8, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define HPC_WGMMA_R16 HPC_WGMMA_R12 ", %12, %13, %14, %15"
#define HPC_WGMMA_D16 HPC_WGMMA_D12, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define HPC_WGMMA_R20 HPC_WGMMA_R16 ", %16, %17, %18, %19"
#define HPC_WGMMA_D20 HPC_WGMMA_D16, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define HPC_WGMMA_R24 HPC_WGMMA_R20 ", %20, %21, %22, %23"
#define HPC_WGMMA_D24 HPC_WGMMA_D20, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define HPC_WGMMA_R28 HPC_WGMMA_R24 ", %24, %25, %26, %27"
#define HPC_WGMMA_D28 HPC_WGMMA_D24, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define HPC_WGMMA_R32 HPC_WGMMA_R28 ", %28, %29, %30, %31"
#define HPC_WGMMA_D32 HPC_WGMMA_D28, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define HPC_WGMMA_R36 HPC_WGMMA_R32 ", %32, %33, %34, %35"
#define HPC_WGMMA_D36 HPC_WGMMA_D32, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define HPC_WGMMA_R40 HPC_WGMMA_R36 ", %36, %37, %38, %39"
#define HPC_WGMMA_D40 HPC_WGMMA_D36, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define HPC_WGMMA_R48 HPC_WGMMA_R40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define HPC_WGMMA_D48 \
  HPC_WGMMA_D40, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define HPC_WGMMA_R52 HPC_WGMMA_R48 ", %48, %49, %50, %51"
#define HPC_WGMMA_D52 HPC_WGMMA_D48, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define HPC_WGMMA_R64 HPC_WGMMA_R52 ", %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define HPC_WGMMA_D64                                                                                       \
  HPC_WGMMA_D52, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), \
      "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define HPC_WGMMA_R80 HPC_WGMMA_R64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define HPC_WGMMA_D80                                                                                         \
  HPC_WGMMA_D64, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]),   \
      "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), \
      "+f"(d[79])
#define HPC_WGMMA_R96 HPC_WGMMA_R80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define HPC_WGMMA_D96                                                                                         \
  HPC_WGMMA_D80, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]),   \
      "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), \
      "+f"(d[95])

// A0 to P are the operand numbers that follow the accumulators.
#define HPC_WGMMA_RS(N, HALF, A0, A1, A2, A3, B, P)                                                        \
  template <>                                                                                              \
  __device__ __forceinline__ void wgmma_rs_bf16<N>(float (&d)[HALF], const uint32_t (&a)[4], uint64_t b,   \
                                                   bool accumulate) {                                      \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P                                                   \
                 ", 0;\n"                                                                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" HPC_WGMMA_R##HALF            \
                 "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1, 0;\n}\n"                  \
                 : HPC_WGMMA_D##HALF                                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate))); \
  }

HPC_WGMMA_RS(8, 4, 4, 5, 6, 7, 8, 9)
HPC_WGMMA_RS(16, 8, 8, 9, 10, 11, 12, 13)
HPC_WGMMA_RS(24, 12, 12, 13, 14, 15, 16, 17)
HPC_WGMMA_RS(32, 16, 16, 17, 18, 19, 20, 21)
HPC_WGMMA_RS(40, 20, 20, 21, 22, 23, 24, 25)
HPC_WGMMA_RS(48, 24, 24, 25, 26, 27, 28, 29)
HPC_WGMMA_RS(56, 28, 28, 29, 30, 31, 32, 33)
HPC_WGMMA_RS(64, 32, 32, 33, 34, 35, 36, 37)
HPC_WGMMA_RS(72, 36, 36, 37, 38, 39, 40, 41)
HPC_WGMMA_RS(80, 40, 40, 41, 42, 43, 44, 45)
HPC_WGMMA_RS(96, 48, 48, 49, 50, 51, 52, 53)
HPC_WGMMA_RS(104, 52, 52, 53, 54, 55, 56, 57)
HPC_WGMMA_RS(128, 64, 64, 65, 66, 67, 68, 69)
HPC_WGMMA_RS(160, 80, 80, 81, 82, 83, 84, 85)
HPC_WGMMA_RS(192, 96, 96, 97, 98, 99, 100, 101)

#undef HPC_WGMMA_R4
#undef HPC_WGMMA_D4
#undef HPC_WGMMA_R8
#undef HPC_WGMMA_D8
#undef HPC_WGMMA_R12
#undef HPC_WGMMA_D12
#undef HPC_WGMMA_R16
#undef HPC_WGMMA_D16
#undef HPC_WGMMA_R20
#undef HPC_WGMMA_D20
#undef HPC_WGMMA_R24
#undef HPC_WGMMA_D24
#undef HPC_WGMMA_R28
#undef HPC_WGMMA_D28
#undef HPC_WGMMA_R32
#undef HPC_WGMMA_D32
#undef HPC_WGMMA_R36
#undef HPC_WGMMA_D36
#undef HPC_WGMMA_R40
#undef HPC_WGMMA_D40
#undef HPC_WGMMA_R48
#undef HPC_WGMMA_D48
#undef HPC_WGMMA_R52
#undef HPC_WGMMA_D52
#undef HPC_WGMMA_R64
#undef HPC_WGMMA_D64
#undef HPC_WGMMA_R80
#undef HPC_WGMMA_D80
#undef HPC_WGMMA_R96
#undef HPC_WGMMA_D96
#undef HPC_WGMMA_RS

}  // namespace hpc

// Down kernel, third of the four: y = h * w2^T for every row, bf16; grouped_gemm.cuh has the plan.
//
// Reads h (rows of an expert are neighbours), w2, scales. Writes y [rows, H]; weighting and summing are the
// reduction's. The tensor map puts weight row 32 w + 4 g + 2 m + h of a unit of 128 at shared row 64 m + 16 w + 8 h +
// g: a thread (warp w, lane group g) then has four neighbouring columns 32 w + 4 g of each of its tokens, and stores 8
// bytes at once (64 neighbouring bytes a token over the warp).
#pragma once

#include "kernels/grouped_produce.cuh"

namespace hpc::moe {

template <class T, bool kKeep>
struct DownEpilogue {
  using Smem = typename T::Smem;
  static constexpr Quant kQuant = T::kQuant;
  static __device__ __forceinline__ void prepare(const GemmParams&, Smem&) {}

  template <int N>
  static __device__ __forceinline__ void run(const GemmParams& p, Smem&, const TurnTask& task, int group, int,
                                             float (&acc)[2][N / 2]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, rows = task.rows;
    const int column = (task.unit + group) * 128 + warp * 32 + lane / 4 * 4;
    const float scale = kQuant == Quant::kTensor ? task.scale : 1.0f;
    const uint64_t policy = out_policy<kKeep>();
    auto* out = static_cast<__nv_bfloat16*>(p.out) + static_cast<int64_t>(task.row) * p.out_columns + column;
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const int token = i / 2 * 8 + 2 * (lane % 4) + i % 2, at = i / 2 * 4 + i % 2;
      if (token < rows) {
        const __nv_bfloat162 four[2] = {__floats2bfloat162_rn(acc[0][at] * scale, acc[0][at + 2] * scale),
                                        __floats2bfloat162_rn(acc[1][at] * scale, acc[1][at + 2] * scale)};
        store_out<kKeep>(out + static_cast<int64_t>(token) * p.out_columns, *reinterpret_cast<const uint2*>(four),
                         policy);
      }
    }
  }
};

// By block, where tokens are M: four lanes have a unit's columns of two rows of each block, 8 neighbouring ones a
// thread and store: 32 i + 8 t + 2 j + c (i, j < 4), which the map puts at shared row 32 i + 8 j + 2 t + c.
template <class T, bool kKeep>
struct DownTokens {
  static_assert(T::kBlock);
  using Smem = typename T::Smem;
  static __device__ __forceinline__ void prepare(const GemmParams&, Smem&) {}

  template <int kBlocks>
  static __device__ __forceinline__ void run(const GemmParams& p, Smem&, const TurnTask& task, int first_unit,
                                             const TokenBlocks& at, int, float (&acc)[kBlocks][64]) {
    const int lane = threadIdx.x % 32;
    const uint64_t policy = out_policy<kKeep>();
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = at.rows[b] + row_in_tile<T>(threadIdx.x % 128 / 32 * 16 + lane / 4 + 8 * h);
        if (row >= at.live) continue;
        auto* out = static_cast<__nv_bfloat16*>(p.out) + static_cast<int64_t>(task.row + row) * p.out_columns +
                    (first_unit + at.unit[b]) * 128 + lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < 4; ++i) store_eight(out + 32 * i, &acc[b][16 * i + 2 * h], policy);
      }
    }
  }

  // kSpread: a unit of a tile of 65 to 96 rows.
  static __device__ __forceinline__ void run_spread(const GemmParams& p, Smem& s, const TurnTask& task, int group,
                                                    float (&acc)[1][64], float (&more)[32]) {
    const int lane = threadIdx.x % 32, row = 64 + row_in_tile<T>(threadIdx.x % 128 / 32 * 16 + lane / 4);
    run<1>(p, s, task, task.unit, {{}, {}, {0}, {group}, 0, 64}, group, acc);
    if (row >= task.rows) return;
    const uint64_t policy = out_policy<kKeep>();
    auto* out = static_cast<__nv_bfloat16*>(p.out) + static_cast<int64_t>(task.row + row) * p.out_columns +
                (task.unit + group) * 128 + lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) store_eight<2>(out + 32 * i, &more[8 * i], policy);
  }

  // v[4 j] and the next, j < 4 (kStep 2: v[2 j]).
  template <int kStep = 4>
  static __device__ __forceinline__ void store_eight(__nv_bfloat16* out, const float* v, uint64_t policy) {
    __nv_bfloat162 eight[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) eight[j] = __floats2bfloat162_rn(v[kStep * j], v[kStep * j + 1]);
    store_out<kKeep>(out, *reinterpret_cast<const uint4*>(eight), policy);
  }

  // kThree: a unit of the CTA's own block, and half of its columns of the third.
  static __device__ __forceinline__ void run_three(const GemmParams& p, Smem& s, const TurnTask& task, int first_unit,
                                                   int group, int, float (&acc)[1][64], float (&third)[32]) {
    const int lane = threadIdx.x % 32, mine = static_cast<int>(blockIdx.x % 2);
    run<1>(p, s, task, first_unit, {{}, {}, {0}, {group}, 0, 64}, group, acc);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = threadIdx.x % 128 / 32 * 16 + lane / 4 + 8 * h;
      if (64 + row >= task.rows) continue;
      auto* out = static_cast<__nv_bfloat16*>(p.out) +
                  static_cast<int64_t>(task.row + (mine ? 64 : 128) + row) * p.out_columns +
                  (first_unit + group) * 128 + mine * 64 + lane % 4 * 8;
#pragma unroll
      for (int i = 0; i < 2; ++i) store_eight(out + 32 * i, &third[16 * i + 2 * h], 0);
    }
  }
};

// kDirect: per tensor, K of at most kDirectK. kKeep: y leaves L2 last.
template <Quant kQuant, bool kHalf, int kWidth, bool kDirect, bool kClusters = false, bool kKeep = false>
__global__ void __launch_bounds__(kGemmThreads, 1)
    down_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ CUtensorMap h_map,
                const __grid_constant__ GemmParams p) {
  using T = Traits<Gemm::kDown, kQuant, kHalf, kWidth, false, false, kClusters>;
  run_gemm<T, kDirect, DownEpilogue<T, kKeep>>(&map, &h_map, p);
}

// kKept: K of at most kKeptStages stages, rows of h stay for several pairs of units. kKeep: y leaves L2 last. Tiles are
// spread where it was faster (hy3-ep8 256 tokens: 1 % slower).
template <bool kHalf, bool kClusters, bool kKept = false, bool kThrees = false, bool kKeep = false>
__global__ void __launch_bounds__(kGemmThreads, 1)
    down_tokens_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ CUtensorMap h_map,
                       const __grid_constant__ GemmParams p) {
  using T = Traits<Gemm::kDown, Quant::kBlock, kHalf, kMaxWidth, false, true, kClusters, kKept, kThrees,
                   !kClusters && (kHalf || kKeep)>;
  run_gemm<T, false, DownTokens<T, kKeep>>(&map, &h_map, p);
}

}  // namespace hpc::moe

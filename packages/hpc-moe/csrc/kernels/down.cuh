// Down kernel, third of the four: y = h * w2^T for every row, bf16; grouped_gemm.cuh has the plan.
//
// Reads h (rows of an expert are neighbours), w2, scales. Writes y [rows, H]; weighting and summing are the
// reduction's. The tensor map puts weight row 32 w + 4 g + 2 m + h of a unit of 128 at shared row 64 m + 16 w + 8 h +
// g: a thread (warp w, lane group g) then has four neighbouring columns 32 w + 4 g of each of its tokens. They go
// through shared memory, 32 tokens at a time, and leave as 16 bytes a thread, 256 neighbouring bytes a token.
#pragma once

#include "kernels/grouped_produce.cuh"

namespace hpc::moe {

template <class T>
struct DownEpilogue {
  using Smem = typename T::Smem;
  static constexpr Quant kQuant = T::kQuant;
  static __device__ __forceinline__ void prepare(const GemmParams&, Smem&) {}

  static constexpr int kTokens = Smem::kDownTokens, kPitch = Smem::kDownPitch;  // staged at a time; bytes of one

  template <int N>
  static __device__ __forceinline__ void run(const GemmParams& p, Smem& s, const TurnTask& task, int group, int,
                                             float (&acc)[2][N / 2]) {
    store<N, 0>(p, s, task, group, acc);
  }

  // Tokens of the tile from kFirst on.
  template <int N, int kFirst>
  static __device__ __forceinline__ void store(const GemmParams& p, Smem& s, const TurnTask& task, int group,
                                               float (&acc)[2][N / 2]) {
    constexpr int kCount = kFirst + kTokens < N ? kTokens : N - kFirst;
    const int lane = threadIdx.x % 32, thread = threadIdx.x % 128;
    const float scale = kQuant == Quant::kTensor ? task.scale : 1.0f;
    uint8_t* staged = s.out[group] + 2 * (lane % 4) * kPitch + thread / 32 * 64 + lane / 4 * 8;
    named_barrier_sync(2 + group, 128);  // what was staged before has left
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {  // the thread's token 8 (i / 2) + 2 (lane % 4) + i % 2
      const int at = (kFirst / 4 + i) / 2 * 4 + i % 2;
      const __nv_bfloat162 four[2] = {__floats2bfloat162_rn(acc[0][at] * scale, acc[0][at + 2] * scale),
                                      __floats2bfloat162_rn(acc[1][at] * scale, acc[1][at + 2] * scale)};
      *reinterpret_cast<uint2*>(staged + (i / 2 * 8 + i % 2) * kPitch) = *reinterpret_cast<const uint2*>(four);
    }
    named_barrier_sync(2 + group, 128);
    const int chunk = thread % 16;
    auto* out = static_cast<uint8_t*>(p.out) + chunk * 16 +
                2 * (static_cast<int64_t>(task.row + kFirst) * p.out_columns + (task.unit + group) * 128);
#pragma unroll
    for (int i = 0; i < (kCount + 7) / 8; ++i) {
      const int token = thread / 16 + 8 * i;
      if (kFirst + token < task.rows) {
        *reinterpret_cast<uint4*>(out + static_cast<int64_t>(token) * p.out_columns * 2) =
            *reinterpret_cast<const uint4*>(s.out[group] + token * kPitch + chunk * 16);
      }
    }
    if constexpr (kFirst + kTokens < N) store<N, kFirst + kTokens>(p, s, task, group, acc);
  }
};

// kDirect: per tensor, K of at most kDirectK.
template <Quant kQuant, bool kHalf, int kWidth, bool kDirect>
__global__ void __launch_bounds__(kGemmThreads, 1)
    down_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ GemmParams p) {
  using T = Traits<Gemm::kDown, kQuant, kHalf, kWidth>;
  run_gemm<T, kDirect, DownEpilogue<T>>(&map, p);
}

}  // namespace hpc::moe

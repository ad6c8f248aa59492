// Gate-up kernel, second of the four: h = quantise(bf16(silu(gate) * up)) from x and w13; grouped_gemm.cuh has the
// plan.
//
// Reads x (or its quantised copy) through the routing index, w13, scales. Writes h [rows, I] and, for block scales,
// h_scale [rows, I / 128 or I / 64]. A warpgroup's m64 tile 0 is 64 gate rows, tile 1 the up rows of the same columns,
// so gate and up of an element are the same register of the same thread. The tensor map puts weight row 16 w + 2 g + h
// of a unit at shared row 16 w + 8 h + g: a thread (warp w, lane group g) then has columns 16 w + 2 g and + 1, and
// packs them.
#pragma once

#include "kernels/grouped_frame.cuh"

namespace hpc::moe {

template <Quant kQuant, bool kHalf>
struct GateUpEpilogue {
  static constexpr bool kBlock = kQuant == Quant::kBlock;

  template <int N>
  static __device__ __forceinline__ void run(const GemmParams& p, GemmSmem& s, const Task& task, int unit, int parity,
                                             float (&acc)[2][N / 2]) {
    const int lane = threadIdx.x % 32, group = threadIdx.x / 128, thread = threadIdx.x % 128;
    const int row = lane / 4, column = 2 * (lane % 4);  // of an 8 x 8 block of the accumulator
    float (&v)[N / 2] = acc[0];
    const float scale = kQuant == Quant::kTensor ? p.w_scale[task.expert] * *p.b_scale : 1.0f;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float act = swiglu(acc[0][i] * scale, acc[1][i] * scale, p.swiglu_limit);
      v[i] = __bfloat162float(__float2bfloat16_rn(act));
    }
    const int first = thread / 32 * 16 + 2 * row;  // of the unit's 64 columns
    if constexpr (kQuant == Quant::kNone) {
      auto* out = static_cast<__nv_bfloat16*>(p.out) + unit * 64 + first;
#pragma unroll
      for (int i = 0; i < N / 4; ++i) {  // token of the tile, in this thread's order
        const int token = i / 2 * 8 + column + i % 2;
        if (token < task.rows) {
          *reinterpret_cast<__nv_bfloat162*>(out + static_cast<int64_t>(task.row + token) * p.out_columns) =
              __floats2bfloat162_rn(v[i / 2 * 4 + i % 2], v[i / 2 * 4 + 2 + i % 2]);
        }
      }
    } else {
      if constexpr (kBlock) {
        group_scales<N>(p, s, task, unit, parity, v);
      } else {
        named_barrier_sync(2 + group, 128);  // the previous task's rows have left s.out
      }
      const float fixed = kBlock ? 0.0f : static_inverse(*p.act_scale);
      uint8_t* staged = s.out[group] + first;
#pragma unroll
      for (int i = 0; i < N / 4; ++i) {
        const int token = i / 2 * 8 + column + i % 2;
        const float inverse = kBlock ? s.inverse[group][token] : fixed;
        *reinterpret_cast<uint16_t*>(staged + token * kOutRow) =
            to_e4m3x2(v[i / 2 * 4 + i % 2] * inverse, v[i / 2 * 4 + 2 + i % 2] * inverse);
      }
      named_barrier_sync(2 + group, 128);
      uint8_t* out = static_cast<uint8_t*>(p.out) + static_cast<int64_t>(task.row) * p.out_columns + unit * 64;
      for (int i = thread; i < task.rows * 4; i += 128) {  // 64 bytes a token, 16 a thread
        *reinterpret_cast<uint4*>(out + static_cast<int64_t>(i / 4) * p.out_columns + i % 4 * 16) =
            *reinterpret_cast<const uint4*>(s.out[group] + i / 4 * kOutRow + i % 4 * 16);
      }
    }
  }

  // Block scales of the tile: largest magnitude of each token over 64 columns (this warpgroup's) or 128 (both
  // warpgroups'); stores the scales and leaves the inverses in s.inverse.
  template <int N>
  static __device__ __forceinline__ void group_scales(const GemmParams& p, GemmSmem& s, const Task& task, int unit,
                                                      int parity, const float (&v)[N / 2]) {
    const int lane = threadIdx.x % 32, group = threadIdx.x / 128, thread = threadIdx.x % 128;
    float (&amax)[8][kMaxWidth] = s.amax[parity];
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      float2 largest =
          make_float2(fmaxf(fabsf(v[4 * j]), fabsf(v[4 * j + 2])), fmaxf(fabsf(v[4 * j + 1]), fabsf(v[4 * j + 3])));
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) {
        largest.x = fmaxf(largest.x, __shfl_xor_sync(~0u, largest.x, mask));
        largest.y = fmaxf(largest.y, __shfl_xor_sync(~0u, largest.y, mask));
      }
      if (lane < 4) *reinterpret_cast<float2*>(&amax[threadIdx.x / 32][8 * j + 2 * lane]) = largest;
    }
    if constexpr (kHalf) {
      named_barrier_sync(2 + group, 128);
    } else {
      named_barrier_sync(1, kConsumers);
    }
    if (thread < N) {
      float largest = 0.0f;
#pragma unroll
      for (int w = 0; w < (kHalf ? 4 : 8); ++w) largest = fmaxf(largest, amax[(kHalf ? group * 4 : 0) + w][thread]);
      const GroupScale scale = group_scale(largest);
      s.inverse[group][thread] = scale.inverse;
      if (thread < task.rows && (kHalf || group == 0)) {
        constexpr int kGroup = kHalf ? 64 : 128;
        p.out_scale[static_cast<int64_t>(task.row + thread) * (p.out_columns / kGroup) + unit * 64 / kGroup] =
            scale.scale;
      }
    }
    named_barrier_sync(2 + group, 128);
  }
};

template <Quant kQuant, bool kHalf>
__global__ void __launch_bounds__(kGemmThreads, 1)
    gate_up_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ GemmParams p) {
  run_gemm<Gemm::kUp, kQuant, kHalf, GateUpEpilogue<kQuant, kHalf>>(&map, p);
}

}  // namespace hpc::moe

// Reduction kernel, last of the four: out[t] = factor * sum over slots of weight * y[row of slot] + shared_output[t].
//
// Grid: one CTA a token (grid-stride), kReduceThreads threads, 8 columns to a thread and step. The sum runs in slot
// order in fp32: no atomics, the same bits every run. A slot whose expert is another rank's has row -1 and is skipped
// whatever its weight holds (NaN too); a token with no live slot is zeros (plus shared_output). PDL: rows and weights
// are read before the wait (written by older kernels); y after it.
#pragma once

#include <cuda_bf16.h>

#include "hpc/pdl.cuh"
#include "kernels/params.hpp"

namespace hpc::moe {

constexpr int kReduceThreads = 256;

__device__ __forceinline__ void unpack8(const uint4& raw, float (&v)[8]) {
  const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&raw);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __bfloat1622float2(pairs[i]);
    v[2 * i] = pair.x;
    v[2 * i + 1] = pair.y;
  }
}

__global__ void __launch_bounds__(kReduceThreads, 4) reduce_kernel(const ReduceParams p) {
  constexpr int kAhead = 8;  // rows loaded before the first is added
  __shared__ int32_t rows_of[2][kMaxTopK];
  __shared__ float weights_of[2][kMaxTopK];
  bool waited = false;
  // A token's rows and weights are asked for while the one before it is summed.
  int32_t row = -1;
  float weight_of_slot = 0.0f;
  const auto ask = [&](int64_t token) {
    if (threadIdx.x >= p.top_k || token >= p.num_tokens) return;
    row = p.slot_to_row[token * p.top_k + threadIdx.x];
    weight_of_slot = p.topk_weights[token * p.weight_token_stride + threadIdx.x * p.weight_slot_stride];
  };
  ask(blockIdx.x);
  int turn = 0;
  for (int64_t token = blockIdx.x; token < p.num_tokens; token += gridDim.x, turn ^= 1) {
    int32_t* rows = rows_of[turn];
    float* weights = weights_of[turn];
    if (threadIdx.x < p.top_k) {
      rows[threadIdx.x] = row;
      weights[threadIdx.x] = weight_of_slot;
    }
    __syncthreads();
    ask(token + gridDim.x);
    if (!waited) {
      pdl_wait();
      pdl_trigger();
      waited = true;
    }
    for (int column = threadIdx.x * 8; column < p.hidden; column += kReduceThreads * 8) {
      const auto* y = static_cast<const __nv_bfloat16*>(p.y) + column;
      float sum[8] = {};
      for (int slot = 0; slot < p.top_k; slot += kAhead) {
        uint4 raw[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int row = slot + i < p.top_k ? rows[slot + i] : -1;
          if (row >= 0) raw[i] = *reinterpret_cast<const uint4*>(y + static_cast<int64_t>(row) * p.hidden);
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (slot + i < p.top_k && rows[slot + i] >= 0) {
            const float weight = weights[slot + i];
            float v[8];
            unpack8(raw[i], v);
#pragma unroll
            for (int c = 0; c < 8; ++c) sum[c] = fmaf(weight, v[c], sum[c]);
          }
        }
      }
      float base[8] = {};
      if (p.shared_output) {
        unpack8(*reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(p.shared_output) +
                                                token * p.shared_stride + column),
                base);
      }
      __nv_bfloat162 packed[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        packed[c] = __floats2bfloat162_rn(fmaf(p.routed_scaling_factor, sum[2 * c], base[2 * c]),
                                          fmaf(p.routed_scaling_factor, sum[2 * c + 1], base[2 * c + 1]));
      }
      *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(p.out) + token * p.out_stride + column) =
          *reinterpret_cast<const uint4*>(packed);
    }
  }
  if (!waited) pdl_wait();
}

}  // namespace hpc::moe

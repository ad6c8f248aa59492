// Reduction kernel, last of the four: out[t] = factor * sum over slots of weight * y[row of slot] + shared_output[t].
//
// Grid: one warp a span of kReduceSpan columns of a token (grid-stride), 16 columns a lane; warps know nothing of each
// other, and skip dead slots without a step. The sum runs in slot order in fp32: no atomics, the same bits every run. A
// slot whose expert is another rank's has row -1 and is skipped whatever its weight holds (NaN too); a token with no
// live slot is zeros (plus shared_output). kDiscard: y, which nobody reads again, is dropped from L2 once read, so that
// it is not written to memory. PDL: rows and weights are read before the wait (written by older kernels); y after it.
#pragma once

#include <cuda_bf16.h>

#include "hpc/pdl.cuh"
#include "kernels/params.hpp"

namespace hpc::moe {

constexpr int kReduceThreads = 256, kReduceWarps = kReduceThreads / 32;
constexpr int kReduceHalf = 256, kReduceSpan = 2 * kReduceHalf;  // columns: a lane has 8 of each half

__device__ __forceinline__ void unpack8(const uint4& raw, float (&v)[8]) {
  const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&raw);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __bfloat1622float2(pairs[i]);
    v[2 * i] = pair.x;
    v[2 * i + 1] = pair.y;
  }
}

// Drops a line of 128 bytes from L2: what it holds is undefined until it is written again.
__device__ __forceinline__ void discard_line(const void* line) {
  asm volatile("discard.global.L2 [%0], 128;" ::"l"(line) : "memory");
}

template <bool kDiscard>
__global__ void __launch_bounds__(kReduceThreads, 4) reduce_kernel(const ReduceParams p) {
  constexpr int kAhead = 2;  // rows loaded before the first is added
  const int lane = threadIdx.x % 32, spans = (p.hidden + kReduceSpan - 1) / kReduceSpan;
  const int items = p.num_tokens * spans, step = static_cast<int>(gridDim.x) * kReduceWarps;
  // A lane has a slot's row and weight; they are asked for while the span before is summed.
  int32_t row = -1;
  float weight = 0.0f;
  const auto ask = [&](int item) {
    row = -1;
    if (lane >= p.top_k || item >= items) return;
    const int64_t token = item / spans;
    row = p.slot_to_row[token * p.top_k + lane];
    weight = p.topk_weights[token * p.weight_token_stride + lane * p.weight_slot_stride];
  };
  int item = static_cast<int>(blockIdx.x) * kReduceWarps + static_cast<int>(threadIdx.x) / 32;
  ask(item);
  bool waited = false;
#pragma unroll 1
  for (; item < items; item += step) {
    const int64_t token = item / spans;
    const int column = (item - static_cast<int>(token) * spans) * kReduceSpan + lane * 8;
    const int32_t own_row = row;
    const float own_weight = weight;
    uint32_t live = __ballot_sync(~0u, own_row >= 0);
    ask(item + step);
    if (!waited) {
      pdl_wait();
      pdl_trigger();
      waited = true;
    }
    const auto* y = static_cast<const __nv_bfloat16*>(p.y) + column;
    float sum[2][8] = {};
#pragma unroll 1
    while (live) {
      uint4 raw[kAhead][2];
      float of[kAhead];
      const int count = min(kAhead, __popc(live));
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (i >= count) continue;
        const int slot = __ffs(static_cast<int>(live)) - 1;
        live &= live - 1;
        const int64_t at = static_cast<int64_t>(__shfl_sync(~0u, own_row, slot)) * p.hidden;
        of[i] = __shfl_sync(~0u, own_weight, slot);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (column + half * kReduceHalf < p.hidden) {
            raw[i][half] = *reinterpret_cast<const uint4*>(y + at + half * kReduceHalf);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (i >= count) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float v[8];
          unpack8(raw[i][half], v);
#pragma unroll
          for (int c = 0; c < 8; ++c) sum[half][c] = fmaf(of[i], v[c], sum[half][c]);
        }
      }
    }
    if constexpr (kDiscard) {  // a lane a line of a row
      __syncwarp();            // all lanes have read
      const int line = column - lane * 8 + lane % 8 * 64;
#pragma unroll 1
      for (int from = 0; from < p.top_k; from += 4) {
        const int32_t read = __shfl_sync(~0u, own_row, from + lane / 8);
        if (read >= 0 && line < p.hidden) {
          discard_line(static_cast<const __nv_bfloat16*>(p.y) + static_cast<int64_t>(read) * p.hidden + line);
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (column + half * kReduceHalf >= p.hidden) continue;
      float base[8] = {};
      if (p.shared_output) {
        unpack8(*reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(p.shared_output) +
                                                token * p.shared_stride + column + half * kReduceHalf),
                base);
      }
      __nv_bfloat162 packed[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        packed[c] = __floats2bfloat162_rn(fmaf(p.routed_scaling_factor, sum[half][2 * c], base[2 * c]),
                                          fmaf(p.routed_scaling_factor, sum[half][2 * c + 1], base[2 * c + 1]));
      }
      *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(p.out) + token * p.out_stride + column +
                                half * kReduceHalf) = *reinterpret_cast<const uint4*>(packed);
    }
  }
  if (!waited) pdl_wait();
}

}  // namespace hpc::moe

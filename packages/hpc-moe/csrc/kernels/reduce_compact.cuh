// The reduction of compact rows of y (compact.cuh); else as reduce.cuh.
#pragma once

#include "kernels/compact.cuh"
#include "kernels/reduce.cuh"

namespace hpc::moe {

// A lane has a piece of the warp's span: 16 columns, two times 8 neighbours.
__global__ void __launch_bounds__(kReduceThreads, 4) reduce_compact_kernel(const ReduceParams p) {
  constexpr int kAhead = 2;  // rows loaded before the first is added
  const int lane = threadIdx.x % 32, spans = (p.hidden + kReduceSpan - 1) / kReduceSpan;
  const int items = p.num_tokens * spans, step = static_cast<int>(gridDim.x) * kReduceWarps;
  const int64_t row_bytes = compact_row_bytes(p.hidden);
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
    const int unit = (item - static_cast<int>(token) * spans) * (kReduceSpan / 128) + lane / 8;
    const int half = lane % 8 / 4, t = lane % 4;
    const int32_t own_row = row;
    const float own_weight = weight;
    uint32_t live = __ballot_sync(~0u, own_row >= 0);
    ask(item + step);
    if (!waited) {
      pdl_wait();
      pdl_trigger();
      waited = true;
    }
    const bool mine = unit * 128 < p.hidden;
    const auto* y = static_cast<const uint8_t*>(p.y);
    const int at_words = unit * 128 + lane % 8 * 16;
    const int at_fifth = (p.hidden + 255) / 256 * 256 + unit / 2 * 64 + t * 16 + lane % 16 / 4 * 4;
    float sum[16] = {}, lifted = 0.0f;
#pragma unroll 1
    while (live) {
      uint4 words[kAhead];
      uint32_t fifth[kAhead];
      float of[kAhead];
      const int count = min(kAhead, __popc(live));
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (i >= count) continue;
        const int slot = __ffs(static_cast<int>(live)) - 1;
        live &= live - 1;
        const uint8_t* from = y + __shfl_sync(~0u, own_row, slot) * row_bytes;
        of[i] = __shfl_sync(~0u, own_weight, slot);
        if (mine) {
          words[i] = *reinterpret_cast<const uint4*>(from + at_words);
          fifth[i] = *reinterpret_cast<const uint32_t*>(from + at_fifth);
        }
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (i >= count) continue;
        const uint32_t word[5] = {words[i].x, words[i].y, words[i].z, words[i].w, fifth[i]};
        uint32_t pair[8];
        compact_pairs(word, pair);
        const float factor = of[i] * compact_scale(fifth[i]);
        lifted += factor;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float2 v = compact_values(pair[j]);
          sum[2 * j] = fmaf(factor, v.x, sum[2 * j]);
          sum[2 * j + 1] = fmaf(factor, v.y, sum[2 * j + 1]);
        }
      }
    }
    if (!mine) continue;
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      const int column = unit * 128 + half * 64 + piece * 32 + t * 8;
      float base[8] = {};
      if (p.shared_output) {
        unpack8(*reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(p.shared_output) +
                                                token * p.shared_stride + column),
                base);
      }
      __nv_bfloat162 packed[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float* of = &sum[8 * piece + 2 * c];
        packed[c] =
            __floats2bfloat162_rn(fmaf(p.routed_scaling_factor, fmaf(-kCompactZero, lifted, of[0]), base[2 * c]),
                                  fmaf(p.routed_scaling_factor, fmaf(-kCompactZero, lifted, of[1]), base[2 * c + 1]));
      }
      *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(p.out) + token * p.out_stride + column) =
          *reinterpret_cast<const uint4*>(packed);
    }
  }
  if (!waited) pdl_wait();
}

}  // namespace hpc::moe

// Low regime, first of two kernels: routing, then h = silu(gate) * up of few rows an expert, weights streamed through
// registers.
//
// Grid: one CTA an SM, tasks by static stride. A task is (tile of up to 8 rows of an expert, 32 columns of I). 256
// threads: the warps share K, warp w takes scale groups (128 of H) w, w + 8, ... of every task; fragment f of m16n8k16
// has gate rows of 8 columns as rows 0 to 7 and their up rows as rows 8 to 15, so gate and up of an element meet in a
// thread. Weights and x come by cp.async into rings that each lane owns (hpc/fifo.cuh), filled across tasks; e4m3
// becomes fp16 (exact), products sum in fp32. At a task's end the warps' sums are added in the order of the warps.
// bf16 x is quantised as it leaves the ring. Block scales: h stays bf16, the down kernel quantises it (a group of h
// spans tasks); per tensor: e4m3.
// Shared memory: rings | scales of each warp and slot | two sum buffers | routing; counters share the rings' memory.
// PDL: waits first.
#pragma once

#include "kernels/low_common.cuh"

namespace hpc::moe {

template <Quant kQuant, bool kBf16X>
struct LowUp {
  static constexpr bool kBlock = kQuant == Quant::kBlock;
  static constexpr int kColumns = 32, kFragments = 4, kChunks = 2;  // of a task; 64s of a scale group
  static constexpr int kWeights = kFragments * kChunks * 2, kVectors = kWeights + kChunks * (kBf16X ? 2 : 1);
  static constexpr int kSlots = 2;
  using Ring = LaneRing<kSlots, kVectors>;
  static constexpr int kScaleBytes = 64;  // a warp's slot: 8 rows of x, gate, up
  static constexpr int kSumBytes = kLowWarps * kFragments * 512;
  static constexpr int kScalesAt = kLowWarps * Ring::kBytes;
  static constexpr int kSumsAt = kScalesAt + kLowWarps * kSlots * kScaleBytes;
  static constexpr int kRouteAt = kSumsAt + 2 * kSumBytes;
  static constexpr int kSmemBytes = kRouteAt + sizeof(LowRoute);
  static_assert(sizeof(LowScratch) <= kScalesAt && kSmemBytes <= 232448);

  // Where a warp stands: a task and a scale group of it.
  struct Place {
    int task, group;
  };

  const LowParams& p;
  const LowRoute& route;
  uint32_t base;
  int warp, lane, groups, columns, tasks;

  __device__ __forceinline__ bool next(Place& at) const {
    at.group += kLowWarps;
    if (at.group < groups) return true;
    at.group = warp;
    at.task += gridDim.x;
    return at.task < tasks;
  }

  __device__ __forceinline__ uint32_t scales(const Ring& ring) const {
    return base + kScalesAt + (warp * kSlots + ring.slot()) * kScaleBytes;
  }

  // What a lane reads of the task it fills slots for.
  struct Source {
    const uint8_t *gate, *x;
    const float* scale;
    int64_t scale_step;
    int bytes;
  };

  __device__ __forceinline__ Source source(int task) const {
    const LowTile tile = route.tiles[task / columns];
    const int column = task % columns * kColumns, g = lane / 4, t = lane % 4;
    Source s{};
    const int64_t row = static_cast<int64_t>(tile.expert) * (2 * p.intermediate) + column;
    s.gate = p.w13 + (row + g) * p.hidden + 16 * t;
    s.bytes = g < tile.rows ? 16 : 0;
    const auto token_of = [&](int r) { return route.row_to_pair[tile.row + (r < tile.rows ? r : 0)] / p.index.top_k; };
    s.x = p.x + token_of(g) * p.x_stride + (kBf16X ? 32 : 16) * t;
    if constexpr (kBlock) {
      if (lane == 8 || lane == 9) {  // gate, up
        const int block = p.intermediate % 128 == 0 ? 128 : 64;
        const int first = (column + (lane == 9 ? p.intermediate : 0)) / block;
        s.scale = p.w13_scale + (static_cast<int64_t>(tile.expert) * (2 * p.intermediate / block) + first) * groups;
        s.scale_step = 1;
      } else if (!kBf16X && lane < tile.rows) {
        s.scale = p.x_scale + token_of(lane) * p.x_scale_stride;
        s.scale_step = p.x_scale_step;
      }
    }
    return s;
  }

  __device__ __forceinline__ void fill(const Ring& ring, const Source& s, int group) const {
    const int64_t eight = static_cast<int64_t>(8) * p.hidden, up = static_cast<int64_t>(p.intermediate) * p.hidden;
    const uint8_t* gate = s.gate + group * 128;
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        cp_async16(ring.at(4 * f + 2 * c), gate + f * eight + c * 64);
        cp_async16(ring.at(4 * f + 2 * c + 1), gate + f * eight + up + c * 64);
      }
    }
    const uint8_t* x = s.x + group * (kBf16X ? 256 : 128);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if constexpr (kBf16X) {
        cp_async16(ring.at(kWeights + 2 * c), x + c * 128, s.bytes);
        cp_async16(ring.at(kWeights + 2 * c + 1), x + c * 128 + 16, s.bytes);
      } else {
        cp_async16(ring.at(kWeights + c), x + c * 64, s.bytes);
      }
    }
    if constexpr (kBlock) {
      if (s.scale) cp_async4(scales(ring) + lane * 4, s.scale + group * s.scale_step, 4);
    }
  }

  // acc += one scale group from the ring's current slot.
  __device__ __forceinline__ void multiply(const Ring& ring, float inverse, float (&acc)[kFragments][4]) const {
    LowFragment fragment[kChunks];
    float row_scale = 0.0f;  // of row g
    if constexpr (kBf16X) {
      row_scale = quantise_fragments<kQuant, kChunks>(ring, kWeights, inverse, fragment);
    } else {
      load_fragments<kChunks>(ring, kWeights, fragment);
    }
    if constexpr (kBlock) {
      const int t = lane % 4;
      const uint32_t at = scales(ring);
      float2 rows;
      if constexpr (kBf16X) {
        rows = make_float2(__shfl_sync(~0u, row_scale, 8 * t), __shfl_sync(~0u, row_scale, 8 * t + 4));
      } else {
        rows = make_float2(lds_float(at + 8 * t), lds_float(at + 8 * t + 4));
      }
      const float gate = lds_float(at + 32), up = lds_float(at + 36);
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        float part[4] = {};
#pragma unroll
        for (int c = 0; c < kChunks; ++c) multiply_rows(ring, 4 * f + 2 * c, fragment[c], part);
        acc[f][0] = fmaf(part[0], rows.x * gate, acc[f][0]);
        acc[f][1] = fmaf(part[1], rows.y * gate, acc[f][1]);
        acc[f][2] = fmaf(part[2], rows.x * up, acc[f][2]);
        acc[f][3] = fmaf(part[3], rows.y * up, acc[f][3]);
      }
    } else {
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) multiply_rows(ring, 4 * f + 2 * c, fragment[c], acc[f]);
      }
    }
  }

  // Adds the warps' sums and stores the task's part of h: 128 threads, a fragment a warp.
  __device__ __forceinline__ void finish(int task, uint32_t sums, float scale) const {
    const LowTile tile = route.tiles[task / columns];
    float v[4] = {};
#pragma unroll
    for (int w = 0; w < kLowWarps; ++w) {
      const uint4 raw = lds128(sums + (w * kFragments + warp) * 512 + lane * 16);
      v[0] += __uint_as_float(raw.x), v[1] += __uint_as_float(raw.y);
      v[2] += __uint_as_float(raw.z), v[3] += __uint_as_float(raw.w);
    }
    const int64_t column = task % columns * kColumns + 8 * warp + lane / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 2 * (lane % 4) + i;
      const __nv_bfloat16 act = __float2bfloat16_rn(swiglu(v[i] * scale, v[i + 2] * scale, p.swiglu_limit));
      if (row < tile.rows) {
        const int64_t at = static_cast<int64_t>(tile.row + row) * p.intermediate + column;
        if constexpr (kBlock) {
          static_cast<__nv_bfloat16*>(p.h)[at] = act;
        } else {
          const float q = __bfloat162float(act) * static_inverse(*p.act_scale);
          static_cast<uint8_t*>(p.h)[at] = static_cast<uint8_t>(to_e4m3x2(q, q));
        }
      }
    }
  }

  __device__ __forceinline__ void run() {
    const float inverse = kBlock || !kBf16X ? 0.0f : static_inverse(*p.x_scale);
    Ring ring(base + warp * Ring::kBytes, lane);
    const int first = blockIdx.x;
    if (first >= tasks) return;
    // A warp without a scale group (K of fewer than 8) only adds zeros.
    const bool idle = warp >= groups;
    Place feed{first, warp};
    Source from = source(first);
    bool more = !idle;
    const auto push = [&] {
      if (more) {
        fill(ring, from, feed.group);
        const int task = feed.task;
        more = next(feed);
        if (more && feed.task != task) from = source(feed.task);
      }
      cp_async_commit();
    };
#pragma unroll 1
    for (int i = 0; i < kSlots; ++i) {
      push();
      ring.advance();
    }
    uint32_t sums = base + kSumsAt;
#pragma unroll 1
    for (int task = first; task < tasks; task += gridDim.x) {
      float acc[kFragments][4] = {};
      // Asked for here, used at the task's end.
      const float scale = kBlock ? 1.0f : p.w13_scale[route.tiles[task / columns].expert] * *p.x_scale;
#pragma unroll 1
      for (int group = warp; group < groups; group += kLowWarps) {
        cp_async_wait<kSlots - 1>();
        __syncwarp();
        multiply(ring, inverse, acc);
        __syncwarp();
        push();
        ring.advance();
      }
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        sts128(sums + (warp * kFragments + f) * 512 + lane * 16,
               make_uint4(__float_as_uint(acc[f][0]), __float_as_uint(acc[f][1]), __float_as_uint(acc[f][2]),
                          __float_as_uint(acc[f][3])));
      }
      __syncthreads();
      if (warp < kFragments) finish(task, sums, scale);
      sums = 2 * (base + kSumsAt) + kSumBytes - sums;  // the other buffer
    }
  }
};

template <class Id, Quant kQuant, bool kBf16X>
__global__ void __launch_bounds__(kLowThreads, 1) low_up_kernel(const __grid_constant__ LowParams p) {
  extern __shared__ __align__(128) uint8_t smem[];
  using Up = LowUp<kQuant, kBf16X>;
  auto& route = *reinterpret_cast<LowRoute*>(smem + Up::kRouteAt);
  pdl_wait();
  pdl_trigger();
  low_route<Id>(p.index, route, *reinterpret_cast<LowScratch*>(smem));
  const int columns = p.intermediate / Up::kColumns;
  Up up{p,
        route,
        shared_address(smem),
        static_cast<int>(threadIdx.x) / 32,
        static_cast<int>(threadIdx.x) % 32,
        p.hidden / 128,
        columns,
        route.num_tiles * columns};
  up.run();
}

}  // namespace hpc::moe

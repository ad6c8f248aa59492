// Low regime, first of two kernels: routing, then h = silu(gate) * up of few rows an expert, weights streamed through
// registers.
//
// Grid: one CTA an SM, tasks by static stride. A task is (tile of up to 8 rows of an expert, 8 * kFragments columns of
// I). 256 threads: the warps share K, warp w takes scale groups (128 of H) w, w + 8, ... of every task; fragment f of
// m16n8k16 has gate rows of 8 columns as rows 0 to 7 and their up rows as rows 8 to 15, so gate and up of an element
// meet in a thread. Weights and x come by cp.async into rings that each lane owns (hpc/fifo.cuh), filled across tasks;
// e4m3 becomes fp16 (exact), products sum in fp32. At a task's end the warps' sums are added in the order of the warps.
// Block scales: h stays bf16 and is quantised later (a group of h spans tasks); per tensor: e4m3. Of few pairs (kFew),
// each CTA has all of x in shared memory, quantised there if it was bf16, and half an SM is enough for it.
// Shared memory: rings | scales of each warp and slot | two sum buffers | routing | x and its scales (kFew); counters
// share the rings' memory.
// PDL: waits first; where its predecessor only quantises x, finds the routing and loads the first weights before.
#pragma once

#include "kernels/low_common.cuh"

namespace hpc::moe {

template <Quant kQuant, bool kBf16X, bool kFew>
struct LowUp {
  static_assert(kFew || !kBf16X);
  static constexpr bool kBlock = kQuant == Quant::kBlock;
  static constexpr int kFragments = kFew ? 2 : 4;
  static constexpr int kColumns = 8 * kFragments, kChunks = 2;  // of a task; 64s of a scale group
  static constexpr int kWeights = kFragments * kChunks * 2, kVectors = kWeights + (kFew ? 0 : kChunks);
  static constexpr int kSlots = 2;
  using Ring = LaneRing<kSlots, kVectors>;
  static constexpr int kScaleBytes = 64;  // a warp's slot: 8 rows of x, gate, up
  static constexpr int kSumBytes = kLowWarps * kFragments * 512;
  static constexpr int kScalesAt = kLowWarps * Ring::kBytes;
  static constexpr int kSumsAt = kScalesAt + kLowWarps * kSlots * kScaleBytes;
  static constexpr int kRouteAt = kSumsAt + 2 * kSumBytes;
  static constexpr int kXAt = kRouteAt + (static_cast<int>(sizeof(LowRoute)) + 15) / 16 * 16;
  static constexpr int kXScalesAt = kXAt + (kFew ? kLowFewX + kLowFewPairs * 64 : 0);
  static constexpr int kSmemBytes = kXScalesAt + (kFew ? kLowFewX / 128 * 4 : 0);
  static constexpr int kCtas = kFew ? 2 : 1;  // an SM: room for one of the down kernel
  using Staged = StagedRows<kBf16X, kBlock, 128, kLowFewX / (kLowThreads * (kBf16X ? 8 : 16))>;
  static_assert(sizeof(LowScratch) <= kScalesAt && kSmemBytes <= kLowSmemBytes<kCtas>);

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
    if constexpr (!kFew) s.x = p.x + token_of(g) * p.x_stride + 16 * t;
    if constexpr (kBlock) {
      if (lane == 8 || lane == 9) {  // gate, up
        const int block = p.intermediate % 128 == 0 ? 128 : 64;
        const int first = (column + (lane == 9 ? p.intermediate : 0)) / block;
        s.scale = p.w13_scale + (static_cast<int64_t>(tile.expert) * (2 * p.intermediate / block) + first) * groups;
        s.scale_step = 1;
      } else if (!kFew && lane < tile.rows) {
        s.scale = p.x_scale + token_of(lane) * p.x_scale_stride;
        s.scale_step = p.x_scale_step;
      }
    }
    return s;
  }

  __device__ __forceinline__ void fill_weights(const Ring& ring, const Source& s, int group) const {
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
    if constexpr (kBlock) {
      if (lane == 8 || lane == 9) cp_async4(scales(ring) + lane * 4, s.scale + group * s.scale_step, 4);
    }
  }

  __device__ __forceinline__ void fill_rows(const Ring& ring, const Source& s, int group) const {
    if constexpr (kFew) return;
    const uint8_t* x = s.x + group * 128;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) cp_async16(ring.at(kWeights + c), x + c * 64, s.bytes);
    if constexpr (kBlock) {
      if (lane < 8 && s.scale) cp_async4(scales(ring) + lane * 4, s.scale + group * s.scale_step, 4);
    }
  }

  // Where x lies of the task that is multiplied (kFew): the lane's 16 bytes of row g, scales of rows 2 t and 2 t + 1.
  struct InShared {
    uint32_t x, scale[2];
  };

  __device__ __forceinline__ InShared in_shared(int task) const {
    const LowTile tile = route.tiles[task / columns];
    const auto token_of = [&](int r) { return route.row_to_pair[tile.row + (r < tile.rows ? r : 0)] / p.index.top_k; };
    const int t = lane % 4;
    const auto scale = [&](int r) { return base + kXScalesAt + token_of(r) * groups * 4; };
    return {base + kXAt + token_of(lane / 4) * staged_pitch(p.hidden) + 16 * t, {scale(2 * t), scale(2 * t + 1)}};
  }

  // acc += one scale group from the ring's current slot.
  __device__ __forceinline__ void multiply(const Ring& ring, const InShared& shared, int group,
                                           float (&acc)[kFragments][4]) const {
    LowFragment fragment[kChunks];
    if constexpr (kFew) {
      load_staged<kChunks>(shared.x + group * 128, fragment);
    } else {
      load_fragments<kChunks>(ring, kWeights, fragment);
    }
    if constexpr (kBlock) {
      const int t = lane % 4;
      const uint32_t at = scales(ring);
      float2 rows;
      if constexpr (kFew) {
        rows = make_float2(lds_float(shared.scale[0] + group * 4), lds_float(shared.scale[1] + group * 4));
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

  // kFew: `staged` x, asked for, and its scale: block, e4m3: the one that this thread puts down; per tensor: of all.
  __device__ __forceinline__ void run(uint8_t* smem, const Staged& staged, float x_scale) {
    Ring ring(base + warp * Ring::kBytes, lane);
    const int first = blockIdx.x;
    if (first >= tasks) {
      if (p.x_is_predecessors) pdl_wait();  // a CTA's end counts as its trigger
      return;
    }
    // A warp without a scale group (K of fewer than 8) only adds zeros.
    const bool idle = warp >= groups;
    Place feed{first, warp};
    Source from = source(first);
    bool more = !idle;
    const auto advance = [&](Place& at, Source& of, bool& any) {
      const int task = at.task;
      any = next(at);
      if (any && at.task != task) of = source(at.task);
    };
    // The first slots: weights, then the rows behind them.
    Place rows = feed;
    Source rows_from = from;
    bool more_rows = more;
#pragma unroll 1
    for (int i = 0; i < kSlots; ++i) {
      if (more) {
        fill_weights(ring, from, feed.group);
        advance(feed, from, more);
      }
      ring.advance();
    }
    if (p.x_is_predecessors) {
      pdl_wait();
      pdl_trigger();
    }
#pragma unroll 1
    for (int i = 0; i < kSlots; ++i) {
      if (more_rows) {
        fill_rows(ring, rows_from, rows.group);
        advance(rows, rows_from, more_rows);
      }
      cp_async_commit();
      ring.advance();
    }
    if constexpr (kFew) {
      auto* scales_of_x = reinterpret_cast<float*>(smem + kXScalesAt);
      if (kBlock && !kBf16X && static_cast<int>(threadIdx.x) < p.reduce.num_tokens * groups) {
        scales_of_x[threadIdx.x] = x_scale;
      }
      staged.store(smem + kXAt, scales_of_x, kBlock || !kBf16X ? 0.0f : static_inverse(x_scale));
      __syncthreads();
    }
    uint32_t sums = base + kSumsAt;
#pragma unroll 1
    for (int task = first; task < tasks; task += gridDim.x) {
      float acc[kFragments][4] = {};
      // Asked for here, used at the task's end.
      const float scale = kBlock ? 1.0f : p.w13_scale[route.tiles[task / columns].expert] * *p.x_scale;
      InShared shared{};
      if constexpr (kFew) shared = in_shared(task);
#pragma unroll 1
      for (int group = warp; group < groups; group += kLowWarps) {
        cp_async_wait<kSlots - 1>();
        __syncwarp();
        multiply(ring, shared, group, acc);
        __syncwarp();
        if (more) {
          fill_weights(ring, from, feed.group);
          fill_rows(ring, from, feed.group);
          advance(feed, from, more);
        }
        cp_async_commit();
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

template <class Id, Quant kQuant, bool kBf16X, bool kFew>
__global__ void __launch_bounds__(kLowThreads, LowUp<kQuant, kBf16X, kFew>::kCtas)
    low_up_kernel(const __grid_constant__ LowParams p) {
  extern __shared__ __align__(128) uint8_t smem[];
  using Up = LowUp<kQuant, kBf16X, kFew>;
  auto& route = *reinterpret_cast<LowRoute*>(smem + Up::kRouteAt);
  if (!p.x_is_predecessors) {
    pdl_wait();
    pdl_trigger();
  }
  typename Up::Staged staged(kFew ? p.reduce.num_tokens : 0, p.hidden);
  float x_scale = 0.0f;
  if constexpr (kFew) {
    staged.load(p.x, p.x_stride);
    static_assert(kLowFewX / 128 <= kLowThreads);
    if (Up::kBlock && !kBf16X) {
      const int groups = p.hidden / 128, token = threadIdx.x / groups, group = threadIdx.x - token * groups;
      if (token < p.reduce.num_tokens) x_scale = p.x_scale[token * p.x_scale_stride + group * p.x_scale_step];
    } else if (!Up::kBlock) {
      x_scale = *p.x_scale;
    }
  }
  low_route<Id, kFew>(p.index, route, *reinterpret_cast<LowScratch*>(smem));
  const int columns = p.intermediate / Up::kColumns;
  Up up{p,
        route,
        shared_address(smem),
        static_cast<int>(threadIdx.x) / 32,
        static_cast<int>(threadIdx.x) % 32,
        p.hidden / 128,
        columns,
        route.num_tiles * columns};
  up.run(smem, staged, x_scale);
}

}  // namespace hpc::moe

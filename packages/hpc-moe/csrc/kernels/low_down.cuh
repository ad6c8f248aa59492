// Low regime, second of two kernels: y = h * w2^T of every row, and the weighted sum over a token's slots.
//
// Grid: one CTA for each 16 * kFragments columns of H; it computes them for all rows, so the reduction stays in its
// shared memory: no partial results in memory, no atomics, sums in slot order. 256 threads: the warps are `streams`
// groups of `splits` warps; a group takes every streams-th tile, its warps share the tile's scale groups (128 of I, or
// 64). Rows 2 g and 2 g + 1 of a fragment's 16 columns are rows g and g + 8 of m16n8k16, so a thread has neighbouring
// columns. Weights and h come through rings as in the gate-up kernel. Of few pairs (kFew), each CTA has all of h in
// shared memory, quantised there if it was bf16 (block scales), and half an SM is enough for it, so that its weights
// are on their way while gate-up runs. Shared memory: rings | weight scales of each warp and slot | sums of the warps
// of a group, twice | y, bf16 | topk_weights | routing | h and its scales (kFew); counters share the rings' memory.
// PDL: finds the routing, topk_weights and the first weights before the wait (ids and topk_weights are two kernels
// old); h after it.
#pragma once

#include "kernels/low_common.cuh"

namespace hpc::moe {

// kThree: a slot holds three scale groups' K: 192 where they are 64 (whole lines of neighbouring rows come together),
// or 384 where a CTA has 16 columns.
template <Quant kQuant, bool kHalf, int kFragments, bool kFew, bool kThree = false>
struct LowDown {
  static_assert(!kThree || (!kFew && (kHalf || kFragments == 1)));
  static constexpr bool kBlock = kQuant == Quant::kBlock;
  static constexpr int kColumns = 16 * kFragments, kScaleGroups = kThree ? 3 : 1;            // of a slot
  static constexpr int kGroupChunks = kHalf ? 1 : 2, kChunks = kScaleGroups * kGroupChunks;  // 64s of K
  static constexpr int kScaleBytes = kThree ? 128 : 64;  // a warp's slot: 8 rows of h, for each group; weights
  static constexpr int kWeights = kFragments * kChunks * 2, kVectors = kWeights + (kFew ? 0 : kChunks);
  static constexpr int kPitch = kColumns * 2 + 4;  // bytes of a row of y, padded against conflicts
  static constexpr int kSumBytes = kLowWarps * kFragments * 512;
  static constexpr int kPairs = kFew ? kLowFewPairs : kLowMaxPairs;
  static constexpr int kHBytes = kFew ? kLowFewH + kLowFewPairs * 64 : 0, kHScales = kFew ? kLowFewH / 64 : 0;
  static constexpr int kRest =
      2 * kSumBytes + kPairs * (kPitch + 4) + static_cast<int>(sizeof(LowRoute)) + 16 + kHBytes + kHScales * 4;
  // As many slots as fit beside the rest: 64 to 96 KB of weights in flight.
  template <int kCtasAnSm>
  static constexpr int kFit = (kLowSmemBytes<kCtasAnSm> - kRest) / (kLowWarps * (kVectors * 512 + kScaleBytes));
  static constexpr int kCtas = kFew && kFit<2> >= 2 ? 2 : 1;
  static constexpr int kSlots = kFit<kCtas> < 8 ? kFit<kCtas> : 8;
  using Ring = LaneRing<kSlots, kVectors>;
  static constexpr int kScalesAt = kLowWarps * Ring::kBytes;
  static constexpr int kSumsAt = kScalesAt + kLowWarps * kSlots * kScaleBytes;
  static constexpr int kYAt = kSumsAt + 2 * kSumBytes;
  static constexpr int kWeightsAt = kYAt + kPairs * kPitch;
  static constexpr int kRouteAt = kWeightsAt + kPairs * 4;
  static constexpr int kHAt = (kRouteAt + static_cast<int>(sizeof(LowRoute)) + 15) / 16 * 16;
  static constexpr int kHScalesAt = kHAt + kHBytes;
  static constexpr int kSmemBytes = kHScalesAt + kHScales * 4;
  static constexpr bool kBf16H = kFew && kBlock;
  using Staged = StagedRows<kBf16H, kBlock, 64 * kChunks, kLowFewH / (kLowThreads * (kBf16H ? 8 : 16))>;
  static_assert(sizeof(LowScratch) <= kScalesAt && kSmemBytes <= kLowSmemBytes<kCtas>);

  const LowParams& p;
  const LowRoute& route;
  uint8_t* smem;
  uint32_t base;
  int warp, lane, groups, splits;

  struct Place {
    int tile, group;
  };

  struct Source {
    const uint8_t *weight, *h;
    const float *weight_scale, *row_scale;  // of lanes 8 and 0 to 7
    int bytes;
  };

  __device__ __forceinline__ int streams() const { return kLowWarps / splits; }
  __device__ __forceinline__ int part() const { return warp % splits; }
  __device__ __forceinline__ bool next(Place& at) const {
    at.group += splits;
    if (at.group < groups) return true;
    at.group = part();
    at.tile += streams();
    return at.tile < route.num_tiles;
  }

  __device__ __forceinline__ uint32_t scale_at(const Ring& ring) const {
    return base + kScalesAt + (warp * kSlots + ring.slot()) * kScaleBytes;
  }

  __device__ __forceinline__ Source source(int index) const {
    const LowTile tile = route.tiles[index];
    const int g = lane / 4, t = lane % 4, column = blockIdx.x * kColumns;
    const int row = g < tile.rows ? g : 0;
    Source s{};
    s.weight = p.w2 + (static_cast<int64_t>(tile.expert) * p.hidden + column + 2 * g) * p.intermediate + 16 * t;
    s.bytes = g < tile.rows ? 16 : 0;
    if constexpr (!kFew) {
      s.h = static_cast<const uint8_t*>(p.h_quant) + static_cast<int64_t>(tile.row + row) * p.intermediate + 16 * t;
    }
    // Lanes 8 i to 8 i + 7 bring row scales of a slot's group i, those from 8 kScaleGroups on the weights'.
    const int in_slot = lane / 8 < kScaleGroups ? lane / 8 : lane - 8 * kScaleGroups;
    if (kBlock && lane >= 8 * kScaleGroups && in_slot < kScaleGroups) {
      s.weight_scale = p.w2_scale + in_slot +
                       (static_cast<int64_t>(tile.expert) * (p.hidden / 128) + column / 128) * (groups * kScaleGroups);
    }
    if (kBlock && !kFew && lane < 8 * kScaleGroups && lane % 8 < tile.rows) {
      s.row_scale = p.h_scale + in_slot + static_cast<int64_t>(tile.row + lane % 8) * (groups * kScaleGroups);
    }
    return s;
  }

  __device__ __forceinline__ void fill_weights(const Ring& ring, const Source& s, int group) const {
    const uint8_t* weight = s.weight + group * (64 * kChunks);
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const uint8_t* even = weight + static_cast<int64_t>(16 * f) * p.intermediate + c * 64;
        cp_async16(ring.at((f * kChunks + c) * 2), even);
        cp_async16(ring.at((f * kChunks + c) * 2 + 1), even + p.intermediate);
      }
    }
    if constexpr (kBlock) {
      if (s.weight_scale) cp_async4(scale_at(ring) + lane * 4, s.weight_scale + group * kScaleGroups, 4);
    }
  }

  __device__ __forceinline__ void fill_rows(const Ring& ring, const Source& s, int group) const {
    if constexpr (kFew) return;
    const uint8_t* h = s.h + group * (64 * kChunks);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) cp_async16(ring.at(kWeights + c), h + c * 64, s.bytes);
    if constexpr (kBlock) {
      if (s.row_scale) cp_async4(scale_at(ring) + lane * 4, s.row_scale + group * kScaleGroups, 4);
    }
  }

  // Where h lies of a tile (kFew): the lane's 16 bytes of row g, scales of rows 2 t and 2 t + 1.
  struct InShared {
    uint32_t h, scale[2];
  };

  __device__ __forceinline__ InShared in_shared(const LowTile& tile) const {
    const int t = lane % 4;
    const auto row_of = [&](int r) { return tile.row + (r < tile.rows ? r : 0); };
    const auto scale = [&](int r) { return base + kHScalesAt + row_of(r) * groups * 4; };
    return {base + kHAt + row_of(lane / 4) * staged_pitch(p.intermediate) + 16 * t, {scale(2 * t), scale(2 * t + 1)}};
  }

  __device__ __forceinline__ void multiply(const Ring& ring, const InShared& shared, int group,
                                           float (&acc)[kFragments][4]) const {
    LowFragment fragment[kChunks];
    float first[kScaleGroups], second[kScaleGroups];  // scales of rows 2 t and 2 t + 1
#pragma unroll
    for (int c = 0; c < kScaleGroups; ++c) first[c] = second[c] = 1.0f;
    if constexpr (kFew) {
      load_staged<kChunks>(shared.h + group * 64 * kChunks, fragment);
    } else {
      load_fragments<kChunks>(ring, kWeights, fragment);
    }
    if constexpr (kBlock) {
      const uint32_t at = scale_at(ring);
#pragma unroll
      for (int c = 0; c < kScaleGroups; ++c) {
        first[c] = lds_float(kFew ? shared.scale[0] + group * 4 : at + 32 * c + 8 * (lane % 4));
        second[c] = lds_float(kFew ? shared.scale[1] + group * 4 : at + 32 * c + 8 * (lane % 4) + 4);
        const float weight = lds_float(at + 32 * kScaleGroups + 4 * c);
        first[c] *= weight;
        second[c] *= weight;
      }
    }
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      float part[kChunks][4] = {};  // apart, so that products need not wait for each other
#pragma unroll
      for (int c = 0; c < kChunks; ++c) multiply_rows(ring, (f * kChunks + c) * 2, fragment[c], part[c]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int g = 0; g < kScaleGroups; ++g) {
          const int c = g * kGroupChunks;
          const float sum = part[c][i] + (kGroupChunks == 2 ? part[c + kGroupChunks - 1][i] : 0.0f);
          acc[f][i] = fmaf(sum, i % 2 ? second[g] : first[g], acc[f][i]);
        }
      }
    }
  }

  // Rounds a tile's sums to bf16 into y.
  __device__ __forceinline__ void put(const LowTile& tile, const float (&acc)[kFragments][4], float scale) const {
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 2 * (lane % 4) + i;
        if (row < tile.rows) {
          *reinterpret_cast<__nv_bfloat162*>(smem + kYAt + (tile.row + row) * kPitch + f * 32 + lane / 4 * 4) =
              __floats2bfloat162_rn(acc[f][i] * scale, acc[f][i + 2] * scale);
        }
      }
    }
  }

  // The sums of a group's warps, added by its first warp in their order.
  __device__ __forceinline__ void exchange(uint32_t sums, bool live, float (&acc)[kFragments][4]) const {
    if (live && part() > 0) {
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        sts128(sums + (warp * kFragments + f) * 512 + lane * 16,
               make_uint4(__float_as_uint(acc[f][0]), __float_as_uint(acc[f][1]), __float_as_uint(acc[f][2]),
                          __float_as_uint(acc[f][3])));
      }
    }
    __syncthreads();
    if (live && part() == 0) {
      for (int other = 1; other < splits; ++other) {
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
          const uint4 raw = lds128(sums + ((warp + other) * kFragments + f) * 512 + lane * 16);
          acc[f][0] += __uint_as_float(raw.x), acc[f][1] += __uint_as_float(raw.y);
          acc[f][2] += __uint_as_float(raw.z), acc[f][3] += __uint_as_float(raw.w);
        }
      }
    }
  }

  __device__ __forceinline__ void run() {
    Ring ring(base + warp * Ring::kBytes, lane);
    const int first = warp / splits, tiles = route.num_tiles;
    Place feed{first, part()};
    // part() < splits <= groups, so that every warp with a tile has a scale group of it.
    bool more = first < tiles;
    Source from{};
    if (more) from = source(first);
    // Slots that are filled before the wait, weights first; then the rows of h behind it.
    Place rows = feed;
    bool more_rows = more;
    Source rows_from = from;
    const auto advance = [&](Place& at, Source& of, bool& any) {
      const int tile = at.tile;
      any = next(at);
      if (any && at.tile != tile) of = source(at.tile);
    };
#pragma unroll 1
    for (int i = 0; i < kSlots; ++i) {
      if (more) {
        fill_weights(ring, from, feed.group);
        advance(feed, from, more);
      }
      if constexpr (kFew) cp_async_commit();
      ring.advance();
    }
    pdl_wait();
    pdl_trigger();
    if constexpr (kFew) {  // rows past the live ones hold what memory held; nobody reads them
      Staged staged(p.index.num_pairs, p.intermediate);
      staged.load(kBf16H ? p.h : p.h_quant, static_cast<int64_t>(p.intermediate) * (kBf16H ? 2 : 1));
      staged.store(smem + kHAt, reinterpret_cast<float*>(smem + kHScalesAt), 0.0f);
      __syncthreads();
    } else {
#pragma unroll 1
      for (int i = 0; i < kSlots; ++i) {
        if (more_rows) {
          fill_rows(ring, rows_from, rows.group);
          advance(rows, rows_from, more_rows);
        }
        cp_async_commit();
        ring.advance();
      }
    }

    uint32_t sums = base + kSumsAt;
#pragma unroll 1
    for (int begin = 0; begin < tiles; begin += streams()) {
      const int index = begin + first;
      const bool live = index < tiles;
      float acc[kFragments][4] = {};
      float scale = 1.0f;
      InShared shared{};
      if (live) {
        if constexpr (kFew) shared = in_shared(route.tiles[index]);
        // Asked for here, used at the tile's end.
        if (!kBlock) scale = p.w2_scale[route.tiles[index].expert] * *p.act_scale;
#pragma unroll 1
        for (int group = part(); group < groups; group += splits) {
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
      }
      if (splits > 1) {
        exchange(sums, live, acc);
        sums = 2 * (base + kSumsAt) + kSumBytes - sums;  // the other buffer
      }
      if (live && part() == 0) put(route.tiles[index], acc, scale);
    }
    __syncthreads();
    reduce();
  }

  // out = factor * sum over slots of weight * y + shared_output: a thread has two columns of a token.
  __device__ __forceinline__ void reduce() const {
    const ReduceParams& r = p.reduce;
    const auto* weights = reinterpret_cast<const float*>(smem + kWeightsAt);
    const int column = blockIdx.x * kColumns + threadIdx.x % (kColumns / 2) * 2;
#pragma unroll 1
    for (int token = threadIdx.x / (kColumns / 2); token < r.num_tokens; token += kLowThreads / (kColumns / 2)) {
      float2 sum = make_float2(0.0f, 0.0f);
      for (int slot = 0; slot < r.top_k; ++slot) {
        const int pair = token * r.top_k + slot, row = route.pair_to_row[pair];
        if (row == kNoLowRow) continue;
        const float weight = weights[pair];
        const float2 y = __bfloat1622float2(
            *reinterpret_cast<const __nv_bfloat162*>(smem + kYAt + row * kPitch + threadIdx.x % (kColumns / 2) * 4));
        sum.x = fmaf(weight, y.x, sum.x);
        sum.y = fmaf(weight, y.y, sum.y);
      }
      float2 shared = make_float2(0.0f, 0.0f);
      if (r.shared_output) {
        shared = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(
            static_cast<const __nv_bfloat16*>(r.shared_output) + token * r.shared_stride + column));
      }
      *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(r.out) + token * r.out_stride + column) =
          __floats2bfloat162_rn(fmaf(r.routed_scaling_factor, sum.x, shared.x),
                                fmaf(r.routed_scaling_factor, sum.y, shared.y));
    }
  }
};

template <class Id, Quant kQuant, bool kHalf, int kFragments, bool kFew, bool kThree = false>
__global__ void __launch_bounds__(kLowThreads, LowDown<kQuant, kHalf, kFragments, kFew, kThree>::kCtas)
    low_down_kernel(const __grid_constant__ LowParams p, int splits) {
  extern __shared__ __align__(128) uint8_t smem[];
  using Down = LowDown<kQuant, kHalf, kFragments, kFew, kThree>;
  auto& route = *reinterpret_cast<LowRoute*>(smem + Down::kRouteAt);
  auto* weights = reinterpret_cast<float*>(smem + Down::kWeightsAt);
#pragma unroll 2
  for (int pair = threadIdx.x; pair < p.index.num_pairs; pair += kLowThreads) {
    const int token = pair / p.index.top_k, slot = pair - token * p.index.top_k;
    weights[pair] = p.reduce.topk_weights[token * p.reduce.weight_token_stride + slot * p.reduce.weight_slot_stride];
  }
  low_route<Id, kFew>(p.index, route, *reinterpret_cast<LowScratch*>(smem));
  Down down{p,
            route,
            smem,
            shared_address(smem),
            static_cast<int>(threadIdx.x) / 32,
            static_cast<int>(threadIdx.x) % 32,
            p.intermediate / (64 * Down::kChunks),
            splits};
  down.run();
}

}  // namespace hpc::moe

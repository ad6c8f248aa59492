// Index kernel, first of the four: routing index and tile list on the device, and the quantisation of bf16 x.
//
// Grid: the first p.ctas CTAs (1, or a cluster of kIndexCluster) make the index; the others (where x is bf16) quantise
// x, 16 lanes to a group of 128 elements. 1,024 threads. Dynamic shared memory: counters [32 warps][E] int32, lane
// masks [32 warps][E]. Index: warp w (counted over the CTAs) owns a contiguous segment of the pairs (token * k + slot).
//   1. each warp counts its segment's experts in its own counters;
//   2. thread e turns the counts of expert e into starts: scan over the CTAs (each reads the others' counts in their
//   shared
//      memory) and over the warps, then one block scan over the experts of (rows, tiles), in each CTA;
//   3. each warp walks its segment again and places every pair: its row is the warp's start plus the pairs of the same
//      expert before it; among 32 lanes those are found by a mask of lanes per expert (match.any takes a turn for each
//      different id: ten times as long). Rows of an expert are therefore in pair order whatever the timing;
//   4. one CTA: thread e writes the tiles of expert e; a cluster: all threads write tiles, tile q finds its expert by
//   binary search in the tile offsets.
// PDL: clears its counters and waits (ids, x and the workspace belong to predecessors), then lets the gate-up kernel
// start.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "hpc/cluster.cuh"
#include "hpc/mbarrier.cuh"
#include "hpc/pdl.cuh"
#include "kernels/params.hpp"
#include "kernels/quantise.cuh"

namespace hpc::moe {

constexpr int kIndexThreads = 1024;
constexpr int kIndexWarps = kIndexThreads / 32;
static_assert(kMaxLocalExperts <= kIndexThreads, "one thread an expert");

// Bytes of dynamic shared memory for `experts` local experts.
inline int index_smem_bytes(int experts) {
  return 2 * kIndexWarps * experts * static_cast<int>(sizeof(int32_t));
}

template <class Id>
struct PairReader {
  const Id* data;
  int64_t token_stride, slot_stride, first;
  int32_t top_k, experts;
  bool dense;

  __device__ explicit PairReader(const IndexParams& p)
      : data(static_cast<const Id*>(p.topk_ids)),
        token_stride(p.id_token_stride),
        slot_stride(p.id_slot_stride),
        first(p.first_expert),
        top_k(p.top_k),
        experts(p.num_experts),
        dense(p.id_slot_stride == 1 && p.id_token_stride == p.top_k) {}

  // Local expert of a pair, or -1.
  __device__ int32_t operator()(int32_t pair) const {
    int64_t offset = pair;
    if (!dense) {
      const int32_t token = pair / top_k;
      offset = token * token_stride + (pair - token * top_k) * slot_stride;
    }
    return grouped::local_expert(static_cast<int64_t>(data[offset]), first, experts);
  }
};

// Exclusive prefix sums of (x, y) over the CTA's threads; the totals come back in `total`.
__device__ __forceinline__ int2 block_scan(int2 value, int2& total) {
  __shared__ int2 warp_sums[kIndexWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int2 sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int x = __shfl_up_sync(~0u, sum.x, step), y = __shfl_up_sync(~0u, sum.y, step);
    if (lane >= step) {
      sum.x += x;
      sum.y += y;
    }
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    int2 s = warp_sums[lane];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int x = __shfl_up_sync(~0u, s.x, step), y = __shfl_up_sync(~0u, s.y, step);
      if (lane >= step) {
        s.x += x;
        s.y += y;
      }
    }
    warp_sums[lane] = s;
  }
  __syncthreads();
  const int2 before = warp ? warp_sums[warp - 1] : make_int2(0, 0);
  total = warp_sums[kIndexWarps - 1];
  return make_int2(before.x + sum.x - value.x, before.y + sum.y - value.y);
}

template <class Id>
__device__ void build_index(const IndexParams& p, const grouped::TileRule rule, int32_t* counts) {
  constexpr int kAhead = 4;  // ids loaded before the first is used
  __shared__ int32_t row_start[kMaxLocalExperts + 1], tile_start[kMaxLocalExperts + 1], cta_rows[kMaxLocalExperts];
  const int rank = blockIdx.x, ctas = p.ctas;  // the cluster is the grid's first
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int experts = p.num_experts;
  const PairReader<Id> expert_of(p);

  // Segments are multiples of 32 pairs, so that only the last warp with work sees a partial step.
  const int steps = (p.num_pairs + 31) / 32, warps = ctas * kIndexWarps, share = (steps + warps - 1) / warps;
  const int first = min((rank * kIndexWarps + warp) * share, steps), last = min(first + share, steps);
  int32_t* own = counts + warp * experts;
  auto* masks = reinterpret_cast<uint32_t*>(counts + kIndexWarps * experts) + warp * experts;

  // Calls body(pair, expert) for each step of this warp's segment; expert is -1 for none. Ids are loaded once where
  // they are few.
  int32_t ids[kAhead];
  const auto walk = [&](bool loaded, auto&& body) {
    for (int step = first; step < last; step += kAhead) {
      if (!loaded || share > kAhead) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int pair = (step + i) * 32 + lane;
          ids[i] = step + i < last && pair < p.num_pairs ? expert_of(pair) : -1;
        }
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (step + i < last) body((step + i) * 32 + lane, ids[i]);
      }
    }
  };

  walk(false, [&](int, int32_t expert) {
    if (expert >= 0) atomicAdd(&own[expert], 1);
  });
  __syncthreads();

  const int e = threadIdx.x;
  int rows = 0, before = 0;  // of all CTAs; of the CTAs before this one
  int32_t of_warp[kIndexWarps];
  if (e < experts) {
#pragma unroll
    for (int w = 0; w < kIndexWarps; ++w) of_warp[w] = counts[w * experts + e];
#pragma unroll
    for (int w = 0; w < kIndexWarps; ++w) rows += of_warp[w];
  }
  if (ctas > 1) {
    if (e < experts) cta_rows[e] = rows;
    cluster_arrive_release();
    cluster_wait();
    rows = 0;
    if (e < experts) {
#pragma unroll
      for (int other = 0; other < kIndexCluster; ++other) {
        const int32_t theirs = load_cluster_s32(cluster_address(smem_address(&cta_rows[e]), other));
        rows += theirs;
        before += other < rank ? theirs : 0;
      }
    }
    cluster_arrive_relaxed();  // waited for at the end: nobody leaves while others read its counts
  }
  int2 total;
  const int2 start = block_scan(make_int2(rows, grouped::num_tiles(rows, rule)), total);
  if (e < experts) {
    int run = start.x + before;
#pragma unroll
    for (int w = 0; w < kIndexWarps; ++w) {
      counts[w * experts + e] = run;
      run += of_warp[w];
    }
    row_start[e] = start.x;
    tile_start[e] = start.y;
    if (e == experts - 1) {
      row_start[experts] = total.x;
      tile_start[experts] = total.y;
    }
  }
  __syncthreads();
  if (rank == 0 && e <= experts) {
    p.routing.offsets[e] = row_start[e];
    p.routing.tile_offsets[e] = tile_start[e];
  }
  if (ctas == 1 && e < experts) {  // few rows, few tiles an expert
#pragma unroll 1
    for (int tile = 0, width = grouped::tile_rows(rows, rule); tile < grouped::num_tiles(rows, rule); ++tile) {
      const grouped::TileSpan span = grouped::tile_span(rows, tile, rule);
      p.routing.tiles[start.y + tile] = {e, start.x + span.first, span.rows, width};
    }
  }

  walk(true, [&](int pair, int32_t expert) {
    int32_t row = -1;
    uint32_t same = 0;
    if (expert >= 0) atomicOr(&masks[expert], 1u << lane);
    __syncwarp();
    if (expert >= 0) {
      same = masks[expert];
      row = own[expert] + __popc(same & ((1u << lane) - 1));
      p.routing.row_to_slot[row] = pair;
    }
    if (pair < p.num_pairs) p.routing.slot_to_row[pair] = row;
    __syncwarp();
    if (expert >= 0 && lane == __ffs(same) - 1) {
      own[expert] += __popc(same);
      masks[expert] = 0;
    }
    __syncwarp();
  });

  if (ctas == 1) return;
#pragma unroll 1
  for (int tile = rank * kIndexThreads + threadIdx.x; tile < total.y; tile += ctas * kIndexThreads) {
    int low = 0, high = experts;  // the expert is the last whose first tile is at most `tile` and that has tiles
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (tile_start[middle] <= tile) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const int count = row_start[low + 1] - row_start[low];
    const grouped::TileSpan span = grouped::tile_span(count, tile - tile_start[low], rule);
    p.routing.tiles[tile] = {low, row_start[low] + span.first, span.rows, grouped::tile_rows(count, rule)};
  }
  cluster_wait();
}

template <class Id, Quant kQuant>
__global__ void __launch_bounds__(kIndexThreads, 1)
    index_kernel(const IndexParams p, const QuantiseParams q, const grouped::TileRule rule) {
  extern __shared__ int32_t counts[];
  if (static_cast<int>(blockIdx.x) < p.ctas) {
    for (int i = threadIdx.x; i < 2 * kIndexWarps * p.num_experts; i += kIndexThreads) counts[i] = 0;
    __syncthreads();
  }
  pdl_wait();
  pdl_trigger();
  if (static_cast<int>(blockIdx.x) < p.ctas) {
    build_index<Id>(p, rule, counts);
    return;
  }
  if constexpr (kQuant != Quant::kNone) {
    const int64_t first = static_cast<int64_t>(blockIdx.x - p.ctas) * kIndexThreads + threadIdx.x;
    quantise_rows<kQuant>(q, first / 16, static_cast<int64_t>(gridDim.x - p.ctas) * (kIndexThreads / 16));
  }
}

}  // namespace hpc::moe

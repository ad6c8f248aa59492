// Routing of a small call, found by each CTA of the low regime's kernels for itself: in shared memory.
//
// 256 threads, at most 1,024 (token, slot) pairs. Rows of an expert are consecutive and in pair order, experts ascend
// (the same order as hpc::grouped's index); a tile is up to 8 rows of one expert.
#pragma once

#include "hpc/grouped.hpp"
#include "kernels/index.cuh"

namespace hpc::moe {

constexpr int kLowThreads = 256, kLowWarps = 8;
constexpr int kLowTile = 8;  // rows of a tile: the N of m16n8k16
constexpr int kLowMaxTiles = kMaxLocalExperts + (kLowMaxPairs - kMaxLocalExperts) / kLowTile;
constexpr uint16_t kNoLowRow = 0xFFFF;

struct LowTile {
  uint16_t expert, row, rows, unused;
};

struct LowRoute {
  LowTile tiles[kLowMaxTiles];
  uint16_t row_to_pair[kLowMaxPairs];
  uint16_t pair_to_row[kLowMaxPairs];
  uint32_t warp_sums[kLowWarps];
  int32_t num_tiles;
};

// Counters that low_route() needs while it runs; may share memory with what is used after it.
struct LowScratch {
  int16_t expert_of[kLowMaxPairs];
  uint32_t counts[kLowWarps][kMaxLocalExperts];
  uint32_t masks[kLowWarps][kMaxLocalExperts];
};

static_assert(kLowFewPairs <= 32);

// low_route() of at most 32 pairs: eight threads a pair, which compare it with four others each. One warp alone would
// take 1.5 us for it, an instruction after the other.
template <class Id>
__device__ __forceinline__ void low_route_few(const IndexParams& p, LowRoute& route, LowScratch& scratch) {
  const int lane = threadIdx.x % 32, pair = threadIdx.x / 8;
  auto* keys = reinterpret_cast<uint32_t*>(scratch.counts);   // expert, then pair; no expert: behind all
  auto* firsts = reinterpret_cast<uint32_t*>(scratch.masks);  // of each row, whether a tile begins there
  if (threadIdx.x < 32) {
    const int32_t id = lane < p.num_pairs ? PairReader<Id>(p)(lane) : -1;
    keys[lane] = id < 0 ? ~0u : static_cast<uint32_t>(id) << 5 | lane;
    firsts[lane] = 0;
    route.pair_to_row[lane] = kNoLowRow;
  }
  __syncthreads();
  const uint32_t key = keys[pair], begin = key & ~31u;
  const uint4 four = *reinterpret_cast<const uint4*>(&keys[threadIdx.x % 8 * 4]);
  // Of the pairs' keys, how many are less than the pair's, than its expert's first and than the next expert's.
  uint32_t less = 0;
#pragma unroll
  for (const uint32_t other : {four.x, four.y, four.z, four.w}) {
    less += (other < key ? 1u : 0u) + (other < begin ? 1u << 8 : 0u) + (other <= begin + 31 ? 1u << 16 : 0u);
  }
#pragma unroll
  for (int mask = 1; mask < 8; mask *= 2) less += __shfl_xor_sync(~0u, less, mask);
  const int row = less & 255, rank = row - (less >> 8 & 255), rest = (less >> 16) - row;
  const bool live = key != ~0u && threadIdx.x % 8 == 0, first = live && rank % kLowTile == 0;
  if (live) {
    route.row_to_pair[row] = static_cast<uint16_t>(pair);
    route.pair_to_row[pair] = static_cast<uint16_t>(row);
    firsts[row] = first;
  }
  __syncthreads();
  const uint32_t tiles = __ballot_sync(~0u, firsts[lane] != 0);
  if (first) {
    route.tiles[__popc(tiles & ((1u << row) - 1))] = {static_cast<uint16_t>(key >> 5), static_cast<uint16_t>(row),
                                                      static_cast<uint16_t>(min(rest, kLowTile)), 0};
  }
  if (threadIdx.x == 0) route.num_tiles = __popc(tiles);
  __syncthreads();
}

// Fills `route`. All threads of the CTA call it; it ends with a barrier. kFew: of at most kLowFewPairs pairs. Loops are
// not unrolled: every CTA fetches this code in every call.
template <class Id, bool kFew>
__device__ __forceinline__ void low_route(const IndexParams& p, LowRoute& route, LowScratch& scratch) {
  if constexpr (kFew) return low_route_few<Id>(p, route, scratch);
  constexpr int kPerThread = kLowMaxPairs / kLowThreads, kExperts = kMaxLocalExperts / kLowThreads;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const PairReader<Id> expert_of(p);
  int32_t ids[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int pair = thread + i * kLowThreads;
    ids[i] = pair < p.num_pairs ? expert_of(pair) : -1;
  }
  auto* zero = reinterpret_cast<uint4*>(scratch.counts);
#pragma unroll 1
  for (int i = thread; i < static_cast<int>((sizeof(scratch.counts) + sizeof(scratch.masks)) / 16); i += kLowThreads) {
    zero[i] = make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) scratch.expert_of[thread + i * kLowThreads] = static_cast<int16_t>(ids[i]);
  __syncthreads();

  // Each warp owns a run of steps of 32 pairs.
  const int steps = (p.num_pairs + 31) / 32, share = (steps + kLowWarps - 1) / kLowWarps;
  const int first = min(warp * share, steps), last = min(first + share, steps);
  uint32_t *own = scratch.counts[warp], *masks = scratch.masks[warp];
#pragma unroll 1
  for (int step = first; step < last; ++step) {
    const int expert = scratch.expert_of[step * 32 + lane];
    if (expert >= 0) atomicAdd(&own[expert], 1u);
  }
  __syncthreads();

  // Neighbouring experts a thread: rows in the low half, tiles in the high half of what is summed.
  uint32_t rows[kExperts], sum = 0;
#pragma unroll
  for (int i = 0; i < kExperts; ++i) {
    const int expert = thread * kExperts + i;
    rows[i] = 0;
#pragma unroll
    for (int w = 0; w < kLowWarps; ++w) rows[i] += scratch.counts[w][expert];
    sum += rows[i] | (rows[i] + kLowTile - 1) / kLowTile << 16;
  }
  uint32_t before = sum;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, before, step);
    if (lane >= step) before += other;
  }
  if (lane == 31) route.warp_sums[warp] = before;
  __syncthreads();
  before -= sum;
  uint32_t total = 0;
#pragma unroll
  for (int w = 0; w < kLowWarps; ++w) {
    if (w < warp) before += route.warp_sums[w];
    total += route.warp_sums[w];
  }
  if (thread == 0) route.num_tiles = static_cast<int32_t>(total >> 16);
#pragma unroll
  for (int i = 0; i < kExperts; ++i) {
    const int expert = thread * kExperts + i;
    uint32_t row = before & 0xFFFF, tile = before >> 16;
#pragma unroll 1
    for (uint32_t done = 0; done < rows[i]; done += kLowTile) {
      route.tiles[tile++] = {static_cast<uint16_t>(expert), static_cast<uint16_t>(row + done),
                             static_cast<uint16_t>(min(rows[i] - done, static_cast<uint32_t>(kLowTile))), 0};
    }
    if (rows[i] > 0) {
#pragma unroll
      for (int w = 0; w < kLowWarps; ++w) {
        const uint32_t count = scratch.counts[w][expert];
        scratch.counts[w][expert] = row;
        row += count;
      }
    }
    before += rows[i] | (rows[i] + kLowTile - 1) / kLowTile << 16;
  }
  __syncthreads();

#pragma unroll 1
  for (int step = first; step < last; ++step) {
    const int pair = step * 32 + lane, expert = scratch.expert_of[pair];
    uint32_t same = 0;
    uint16_t row = kNoLowRow;
    if (expert >= 0) atomicOr(&masks[expert], 1u << lane);
    __syncwarp();
    if (expert >= 0) {
      same = masks[expert];
      row = static_cast<uint16_t>(own[expert] + __popc(same & ((1u << lane) - 1)));
      route.row_to_pair[row] = static_cast<uint16_t>(pair);
    }
    route.pair_to_row[pair] = row;
    __syncwarp();
    if (expert >= 0 && lane == __ffs(same) - 1) {
      own[expert] += __popc(same);
      masks[expert] = 0;
    }
    __syncwarp();
  }
  __syncthreads();
}

}  // namespace hpc::moe

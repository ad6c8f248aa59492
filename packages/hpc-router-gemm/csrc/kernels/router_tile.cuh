// Router GEMM for many tokens: y[m, n] = x[m, k] weight[n, k]^T by wgmma, the fp32 weight split in registers.
//
// Tile    64 WM expert rows (the M of wgmma, A from registers) x NT tokens (its N, from shared memory). Grid: clusters
// of
//         split x token_tiles x expert_tiles CTAs, rank in this order; clusters walk the expert tiles first, so that a
//         token tile is read from memory once.
// Warps   WM x WK consumer warpgroups and one producer warpgroup, of which one thread issues all copies. A consumer
//         (wm, wk) has rows 64 wm .. 64 wm + 63 and every WK-th block of k = 128.
// Stages  k = 64 each: weight rows (fp32: two boxes of 32 columns) and token rows, 128-byte swizzle. Of a weight tile
//         shared by `token_tiles` CTAs each copies its part to all of them, and likewise for token tiles.
// Rows    lane group g takes row 2 (g % 4) + g / 4 of each 8: with the natural order, rows 0 and 1 of the swizzle would
//         meet in the same banks. The epilogue undoes it.
// Math    windows of W k16 steps: fragments of the next window are read and split while this one multiplies. In a
//         window the smaller terms come first. The tensor core truncates each sum, so the accumulator is moved to an
//         ordinary fp32 sum every 128 of k (64 for three terms) and restarted.
// Sum     over the k groups in shared memory, over the cluster as in router_stream.cuh: ranks ascending.
// PDL     the first stages' weights are requested before pdl_wait() where params.prefetch allows it; x after it.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include "hpc/cluster.cuh"
#include "hpc/mbarrier.cuh"
#include "hpc/pdl.cuh"
#include "hpc/tma.cuh"
#include "hpc/wgmma_rs.cuh"
#include "kernels/params.hpp"
#include "kernels/split.cuh"

namespace hpc::router {

template <int WM, int WK, int NT, Weight kWeight>
struct TileShape {
  static constexpr int kTerms = weight_terms(kWeight);
  static constexpr bool kFloat = kWeight != Weight::kBf16;
  static constexpr int kRows = 64 * WM;
  static constexpr int kConsumers = WM * WK;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kWindow = NT > 160 ? 1 : 2;      // k16 steps
  static constexpr int kPromote = kTerms == 3 ? 4 : 8;  // k16 steps
  static constexpr int kHalfBytes = kRows * 128;        // a box of weights
  static constexpr int kWeightBytes = kHalfBytes * (kFloat ? 2 : 1);
  static constexpr int kStageBytes = tile_stage_bytes(kRows, NT, kWeight);
};

__device__ __forceinline__ float2 load_shared_pair(uint32_t smem) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(smem));
  return v;
}

__device__ __forceinline__ uint32_t load_shared_word(uint32_t smem) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(smem));
  return v;
}

// Position in the ring of stages.
struct Ring {
  int slot = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance(int count, int stages) {
    slot += count;
    while (slot >= stages) {
      slot -= stages;
      phase ^= 1;
    }
  }
};

// The place of a CTA: its tile, its part of k, and whom it shares copies with.
struct TilePlace {
  int split_rank, token_rank, expert_rank;
  int row0;
  int64_t token0;
  int first_block, blocks;

  __device__ __forceinline__ TilePlace(const TileParams& p, int rows, int tokens) {
    // Volatile: the epilogue works its place out anew, so that no register holds it during the products.
    int block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    const int cluster = p.split * p.token_tiles * p.expert_tiles;
    const int rank = block % cluster;
    const int group = block / cluster;
    split_rank = rank % p.split;
    token_rank = rank / p.split % p.token_tiles;
    expert_rank = rank / p.split / p.token_tiles;
    row0 = (group % p.expert_groups * p.expert_tiles + expert_rank) * rows;
    token0 = static_cast<int64_t>(group / p.expert_groups * p.token_tiles + token_rank) * tokens;
    first_block = static_cast<int>(static_cast<int64_t>(split_rank) * p.k_blocks / p.split);
    blocks = static_cast<int>(static_cast<int64_t>(split_rank + 1) * p.k_blocks / p.split) - first_block;
  }

  // Ranks of the CTAs with the same tokens (over expert tiles) and the same weights (over token tiles).
  __device__ __forceinline__ int rank_of(const TileParams& p, int token, int expert) const {
    return split_rank + p.split * (token + p.token_tiles * expert);
  }
};

// The producer thread: requests all stages of this CTA's part of k.
template <int WM, int WK, int NT, Weight kWeight>
__device__ __forceinline__ void produce_tiles(const TileParams& p, const TilePlace& place,
                                              const CUtensorMap* weight_map, const CUtensorMap* x_map, uint32_t stage0,
                                              uint32_t full, uint32_t empty) {
  using Shape = TileShape<WM, WK, NT, kWeight>;
  const int total = place.blocks * (kTileBlockK / kTileStageK);
  const int rows = Shape::kRows / p.token_tiles;
  const int tokens = NT / p.expert_tiles;
  uint16_t weight_mask = 0, x_mask = 0;
#pragma unroll 1
  for (int i = 0; i < p.token_tiles; ++i) weight_mask |= 1 << place.rank_of(p, i, place.expert_rank);
#pragma unroll 1
  for (int i = 0; i < p.expert_tiles; ++i) x_mask |= 1 << place.rank_of(p, place.token_rank, i);

  const auto load_weight = [&](int slot, int i) {
    const uint32_t barrier = full + slot * 8;
    const int k0 = place.first_block * kTileBlockK + i * kTileStageK;
    const int first = place.token_rank * rows;
#pragma unroll
    for (int half = 0; half < Shape::kWeightBytes / Shape::kHalfBytes; ++half) {
      const uint32_t target = stage0 + slot * Shape::kStageBytes + half * Shape::kHalfBytes + first * 128;
      if (p.token_tiles == 1) {
        tma_load_2d(target, weight_map, barrier, k0 + half * 32, place.row0);
      } else {
        tma_load_2d_multicast(target, weight_map, barrier, k0 + half * 32, place.row0 + first, weight_mask);
      }
    }
  };
  const auto load_x = [&](int slot, int i) {
    const uint32_t barrier = full + slot * 8;
    const int k0 = place.first_block * kTileBlockK + i * kTileStageK;
    const int first = place.expert_rank * tokens;
    const uint32_t target = stage0 + slot * Shape::kStageBytes + Shape::kWeightBytes + first * 128;
    const int token = static_cast<int>(place.token0) + first;
    if (p.expert_tiles == 1) {
      tma_load_2d(target, x_map, barrier, k0, token);
    } else {
      tma_load_2d_multicast(target, x_map, barrier, k0, token, x_mask);
    }
  };

  tma_prefetch_map(weight_map);
  tma_prefetch_map(x_map);
  const int early = min(p.stages, total);
  if (!p.prefetch) pdl_wait();
#pragma unroll 1
  for (int i = 0; i < early; ++i) {
    mbarrier_arrive_expect_tx(full + i * 8, Shape::kStageBytes);
    load_weight(i, i);
  }
  if (p.prefetch) pdl_wait();
  pdl_trigger();
#pragma unroll 1
  for (int i = 0; i < early; ++i) load_x(i, i);
  Ring ring;
  ring.advance(early, p.stages);
#pragma unroll 1
  for (int i = early; i < total; ++i) {
    mbarrier_wait(empty + ring.slot * 8, ring.phase ^ 1);
    mbarrier_arrive_expect_tx(full + ring.slot * 8, Shape::kStageBytes);
    load_weight(ring.slot, i);
    load_x(ring.slot, i);
    ring.advance(1, p.stages);
  }
  // Other CTAs arrive at these barriers: stay until they have.
  if (p.token_tiles * p.expert_tiles > 1) {
    Ring last;
    last.advance(total - early, p.stages);
#pragma unroll 1
    for (int i = 0; i < early; ++i) {
      mbarrier_wait(empty + last.slot * 8, last.phase);
      last.advance(1, p.stages);
    }
  }
}

// Reads and splits the A fragments of k16 step `step` (0 to 3) of a stage.
template <int WM, Weight kWeight, int Terms>
__device__ __forceinline__ void load_fragment(uint32_t weights, uint32_t lane_offset, int step,
                                              uint32_t (&a)[Terms][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // row half i % 2, k half i / 2
    if constexpr (kWeight == Weight::kBf16) {
      a[0][i] = load_shared_word(weights + (lane_offset ^ ((2 * step + i / 2) << 4)) + i % 2 * 1024);
    } else {
      const uint32_t half = weights + step / 2 * (WM * 64 * 128);
      const float2 v = load_shared_pair(half + (lane_offset ^ ((step % 2 * 2 + i / 2) << 5)) + i % 2 * 1024);
      uint32_t terms[Terms];
      split_pair<Terms>(v.x, v.y, terms);
#pragma unroll
      for (int term = 0; term < Terms; ++term) a[term][i] = terms[term];
    }
  }
}

// A consumer warpgroup's part of the products, in sum[].
template <int WM, int WK, int NT, Weight kWeight>
__device__ __forceinline__ void multiply_tiles(const TileParams& p, const TilePlace& place, int wm, int wk,
                                               uint32_t stage0, uint32_t full, uint32_t empty, float (&sum)[NT / 2]) {
  using Shape = TileShape<WM, WK, NT, kWeight>;
  constexpr int kTerms = Shape::kTerms;
  constexpr int kWindow = Shape::kWindow;
  constexpr int kWindows = 8 / kWindow;  // of a block
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;
  const int g = lane / 4;
  const int t = lane % 4;
  const int row = 64 * wm + 16 * warp + 2 * (g % 4) + g / 4;
  const uint32_t lane_offset =
      Shape::kFloat ? row * 128 + (((t / 2) ^ (row & 7)) << 4) + (t & 1) * 8 : row * 128 + ((row & 7) << 4) + t * 4;

  // Lane i of each warp frees a stage for the i-th CTA that copies to this one.
  const int sharers = p.token_tiles + p.expert_tiles - 1;
  const int sharer_rank =
      lane < p.token_tiles
          ? place.rank_of(p, lane, place.expert_rank)
          : place.rank_of(p, place.token_rank, (place.expert_rank + lane - p.token_tiles + 1) % p.expert_tiles);
  const uint32_t empty_there = sharers > 1 && lane < sharers ? cluster_address(empty, sharer_rank) : empty;
  const auto release = [&](int slot) {
    if (sharers == 1) {
      if (lane == 0) mbarrier_arrive(empty + slot * 8);
    } else if (lane < sharers) {
      mbarrier_arrive_cluster(empty_there + slot * 8);
    }
  };
  const auto weights_of = [&](int slot) { return stage0 + slot * Shape::kStageBytes; };

#pragma unroll
  for (int i = 0; i < NT / 2; ++i) sum[i] = 0.0f;
  if (wk >= place.blocks) return;
  float part[NT / 2];
  uint32_t a[2][kWindow][kTerms][4];
  Ring ring;
  ring.advance(2 * wk, p.stages);
  mbarrier_wait(full + ring.slot * 8, ring.phase);
#pragma unroll
  for (int j = 0; j < kWindow; ++j) load_fragment<WM, kWeight, kTerms>(weights_of(ring.slot), lane_offset, j, a[0][j]);

  for (int block = wk; block < place.blocks; block += WK) {
    Ring second = ring;
    second.advance(1, p.stages);
    Ring next = ring;
    next.advance(2 * WK, p.stages);
#pragma unroll
    for (int w = 0; w < kWindows; ++w) {
      const int step = w * kWindow;  // of 8 in the block
      const uint64_t x = wgmma_descriptor(weights_of(step < 4 ? ring.slot : second.slot) + Shape::kWeightBytes);
      wgmma_fence(part);
      wgmma_arrive();
#pragma unroll
      for (int term = kTerms - 1; term >= 0; --term) {
#pragma unroll
        for (int j = 0; j < kWindow; ++j) {
          wgmma_rs_bf16<NT>(part, a[w % 2][j][term], x + 2 * ((step + j) % 4),
                            !(step % Shape::kPromote == 0 && term == kTerms - 1 && j == 0));
        }
      }
      wgmma_commit();
      wgmma_wait<1>();  // the window before: its registers and, after the last of a stage, its shared memory are free
      if (step == 4) release(ring.slot);
      if (w + 1 < kWindows) {
        if (step + kWindow == 4) mbarrier_wait(full + second.slot * 8, second.phase);
#pragma unroll
        for (int j = 0; j < kWindow; ++j) {
          load_fragment<WM, kWeight, kTerms>(weights_of(step + kWindow < 4 ? ring.slot : second.slot), lane_offset,
                                             (step + kWindow + j) % 4, a[(w + 1) % 2][j]);
        }
      } else if (block + WK < place.blocks) {
        mbarrier_wait(full + next.slot * 8, next.phase);
#pragma unroll
        for (int j = 0; j < kWindow; ++j) {
          load_fragment<WM, kWeight, kTerms>(weights_of(next.slot), lane_offset, j, a[0][j]);
        }
      }
      if ((step + kWindow) % Shape::kPromote == 0) {
        wgmma_wait<0>();
        wgmma_fence(part);
#pragma unroll
        for (int i = 0; i < NT / 2; ++i) sum[i] += part[i];
      }
    }
    release(second.slot);
    ring = next;
  }
}

// A CTA's part of a split sum, in blocks of 64 rows x 8 tokens, one float4 (quad) a thread. Block index: token block *
// WM
// + row group. Of the blocks that hold tokens, rank r owns `part` from r * part on, the last ranks fewer or none.
template <int WM, int NT>
struct TileSums {
  int valid_blocks;  // token blocks that hold tokens
  int part, owned;

  __device__ __forceinline__ TileSums(const TileParams& p, const TilePlace& place) {
    const int64_t left = p.m - place.token0;
    valid_blocks = static_cast<int>(left >= NT ? NT / 8 : left <= 0 ? 0 : (left + 7) / 8);
    part = (valid_blocks * WM + p.split - 1) / p.split;
    owned = min(part, max(0, valid_blocks * WM - place.split_rank * part));
  }
};

template <int WM, int WK, int NT, Weight kWeight>
__global__ void __launch_bounds__(TileShape<WM, WK, NT, kWeight>::kThreads, 1)
    router_tile_kernel(const TileParams p, const __grid_constant__ CUtensorMap weight_map,
                       const __grid_constant__ CUtensorMap x_map) {
  using Shape = TileShape<WM, WK, NT, kWeight>;
  constexpr int kConsumerThreads = 128 * Shape::kConsumers;
  extern __shared__ uint8_t smem_raw[];
  const uint32_t stage0 = (smem_address(smem_raw) + 1023) & ~1023u;
  const uint32_t slots = stage0 + p.stages * Shape::kStageBytes;
  const uint32_t full = slots + tile_slot_bytes(Shape::kRows, NT, p.split);
  const uint32_t empty = full + kTileMaxStages * 8;
  const uint32_t sums_barrier = empty + kTileMaxStages * 8;
  const int group = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
  const bool multicast = p.token_tiles * p.expert_tiles > 1;
  const bool clustered = multicast || p.split > 1;

  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < p.stages; ++i) {
      mbarrier_init(full + i * 8, 1);
      mbarrier_init(empty + i * 8, 4 * WM * (p.token_tiles + p.expert_tiles - 1));
    }
    mbarrier_init(sums_barrier, 1);
    mbarrier_init_fence();
    if (p.split > 1) {
      const TileSums<WM, NT> sums(p, TilePlace(p, Shape::kRows, NT));
      mbarrier_arrive_expect_tx(sums_barrier, sums.owned * p.split * 2048);
    }
  }
  __syncthreads();
  if (clustered) cluster_arrive_relaxed();
  if (multicast) cluster_wait();

  if (group == Shape::kConsumers) {
    if constexpr (Shape::kConsumers == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x % 128 == 0) {
      produce_tiles<WM, WK, NT, kWeight>(p, TilePlace(p, Shape::kRows, NT), &weight_map, &x_map, stage0, full, empty);
    } else {
      pdl_wait();
      pdl_trigger();
    }
    __syncwarp();
    if (clustered && !multicast) cluster_wait();
    return;
  }
  if constexpr (Shape::kConsumers == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  pdl_wait();
  pdl_trigger();
  float sum[NT / 2];
  multiply_tiles<WM, WK, NT, kWeight>(p, TilePlace(p, Shape::kRows, NT), group % WM, group / WM, stage0, full, empty,
                                      sum);

  int tid;  // anew, like TilePlace
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
  const int thread = tid % 128;
  const int wm = tid / 128 % WM;
  const int wk = tid / 128 / WM;

  // The k groups exchange halves of their sums over the stages, which nobody uses any more.
  if constexpr (WK == 2) {
    constexpr int kHalf = NT / 16;  // token blocks of k group 0; the other has the rest
    const uint32_t mine = stage0 + (wm * 128 + thread) * 16;
    constexpr int kStride = WM * 128 * 16;
    named_barrier_sync(1, kConsumerThreads);
#pragma unroll
    for (int b = 0; b < NT / 8; ++b) {
      if ((b < kHalf) == (wk == 1)) {
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(mine + b * kStride), "f"(sum[4 * b]),
                     "f"(sum[4 * b + 1]), "f"(sum[4 * b + 2]), "f"(sum[4 * b + 3])
                     : "memory");
      }
    }
    named_barrier_sync(1, kConsumerThreads);
#pragma unroll
    for (int b = 0; b < NT / 8; ++b) {
      if ((b < kHalf) == (wk == 0)) {
        const float2 low = load_shared_pair(mine + b * kStride);
        const float2 high = load_shared_pair(mine + b * kStride + 8);
        sum[4 * b] += low.x;
        sum[4 * b + 1] += low.y;
        sum[4 * b + 2] += high.x;
        sum[4 * b + 3] += high.y;
      }
    }
  }
  const TilePlace place(p, Shape::kRows, NT);
  const TileSums<WM, NT> sums(p, place);
  const auto owns_block = [&](int b) { return WK == 1 || (b < NT / 16) == (wk == 0); };

  // The first row of this thread in its row group, and its first token; a quad is {row, token}, {row, token + 1},
  // {row + 8, token}, {row + 8, token + 1}.
  const int lane = thread % 32;
  const int row = place.row0 + thread / 32 * 16 + 2 * (lane / 4 % 4) + lane / 16;
  const int64_t token = place.token0 + 2 * (lane % 4);
  const auto store = [&](int b, int rows, float4 v) {
    const int64_t first = token + 8 * b;
    const int r = row + 64 * rows;
    float* y = p.y + first * p.y_stride + r;
    if (first < p.m) {
      if (r < p.n) y[0] = v.x;
      if (r + 8 < p.n) y[8] = v.z;
    }
    if (first + 1 < p.m) {
      y += p.y_stride;
      if (r < p.n) y[0] = v.y;
      if (r + 8 < p.n) y[8] = v.w;
    }
  };

  if (p.split == 1) {
#pragma unroll
    for (int b = 0; b < NT / 8; ++b) {
      if (b < sums.valid_blocks && owns_block(b)) {
        store(b, wm, make_float4(sum[4 * b], sum[4 * b + 1], sum[4 * b + 2], sum[4 * b + 3]));
      }
    }
    return;
  }

  if (!multicast) cluster_wait();
  const int rank0 = place.rank_of(p, place.token_rank, place.expert_rank) - place.split_rank;
  const uint32_t my_slot = slots + (place.split_rank * sums.part * 128 + thread) * 16;
#pragma unroll
  for (int b = 0; b < NT / 8; ++b) {
    if (b < sums.valid_blocks && owns_block(b)) {
      const int block = b * WM + wm;
      const int owner = block / sums.part;
      store_async_16(cluster_address(my_slot + (block - owner * sums.part) * 2048, rank0 + owner),
                     cluster_address(sums_barrier, rank0 + owner),
                     make_float4(sum[4 * b], sum[4 * b + 1], sum[4 * b + 2], sum[4 * b + 3]));
    }
  }
  if (sums.owned == 0) return;
  mbarrier_wait(sums_barrier, 0);
  for (int i = tid / 128; i < sums.owned; i += Shape::kConsumers) {
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int r = 0; r < p.split; ++r) {
      const uint32_t slot = slots + ((r * sums.part + i) * 128 + thread) * 16;
      const float2 low = load_shared_pair(slot);
      const float2 high = load_shared_pair(slot + 8);
      v.x += low.x;
      v.y += low.y;
      v.z += high.x;
      v.w += high.y;
    }
    const int block = place.split_rank * sums.part + i;
    store(block / WM, block % WM, v);
  }
}

}  // namespace hpc::router

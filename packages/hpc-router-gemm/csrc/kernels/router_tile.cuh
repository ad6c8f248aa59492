// Router GEMM for many tokens: y[m, n] = x[m, k] weight[n, k]^T by wgmma, the fp32 weight split in registers.
//
// Tile    64 WM expert rows (the M of wgmma, A from registers) x NT tokens (its N, from shared memory). Grid (split,
//         expert tiles, token tiles); the `split` CTAs of a tile are one cluster, each with a part of k.
// Warps   WM x WK consumer warpgroups, then producer warps, of which one thread each issues the copies for every second
//         or fourth slot of the ring: one thread alone takes 0.1 us a stage. A consumer (wm, wk) has rows 64 wm to
//         64 wm + 63 and the wk-th part of every stage's k. One consumer alone leaves room for a second CTA on the SM:
//         the next call's, which then starts, reads its weights and waits while this one still works.
// Stages  k = 64 each: weight rows (fp32: two boxes of 32 columns) and token rows, 128-byte swizzle.
// Rows    lane group g takes row 2 (g % 4) + g / 4 of each 8: with the natural order, rows 0 and 1 of the swizzle would
//         meet in the same banks. The epilogue undoes it.
// Math    windows of 1 or 2 k16 steps: fragments of the next window are read and split while this one multiplies. The
//         smaller terms come first: in each window, or, with three terms, in each group of 4 steps. The tensor core
//         truncates each sum, so the accumulator is moved to an ordinary fp32 sum every 8 of a consumer's steps (4 but
//         for two terms) and restarted.
// Sum     over the k groups in shared memory, then over the cluster (cluster.cuh), ranks ascending. Both lie over the
//         stages: a cluster barrier after the products says that nobody needs them any more.
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
  // With several consumers the producers are a whole warpgroup, so that it can give its registers away.
  static constexpr int kProducers = kConsumers == 1 ? 2 : 4;  // warps
  static constexpr int kThreads = 128 * kConsumers + 32 * kProducers;
  static constexpr int kMinCtas = kConsumers == 1 ? 2 : 1;                                                  // of an SM
  static constexpr int kWindow = NT > 160 || (kConsumers == 1 && NT >= (kTerms == 3 ? 104 : 128)) ? 1 : 2;  // k16 steps
  static constexpr int kPromote = kTerms == 2 ? 8 : 4;                                                      // k16 steps
  static constexpr int kGroup = kTerms == 3 ? 4 : kWindow;  // k16 steps whose smaller terms come before their first
  static constexpr int kBlockK = tile_block_k(WK);          // 8 k16 steps for each consumer
  static constexpr int kBlockStages = kBlockK / kTileStageK;
  static constexpr int kHalfBytes = kRows * 128;  // a box of weights
  static constexpr int kWeightBytes = kHalfBytes * (kFloat ? 2 : 1);
  static constexpr int kStageBytes = tile_stage_bytes(kRows, NT, kWeight);
};

__device__ __forceinline__ float2 load_shared_pair(uint32_t smem) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(smem));
  return v;
}

__device__ __forceinline__ float4 load_shared_quad(uint32_t smem) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(smem));
  return v;
}

__device__ __forceinline__ uint32_t load_shared_word(uint32_t smem) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(smem));
  return v;
}

// Position in a ring of stages.
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

// Addresses in shared memory.
struct TileMemory {
  uint32_t stages, full, empty, sums_barrier;
};

// First block of k of this CTA, and how many it has.
struct TileBlocks {
  int first, count;
  __device__ __forceinline__ TileBlocks(const TileParams& p, int rank) {
    first = rank * p.k_blocks + min(rank, p.k_extra);
    count = p.k_blocks + (rank < p.k_extra);
  }
};

// The thread of producer warp `warp`: fills every kProducers-th slot of the ring with this CTA's part of k.
template <int WM, int WK, int NT, Weight kWeight>
__device__ __forceinline__ void produce_tiles(const TileParams& p, int warp, const CUtensorMap* weight_map,
                                              const CUtensorMap* x_map, const TileMemory& memory) {
  using Shape = TileShape<WM, WK, NT, kWeight>;
  constexpr int kProducers = Shape::kProducers;
  const TileBlocks blocks(p, blockIdx.x);
  const int total = blocks.count * Shape::kBlockStages;
  const int k0 = blocks.first * Shape::kBlockK;
  const int row0 = blockIdx.y * Shape::kRows;
  const int token0 = blockIdx.z * NT;

  const auto load_weight = [&](int slot, int i) {
    const uint32_t barrier = memory.full + slot * 8;
    const uint32_t target = memory.stages + slot * Shape::kStageBytes;
    const int k = k0 + i * kTileStageK;
    if (Shape::kFloat && p.weight_columns == 64) {  // the map has chunks of 32 columns, two to a copy
      tma_load_3d(target, weight_map, barrier, 0, row0, k / 32);
    } else {
      tma_load_3d(target, weight_map, barrier, k, row0, 0);
      if (Shape::kFloat) tma_load_3d(target + Shape::kHalfBytes, weight_map, barrier, k + 32, row0, 0);
    }
  };
  const auto load_x = [&](int slot, int i) {
    tma_load_2d(memory.stages + slot * Shape::kStageBytes + Shape::kWeightBytes, x_map, memory.full + slot * 8,
                k0 + i * kTileStageK, token0);
  };

  // Weights requested before the tokens of the first stage: all where the call starts under its predecessor; else few,
  // or the first tokens would queue behind them.
  constexpr int kAhead = Shape::kConsumers == 1 ? kTileMaxStages : 2;
  const int early = min(p.stages, total);
  const int ahead = min(early, kAhead);
  if (!p.prefetch) pdl_wait();
#pragma unroll 1
  for (int i = warp; i < ahead; i += kProducers) {
    mbarrier_arrive_expect_tx(memory.full + i * 8, Shape::kStageBytes);
    load_weight(i, i);
  }
  if (p.prefetch) pdl_wait();
  pdl_trigger();
#pragma unroll 1
  for (int i = warp; i < early; i += kProducers) {
    if (i >= ahead) {
      mbarrier_arrive_expect_tx(memory.full + i * 8, Shape::kStageBytes);
      load_weight(i, i);
    }
    load_x(i, i);
  }
  // A slot is always refilled by the same thread: waiting by parity, it must not miss a phase of it.
  uint32_t phase = 0;
#pragma unroll 1
  for (int first = p.stages; first < total; first += p.stages, phase ^= 1) {
#pragma unroll 1
    for (int slot = warp; slot < p.stages && first + slot < total; slot += kProducers) {
      mbarrier_wait(memory.empty + slot * 8, phase);
      mbarrier_arrive_expect_tx(memory.full + slot * 8, Shape::kStageBytes);
      load_weight(slot, first + slot);
      load_x(slot, first + slot);
    }
  }
}

// Reads and splits the A fragments of k16 step `step` of a stage: the first term's, and the others'.
template <int WM, Weight kWeight, int Terms, int Others>
__device__ __forceinline__ void load_fragment(uint32_t weights, uint32_t lane_offset, int step, uint32_t (&first)[4],
                                              uint32_t (&others)[Others][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // row half i % 2, k half i / 2
    if constexpr (kWeight == Weight::kBf16) {
      first[i] = load_shared_word(weights + (lane_offset ^ ((2 * step + i / 2) << 4)) + i % 2 * 1024);
    } else {
      const uint32_t half = weights + step / 2 * (WM * 64 * 128);
      const float2 v = load_shared_pair(half + (lane_offset ^ ((step % 2 * 2 + i / 2) << 5)) + i % 2 * 1024);
      uint32_t terms[Terms];
      split_pair<Terms>(v.x, v.y, terms);
      first[i] = terms[0];
#pragma unroll
      for (int term = 1; term < Terms; ++term) others[term - 1][i] = terms[term];
    }
  }
}

// The products of consumer (wm, wk), in sum[].
template <int WM, int WK, int NT, Weight kWeight, int wk>
__device__ __forceinline__ void multiply_tiles(const TileParams& p, int wm, const TileMemory& memory,
                                               float (&sum)[NT / 2]) {
  using Shape = TileShape<WM, WK, NT, kWeight>;
  constexpr int kTerms = Shape::kTerms;
  constexpr int kWindow = Shape::kWindow;
  constexpr int kWindows = 8 / kWindow;  // of a block
  constexpr int kSteps = 4 / WK;         // k16 steps of a stage that are this consumer's
  constexpr int kStageWindows = kSteps / kWindow;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;
  const int g = lane / 4;
  const int t = lane % 4;
  const int row = 64 * wm + 16 * warp + 2 * (g % 4) + g / 4;
  // This consumer's steps of a stage begin at step wk * kSteps (2 for the second of two).
  const uint32_t own_offset = Shape::kFloat ? wk * (kSteps / 2) * Shape::kHalfBytes : 0;
  const uint32_t lane_offset = Shape::kFloat ? row * 128 + (((t / 2) ^ (row & 7)) << 4) + (t & 1) * 8
                                             : (row * 128 + ((row & 7) << 4) + t * 4) ^ (wk * kSteps * 2 << 4);
  const int blocks = TileBlocks(p, blockIdx.x).count;
  const auto release = [&](int slot) {
    if (lane == 0) mbarrier_arrive(memory.empty + slot * 8);
  };
  const auto weights_of = [&](int slot) { return memory.stages + slot * Shape::kStageBytes; };

#pragma unroll
  for (int i = 0; i < NT / 2; ++i) sum[i] = 0.0f;
  float part[NT / 2];
  // Fragments of the window being multiplied and of the next. Those of the first term are kept to the end of their
  // group, so the next group's first window has registers of its own.
  constexpr int kOthers = kTerms > 1 ? kTerms - 1 : 1;
  constexpr int kGroup = Shape::kGroup;
  uint32_t others[2][kWindow][kOthers][4];
  uint32_t first[kWindow + kGroup][4];
  const auto first_index = [](int step) {
    const int place = step % kGroup;
    return place < kWindow ? step / kGroup % 2 * kWindow + place : kWindow + place;
  };
  const auto load_window = [&](int slot, int step) {
#pragma unroll
    for (int j = 0; j < kWindow; ++j) {
      load_fragment<WM, kWeight, kTerms, kOthers>(weights_of(slot) + own_offset, lane_offset, (step + j) % kSteps,
                                                  first[first_index(step + j)], others[step / kWindow % 2][j]);
    }
  };
  const auto before = [&](int slot) { return slot == 0 ? p.stages - 1 : slot - 1; };
  const auto tokens_of = [&](int slot) {
    return wgmma_descriptor(weights_of(slot) + Shape::kWeightBytes) + 2 * wk * kSteps;
  };
  // Stages are freed by whole groups of steps.
  constexpr int kFreeSteps = kGroup > kSteps ? kGroup : kSteps;
  const auto release_group = [&](int last_slot) {
    release(last_slot);
    if (kFreeSteps > kSteps) release(before(last_slot));
  };
  Ring ring;  // of the window being read
  mbarrier_wait(memory.full, 0);
  load_window(0, 0);

#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    int slot = ring.slot;  // of the window being multiplied
#pragma unroll
    for (int w = 0; w < kWindows; ++w) {
      const int step = w * kWindow;  // of 8 in the block
      const uint64_t x = tokens_of(slot);
      wgmma_fence(part);
      wgmma_arrive();
#pragma unroll
      for (int term = kTerms - 1; term >= 1; --term) {
#pragma unroll
        for (int j = 0; j < kWindow; ++j) {
          wgmma_rs_bf16<NT>(part, others[w % 2][j][term - 1], x + 2 * (step % kSteps + j),
                            !(step % Shape::kPromote == 0 && term == kTerms - 1 && j == 0));
        }
      }
      if ((step + kWindow) % kGroup == 0) {
        const uint64_t x_before = kGroup > kSteps ? tokens_of(before(slot)) : x;
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          const int at = step + kWindow - kGroup + i;
          wgmma_rs_bf16<NT>(part, first[first_index(at)],
                            (at / kSteps == step / kSteps ? x : x_before) + 2 * (at % kSteps),
                            !(at % Shape::kPromote == 0 && kTerms == 1));
        }
      }
      wgmma_commit();
      wgmma_wait<1>();  // the window before: its registers and, at the end of a group, its shared memory are free
      if (w > 0 && step % kFreeSteps == 0) release_group(before(slot));
      if (w + 1 < kWindows || block + 1 < blocks) {
        if ((w + 1) % kStageWindows == 0) {
          ring.advance(1, p.stages);
          mbarrier_wait(memory.full + ring.slot * 8, ring.phase);
        }
        load_window(ring.slot, (step + kWindow) % 8);
      }
      if ((step + kWindow) % Shape::kPromote == 0) {
        wgmma_wait<0>();
        wgmma_fence(part);
#pragma unroll
        for (int i = 0; i < NT / 2; ++i) sum[i] += part[i];
      }
      if (w + 1 < kWindows) slot = ring.slot;
    }
    release_group(slot);
  }
}

// What follows the products. A block is 64 rows x 8 tokens, one float4 (quad) a thread: {row, token}, {row, token + 1},
// {row + 8, token}, {row + 8, token + 1}. Block index: row group * NT / 8 + token block. In a split sum rank r owns
// params.sum_part blocks from r * sum_part on, the last ranks fewer or none.
template <int WM, int NT>
struct TileBlock {
  static constexpr int kTokenBlocks = NT / 8;
  static constexpr int kBlocks = WM * kTokenBlocks;
  static constexpr int kBytes = 2048;

  static __device__ __forceinline__ int owned(const TileParams& p, int rank) {
    return min(p.sum_part, max(0, kBlocks - rank * p.sum_part));
  }
};

// Stores quads of one thread.
struct TileStore {
  float* y;  // at this thread's first row and token
  int64_t stride;
  int64_t tokens_left;
  int rows_left;

  __device__ __forceinline__ TileStore(const TileParams& p, int row0, int64_t token0, int thread) {
    const int lane = thread % 32;
    const int row = row0 + thread / 32 * 16 + 2 * (lane / 4 % 4) + lane / 16;
    const int64_t token = token0 + 2 * (lane % 4);
    stride = p.y_stride;
    y = p.y + token * stride + row;
    rows_left = p.n - row;
    tokens_left = p.m - token;
  }
  __device__ __forceinline__ void operator()(int row_group, int token_block, float4 v) const {
    float* target = y + 8 * token_block * stride + 64 * row_group;
    const int64_t tokens = tokens_left - 8 * token_block;
    const int rows = rows_left - 64 * row_group;
    if (tokens > 0) {
      if (rows > 0) target[0] = v.x;
      if (rows > 8) target[8] = v.z;
    }
    if (tokens > 1) {
      if (rows > 0) target[stride] = v.y;
      if (rows > 8) target[stride + 8] = v.w;
    }
  }
};

template <int WM, int WK, int NT, Weight kWeight>
__global__ void __launch_bounds__(TileShape<WM, WK, NT, kWeight>::kThreads, TileShape<WM, WK, NT, kWeight>::kMinCtas)
    router_tile_kernel(const TileParams p, const __grid_constant__ CUtensorMap weight_map,
                       const __grid_constant__ CUtensorMap x_map) {
  using Shape = TileShape<WM, WK, NT, kWeight>;
  using Block = TileBlock<WM, NT>;
  constexpr int kConsumerThreads = 128 * Shape::kConsumers;
  extern __shared__ uint8_t smem_raw[];
  TileMemory memory;
  memory.stages = (smem_address(smem_raw) + 1023) & ~1023u;
  memory.full = memory.stages + p.stages * Shape::kStageBytes;
  memory.empty = memory.full + kTileMaxStages * 8;
  memory.sums_barrier = memory.empty + kTileMaxStages * 8;
  const int group = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
  const int rank = blockIdx.x;
  const bool producer = group == Shape::kConsumers;

  if (threadIdx.x < 32) {
    if (threadIdx.x < p.stages) {
      mbarrier_init(memory.full + threadIdx.x * 8, 1);
      mbarrier_init(memory.empty + threadIdx.x * 8, 4 * Shape::kConsumers);
    }
    if (threadIdx.x == 31 && p.split > 1) {
      mbarrier_init(memory.sums_barrier, 1);
      mbarrier_arrive_expect_tx(memory.sums_barrier, Block::owned(p, rank) * p.split * Block::kBytes);
    }
    mbarrier_init_fence();
  } else if (threadIdx.x == kConsumerThreads) {
    tma_prefetch_map(&weight_map);
    tma_prefetch_map(&x_map);
  }
  __syncthreads();
  if (producer) {
    if constexpr (Shape::kConsumers == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x % 32 == 0) {
      produce_tiles<WM, WK, NT, kWeight>(p, (threadIdx.x - kConsumerThreads) / 32, &weight_map, &x_map, memory);
    } else {
      pdl_wait();
      pdl_trigger();
    }
    __syncwarp();
    if (p.split > 1) {
      cluster_arrive_relaxed();
      cluster_wait();
    }
    return;
  }
  if constexpr (Shape::kConsumers == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  pdl_wait();
  pdl_trigger();
  float sum[NT / 2];
  if (WK == 1 || group / WM == 0) {
    multiply_tiles<WM, WK, NT, kWeight, 0>(p, group % WM, memory, sum);
  } else {
    multiply_tiles<WM, WK, NT, kWeight, WK - 1>(p, group % WM, memory, sum);
  }

  int tid;  // anew: no register holds it during the products
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
  const int thread = tid % 128;
  const int wm = tid / 128 % WM;
  const int wk = tid / 128 / WM;

  // The k groups exchange halves of their sums over the stages.
  if constexpr (WK == 2) {
    constexpr int kHalf = Block::kTokenBlocks / 2;  // token blocks of k group 0; the other has the rest
    const uint32_t mine = memory.stages + (wm * 128 + thread) * 16;
    constexpr int kStride = WM * Block::kBytes;
    named_barrier_sync(1, kConsumerThreads);
#pragma unroll
    for (int b = 0; b < Block::kTokenBlocks; ++b) {
      if ((b < kHalf) == (wk == 1)) {
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(mine + b * kStride), "f"(sum[4 * b]),
                     "f"(sum[4 * b + 1]), "f"(sum[4 * b + 2]), "f"(sum[4 * b + 3])
                     : "memory");
      }
    }
    named_barrier_sync(1, kConsumerThreads);
#pragma unroll
    for (int b = 0; b < Block::kTokenBlocks; ++b) {
      if ((b < kHalf) == (wk == 0)) {
        const float4 v = load_shared_quad(mine + b * kStride);
        sum[4 * b] += v.x;
        sum[4 * b + 1] += v.y;
        sum[4 * b + 2] += v.z;
        sum[4 * b + 3] += v.w;
      }
    }
  }
  const auto owns_block = [&](int b) { return WK == 1 || (b < Block::kTokenBlocks / 2) == (wk == 0); };

  const int64_t token0 = static_cast<int64_t>(blockIdx.z) * NT;
  const TileStore store(p, blockIdx.y * Shape::kRows, token0, thread);
  if (p.split == 1) {
#pragma unroll
    for (int b = 0; b < Block::kTokenBlocks; ++b) {
      if (owns_block(b)) store(wm, b, make_float4(sum[4 * b], sum[4 * b + 1], sum[4 * b + 2], sum[4 * b + 3]));
    }
    return;
  }

  // Everybody has finished with its stages (relaxed: they were only read), and its barrier exists.
  cluster_arrive_relaxed();
  cluster_wait();
  int owner = wm * Block::kTokenBlocks / p.sum_part;
  int index = wm * Block::kTokenBlocks - owner * p.sum_part;
  const uint32_t my_slot = memory.stages + rank * p.sum_part * Block::kBytes + thread * 16;
#pragma unroll
  for (int b = 0; b < Block::kTokenBlocks; ++b) {
    if (owns_block(b)) {
      store_async_16(cluster_address(my_slot + index * Block::kBytes, owner),
                     cluster_address(memory.sums_barrier, owner),
                     make_float4(sum[4 * b], sum[4 * b + 1], sum[4 * b + 2], sum[4 * b + 3]));
    }
    if (++index == p.sum_part) index = 0, ++owner;
  }
  const int owned = Block::owned(p, rank);
  if (owned == 0) return;
  mbarrier_wait(memory.sums_barrier, 0);
#pragma unroll 1
  for (int i = tid / 128; i < owned; i += Shape::kConsumers) {
    // All loads first: one after the other would wait for each.
    float4 ranks[kMaxCluster];
#pragma unroll
    for (int r = 0; r < kMaxCluster; ++r) {
      if (r < p.split) ranks[r] = load_shared_quad(memory.stages + ((r * p.sum_part + i) * 128 + thread) * 16);
    }
    float4 v = ranks[0];
#pragma unroll
    for (int r = 1; r < kMaxCluster; ++r) {
      if (r < p.split) {
        v.x += ranks[r].x;
        v.y += ranks[r].y;
        v.z += ranks[r].z;
        v.w += ranks[r].w;
      }
    }
    const int block = rank * p.sum_part + i;
    store(WM == 1 ? 0 : block / Block::kTokenBlocks, WM == 1 ? block : block % Block::kTokenBlocks, v);
  }
}

}  // namespace hpc::router

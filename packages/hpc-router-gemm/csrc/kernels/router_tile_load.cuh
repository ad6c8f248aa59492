// Parts of router_tile.cuh: its shapes, its ring of stages, and the producers that fill it.
#pragma once

#include <cuda.h>

#include "hpc/mbarrier.cuh"
#include "hpc/pdl.cuh"
#include "hpc/tma.cuh"
#include "hpc/wgmma_ss.cuh"
#include "kernels/params.hpp"

namespace hpc::router {

constexpr int kTileFillers = 2;  // producer threads, of a warp each

template <int WM, int WK, int WN, int NT, Weight kWeight>
struct TileShape {
  static constexpr int kTerms = weight_terms(kWeight);
  static constexpr bool kSplit = weight_is_split(kWeight);
  static constexpr bool kChunks = weight_in_chunks(kWeight);
  // CTAs, neighbours in the cluster, that take turns to copy a stage's weights, or tokens, to both.
  static constexpr int kPair = weight_is_paired(kWeight) ? 2 : 1;
  static constexpr bool kPairsExperts = weight_pairs_experts(kWeight);
  static constexpr bool kFloat = kWeight != Weight::kBf16 && !kSplit;
  static constexpr int kRows = 64 * WM;
  static constexpr int kTileTokens = NT;
  static constexpr int kTokens = NT / WN;  // of a consumer
  static constexpr int kGroups = WK;       // consumers that share each stage's k
  static constexpr int kConsumers = WM * WK * WN;
  // Products in batches, router_tile_batch.cuh: where registers hold the fragments of two; but two k groups fill each
  // other's pauses where there are two terms.
  static constexpr bool kBatches =
      kFloat && ((kTerms == 3 && kTokens <= 128) || (kTerms == 2 && kTokens <= 64 && WK == 1));
  static constexpr int kBatchSteps = kTokens <= 64 ? 4 : 2;  // k16 steps of one
  // Their weights are read from shared memory a batch earlier than split. Not where another warpgroup works meanwhile,
  // or (64 x 104) another CTA of the SM.
  static constexpr bool kReadAhead = kBatches && kBatchSteps == 2 && kConsumers == 1 && kTokens != 104;
  // Whether a rank's blocks of a split sum are counted by two barriers, to add the first half while the rest comes.
  static constexpr bool kSumHalves = kSplit;
  // With several consumers, or batches, the producers are a whole warpgroup, so that it can give its registers away.
  static constexpr int kProducers = kConsumers == 1 && !kBatches ? 2 : 4;  // warps
  static constexpr int kThreads = 128 * kConsumers + 32 * kProducers;
  static constexpr int kMinCtas = kConsumers == 1 && !(kSplit && kTokens > 104) ? 2 : 1;  // of an SM
  // k16 steps of one accumulator: kPromoteBlocks blocks, or kPromote steps of a block.
  static constexpr int kPromoteBlocks = kTerms == 2 ? 2 : 1;
  static constexpr int kPromote = kTerms == 2 ? 8 : 4;
  static constexpr int kGroup = kTerms == 3 ? 4 : 1;  // k16 steps whose smaller terms come first
  // The same where terms are in memory, in k16 steps.
  static constexpr int kTermPromote = kTerms == 2 ? 16 : 4;
  static constexpr int kTermGroup = kTerms == 2 ? 1 : 4;
  static constexpr int kBlockK = kTileBlockK;  // 8 k16 steps of a consumer, or 4 of each of two
  static constexpr int kStageK = tile_stage_k(kRows, WK, NT, kWeight);
  static constexpr int kBlockStages = kBlockK / kStageK;
  // Whether tokens can have a ring of their own, of such stages.
  static constexpr bool kTwoRings = tile_has_two_rings(kRows, WK, NT, kWeight);
  static_assert(!kTwoRings || (kBatches && kStageK == 32), "multiply_batches() takes two rings");
  static constexpr int kTokenBytes = NT * 64 * 2;
  static constexpr int kBoxes = kFloat && kStageK == 64 ? 2 : 1;  // of weights in a stage
  static constexpr int kHalfBytes = kRows * 128;                  // one of them
  static constexpr int kTermBytes = kRows * kStageK * 2;          // of a term in memory, in a stage
  static constexpr int kWeightBytes = kSplit ? kTerms * kTermBytes : kHalfBytes * kBoxes;
  static constexpr int kStageBytes = tile_stage_bytes(kRows, WK, NT, kWeight);
  static constexpr int kCopyBytes = kWeightBytes + NT * kStageK * 2;
  static_assert(kStageBytes % 1024 == 0 && kTokens * kStageK * 2 % 512 == 0, "swizzled rows are aligned");
  // A CTA that has its SM for itself requests kAtOnce stages at once and the others of its ring kPace cycles apart:
  // such CTAs start at one time, and if each asked for all that it can hold, the last would wait for everybody's.
  static constexpr int kAtOnce = 2;
  // The successor may start when so many stages are left to request; 0: at once. See bring_others().
  static constexpr int kLeft = 0;
  static constexpr uint32_t kPace = kCopyBytes / 160;
};

// Descriptor of rows of 128 or 64 bytes in the swizzle of that width (8 rows are 1,024 or 512 bytes apart).
template <int StageK>
__device__ __forceinline__ uint64_t stage_descriptor(uint32_t smem) {
  if constexpr (StageK == 64) return wgmma_descriptor(smem);
  return (uint64_t{2} << 62) | (uint64_t{512 >> 4} << 32) | (uint64_t{1} << 16) | ((smem >> 4) & 0x3FFF);
}

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

__device__ __forceinline__ void store_shared_quad(uint32_t smem, float4 v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

__device__ __forceinline__ uint32_t load_shared_word(uint32_t smem) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(smem));
  return v;
}

// To all CTAs of the cluster whose bit of `mask` is set, at the same address in each, whose barrier counts it there.
__device__ __forceinline__ void tma_load_2d_multicast(uint32_t smem, const CUtensorMap* map, uint32_t barrier, int c0,
                                                      int c1, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(smem),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "h"(mask)
      : "memory");
}

// The same of four dimensions.
__device__ __forceinline__ void tma_load_4d_multicast(uint32_t smem, const CUtensorMap* map, uint32_t barrier, int c0,
                                                      int c1, int c2, int c3, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(smem),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(mask)
      : "memory");
}

__device__ __forceinline__ void tma_prefetch_4d(const CUtensorMap* map, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(c0), "r"(c1),
               "r"(c2), "r"(c3)
               : "memory");
}

// The row, of each 8 of its warp's 16, whose products are with a lane. Weights that consumers read are in an order of
// their own: with the natural one, rows 0 and 1 of the swizzle would meet in the same banks.
template <bool kNatural>
__device__ __forceinline__ int tile_lane_row(int lane) {
  return kNatural ? lane / 4 : 2 * (lane / 4 % 4) + lane / 16;
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
  // Of one token group, where it is wanted: says that the predecessor has ended.
  __device__ __forceinline__ uint32_t released() const { return sums_barrier + 16; }
};

// Where a CTA is: of each tile the `split` ranks are a cluster, or of two token or expert tiles' ranks in turn. Tiles
// that share what is not copied in pairs are neighbours in the grid.
template <typename Shape>
struct TilePlace {
  static __device__ __forceinline__ int member() { return blockIdx.x % Shape::kPair; }
  static __device__ __forceinline__ int rank() { return blockIdx.x / Shape::kPair; }
  static __device__ __forceinline__ uint32_t expert_tile() {
    return Shape::kPairsExperts ? blockIdx.z * Shape::kPair + member() : blockIdx.y;
  }
  static __device__ __forceinline__ uint32_t token_tile() {
    return Shape::kPairsExperts ? blockIdx.y : blockIdx.z * Shape::kPair + member();
  }
  // The CTA of the cluster that is rank `rank` of this tile.
  static __device__ __forceinline__ int cluster_rank(int rank) { return rank * Shape::kPair + member(); }
};

// First block of k of this CTA, and how many it has.
struct TileBlocks {
  int first, count;
  __device__ __forceinline__ TileBlocks(const TileParams& p, int rank) {
    first = rank * p.k_blocks + min(rank, p.k_extra);
    count = p.k_blocks + (rank < p.k_extra);
  }
};

// The thread of producer warp `warp`, 0 or 1: fills every second slot of the ring with this CTA's part of k, or, of two
// rings, that of the weights (0) or of the tokens. (One thread alone takes 0.1 us a stage.) A slot is always filled by
// the same thread: waiting by parity, it must not miss a phase.
template <typename Shape>
struct TileProducer {
  using Place = TilePlace<Shape>;

  const TileParams& p;
  int warp;
  const CUtensorMap* weight_map;
  const CUtensorMap* x_map;
  const TileMemory& memory;
  int total, k0, row0, token0;
  bool two_rings;

  __device__ __forceinline__ TileProducer(const TileParams& p, int warp, const CUtensorMap* weight_map,
                                          const CUtensorMap* x_map, const TileMemory& memory)
      : p(p), warp(warp), weight_map(weight_map), x_map(x_map), memory(memory) {
    const TileBlocks blocks(p, Place::rank());
    two_rings = Shape::kTwoRings && p.token_stages > 0;
    total = blocks.count * Shape::kBlockStages;
    k0 = blocks.first * Shape::kBlockK;
    row0 = Place::expert_tile() * Shape::kRows;
    token0 = Place::token_tile() * Shape::kTileTokens;
  }

  __device__ __forceinline__ void load_weight(int slot, int i) const {
    const uint32_t barrier = memory.full + slot * 8;
    const uint32_t target = memory.stages + slot * (two_rings ? Shape::kWeightBytes : Shape::kStageBytes);
    const int k = k0 + i * Shape::kStageK;
    mbarrier_arrive_expect_tx(barrier, two_rings ? Shape::kWeightBytes : Shape::kCopyBytes);
    // A pair: a box of all terms for both, by one of them. The first are requested before the other's barriers exist.
    if (Shape::kPair == 2 && !Shape::kPairsExperts && i >= Shape::kAtOnce) {
      if (i % 2 != Place::member()) return;
      if constexpr (Shape::kChunks) {
        tma_load_4d_multicast(target, weight_map, barrier, 0, row0, 0, k / 64, 3 << (blockIdx.x & ~1));
      } else {
        tma_load_3d_multicast(target, weight_map, barrier, k, row0, 0, 3 << (blockIdx.x & ~1));
      }
    } else if constexpr (Shape::kChunks) {  // a box of all terms
      tma_load_4d(target, weight_map, barrier, 0, row0, 0, k / 64);
    } else if constexpr (Shape::kSplit) {
      tma_load_3d(target, weight_map, barrier, k, row0, 0);
    } else if (Shape::kBoxes == 2 && p.weight_columns == 64) {  // the map has chunks of 32 columns, two to a copy
      tma_load_3d(target, weight_map, barrier, 0, row0, k / 32);
    } else {
      tma_load_3d(target, weight_map, barrier, k, row0, 0);
      if (Shape::kBoxes == 2) tma_load_3d(target + Shape::kHalfBytes, weight_map, barrier, k + 32, row0, 0);
    }
  }
  __device__ __forceinline__ void load_x(int slot, int i) const {
    const uint32_t target = memory.stages + slot * Shape::kStageBytes + Shape::kWeightBytes;
    const uint32_t barrier = memory.full + slot * 8;
    const int k = k0 + i * Shape::kStageK;
    if (Shape::kPairsExperts && i >= Shape::kAtOnce) {
      if (i % 2 == Place::member()) tma_load_2d_multicast(target, x_map, barrier, k, token0, 3 << (blockIdx.x & ~1));
    } else {
      tma_load_2d(target, x_map, barrier, k, token0);
    }
  }
  // Of the tokens' own ring, whose slots and barriers are behind those of the weights.
  __device__ __forceinline__ void load_tokens(int slot, int i) const {
    const uint32_t barrier = memory.full + (p.stages + slot) * 8;
    mbarrier_arrive_expect_tx(barrier, Shape::kTokenBytes);
    tma_load_2d(memory.stages + p.stages * Shape::kWeightBytes + slot * Shape::kTokenBytes, x_map, barrier, k0 + i * 64,
                token0);
  }
  __device__ __forceinline__ void bring_weight(int i) const {  // to L2
    const int k = k0 + i * Shape::kStageK;
    if constexpr (Shape::kChunks) {
      tma_prefetch_4d(weight_map, 0, row0, 0, k / 64);
    } else if (Shape::kBoxes == 2 && p.weight_columns == 64) {
      tma_prefetch_3d(weight_map, 0, row0, k / 32);
    } else {
      tma_prefetch_3d(weight_map, k, row0, 0);
      if (Shape::kBoxes == 2) tma_prefetch_3d(weight_map, k + 32, row0, 0);
    }
  }

  // Where this call leaves room for a cluster of the next one: that is there as soon as it may be, and until the
  // predecessor has ended brings the first `count` stages of the other expert tiles to L2. Let start at once, it would
  // take the memory's time from a call that still reads its own.
  __device__ __forceinline__ void bring_others(int count) const {
    if (blockIdx.y > 0 || blockIdx.z > 0) return;
#pragma unroll 1
    for (int i = Place::member(); i < min(count, total); i += Shape::kPair) {
#pragma unroll 1
      for (int tile = 1; tile < gridDim.y; ++tile) {
        if (mbarrier_test(memory.released(), 0)) return;
        tma_prefetch_4d(weight_map, 0, tile * Shape::kRows, 0, (k0 + i * Shape::kStageK) / 64);
      }
    }
  }

  // Whether two CTAs share an SM: then this one is there before its predecessor's end. It fills its ring then, after
  // the CTA's barrier, as waiting in start() would hold up the consumers instead.
  __device__ __forceinline__ bool starts_early() const { return Shape::kConsumers == 1 && p.l2_prefetch; }

  // Stages whose weights are requested before the predecessor's end. Where a CTA has its SM for itself, few: the first
  // tokens would queue behind them; but a call of small parts waits for memory, which has nothing else to do then (not
  // for more than that where two k groups of 104 or 128 tokens have three terms).
  __device__ __forceinline__ int ahead() const {
    constexpr bool kFew = Shape::kPair == 2 || (Shape::kGroups == 2 && Shape::kTerms == 3 && Shape::kTokens >= 104);
    return starts_early() ? kTileMaxStages : p.split >= 8 && !kFew ? 4 : 2;
  }

  // Before the CTA's first barrier, which takes time: this thread's slots of the ring, and mostly their first copies.
  __device__ __forceinline__ void start() const {
    tma_prefetch_map(warp == 0 ? weight_map : x_map);
    const int slots = p.stages + (two_rings ? p.token_stages : 0);
#pragma unroll 1
    for (int slot = warp; slot < slots; slot += kTileFillers) {
      mbarrier_init(memory.full + slot * 8, 1);
      mbarrier_init(memory.empty + slot * 8, 4 * Shape::kConsumers * Shape::kPair);
    }
    mbarrier_init_fence();
    if (!starts_early()) copy_first();
  }

  __device__ __forceinline__ void copy_first() const {
    const int early = min(p.stages, total);
    const int at_once = starts_early() ? early : min(early, Shape::kAtOnce);
    if (!p.prefetch) pdl_wait();
#pragma unroll 1
    for (int i = warp; i < min(early, ahead()); i += kTileFillers) load_weight(i, i);
    if constexpr (Shape::kSplit &&
                  Shape::kTerms == 2) {  // of the CTAs that share a stage's tokens, that of one expert tile
#pragma unroll 1
      for (int i = warp; i < min(early, p.token_prefetch); i += kTileFillers) {
        if (i % gridDim.y == blockIdx.y) tma_prefetch_2d(x_map, k0 + i * Shape::kStageK, token0);
      }
    }
    if (starts_early()) {
#pragma unroll 1
      for (int i = warp; i < total; i += kTileFillers) {
        const int turn = i / kTileFillers;  // what the CTAs of a row or column of tiles share is divided among them
        if (turn % gridDim.y == blockIdx.y) tma_prefetch_2d(x_map, k0 + i * Shape::kStageK, token0);
        if (i >= early && turn % gridDim.z == blockIdx.z) bring_weight(i);
      }
    }
    if (p.prefetch) pdl_wait();
    if constexpr (Shape::kLeft > 0) {
      if (warp == 0) mbarrier_arrive(memory.released());
    } else {
      pdl_trigger();
    }
#pragma unroll 1
    for (int i = warp; i < at_once; i += kTileFillers) load_x(i, i);
  }

  // Two rings, of a CTA that is there before its predecessor's end: all of one of them.
  __device__ __forceinline__ void fill_weights() const {
    const int early = min(p.stages, total);
    if (!p.prefetch) pdl_wait();
#pragma unroll 1
    for (int i = 0; i < early; ++i) load_weight(i, i);
#pragma unroll 1
    for (int i = early; i < total; ++i) {
      if (i % gridDim.z == blockIdx.z) bring_weight(i);
    }
    if (p.prefetch) pdl_wait();
    pdl_trigger();
    refill(memory.empty, p.stages, total, [&](int slot, int i) { load_weight(slot, i); });
  }
  __device__ __forceinline__ void fill_tokens() const {
    const int count = total / 2;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      if (i % gridDim.y == blockIdx.y) tma_prefetch_2d(x_map, k0 + i * 64, token0);
    }
    pdl_wait();
    pdl_trigger();
#pragma unroll 1
    for (int i = 0; i < min(p.token_stages, count); ++i) load_tokens(i, i);
    refill(memory.empty + p.stages * 8, p.token_stages, count, [&](int slot, int i) { load_tokens(slot, i); });
  }
  template <typename Load>
  __device__ __forceinline__ void refill(uint32_t empty, int stages, int count, const Load& load) const {
    uint32_t phase = 0;
#pragma unroll 1
    for (int first = stages; first < count; first += stages, phase ^= 1) {
#pragma unroll 1
      for (int slot = 0; slot < stages && first + slot < count; ++slot) {
        mbarrier_wait(empty + slot * 8, phase);
        load(slot, first + slot);
      }
    }
  }

  // Then the copies of all the rest.
  __device__ __forceinline__ void run() const {
    if (two_rings) return warp == 0 ? fill_weights() : fill_tokens();
    if (starts_early()) {
      copy_first();
    } else {
      const auto begin = static_cast<uint32_t>(clock());
#pragma unroll 1
      for (int i = warp + Shape::kAtOnce; i < min(p.stages, total); i += kTileFillers) {
        while (static_cast<uint32_t>(clock()) - begin < (i - Shape::kAtOnce + 1) * Shape::kPace) {
        }
        if (i >= ahead()) load_weight(i, i);
        load_x(i, i);
      }
    }
    uint32_t phase = 0;
#pragma unroll 1
    for (int first = p.stages; first < total; first += p.stages, phase ^= 1) {
#pragma unroll 1
      for (int slot = warp; slot < p.stages && first + slot < total; slot += kTileFillers) {
        mbarrier_wait(memory.empty + slot * 8, phase);
        load_weight(slot, first + slot);
        load_x(slot, first + slot);
        if (Shape::kLeft > 0 && first + slot >= total - Shape::kLeft) pdl_trigger();
      }
    }
    if constexpr (Shape::kLeft > 0) pdl_trigger();
  }
};

}  // namespace hpc::router

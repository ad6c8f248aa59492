// Router GEMM for many tokens: y[m, n] = x[m, k] weight[n, k]^T by wgmma, the fp32 weight split in registers.
//
// Tile    64 WM expert rows (the M of wgmma, A from registers) x NT tokens (its N, from shared memory). Grid (split,
//         expert tiles, token tiles); the `split` CTAs of a tile are one cluster, each with a part of k.
//         Pairs: those of two token tiles are, in turn, and copy weights for each other (TilePlace; grid (2 split,
//         expert tiles, token tiles / 2)), or those of two expert tiles tokens (2 split, token tiles, expert tiles /
//         2).
// Warps   WM x WK x WN consumer warpgroups, then producer warps, of which two fill the ring, a thread each every second
//         slot. A consumer has 64 rows, the tokens of its wn and the wk-th part of every stage's k. One consumer alone
//         leaves room for a second CTA on the SM: the next call's, which then starts, reads its weights and waits while
//         this one still works.
// Stages  k = 64 or 32 each: weight rows (fp32: boxes of 32 columns) in the 128-byte swizzle, and token rows in the
//         swizzle of their width. Where two CTAs of 64 x 64 share an SM, tokens have a ring of their own, of 64.
// Weight  fp32 or bf16: read and split by the consumers, as here, or in batches of 2 or 4 steps: router_tile_batch.cuh.
//         Terms in memory: router_tile_terms.cuh.
// Math    k16 steps. While a step's products run, the weights of the next are split and those after it read. Smaller
//         terms come first: in each step, or, with three terms, in each group of 4. The tensor core truncates each sum,
//         so the accumulator is moved to an ordinary fp32 sum, and restarted, every 16 of a consumer's steps for two
//         terms, else every 4.
// Sum     router_tile_sum.cuh: over the k groups in shared memory, then over the cluster (cluster.cuh) by ascending
//         ranks. Both lie over the stages: a cluster barrier after the products says that nobody needs them any more.
//         With sums_offset those of the cluster have memory of their own: a rank sends when it has finished, whoever
//         still multiplies. Of two token groups the first's have: they are sent while the second still multiplies.
// PDL     before pdl_wait() the first stages' weights are requested where params.prefetch allows it, and what follows
//         is brought to L2 where params.l2_prefetch says so, x too: that reads nothing, so it may still be written.
#pragma once

#include <cuda_bf16.h>

#include "hpc/cluster.cuh"
#include "hpc/mbarrier.cuh"
#include "hpc/pdl.cuh"
#include "hpc/wgmma_rs.cuh"
#include "kernels/router_tile_batch.cuh"
#include "kernels/router_tile_load.cuh"
#include "kernels/router_tile_sum.cuh"
#include "kernels/router_tile_terms.cuh"
#include "kernels/split.cuh"

namespace hpc::router {

// The weights of one k16 step of a stage as a lane's A fragment wants them: word i is row half i % 2, k half i / 2.
template <Weight kWeight>
struct RawFragment {
  float2 pairs[4];
};
template <>
struct RawFragment<Weight::kBf16> {
  uint32_t words[4];
};

template <int WM, Weight kWeight>
__device__ __forceinline__ void load_raw(uint32_t weights, uint32_t lane_offset, int step, RawFragment<kWeight>& raw) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kWeight == Weight::kBf16) {
      raw.words[i] = load_shared_word(weights + (lane_offset ^ ((2 * step + i / 2) << 4)) + i % 2 * 1024);
    } else {
      const uint32_t half = weights + step / 2 * (WM * 64 * 128);
      raw.pairs[i] = load_shared_pair(half + (lane_offset ^ ((step % 2 * 2 + i / 2) << 5)) + i % 2 * 1024);
    }
  }
}

// The products of consumer (wm, wk, wn), in sum[]. The place is not a template parameter: consumers run the same code,
// which takes half the instruction cache.
template <int WM, int WK, int WN, int NT, Weight kWeight>
__device__ __forceinline__ void multiply_tiles(const TileParams& p, int wm, int wk, int wn, const TileMemory& memory,
                                               float (&sum)[NT / WN / 2]) {
  using Shape = TileShape<WM, WK, WN, NT, kWeight>;
  constexpr int kTokens = Shape::kTokens;
  constexpr int kTerms = Shape::kTerms;
  constexpr int kSteps = Shape::kStageK / 16 / WK;  // k16 steps of a stage that are this consumer's
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;
  const int t = lane % 4;
  const int row = 64 * wm + 16 * warp + tile_lane_row<false>(lane);
  // This consumer's steps of a stage begin at step wk * kSteps (2 for the second of two).
  const uint32_t lane_offset =
      Shape::kFloat ? wk * (kSteps / 2) * Shape::kHalfBytes + row * 128 + (((t / 2) ^ (row & 7)) << 4) + (t & 1) * 8
                    : (row * 128 + ((row & 7) << 4) + t * 4) ^ (wk * kSteps * 2 << 4);
  // In blocks of 8 of this consumer's steps; where two share k the last may have 4.
  const int units = TileBlocks(p, TilePlace<Shape>::rank()).count;
  const int blocks = (units + WK - 1) / WK;
  const bool half = WK == 2 && units % 2 != 0;
  const auto release = [&](int slot) {
    if (lane == 0) mbarrier_arrive(memory.empty + slot * 8);
  };
  const auto weights_of = [&](int slot) { return memory.stages + slot * Shape::kStageBytes; };

#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) sum[i] = 0.0f;
  float part[kTokens / 2];
  // Fragments of the step being multiplied and of the next. Those of the first term are kept to the end of their
  // group, so the next group's first step has registers of its own.
  constexpr int kOthers = kTerms > 1 ? kTerms - 1 : 1;
  constexpr int kGroup = Shape::kGroup;
  uint32_t others[2][kOthers][4];
  uint32_t first[1 + kGroup][4];
  // Weights of the next step but one; where registers are short, of the next one.
  RawFragment<kWeight> raw;
  constexpr int kAhead = kTerms == 3 && kTokens >= 128 ? 1 : 2;
  const auto first_index = [](int step) { return step % kGroup == 0 ? step / kGroup % 2 : 1 + step % kGroup; };
  const auto split = [&](int step, int from) {  // words from and from + 1
#pragma unroll
    for (int i = from; i < from + 2; ++i) {
      if constexpr (kWeight == Weight::kBf16) {
        first[first_index(step)][i] = raw.words[i];
      } else {
        uint32_t terms[kTerms];
        split_pair<kTerms>(raw.pairs[i].x, raw.pairs[i].y, terms);
        first[first_index(step)][i] = terms[0];
#pragma unroll
        for (int term = 1; term < kTerms; ++term) others[step % 2][term - 1][i] = terms[term];
      }
    }
  };
  const auto before = [&](int slot) { return slot == 0 ? p.stages - 1 : slot - 1; };
  const uint32_t own_tokens = Shape::kWeightBytes + wn * kTokens * Shape::kStageK * 2 + wk * kSteps * 32;
  const auto tokens_of = [&](int slot) { return stage_descriptor<Shape::kStageK>(weights_of(slot) + own_tokens); };
  // Stages are freed by whole groups of steps.
  constexpr int kFreeSteps = kGroup > kSteps ? kGroup : kSteps;
  const auto release_group = [&](int last_slot) {
    if (kFreeSteps > kSteps) release(before(last_slot));
    release(last_slot);
  };
  Ring ring;     // of raw
  int slot = 0;  // of the step being multiplied
  mbarrier_wait(memory.full, 0);
  load_raw<WM, kWeight>(memory.stages, lane_offset, 0, raw);
  split(0, 0);
  split(0, 2);
  if (kAhead == 2) load_raw<WM, kWeight>(memory.stages, lane_offset, 1, raw);
  const auto fetch = [&](int step) {
    if (step % kSteps == 0) {
      ring.advance(1, p.stages);
      mbarrier_wait(memory.full + ring.slot * 8, ring.phase);
    }
    load_raw<WM, kWeight>(weights_of(ring.slot), lane_offset, step % kSteps, raw);
  };

  // One block of k: 8 of this consumer's steps, or `half` of them. kFresh: the accumulator starts anew; kMove: it is
  // moved to sum[] at the end of the block.
  const auto multiply_block = [&]<bool kFresh, bool kMove>(bool last, bool half) {
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      const bool ends_group = (step + 1) % kGroup == 0;
      if (step % kSteps == 0) slot = step == 0 ? slot : slot + 1 == p.stages ? 0 : slot + 1;
      const uint64_t x = tokens_of(slot) + 2 * (step % kSteps);
      const bool starts = kFresh && step % Shape::kPromote == 0;  // the accumulator
      wgmma_fence(part);
      wgmma_arrive();
      const auto multiply_first = [&] {
        const uint64_t x_before = kGroup > kSteps ? tokens_of(before(slot)) : tokens_of(slot);
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          const int at = step + 1 - kGroup + i;
          wgmma_rs_bf16<kTokens>(part, first[first_index(at)],
                                 (at / kSteps == step / kSteps ? tokens_of(slot) : x_before) + 2 * (at % kSteps),
                                 !(starts && kTerms == 1));
        }
      };
      if constexpr (kTerms > 1) {
        wgmma_rs_bf16<kTokens>(part, others[step % 2][kTerms - 2], x, !starts);
      } else {
        multiply_first();
      }
      wgmma_commit();
      wgmma_wait<1>();  // the step before: its registers and, at the end of a group, its shared memory are free
      if (step % kFreeSteps == 0 && (step > 0 || !kFresh)) release_group(before(slot));
      const bool ends = kMove && step == 3 && half;
      const bool more = !ends && (step + 1 < 8 || !last);
      if (kAhead == 1 && more) fetch(step + 1);
      if (more) split(step + 1, 0);
      if (kAhead == 1 && more) split(step + 1, 2);
      if constexpr (kTerms > 1) {
        wgmma_arrive();
        if constexpr (kTerms == 3) wgmma_rs_bf16<kTokens>(part, others[step % 2][0], x, true);
        if (ends_group) multiply_first();
        if (kTerms == 3 || ends_group) wgmma_commit();
      }
      if (kAhead == 2 && more) split(step + 1, 2);
      if (kAhead == 2 && !ends && !(kMove && step == 2 && half) && (step + 2 < 8 || !last)) fetch(step + 2);
      if ((kMove && (step + 1) % Shape::kPromote == 0) || ends) {
        wgmma_wait<0>();
        wgmma_fence(part);
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) sum[i] += part[i];
      }
      if (ends) break;
    }
    if (kMove) release_group(slot);  // else in the next block's first step
    slot = slot + 1 == p.stages ? 0 : slot + 1;
  };
  int block = 0;
  if constexpr (Shape::kPromoteBlocks == 2) {
#pragma unroll 1
    for (; block + 2 <= blocks; block += 2) {
      multiply_block.template operator()<true, false>(false, false);
      multiply_block.template operator()<false, true>(block + 2 == blocks, half && block + 2 == blocks);
    }
  }
#pragma unroll 1
  for (; block < blocks; ++block)
    multiply_block.template operator()<true, true>(block + 1 == blocks, half && block + 1 == blocks);
}

template <int WM, int WK, int WN, int NT, Weight kWeight>
__global__ void __launch_bounds__(TileShape<WM, WK, WN, NT, kWeight>::kThreads,
                                  TileShape<WM, WK, WN, NT, kWeight>::kMinCtas)
    router_tile_kernel(const TileParams p, const __grid_constant__ CUtensorMap weight_map,
                       const __grid_constant__ CUtensorMap x_map) {
  using Shape = TileShape<WM, WK, WN, NT, kWeight>;
  extern __shared__ uint8_t smem_raw[];
  TileMemory memory;
  memory.stages = (smem_address(smem_raw) + 1023) & ~1023u;
  memory.full = memory.stages + p.stages * Shape::kStageBytes;
  memory.empty = memory.full + kTileMaxSlots * 8;
  memory.sums_barrier = memory.empty + kTileMaxSlots * 8;
  const bool sums_apart = p.sums_offset > 0;
  const int group = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
  using Place = TilePlace<Shape>;
  const int rank = Place::rank();
  const bool producer = group == Shape::kConsumers;

  // Barriers by one thread of each warp: threads of a warp would take turns. Each producer makes those of the slots
  // that it fills, and requests its first weights before the CTA has met.
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
  TileProducer<Shape> fill(p, warp - 4 * Shape::kConsumers, &weight_map, &x_map, memory);
  if (threadIdx.x % 32 == 0) {
    if (producer) {
      if (fill.warp < kTileFillers) fill.start();
    } else if (warp == 0 && p.split > 1) {
      const int owned = p.sum_blocks + (rank < p.sum_extra);
#pragma unroll
      for (int i = 0; i < WN; ++i) {
        const uint32_t barrier = memory.sums_barrier + i * 16;
        const int half = Shape::kSumHalves ? p.sum_part / 2 : 0;  // of those, counted by a barrier of their own
        mbarrier_init(barrier, 1);
        mbarrier_arrive_expect_tx(barrier, (owned - half) * (p.split - 1) * kSumBlockBytes);
        if constexpr (Shape::kSumHalves) {
          mbarrier_init(barrier + 8, 1);
          mbarrier_arrive_expect_tx(barrier + 8, half * (p.split - 1) * kSumBlockBytes);
        }
      }
      mbarrier_init_fence();
    }
  }
  __syncthreads();
  // The barriers of all ranks exist before a sum is sent, and those of pairs before weights are.
  const bool meets = sums_apart || Shape::kPair == 2;
  if (meets) cluster_arrive_relaxed();
  if (producer) {
    if constexpr (Shape::kProducers == 4) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (meets) cluster_wait();
    if (threadIdx.x % 32 == 0 && fill.warp < kTileFillers) {
      fill.run();
    } else {
      pdl_wait();
      pdl_trigger();
    }
    __syncwarp();
    if ((!sums_apart || WN == 2) && p.split > 1) {
      cluster_arrive_relaxed();
      cluster_wait();
    }
    return;
  }
  if constexpr (Shape::kConsumers == 2) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  } else if constexpr (Shape::kProducers == 4) {  // two such CTAs fill an SM's registers
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  }
  if (meets) cluster_wait();
  pdl_wait();
  pdl_trigger();
  // What the end needs comes to the constant cache meanwhile.
  asm volatile("" ::"l"(p.y), "l"(p.y_stride), "l"(p.m), "r"(p.n), "r"(p.sum_part), "r"(p.sums_offset));
  float sum[Shape::kTokens / 2];
  const int wm = group % WM, wk = WK == 1 ? 0 : group / WM, wn = WN == 1 ? 0 : group / WM;
  if constexpr (Shape::kBatches) {
    if (Shape::kTwoRings && p.token_stages > 0) {
      multiply_batches<WM, WK, WN, NT, kWeight, Shape::kTwoRings>(p, wm, wk, wn, memory, sum);
    } else {
      multiply_batches<WM, WK, WN, NT, kWeight, false>(p, wm, wk, wn, memory, sum);
    }
  } else if constexpr (Shape::kSplit) {
    multiply_terms<WM, WK, WN, NT, kWeight>(p, wm, wk, wn, memory, sum);
  } else {
    multiply_tiles<WM, WK, WN, NT, kWeight>(p, wm, wk, wn, memory, sum);
  }

  // Anew: no register holds it during the products.
  int tid;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
  if (Shape::kConsumers == 1 || tid < 128) {
    TileEnd<WM, WK, WN, NT, kWeight, 0>(p, memory, tid % 128).finish(sum);
  } else {
    TileEnd<WM, WK, WN, NT, kWeight, Shape::kConsumers - 1>(p, memory, tid % 128).finish(sum);
  }
}

}  // namespace hpc::router

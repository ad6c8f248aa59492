// The products of router_tile.cuh where the weight's terms are bf16 matrices in memory: both operands of wgmma come
// from shared memory, and a consumer does nothing but issue them.
//
// The order of products, and so each score's bits, is that of multiply_tiles(): smaller terms first in each k16 step,
// or, with three terms, in each group of 4; the accumulator is moved to an ordinary fp32 sum every 16 of a consumer's
// steps for two terms, every 4 for three. Two accumulators take turns, so that the tensor cores have work meanwhile.
#pragma once

#include "hpc/cluster.cuh"
#include "hpc/mbarrier.cuh"
#include "hpc/wgmma_ss.cuh"
#include "kernels/router_tile_load.cuh"

namespace hpc::router {

template <int WM, int WK, int WN, int NT, Weight kWeight>
__device__ __forceinline__ void multiply_terms(const TileParams& p, int wm, int wk, int wn, const TileMemory& memory,
                                               float (&sum)[NT / WN / 2]) {
  using Shape = TileShape<WM, WK, WN, NT, kWeight>;
  constexpr int kTokens = Shape::kTokens;
  constexpr int kTerms = Shape::kTerms;
  constexpr int kRowBytes = Shape::kStageK * 2;
  constexpr int kSteps = Shape::kStageK / 16 / WK;  // k16 steps of a stage that are this consumer's
  constexpr int kGroup = Shape::kTermGroup;         // steps whose smaller terms come first
  // Stages whose products are issued together, and how many such turns share an accumulator.
  constexpr int kStages = kGroup > kSteps ? kGroup / kSteps : 1;
  constexpr int kTurns = Shape::kTermPromote / (kStages * kSteps);
  const int lane = threadIdx.x % 32;
  const uint32_t own_weights = wm * 64 * kRowBytes + wk * kSteps * 32;
  const uint32_t own_tokens = Shape::kWeightBytes + wn * kTokens * kRowBytes + wk * kSteps * 32;
  const int blocks = TileBlocks(p, TilePlace<Shape>::rank()).count;
  Ring ring;     // of the next stage
  int used = 0;  // slot of the next to be given back
  // Stages that will be copied to the slots of earlier ones. A pair gives back no others: who has ended may be gone.
  int refills = blocks * Shape::kBlockStages - p.stages;
  const auto release = [&] {
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      if (Shape::kPair == 1) {
        if (lane == 0) mbarrier_arrive(memory.empty + used * 8);
      } else if (--refills >= 0 && lane < 2) {  // to both of the pair
        mbarrier_arrive_cluster(cluster_address(memory.empty + used * 8, (blockIdx.x & ~1) + lane));
      }
      used = used + 1 == p.stages ? 0 : used + 1;
    }
  };

  const auto multiply = [&](float (&part)[kTokens / 2], bool fresh) {
    uint64_t weights[kStages], tokens[kStages];
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      mbarrier_wait(memory.full + ring.slot * 8, ring.phase);
      const uint32_t stage = memory.stages + ring.slot * Shape::kStageBytes;
      weights[i] = stage_descriptor<Shape::kStageK>(stage + own_weights);
      tokens[i] = stage_descriptor<Shape::kStageK>(stage + own_tokens);
      ring.advance(1, p.stages);
    }
    wgmma_fence(part);
    wgmma_arrive();
#pragma unroll
    for (int from = 0; from < kStages * kSteps; from += kGroup) {
#pragma unroll
      for (int i = 0; i < kTerms * kGroup; ++i) {  // all terms but the first of each step, then the first
        const bool others = i < (kTerms - 1) * kGroup;
        const int step = from + (others ? i / (kTerms - 1) : i % kGroup);
        const int term = others ? kTerms - 1 - i % (kTerms - 1) : 0;
        wgmma_ss<WgmmaType::kBf16, kTokens>(
            part, weights[step / kSteps] + term * (Shape::kTermBytes >> 4) + 2 * (step % kSteps),
            tokens[step / kSteps] + 2 * (step % kSteps), !fresh || from + i > 0);
      }
    }
    wgmma_commit();
  };
  int turns = blocks * (8 / WK / (kStages * kSteps));
  const auto add = [&](float (&part)[kTokens / 2]) {
    wgmma_fence(part);
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) sum[i] += part[i];
  };
  // Products of one accumulator; those of the one before it end meanwhile, and the sum takes it.
  const auto accumulate = [&](float (&now)[kTokens / 2], float (&before)[kTokens / 2], bool first) {
    const int count = min(turns, kTurns);
    turns -= count;
    multiply(now, true);
    if (!first) {
      wgmma_wait<1>();
      release();
      add(before);
    }
#pragma unroll 1
    for (int i = 1; i < count; ++i) {
      multiply(now, false);
      wgmma_wait<1>();
      release();
    }
  };
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) sum[i] = 0.0f;
  float even[kTokens / 2], odd[kTokens / 2];
  accumulate(even, odd, true);
#pragma unroll 1
  while (turns > 0) {
    accumulate(odd, even, false);
    if (turns == 0) {
      wgmma_wait<0>();
      return add(odd);
    }
    accumulate(even, odd, false);
  }
  wgmma_wait<0>();
  add(even);
}

}  // namespace hpc::router

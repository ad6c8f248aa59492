// The products of router_tile.cuh where the weight's terms are bf16 matrices in memory: both operands of wgmma come
// from shared memory, and a consumer does nothing but issue them.
//
// The order of products, and so each score's bits, is that of multiply_tiles(): smaller terms first in each k16 step,
// or, with three terms, in each group of 4; the accumulator is moved to an ordinary fp32 sum every 16 of a consumer's
// steps for two terms, every 4 for three.
#pragma once

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
  Ring ring;     // of the next stage
  int used = 0;  // slot of the next to be given back
  const auto release = [&] {
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      if (lane == 0) mbarrier_arrive(memory.empty + used * 8);
      used = used + 1 == p.stages ? 0 : used + 1;
    }
  };

#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) sum[i] = 0.0f;
  float part[kTokens / 2];
  const auto multiply = [&](bool fresh) {
    uint64_t weights[kStages], tokens[kStages];
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      mbarrier_wait(memory.full + ring.slot * 8, ring.phase);
      const uint32_t stage = memory.stages + ring.slot * Shape::kStageBytes;
      weights[i] = stage_descriptor<Shape::kStageK>(stage + own_weights);
      tokens[i] = stage_descriptor<Shape::kStageK>(stage + own_tokens);
      ring.advance(1, p.stages);
    }
    const auto product = [&](int step, int term, bool accumulate) {
      wgmma_ss<WgmmaType::kBf16, kTokens>(
          part, weights[step / kSteps] + term * (Shape::kTermBytes >> 4) + 2 * (step % kSteps),
          tokens[step / kSteps] + 2 * (step % kSteps), accumulate);
    };
    wgmma_fence(part);
    wgmma_arrive();
#pragma unroll
    for (int from = 0; from < kStages * kSteps; from += kGroup) {
#pragma unroll
      for (int step = from; step < from + kGroup; ++step) {
#pragma unroll
        for (int term = kTerms - 1; term > 0; --term) product(step, term, !fresh || step > 0 || term < kTerms - 1);
      }
#pragma unroll
      for (int step = from; step < from + kGroup; ++step) product(step, 0, true);
    }
    wgmma_commit();
  };
  int turns = TileBlocks(p, blockIdx.x).count * (8 / (kStages * kSteps));
#pragma unroll 1
  while (turns > 0) {
    const int count = min(turns, kTurns);
    turns -= count;
    multiply(true);
#pragma unroll 1
    for (int i = 1; i < count; ++i) {
      multiply(false);
      wgmma_wait<1>();
      release();
    }
    wgmma_wait<0>();
    wgmma_fence(part);
    release();
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) sum[i] += part[i];
  }
}

}  // namespace hpc::router

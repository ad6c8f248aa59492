// The products of router_tile.cuh for an fp32 weight in batches: of three terms for up to 128 tokens of a consumer, of
// two for few.
//
// Products whose weights come from registers don't overlap with those of an earlier batch: each batch takes some 70
// cycles more than its products. So all fragments of 4 k16 steps, or, where registers are short, of 2, are made while
// the batch before is multiplied. The order of products and sums, and so each score's bits, is that of
// multiply_tiles(): groups of 4 steps, of which the second batch of 2 has the products of the first term.
#pragma once

#include "hpc/mbarrier.cuh"
#include "hpc/wgmma_rs.cuh"
#include "kernels/router_tile_load.cuh"
#include "kernels/split.cuh"

namespace hpc::router {

// kTwoRings: tokens have a ring of their own, whose stage is a group, and weights are given back when they are split.
template <int WM, int WK, int WN, int NT, Weight kWeight, bool kTwoRings>
__device__ __forceinline__ void multiply_batches(const TileParams& p, int wm, int wk, int wn, const TileMemory& memory,
                                                 float (&sum)[NT / WN / 2]) {
  using Shape = TileShape<WM, WK, WN, NT, kWeight>;
  constexpr int kTokens = Shape::kTokens;
  constexpr int kTerms = Shape::kTerms;
  constexpr int kSteps = Shape::kStageK / 16 / WK;  // k16 steps of a stage that are this consumer's
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;
  const int t = lane % 4;
  const int row = 64 * wm + 16 * warp + tile_lane_row<false>(lane);
  const uint32_t lane_offset =
      wk * (kSteps / 2) * Shape::kHalfBytes + row * 128 + (((t / 2) ^ (row & 7)) << 4) + (t & 1) * 8;
  const uint32_t own_tokens =
      (kTwoRings ? 0 : Shape::kWeightBytes) + wn * kTokens * Shape::kStageK * 2 + wk * kSteps * 32;

  // Fragments of two batches, in turn. Those of the first term are kept to the end of their group of 4 steps; in
  // batches of 2 the group's second one needs no turn of its own.
  constexpr int kBatch = Shape::kBatchSteps;
  constexpr int kParts = 4 / kBatch;  // batches of a group
  uint32_t others[2][kBatch][kTerms - 1][4];
  uint32_t first[kParts == 1 ? 8 : 6][4];
  const auto turn = [](int group, int step) { return kParts == 1 ? group : step / kBatch; };
  const auto first_index = [](int group, int step) {
    return kParts == 1 ? 4 * group + step : step < 2 ? 2 * group + step : 2 + step;
  };
  constexpr int kTokenK = kTwoRings ? 64 : Shape::kStageK;
  constexpr int kTokenSteps = kTwoRings ? 4 : kSteps;
  constexpr int kTokenStages = 4 / kTokenSteps;  // of a group
  uint64_t tokens[2][kTokenStages];
  float2 raw[2][4];
  uint32_t stage = memory.stages;
  // The next slot to be read, whether it is known to be full (of two rings), and the next to be given back.
  struct Reader {
    int slot = 0, freed = 0;
    uint32_t phase = 0;
    bool full = false;
  };
  Reader weight_ring, token_ring;
  const int token_slots = kTwoRings ? p.token_stages : p.stages;
  const uint32_t first_token_slot = kTwoRings ? p.stages : 0;  // of all slots
  const uint32_t token_stages = memory.stages + (kTwoRings ? p.stages * Shape::kWeightBytes : 0);
  // Waits for the next slot. Of two rings: whether the one behind it is full is asked now, when nobody waits for it.
  const auto take = [&](Reader& ring, uint32_t full, int slots) {
    if (!ring.full) mbarrier_wait(full + ring.slot * 8, ring.phase);
    const int slot = ring.slot;
    ring.slot = slot + 1 == slots ? 0 : slot + 1;
    if (ring.slot == 0) ring.phase ^= 1;
    if constexpr (kTwoRings) ring.full = mbarrier_test(full + ring.slot * 8, ring.phase);
    return slot;
  };
  const auto give = [&](Reader& ring, uint32_t empty, int slots, uint32_t when = 0) {
    if (lane == 0) mbarrier_arrive(empty + ring.freed * 8 + when);
    ring.freed = ring.freed + 1 == slots ? 0 : ring.freed + 1;
  };

  const auto load = [&](int group, int step) {
    if (step % kSteps == 0) {
      const int slot = take(weight_ring, memory.full, p.stages);
      stage = memory.stages + slot * (kTwoRings ? Shape::kWeightBytes : Shape::kStageBytes);
      if constexpr (!kTwoRings) tokens[group][step / kSteps] = stage_descriptor<kTokenK>(stage + own_tokens);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t half = stage + step % kSteps / 2 * (WM * 64 * 128);
      raw[step % 2][i] = load_shared_pair(half + (lane_offset ^ ((step % 2 * 2 + i / 2) << 5)) + i % 2 * 1024);
    }
  };
  constexpr bool kReadAhead = Shape::kReadAhead;
  const auto read_ahead = [&](int group, int from) {
    if constexpr (kReadAhead) {
      load(group, from);
      load(group, from + 1);
    }
  };
  const auto prepare = [&](int group, int from) {  // the batch that begins at step `from`
    if (!kReadAhead) load(group, from);
#pragma unroll
    for (int step = from; step < from + kBatch; ++step) {
      if (!kReadAhead && step + 1 < from + kBatch) load(group, step + 1);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t terms[kTerms];
        split_pair<kTerms>(raw[step % 2][i].x, raw[step % 2][i].y, terms);
        first[first_index(group, step)][i] = terms[0];
#pragma unroll
        for (int term = 1; term < kTerms; ++term) others[turn(group, step)][step % kBatch][term - 1][i] = terms[term];
      }
      if constexpr (kTwoRings) {
        if ((step + 1) % kSteps != 0) continue;
        // 0, but known when the stage's last terms are: else the compiler splits behind the wait for other products.
        uint32_t all = 0;
#pragma unroll
        for (int s = step + 1 - kSteps; s <= step; ++s) {
#pragma unroll
          for (int i = 0; i < 4; ++i) all |= others[turn(group, s)][s % kBatch][kTerms - 2][i];
        }
        __syncwarp();
        give(weight_ring, memory.empty, p.stages, all & p.stages & 0x80000000u);
      }
    }
  };
  float part[kTokens / 2];
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) sum[i] = 0.0f;
  const auto multiply = [&](int group, int from, bool fresh) {
    if (kTwoRings && from == 0) {
      const int slot = take(token_ring, memory.full + first_token_slot * 8, token_slots);
      tokens[group][0] = stage_descriptor<kTokenK>(token_stages + slot * Shape::kTokenBytes + own_tokens);
    }
    if (from == 0) wgmma_fence(part);
    wgmma_arrive();
    const auto one = [&](int step, const uint32_t (&weights)[4], bool accumulate) {
      wgmma_rs_bf16<kTokens>(part, weights, tokens[group][step / kTokenSteps] + 2 * (step % kTokenSteps), accumulate);
    };
#pragma unroll
    for (int step = from; step < from + kBatch; ++step) {
      const int batch = turn(group, step);
      one(step, others[batch][step % kBatch][kTerms - 2], !fresh || step > 0);
      if constexpr (kTerms == 3) one(step, others[batch][step % kBatch][0], true);
      if (kTerms == 2) one(step, first[first_index(group, step)], true);
    }
    if (kTerms == 3 && from + kBatch == 4) {
#pragma unroll
      for (int step = 0; step < 4; ++step) one(step, first[first_index(group, step)], true);
    }
    wgmma_commit();
  };
  // The products of a group, while what follows is prepared.
  const auto run = [&](int group, bool fresh, bool more) {
    multiply(group, 0, fresh);
    if constexpr (kParts == 2) {
      prepare(group, 2);
      if (more) read_ahead(1 - group, 0);
      multiply(group, 2, fresh);
      wgmma_wait<1>();
    }
    if (more) prepare(1 - group, 0);
    if (more) read_ahead(1 - group, 2);
  };
  const auto finish = [&](bool move) {
    wgmma_wait<0>();
    wgmma_fence(part);
#pragma unroll
    for (int i = 0; i < kTokenStages; ++i) give(token_ring, memory.empty + first_token_slot * 8, token_slots);
    if (move) {
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) sum[i] += part[i];
    }
  };
  const int groups = TileBlocks(p, TilePlace<Shape>::rank()).count * (Shape::kBlockK / (64 * WK));
  read_ahead(0, 0);
  prepare(0, 0);
  read_ahead(0, 2);
#pragma unroll 1
  for (int i = 0;; i += 2) {
    const bool one = i + 1 == groups;
    run(0, kTerms == 3 || i % 4 == 0, !one);
    finish(kTerms == 3 || one);
    if (one) break;
    const bool last = i + 2 == groups;
    run(1, kTerms == 3, !last);
    finish(kTerms == 3 || last || i % 4 == 2);
    if (last) break;
  }
}

}  // namespace hpc::router

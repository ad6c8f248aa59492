// Consumers of the grouped GEMMs of large calls: tokens as M, weights as N; grouped_gemm.cuh has the plan.
//
// Shared memory holds what it does for the others (a stage's weights, rows of B, scales): only the operands' roles
// differ. A thread then has two rows of B and a stage's scales are two numbers for 64 or 128 sums each, where weights
// as M would need one for every fourth; and all columns of a row in four neighbouring lanes, so that the epilogue
// needs no shared memory. Rows of B are multiplied 64 at a time: for experts with many, by block (per tensor weights as
// M are as fast, and need less padding).
#pragma once

#include "kernels/grouped_consume.cuh"

namespace hpc::moe {

// What a warpgroup has of a task: one or two blocks of 64 rows of B by one unit of the weights.
struct TokenBlocks {
  uint32_t a[2], b[2];  // rows of B, weights: in 16 bytes from the stage's start, with kLowBits; kept rows: an address,
                        // of the first stage of K
  int rows[2];          // first of the block's rows, of its tile
  int unit[2];          // of the task's units, 0 or 1
  int tile;             // of the task's tiles, 0 or 1
  int live;             // rows of the tile that exist
};

// K loop of one task: acc[b] is block b; columns 8 j + 2 (lane % 4) + c of the unit's rows in shared memory.
template <class T, int kBlocks>
__device__ __forceinline__ void multiply_tokens(const GemmParams& p, typename T::Smem& s, typename T::Ring& ring,
                                                const TokenBlocks& at, float (&acc)[kBlocks][64]) {
  static_assert(T::kBlock);
  constexpr int kSteps = 4 / T::kGroups;
  constexpr int kKinds = T::kGemm == Gemm::kUp ? 2 : 1;  // of weight rows of a unit, by scale: gate and up
  const int lane = threadIdx.x % 32, num_k = (p.k_bytes + 127) / 128;
  const uint32_t full = smem_address(s.full), back = back_address<T>(smem_address(s.empty));
  const uint32_t stages = smem_address(s.stage) >> 4;
  int place[kBlocks];  // of the scale of the thread's first row; its second row's is 2 further
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    place[b] = at.tile * T::kWidth + scale_place(at.rows[b] + threadIdx.x % 128 / 32 * 16 + lane / 4);
#pragma unroll
    for (int i = 0; i < 64; ++i) acc[b][i] = 0.0f;
  }
  bool ready = false;  // the stage has been waited for
#pragma unroll 1
  for (int k = 0; k < num_k; ++k) {
    const uint32_t stage = ring.stage();
    if (!ready) arrived<T>(full, ring);
    const uint32_t base = stages + uniform(stage * (T::kStageBytes >> 4));
    const uint32_t rows = T::kKept ? uniform(k * (T::kWidth * 128 >> 4)) : base;
    const float* scale = s.scale[stage];
    ring.advance();
    // Scale group g; gives the stage back where it is its last, and looks for the next while products are on their way.
    const auto run = [&](int g, bool last) {
      float of[kBlocks][2][kKinds];  // by the thread's row
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const float* weights = scale + 2 * T::kWidth + g * 4 + at.unit[b] * 2;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int m = 0; m < kKinds; ++m) of[b][h][m] = scale[g * T::kWidth + place[b] + 2 * h] * weights[m];
        }
      }
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        float part[64];
        wgmma_fence(part);
        wgmma_arrive();
        multiply<WgmmaType::kE4m3, kSteps, false, 128>(part, rows + at.a[b] + 2 * kSteps * g,
                                                       base + at.b[b] + 2 * kSteps * g);
        wgmma_commit();
        if (last && b + 1 == kBlocks) ready = k + 1 < num_k && has_arrived<T>(full, ring);
        wgmma_wait<0>();
        wgmma_fence(part);
        if (last && b + 1 == kBlocks) give_back<T>(back + stage * 8);
#pragma unroll
        for (int i = 0; i < 64; ++i) {
          acc[b][i] = fmaf(part[i], of[b][i / 2 % 2][i * kKinds / 64], acc[b][i]);
        }
      }
    };
    const bool second = T::kGroups == 2 && (k + 1) * 128 <= p.k_bytes;
    run(0, !second);
    if constexpr (T::kGroups == 2) {
      if (second) run(1, true);
    }
  }
}

// K loop of one task of which a warpgroup has a unit for two blocks, its CTA's own, whole, and the third, by half of
// the columns (kThree). Half `mine` of a unit: gate-up: every other 8 rows, as many of gate as of up; down: 64 rows.
template <class T>
__device__ __forceinline__ void multiply_three(const GemmParams& p, typename T::Smem& s, typename T::Ring& ring,
                                               uint32_t at_a, uint32_t at_b, int unit, float (&acc)[64],
                                               float (&third)[32]) {
  constexpr int kSteps = 4 / T::kGroups;
  constexpr bool kUp = T::kGemm == Gemm::kUp;
  constexpr int kKinds = kUp ? 2 : 1;
  constexpr uint32_t kBlock = 64 * 128 >> 4, kStride = kUp ? 2048 : 1024;
  const int lane = threadIdx.x % 32, num_k = (p.k_bytes + 127) / 128;
  const uint32_t full = smem_address(s.full), back = back_address<T>(smem_address(s.empty));
  const uint32_t stages = smem_address(s.stage) >> 4;
  const uint32_t at_half = at_b + blockIdx.x % 2 * (kUp ? 1024 >> 4 : kBlock);
  const int place = scale_place(threadIdx.x % 128 / 32 * 16 + lane / 4);  // the third's is 64 further
#pragma unroll
  for (int i = 0; i < 64; ++i) acc[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < 32; ++i) third[i] = 0.0f;
  bool ready = false;  // the stage has been waited for
#pragma unroll 1
  for (int k = 0; k < num_k; ++k) {
    const uint32_t stage = ring.stage();
    if (!ready) arrived<T>(full, ring);
    const uint32_t base = stages + uniform(stage * (T::kStageBytes >> 4));
    const uint32_t rows = (T::kKept ? uniform(k * (T::kWidth * 128 >> 4)) : base) + at_a;
    const float* scale = s.scale[stage];
    ring.advance();
    const auto run = [&](int g, bool last) {
      const float* weights = scale + 2 * T::kWidth + g * 4 + unit * 2;
      float of[2][2][kKinds];  // by block and row
#pragma unroll
      for (int b = 0; b < 2; ++b) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int m = 0; m < kKinds; ++m) {
            of[b][h][m] = scale[g * T::kWidth + 64 * b + place + 2 * h] * weights[m];
          }
        }
      }
      float part[64], half[32];
      wgmma_fence(part);
      wgmma_arrive();
      multiply<WgmmaType::kE4m3, kSteps, false, 128>(part, rows + 2 * kSteps * g, base + at_b + 2 * kSteps * g);
      wgmma_commit();
      wgmma_fence(half);
      wgmma_arrive();
      multiply<WgmmaType::kE4m3, kSteps, false, 64, kStride>(half, rows + kBlock + 2 * kSteps * g,
                                                             base + at_half + 2 * kSteps * g);
      wgmma_commit();
      if (last) ready = k + 1 < num_k && has_arrived<T>(full, ring);
      wgmma_wait<1>();
      wgmma_fence(part);
#pragma unroll
      for (int i = 0; i < 64; ++i) acc[i] = fmaf(part[i], of[0][i / 2 % 2][i * kKinds / 64], acc[i]);
      wgmma_fence(acc);  // while the other is multiplied
      wgmma_wait<0>();
      wgmma_fence(half);
      if (last) give_back<T>(back + stage * 8);
#pragma unroll
      for (int i = 0; i < 32; ++i) third[i] = fmaf(half[i], of[1][i / 2 % 2][i * kKinds / 32], third[i]);
    };
    const bool second = T::kGroups == 2 && (k + 1) * 128 <= p.k_bytes;
    run(0, !second);
    if constexpr (T::kGroups == 2) {
      if (second) run(1, true);
    }
  }
}

// kSpread: K loop of a warpgroup that has a unit of a tile of 65 to 96 rows: of its first 64, and of the others, of
// which a thread has one.
template <class T>
__device__ __forceinline__ void multiply_spread(const GemmParams& p, typename T::Smem& s, typename T::Ring& ring,
                                                uint32_t at_a, uint32_t at_b, int unit, float (&acc)[64],
                                                float (&more)[32]) {
  constexpr int kSteps = 4 / T::kGroups;
  constexpr uint32_t kBlock = 64 * 128 >> 4;
  const int lane = threadIdx.x % 32, num_k = (p.k_bytes + 127) / 128;
  const uint32_t full = smem_address(s.full), back = back_address<T>(smem_address(s.empty));
  const uint32_t stages = smem_address(s.stage) >> 4;
  const int place = scale_place(threadIdx.x % 128 / 32 * 16 + lane / 4);
#pragma unroll
  for (int i = 0; i < 64; ++i) acc[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < 32; ++i) more[i] = 0.0f;
  bool ready = false;  // the stage has been waited for
#pragma unroll 1
  for (int k = 0; k < num_k; ++k) {
    const uint32_t stage = ring.stage();
    if (!ready) arrived<T>(full, ring);
    const uint32_t base = stages + uniform(stage * (T::kStageBytes >> 4));
    const float* scale = s.scale[stage];
    ring.advance();
    const auto run = [&](int g, bool last) {
      const float weight = scale[2 * T::kWidth + g * 4 + unit * 2], *rows = scale + g * T::kWidth + place;
      const float of[2] = {rows[0] * weight, rows[2] * weight}, of_more = rows[64] * weight;
      float part[64];
      wgmma_fence(part);
      wgmma_arrive();
      multiply<WgmmaType::kE4m3, kSteps, false, 128>(part, base + at_a + 2 * kSteps * g, base + at_b + 2 * kSteps * g);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_fence(part);
#pragma unroll
      for (int i = 0; i < 64; ++i) acc[i] = fmaf(part[i], of[i / 2 % 2], acc[i]);
      wgmma_fence(part);
      wgmma_arrive();
      multiply<WgmmaType::kE4m3, kSteps, false, 128>(part, base + at_a + kBlock + 2 * kSteps * g,
                                                     base + at_b + 2 * kSteps * g);
      wgmma_commit();
      if (last) ready = k + 1 < num_k && has_arrived<T>(full, ring);
      wgmma_wait<0>();
      wgmma_fence(part);
      if (last) give_back<T>(back + stage * 8);
#pragma unroll
      for (int i = 0; i < 32; ++i) more[i] = fmaf(part[i / 2 * 4 + i % 2], of_more, more[i]);
    };
    const bool second = T::kGroups == 2 && (k + 1) * 128 <= p.k_bytes;
    run(0, !second);
    if constexpr (T::kGroups == 2) {
      if (second) run(1, true);
    }
  }
}

// In 16 bytes, with kLowBits: where the kept rows of B of a task lie, by the parity of the task.
template <class T>
__device__ __forceinline__ uint32_t kept_rows(typename T::Smem& s, int parity) {
  if constexpr (T::kKept) return uniform(kLowBits + (smem_address(s.rows[parity]) >> 4));
  return 0;
}

// Gives them back, a warp.
template <class T>
__device__ __forceinline__ void give_rows_back(typename T::Smem& s, int parity) {
  if constexpr (T::kKept) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(smem_address(&s.read[parity]));
  }
}

// Consumer warps. `Epilogue::run<kBlocks>(p, s, task, first unit, blocks, group, acc)` stores the blocks,
// `run_three(p, s, task, first unit, group, tasks of three before, acc, third)` those of kThree.
template <class T, class Epilogue>
__device__ __forceinline__ void consume_tokens(const GemmParams& p, typename T::Smem& s) {
  const int group = uniform(threadIdx.x / 128);
  const uint32_t full = smem_address(s.full);
  constexpr uint32_t kUnit = kUnitBytes >> 4, kHalfTile = 64 * 128 >> 4;
  Epilogue::prepare(p, s);
  typename T::Ring ring;
  [[maybe_unused]] int threes = 0;
#pragma unroll 1
  for (int turn = 0;; ++turn) {
    mbarrier_wait(full + ring.stage() * 8, ring.phase());
    const TurnTask& task = s.turns[turn % kTurns];
    if (task.width == 0) break;
    const int rows = task.rows;
    if (rows == 0) {  // a guess that was wrong, or a task of the cluster's other CTA alone
      skip_stages<T>(s, ring, T::kClusters && task.units == 0 ? task_stages<T>(p, task) : task.units);
      give_rows_back<T>(s, turn % 2);
      continue;
    }
    if constexpr (T::kThrees) {
      if (task.expert & kThree) {
        const uint32_t at_a = T::kKept ? kept_rows<T>(s, turn % 2) : kLowBits + 2 * kUnit;
        const uint32_t at_b = uniform(kLowBits + group * kUnit);
        const int pairs = T::kKept ? task.second_rows : 1;
#pragma unroll 1
        for (int pair = 0; pair < pairs; ++pair) {
          float acc[1][64], third[32];
          multiply_three<T>(p, s, ring, at_a, at_b, group, acc[0], third);
          if (pair + 1 == pairs) give_rows_back<T>(s, turn % 2);
          Epilogue::run_three(p, s, task, task.unit + 2 * pair, group, threes++, acc, third);
        }
        continue;
      }
    }
    if constexpr (T::kSpread) {
      if (task.units == 2 && rows > 64 && rows <= 96) {
        float acc[1][64], more[32];
        multiply_spread<T>(p, s, ring, kLowBits + 2 * kUnit, uniform(kLowBits + group * kUnit), group, acc[0], more);
        Epilogue::run_spread(p, s, task, group, acc, more);
        continue;
      }
    }
    const bool two_tiles = T::kTwoTiles && task.second_rows > 0;
    const bool split = !two_tiles && task.units == 2 && rows <= 64;  // a unit a warpgroup
    if (group > 0 && task.units == 1 && !two_tiles && rows <= 64) {
      skip_stages<T>(s, ring, task_stages<T>(p, task));
      give_rows_back<T>(s, turn % 2);
      continue;
    }
    TokenBlocks at;
    at.tile = two_tiles ? group : 0;
    at.live = two_tiles && group ? task.second_rows : rows;
    const bool both = two_tiles ? at.live > 64 : (task.units == 2 && !split);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const int half = two_tiles ? b : (split ? 0 : group);
      at.unit[b] = two_tiles || task.units == 1 ? 0 : (split ? group : b);
      at.rows[b] = 64 * half;
      at.a[b] = half * kHalfTile +
                (T::kKept ? kept_rows<T>(s, turn % 2) : uniform(kLowBits + (two_tiles && group ? kUnit : 2 * kUnit)));
      at.b[b] = uniform(kLowBits + at.unit[b] * kUnit);
    }
    const int pairs = T::kKept ? task.second_rows : 1;
    const auto run = [&]<int kBlocks>() {
#pragma unroll 1
      for (int pair = 0; pair < pairs; ++pair) {
        float acc[kBlocks][64];
        multiply_tokens<T, kBlocks>(p, s, ring, at, acc);
        if (pair + 1 == pairs) give_rows_back<T>(s, turn % 2);
        Epilogue::template run<kBlocks>(p, s, task, task.unit + 2 * pair, at, group, acc);
      }
    };
    if (uniform(both)) {
      run.template operator()<2>();
    } else {
      run.template operator()<1>();
    }
  }
}

}  // namespace hpc::moe

// Down kernel for short rows of w2 (I of kShortK), in token tiles of 32 or 64 rows with weights as M: y = h * w2^T for
// every row, bf16; what down.cuh's kernel does, with the same bits.
//
// A row of w2 is 192 bytes. In boxes of 128 bytes of K a task takes two stages, the second half empty, and two rows
// five requests for their three lines. Here a stage is all of K: the 384 bytes of rows 2 p and 2 p + 1 of w2 come as
// three whole lines, line j of all pairs p side by side. Even and odd rows are an m64 tile each: K of the even ones is
// line 0 and the first half of line 1, of the odd ones the second half of line 1 and line 2. A step of 32 of K lies in
// one line, and wgmma takes any step of any row of 128 bytes: the same products in the same order.
//
// Grid: one CTA an SM, persistent. 384 threads: two consumer warpgroups with a unit (128 columns of H) each; four
// producer warps, each of which finds the tasks (grouped_tasks.cuh) for itself, one a lane. Two bring weights, of a
// unit each, by the lane that found the task; one rows of h, 8 a lane, and publishes tasks; one the rows' last 64 bytes
// and (block) the scales: a copy waits for its descriptor's registers, so one warp issuing all would be late.
//
// Shared memory: two rings, of weights (48 KB a stage; barriers of each unit: full[u][s], the bringing lane's arrival
// and bytes, empty[u][s], one a warp of warpgroup u) and of rows of h (their first 128 bytes; the last 64, as rows of
// 128) with scales (rows_full[s], the publishing lane's arrival and bytes, block: one arrival a lane of the last warp,
// when its scales have landed; rows_empty[s], one a consumer warp); published tasks.
//
// The tensor map puts weight row 32 w + 4 g + 2 h + m of a unit at row 16 w + 8 h + g of tile m: a thread (warp w, lane
// group g) has four neighbouring columns of each of its tokens, as in down.cuh. PDL: reads the index and fills its
// stages with weights before it waits for h; the warps of weights wait at their end.
#pragma once

#include "kernels/grouped_consume.cuh"
#include "kernels/grouped_tasks.cuh"

namespace hpc::moe {

constexpr int kShortK = kShortColumns, kShortLines = 3, kShortGroups = 3, kShortThreads = kConsumers + 128;
constexpr int kShortUnitBytes = 128 * kShortK;

template <int kWidth, bool kBlock>
struct ShortSmem {
  static_assert(kWidth == 32 || kWidth == 64);
  static constexpr int kStages = kWidth == 64 && kBlock ? 3 : 4, kRowStages = kWidth == 64 && !kBlock ? 2 : 3;
  static constexpr int kScales = kShortGroups * kWidth + 8;  // floats: rows [group][width], weights [group][unit]
  static constexpr int kBytes = 2 * kShortUnitBytes, kRowBytes = 2 * kWidth * 128;
  alignas(1024) uint8_t stage[kStages][kBytes];
  alignas(1024) uint8_t rows[kRowStages][kRowBytes];
  alignas(16) float scale[kBlock ? kRowStages : 1][kBlock ? kScales : 1];
  alignas(16) TurnTask turns[kTurns];
  alignas(8) uint64_t full[2][kStages];  // of a unit
  uint64_t empty[2][kStages];
  uint64_t rows_full[kRowStages], rows_empty[kRowStages];
};
template <int kWidth, bool kBlock>
constexpr int kShortSmemBytes = sizeof(ShortSmem<kWidth, kBlock>) + 1024;
static_assert(kShortSmemBytes<32, true> <= 232448 && kShortSmemBytes<64, true> <= 232448, "227 KB a CTA");

// A producer warp's tasks, 32 found at a time, one a lane: run(turn, lane that has it, found) until it says false.
// `first`: called when the first have been found.
template <class T, class First, class Run>
__device__ __forceinline__ void with_tasks(const GemmParams& p, First first, Run run) {
  const Schedule<T> schedule(p, p.routing.tile_offsets[p.experts], T::kTensor ? *p.act_scale : 1.0f);
  TurnTask found{};
  int base = 0;
#pragma unroll 1
  for (int turn = 0;; ++turn) {
    if (turn - base == 32 || turn == 0) {
      base = turn;
      found = schedule.at(base + static_cast<int>(threadIdx.x) % 32);
      if (turn == 0) first();
    }
    if (!run(turn, turn - base, found)) break;
  }
}

// A warp that brings weights, of unit `u` of each task; each lane those of the task that it found.
template <class T>
__device__ __forceinline__ void produce_short_weights(const GemmParams& p, const CUtensorMap* map,
                                                      ShortSmem<T::kWidth, T::kBlock>& s, int u) {
  using Smem = ShortSmem<T::kWidth, T::kBlock>;
  const int lane = threadIdx.x % 32;
  const uint32_t full = smem_address(s.full[u]), empty = smem_address(s.empty[u]);
  const uint32_t stages = smem_address(s.stage) + u * kShortUnitBytes;
  const uint64_t policy = p.evict_first ? l2_evict_first() : l2_evict_normal();
  StageRing<Smem::kStages> head;
  const auto bring = [&](int, int at, const TurnTask& found) {
    if (__shfl_sync(~0u, found.width, at) == 0) return false;
    if (lane == at) {
      const int row = found.expert * (p.weight_rows / 32) + found.unit * 4;
      const uint32_t barrier = full + head.stage() * 8;
      mbarrier_wait(empty + head.stage() * 8, head.phase() ^ 1);
      if (u < found.units) {
        mbarrier_arrive_expect_tx(barrier, kShortUnitBytes);
        for (int j = 0; j < kShortLines; ++j) {
          tma_load_5d(stages + head.stage() * Smem::kBytes + j * 8192, map, barrier, 0, 0, 0, row + 4 * u, j, policy);
        }
      } else {
        mbarrier_arrive(barrier);
      }
    }
    __syncwarp();
    head.advance();
    return true;
  };
  with_tasks<T>(p, [] {}, bring);
  pdl_wait();  // no thread ends before
}

// Two warps that bring rows of h: `half` 0 their first 128 bytes, and publishes tasks; 1 the last 64, and the scales.
template <class T>
__device__ __forceinline__ void produce_short_rows(const GemmParams& p, const CUtensorMap* h_map,
                                                   ShortSmem<T::kWidth, T::kBlock>& s, int half) {
  using Smem = ShortSmem<T::kWidth, T::kBlock>;
  const int lane = threadIdx.x % 32;
  const uint32_t full = smem_address(s.rows_full), empty = smem_address(s.rows_empty);
  StageRing<Smem::kRowStages> head;
  const auto first = [] {
    pdl_wait();
    pdl_trigger();
  };
  const auto bring = [&](int turn, int at, const TurnTask& found) {
    if (half == 0) {
      if (lane == at) s.turns[turn % kTurns] = found;
      __syncwarp();
    }
    const auto field = [&](int value) { return __shfl_sync(~0u, value, at); };
    const int width = field(found.width), rows = field(found.rows), row = field(found.row);
    mbarrier_wait(empty + head.stage() * 8, head.phase() ^ 1);
    const uint32_t barrier = full + head.stage() * 8;
    const int eights = (rows + kRowsBox - 1) / kRowsBox;
    if (half == 0 && lane == at) {  // the task is published
      mbarrier_arrive_expect_tx(barrier, width == 0 ? 0 : eights * kRowsBox * 256);
    }
    if (width == 0) {
      if (T::kBlock && half == 1) mbarrier_arrive(barrier);
      return false;
    }
    __syncwarp();
    if (lane < eights) {
      const uint32_t to = smem_address(s.rows[head.stage()]) + (half * T::kWidth + lane * kRowsBox) * 128;
      tma_load_2d(to, h_map, barrier, half * 128, row + lane * kRowsBox);
    }
    if (T::kBlock && half == 1) {
      const uint32_t scales = smem_address(s.scale[head.stage()]);
      const int expert = field(found.expert), unit = field(found.unit), units = field(found.units);
#pragma unroll 1
      for (int i = lane; i < rows * kShortGroups; i += 32) {
        const int r = i / kShortGroups, g = i - r * kShortGroups;
        cp_async_4(scales + (g * T::kWidth + scale_place(r)) * 4,
                   p.b_scale + static_cast<int64_t>(row + r) * p.b_scale_stride + g);
      }
      if (lane < units * kShortGroups) {
        const int u = lane / kShortGroups, g = lane - u * kShortGroups;
        cp_async_4(scales + (kShortGroups * T::kWidth + 2 * g + u) * 4,
                   p.w_scale + (static_cast<int64_t>(expert) * p.w_scale_rows + unit + u) * p.w_scale_cols + g);
      }
      cp_async_arrive(barrier);
    }
    head.advance();
    return true;
  };
  with_tasks<T>(p, first, bring);
}

template <class T, bool kKeep, int N>
__device__ __forceinline__ void consume_short(const GemmParams& p, const TurnTask& task, int group, uint32_t a,
                                              uint32_t b, uint32_t back, uint32_t rows_back,
                                              [[maybe_unused]] const float* scales) {
  constexpr uint32_t kLine = 8192 >> 4;
  float acc[2][N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) acc[0][i] = acc[1][i] = 0.0f;
  const auto multiply = [&](float (&d)[N / 2], int m, int step, bool accumulate) {
    const int from = m * (kShortK / 32) + step;  // of the pair's rows
    wgmma_ss<WgmmaType::kE4m3, N>(d, descriptor(a + from / 4 * kLine + 2 * (from % 4)),
                                  descriptor(b + step / 4 * (T::kWidth * 128 >> 4) + 2 * (step % 4)), accumulate);
  };
  if constexpr (T::kTensor) {
    wgmma_fence(acc[0]);
    wgmma_fence(acc[1]);
    wgmma_arrive();
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int step = 0; step < kShortK / 32; ++step) multiply(acc[m], m, step, true);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_fence(acc[0]);
    wgmma_fence(acc[1]);
  } else {
    float first[N / 2], second[N / 2];
#pragma unroll
    for (int g = 0; g < kShortGroups; ++g) {
      wgmma_fence(first);
      wgmma_arrive();
      multiply(first, 0, 2 * g, false);
      multiply(first, 0, 2 * g + 1, true);
      wgmma_commit();
      wgmma_fence(second);
      wgmma_arrive();
      multiply(second, 1, 2 * g, false);
      multiply(second, 1, 2 * g + 1, true);
      wgmma_commit();
      const float* rows_of = scales + g * T::kWidth + 4 * (threadIdx.x % 4);
      const float weight = scales[kShortGroups * T::kWidth + 2 * g + group];
      wgmma_wait<1>();
      wgmma_fence(first);
      promote<true, N>(acc[0], first, weight, rows_of);
      wgmma_wait<0>();
      wgmma_fence(second);
      promote<true, N>(acc[1], second, weight, rows_of);
    }
  }
  const int row = task.row, rows = task.rows, unit = task.unit + group;
  const float scale = T::kTensor ? task.scale : 1.0f;
  __syncwarp();
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  if (lane == 0) {
    mbarrier_arrive(back);
    mbarrier_arrive(rows_back);
  }
  const uint64_t policy = out_policy<kKeep>();
  auto* out = static_cast<__nv_bfloat16*>(p.out) + static_cast<int64_t>(row) * p.out_columns + unit * 128 + warp * 32 +
              lane / 4 * 4;
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    const int token = i / 2 * 8 + 2 * (lane % 4) + i % 2, at = i / 2 * 4 + i % 2;
    if (token < rows) {
      const __nv_bfloat162 four[2] = {__floats2bfloat162_rn(acc[0][at] * scale, acc[1][at] * scale),
                                      __floats2bfloat162_rn(acc[0][at + 2] * scale, acc[1][at + 2] * scale)};
      store_out<kKeep>(out + static_cast<int64_t>(token) * p.out_columns, *reinterpret_cast<const uint2*>(four),
                       policy);
    }
  }
}

template <Quant kQuant, int kWidth, bool kKeep = false>  // kKeep: y leaves L2 last
__global__ void __launch_bounds__(kShortThreads, 1)
    down_short_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ CUtensorMap h_map,
                      const __grid_constant__ GemmParams p) {
  using T = Traits<Gemm::kDown, kQuant, true, kWidth>;
  using Smem = ShortSmem<kWidth, T::kBlock>;
  extern __shared__ uint8_t raw[];
  auto& s = *reinterpret_cast<Smem*>(raw + (-smem_address(raw) & 1023));
  if (threadIdx.x == 0) {
    tma_prefetch_map(&map);
    for (int i = 0; i < 2 * Smem::kStages; ++i) {
      mbarrier_init(smem_address(&s.full[0][0]) + i * 8, 1);
      mbarrier_init(smem_address(&s.empty[0][0]) + i * 8, 128 / 32);
    }
    for (int i = 0; i < Smem::kRowStages; ++i) {
      mbarrier_init(smem_address(&s.rows_full[i]), T::kBlock ? 33 : 1);
      mbarrier_init(smem_address(&s.rows_empty[i]), kConsumers / 32);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    if (threadIdx.x < kConsumers + 64) {
      produce_short_weights<T>(p, &map, s, threadIdx.x / 32 % 2);
    } else {
      produce_short_rows<T>(p, &h_map, s, threadIdx.x / 32 % 2);
    }
    return;
  }
  pdl_wait();  // nothing may be stored before
  pdl_trigger();
  const int group = uniform(threadIdx.x / 128);
  StageRing<Smem::kStages> ring;
  StageRing<Smem::kRowStages> rows;
#pragma unroll 1
  for (int turn = 0;; ++turn, ring.advance(), rows.advance()) {
    mbarrier_wait(smem_address(s.rows_full) + rows.stage() * 8, rows.phase());
    const TurnTask& task = s.turns[turn % kTurns];
    if (task.width == 0) break;
    const uint32_t place = (group * Smem::kStages + ring.stage()) * 8, back = smem_address(s.empty) + place;
    const uint32_t rows_back = smem_address(s.rows_empty) + rows.stage() * 8;
    if (group >= task.units) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        mbarrier_arrive(back);
        mbarrier_arrive(rows_back);
      }
      continue;
    }
    mbarrier_wait(smem_address(s.full) + place, ring.phase());
    const uint32_t base = (smem_address(s.stage) >> 4) + uniform(ring.stage() * (Smem::kBytes >> 4));
    const uint32_t a = base + uniform(kLowBits + group * (kShortUnitBytes >> 4)),
                   b = (smem_address(s.rows) >> 4) + uniform(kLowBits + rows.stage() * (Smem::kRowBytes >> 4));
    const auto run = [&]<int N>() {
      consume_short<T, kKeep, N>(p, task, group, a, b, back, rows_back, s.scale[T::kBlock ? rows.stage() : 0]);
    };
    with_width<T>(task.width, run);
  }
}

}  // namespace hpc::moe

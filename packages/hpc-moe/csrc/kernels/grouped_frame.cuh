// Tasks, producers and roles of the grouped GEMMs; grouped_gemm.cuh has the plan and the K loop.
//
// A task found when its turn comes takes three dependent loads, and its rows a fourth: 2 us in which a CTA asks for no
// weights. So each producer warp finds 32 tasks at once, one a lane, and asks for a tile's rows one task early; each
// consumer warpgroup finds 8 at once; and where the last round would occupy less than half the CTAs, its pairs are
// split into their units (Schedule).
#pragma once

#include "kernels/grouped_gemm.cuh"

namespace hpc::moe {

// The tasks of a call, in the order in which the CTAs draw them: pairs of units, all of an expert neighbours, pair
// outermost, then token tile. Then single units: of the pairs that would start a round of which less than half the CTAs
// have a task (kSplit), or, where the number of units is odd, of the last unit, which fills that round as well. Among
// the pairs these would give every other CTA half the work.
template <bool kSplit>
struct Schedule {
  const GemmParams& p;
  int tiles, whole, split;  // token tiles; tasks of pairs; pairs that are split

  __device__ __forceinline__ explicit Schedule(const GemmParams& params)
      : p(params), tiles(params.routing.tile_offsets[params.experts]) {
    const int pairs = tiles * (p.units / 2), rest = pairs % static_cast<int>(gridDim.x);
    split = kSplit && p.units % 2 == 0 && 2 * rest <= static_cast<int>(gridDim.x) ? rest : 0;
    whole = pairs - split;
  }

  // Tasks of this CTA.
  __device__ __forceinline__ int count() const {
    const int rest = whole + 2 * split + p.units % 2 * tiles - static_cast<int>(blockIdx.x);
    return rest > 0 ? (rest - 1) / static_cast<int>(gridDim.x) + 1 : 0;
  }

  // The CTA's task `turn` (of those past the last, the last).
  __device__ __forceinline__ TurnTask at(int turn) const {
    int pair = blockIdx.x + min(turn, count() - 1) * gridDim.x, single = -1;
    if (pair >= whole) {
      single = pair - whole;
      if (single >= 2 * split) return turn_task(p.routing.tiles[single - 2 * split], p.units - 1, 1);
      pair = whole + single / 2;
    }
    const int expert = p.routing.tiles[pair / (p.units / 2)].expert;
    const int first = p.routing.tile_offsets[expert], own = p.routing.tile_offsets[expert + 1] - first;
    const int local = pair - first * (p.units / 2), unit = local / own;
    const grouped::TileTask tile = p.routing.tiles[first + local - unit * own];
    return single < 0 ? turn_task(tile, 2 * unit, 2) : turn_task(tile, 2 * unit + single % 2, 1);
  }

 private:
  static __device__ __forceinline__ TurnTask turn_task(const grouped::TileTask& tile, int unit, int active) {
    return {tile.row,
            static_cast<uint16_t>(tile.expert),
            static_cast<uint16_t>(unit),
            static_cast<uint8_t>(tile.rows),
            static_cast<uint8_t>(tile.width),
            static_cast<uint8_t>(active),
            0};
  }
};

// A scale group of 128 columns of I spans both units of a pair of gate-up: they stay together.
template <Gemm kGemm, Quant kQuant, bool kHalf>
constexpr bool kSplitPairs = !(kGemm == Gemm::kUp && kQuant == Quant::kBlock && !kHalf);

template <Gemm kGemm, Quant kQuant, bool kHalf>
__device__ void produce(const GemmParams& p, const CUtensorMap* map, GemmSmem& s) {
  using T = Traits<kGemm, kQuant, kHalf>;
  constexpr int kFound = 31;  // tasks found at once, and one more to look ahead
  const int thread = threadIdx.x - kConsumers, lane = thread % 32;
  const int chunk = thread % 8, first_row = thread / 8;  // 16-byte chunk of a row, first of the thread's rows
  const uint32_t to = 2 * kUnitBytes + first_row * 128 + ((chunk ^ (first_row & 7)) << 4);
  const int num_k = (p.k_bytes + 127) / 128;
  const Schedule<kSplitPairs<kGemm, kQuant, kHalf>> schedule(p);
  const int count = schedule.count();
  const uint32_t full = smem_address(s.full), empty = smem_address(s.empty);
  const uint32_t stages = smem_address(s.stage), scales = smem_address(s.scale);
  const uint64_t policy = p.evict_first ? l2_evict_first() : l2_evict_normal();
  const auto weight_row = [&](int expert, int unit) {
    return expert * (p.weight_rows / (kGemm == Gemm::kUp ? 16 : 32)) + unit * 4;
  };

  int prefetched = 0;  // stages whose weights are on their way before the wait
  if constexpr (kGemm == Gemm::kDown) {
    if (count > 0) {
      prefetched = min(kStages, num_k);
      if (thread == 0) {
        const TurnTask task = schedule.at(0);
        for (int k = 0; k < prefetched; ++k) {
          load_weights<kGemm>(p, map, weight_row(task.expert, task.unit), task.active, k, stages + k * kStageBytes,
                              full + k * 8, policy);
        }
      }
    }
    pdl_wait();
    pdl_trigger();
  }

  TurnTask found{};
  const auto found_row = [&](int i) { return __shfl_sync(~0u, found.row, i); };
  const auto found_rows = [&](int i) { return __shfl_sync(~0u, static_cast<int>(found.rows), i); };
  // Row `thread` of a tile, as a slot; asked for one task early.
  const auto slot_of = [&](int row, int rows) {
    return kGemm == Gemm::kUp && thread < rows ? p.routing.row_to_slot[row + thread] : 0;
  };
  Ring head;
  int slot = 0;
#pragma unroll 1
  for (int turn = 0; turn < count; ++turn) {
    const int at = turn % kFound;
    if (at == 0) found = schedule.at(turn + lane);
    const int tile_row = found_row(at), rows = found_rows(at);
    const int expert = __shfl_sync(~0u, static_cast<int>(found.expert), at);
    const int unit = __shfl_sync(~0u, static_cast<int>(found.unit), at);
    const int active = __shfl_sync(~0u, static_cast<int>(found.active), at);
    uint32_t source[kMaxWidth / 16];  // where the thread's rows start, in 16 bytes
    int own = tile_row + thread;      // row of B that the tile's row `thread` reads
    if constexpr (kGemm == Gemm::kUp) {
      if (turn == 0) slot = slot_of(tile_row, rows);
      own = slot / p.top_k;
      named_barrier_sync(4, kProducers);  // the tile before has been read
      s.token[thread] = static_cast<uint16_t>(own);
      named_barrier_sync(4, kProducers);
      slot = slot_of(found_row(at + 1), found_rows(at + 1));
    }
#pragma unroll
    for (int i = 0; i < kMaxWidth / 16; ++i) {
      const int row = first_row + 16 * i;
      const uint32_t token = kGemm == Gemm::kUp ? s.token[row] : tile_row + row;
      source[i] = row < rows ? token * p.b_stride : kNoRow;
    }
    const int weights = weight_row(expert, unit);
    const float *row_scale = nullptr, *weight_scale = nullptr;  // rows 16 i further: + 2 KB
    if constexpr (T::kBlock) {
      if (thread < rows) row_scale = p.b_scale + own * p.b_scale_stride;
      if (thread / 2 < active) {
        const int mine = unit + thread / 2;
        const int block = kGemm == Gemm::kUp ? (mine * 64 + (thread & 1) * p.out_columns) / T::kRowBlock : mine;
        weight_scale = p.w_scale + (static_cast<int64_t>(expert) * p.w_scale_rows + block) * p.w_scale_cols;
      }
    }

#pragma unroll 1
    for (int k = 0; k < num_k; ++k) {
      mbarrier_wait(empty + head.stage() * 8, head.phase() ^ 1);
      const uint32_t base = stages + head.stage() * kStageBytes;
      if (prefetched > 0) {
        --prefetched;
      } else if (thread == 0) {
        load_weights<kGemm>(p, map, weights, active, k, base, full + head.stage() * 8, policy);
      }
      const int column = k * 128 + chunk * 16;
      if (column < p.k_bytes || T::kZeroTail) {
        const uint8_t* from = p.b + (column < p.k_bytes ? column : 0);
        [[maybe_unused]] const int bytes = column < p.k_bytes ? 16 : 0;
#pragma unroll
        for (int i = 0; i < kMaxWidth / 16; ++i) {
          if (source[i] == kNoRow) continue;
          if constexpr (T::kZeroTail) {
            cp_async_16_zfill(base + to + i * 16 * 128, from + uint64_t{source[i]} * 16, bytes);
          } else {
            cp_async_16(base + to + i * 16 * 128, from + uint64_t{source[i]} * 16);
          }
        }
      }
      if constexpr (T::kBlock) {
        const uint32_t scale_to = scales + (head.stage() * kScaleFloats + thread) * 4;
#pragma unroll
        for (int g = 0; g < T::kGroups; ++g) {
          const int group = k * T::kGroups + g;
          if (group < p.w_scale_cols) {
            if (row_scale) cp_async_4(scale_to + g * kMaxWidth * 4, row_scale + group * p.b_scale_step);
            if (weight_scale) cp_async_4(scale_to + (2 * kMaxWidth + g * 4) * 4, weight_scale + group);
          }
        }
      }
      cp_async_arrive(full + head.stage() * 8);
      ++head.count;
    }
  }
}

// The kernel's frame: roles, and the width switch. `Epilogue::run<N>(p, s, task, unit, parity, acc)` stores a unit of a
// task; it is called by whole warpgroups.
template <Gemm kGemm, Quant kQuant, bool kHalf, class Epilogue>
__device__ __forceinline__ void run_gemm(const CUtensorMap* map, const GemmParams& p) {
  GemmSmem& s = start_gemm<kGemm>(map);
  if (threadIdx.x >= kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    produce<kGemm, kQuant, kHalf>(p, map, s);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
  if constexpr (kGemm == Gemm::kDown) {
    pdl_wait();
    pdl_trigger();
  }
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
  using Tasks = Schedule<kSplitPairs<kGemm, kQuant, kHalf>>;  // made again when needed: registers are scarce
  const int count = Tasks(p).count();
  Ring ring;
  for (int turn = 0; turn < count; ++turn) {
    if (turn % kTurns == 0) {  // the next tasks, one a thread
      named_barrier_sync(2 + group, 128);
      if (thread < kTurns) s.turns[group][thread] = Tasks(p).at(turn + thread);
      named_barrier_sync(2 + group, 128);
    }
    const TurnTask& task = s.turns[group][turn % kTurns];
    const bool active = group < task.active;
    const auto run = [&]<int N>() {
      float acc[2][N / 2];
      multiply_task<kGemm, kQuant, kHalf, N>(p, s, ring, active, acc);
      const Task tile{task.expert, task.row, task.rows, task.width, task.unit / 2};
      if (active) Epilogue::template run<N>(p, s, tile, task.unit + group, turn & 1, acc);
    };
    with_width(task.width, run);
  }
}

}  // namespace hpc::moe

// Producers of the grouped GEMMs, and the kernel's frame; grouped_gemm.cuh has the plan.
#pragma once

#include "kernels/grouped_consume.cuh"
#include "kernels/grouped_tasks.cuh"

namespace hpc::moe {

// The map's coordinate of a unit: in the groups of 16 (gate-up) or 32 (down) weight rows that it is made of. The maps
// put rows in an order that leaves neighbouring output columns in one thread's registers (launch/weight_map.cu).
template <Gemm kGemm>
__device__ __forceinline__ int weight_coordinate(const GemmParams& p, int expert, int unit) {
  return expert * (p.weight_rows / (kGemm == Gemm::kUp ? 16 : 32)) + unit * 4;
}

// Weights of one stage, by one thread; also its arrival.
template <Gemm kGemm>
__device__ __forceinline__ void load_weights(const GemmParams& p, const CUtensorMap* map, int row, int units, int k,
                                             uint32_t smem, uint32_t full, uint64_t policy) {
  mbarrier_arrive_expect_tx(full, units * kUnitBytes);
  for (int i = 0; i < units; ++i) {
    if constexpr (kGemm == Gemm::kUp) {
      tma_load_4d(smem + i * kUnitBytes, map, full, k * 128, 0, 0, row + 4 * i, policy);
      tma_load_4d(smem + i * kUnitBytes + kUnitBytes / 2, map, full, k * 128, 0, 0, row + 4 * i + p.out_columns / 16,
                  policy);
    } else {
      tma_load_5d(smem + i * kUnitBytes, map, full, k * 128, 0, 0, row + 4 * i, 0, policy);
    }
  }
}

// Gate-up, before its wait: where most experts have rows and few of them two tiles, the CTA's first task is known
// without the index. Its first stages are brought to L2 while the index is made; a wrong guess costs nothing but that.
__device__ __forceinline__ void guess_weights(const GemmParams& p, const CUtensorMap* map) {
  const int whole = p.units / 2, pair = blockIdx.x;
  if (p.guess_stages == 0 || pair >= p.experts * whole) return;
  const int row = weight_coordinate<Gemm::kUp>(p, pair / whole, pair % whole * 2);
  for (int k = 0; k < p.guess_stages; ++k) {
    for (int i = 0; i < 4; ++i) {
      const int unit_row = row + 4 * (i / 2) + i % 2 * (p.out_columns / 16);
      asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(k * 128),
                   "r"(0), "r"(0), "r"(unit_row)
                   : "memory");
    }
  }
}

// kZeroTail: K may end with half a stage, and whole stages are multiplied: the other half of B is filled with zeros
// (the weights' is, by the copy engine).
template <Gemm kGemm, Quant kQuant, bool kHalf, bool kZeroTail>
__device__ void produce(const GemmParams& p, const CUtensorMap* map, GemmSmem& s) {
  using T = Traits<kGemm, kQuant, kHalf>;
  const int thread = threadIdx.x - kConsumers, lane = thread % 32;
  const int chunk = thread % 8, first_row = thread / 8;  // 16-byte chunk of a row, first of the thread's rows
  const uint32_t to = 2 * kUnitBytes + first_row * 128 + ((chunk ^ (first_row & 7)) << 4);  // rows 16 i further: + 2 KB
  const int num_k = (p.k_bytes + 127) / 128;
  const uint32_t full = smem_address(s.full), empty = smem_address(s.empty);
  const uint32_t stages = smem_address(s.stage), scales = smem_address(s.scale);
  const uint64_t policy = p.evict_first ? l2_evict_first() : l2_evict_normal();
  if constexpr (kGemm == Gemm::kUp) {
    if (thread == 0) guess_weights(p, map);
    pdl_wait();
    pdl_trigger();
  }
  const Schedule<kGemm, T, kQuant == Quant::kTensor> schedule(p);

  TurnTask found = schedule.at(lane);  // of turns `base` + lane
  int base = 0, prefetched = 0;        // stages whose weights are on their way before the wait
  if constexpr (kGemm == Gemm::kDown) {
    if (thread == 0 && found.width > 0) {
      s.turns[0] = found;
      const int row = weight_coordinate<kGemm>(p, found.expert, found.unit);
      for (int k = 0; k < min(kStages, num_k); ++k) {
        load_weights<kGemm>(p, map, row, found.units, k, stages + k * kStageBytes, full + k * 8, policy);
      }
    }
    prefetched = min(kStages, num_k);
    pdl_wait();
    pdl_trigger();
  }

  // Row `thread` of the task of turn `base` + at, as a slot: asked for one task early.
  const auto field = [&](int value, int at) { return __shfl_sync(~0u, value, at); };
  const auto slot_of = [&](int at) {
    const int row = field(found.row, at), rows = field(found.rows, at);
    return kGemm == Gemm::kUp && thread < rows ? p.routing.row_to_slot[row + thread] : 0;
  };
  Ring head;
  int slot = slot_of(0);
#pragma unroll 1
  for (int turn = 0, published = 0;; ++turn) {
    if (turn - base == 31) {  // the last one found only told which rows come next
      base = turn;
      found = schedule.at(base + lane);
    }
    const int at = turn - base;
    const int width = field(found.width, at), units = field(found.units, at);
    if (width > 0 && units == 0) {
      slot = slot_of(at + 1);
      continue;
    }
    if (thread / 32 == 0) {  // released by thread 0's arrival at the task's first stage
      if (lane == at) s.turns[published % kTurns] = found;
      __syncwarp();
    }
    ++published;
    if (width == 0) break;
    const int tile_row = field(found.row, at), rows = field(found.rows, at);
    const int expert = field(found.expert, at), unit = field(found.unit, at);
    const int second = T::kTwoTiles ? field(found.second_rows, at) : 0;
    uint32_t source[kMaxWidth / 16], source2[kMaxWidth / 16];  // where the thread's rows start, in 16 bytes
    int own = tile_row + thread, own2 = 0;                     // rows of B that the tiles' rows `thread` read
    if constexpr (kGemm == Gemm::kUp) {
      own = slot / p.top_k;
      if (second) own2 = thread < second ? p.routing.row_to_slot[tile_row + rows + thread] / p.top_k : 0;
      named_barrier_sync(4, kProducers);  // the tile before has been read
      s.token[thread] = static_cast<uint16_t>(own);
      if (second) s.token[kMaxWidth + thread] = static_cast<uint16_t>(own2);
      named_barrier_sync(4, kProducers);
      slot = slot_of(at + 1);
    }
#pragma unroll
    for (int i = 0; i < kMaxWidth / 16; ++i) {
      const int row = first_row + 16 * i;
      const uint32_t token = kGemm == Gemm::kUp ? s.token[row] : tile_row + row;
      source[i] = row < rows ? token * p.b_stride : kNoRow;
      if constexpr (T::kTwoTiles) source2[i] = row < second ? s.token[kMaxWidth + row] * p.b_stride : kNoRow;
    }
    const int weights = weight_coordinate<kGemm>(p, expert, unit);
    // Thread r brings the scales of the tiles' rows r, threads 0 to 3 those of the weights' four m64 tiles.
    const float *row_scale = nullptr, *row_scale2 = nullptr, *weight_scale = nullptr;
    if constexpr (T::kBlock) {
      if (thread < rows) row_scale = p.b_scale + own * p.b_scale_stride;
      if (thread < second) row_scale2 = p.b_scale + own2 * p.b_scale_stride;
      if (thread / 2 < units) {
        const int mine = unit + thread / 2;
        const int block = kGemm == Gemm::kUp ? (mine * 64 + (thread & 1) * p.out_columns) / T::kRowBlock : mine;
        weight_scale = p.w_scale + (static_cast<int64_t>(expert) * p.w_scale_rows + block) * p.w_scale_cols;
      }
    }

#pragma unroll 1
    for (int k = 0; k < num_k; ++k) {
      mbarrier_wait(empty + head.stage() * 8, head.phase() ^ 1);
      const uint32_t stage = stages + head.stage() * kStageBytes;
      if (prefetched > 0) {
        --prefetched;
      } else if (thread == 0) {
        load_weights<kGemm>(p, map, weights, units, k, stage, full + head.stage() * 8, policy);
      }
      const int column = k * 128 + chunk * 16;
      if (column < p.k_bytes || kZeroTail) {
        const uint8_t* from = p.b + (column < p.k_bytes ? column : 0);
        [[maybe_unused]] const int bytes = column < p.k_bytes ? 16 : 0;
#pragma unroll
        for (int i = 0; i < kMaxWidth / 16; ++i) {
          if (source[i] == kNoRow) continue;
          if constexpr (kZeroTail) {
            cp_async_16_zfill(stage + to + i * 16 * 128, from + uint64_t{source[i]} * 16, bytes);
          } else {
            cp_async_16(stage + to + i * 16 * 128, from + uint64_t{source[i]} * 16);
          }
        }
        if (second) {
#pragma unroll
          for (int i = 0; i < kMaxWidth / 16; ++i) {
            if (source2[i] == kNoRow) continue;
            cp_async_16(stage + to - kUnitBytes + i * 16 * 128, from + uint64_t{source2[i]} * 16);
          }
        }
      }
      if constexpr (T::kBlock) {
        const uint32_t scale_to = scales + head.stage() * kScaleFloats * 4;
        const uint32_t row_to = scale_to + scale_place(thread) * 4;
#pragma unroll
        for (int g = 0; g < T::kGroups; ++g) {
          const int group = k * T::kGroups + g;
          if (group < p.w_scale_cols) {
            if (row_scale) cp_async_4(row_to + g * kMaxWidth * 4, row_scale + group * p.b_scale_step);
            if (row_scale2) cp_async_4(row_to + kMaxWidth * 4, row_scale2 + group * p.b_scale_step);
            if (weight_scale) cp_async_4(scale_to + (2 * kMaxWidth + g * 4 + thread) * 4, weight_scale + group);
          }
        }
      }
      // Arrives when this thread's copies have landed: all stages may be on their way, nobody waits for the rows here.
      cp_async_arrive(full + head.stage() * 8);
      ++head.count;
    }
  }
  // The end: a stage without data.
  mbarrier_wait(empty + head.stage() * 8, head.phase() ^ 1);
  mbarrier_arrive(full + head.stage() * 8);
  if (thread == 0) mbarrier_arrive(full + head.stage() * 8);
}

// The kernel's frame: barriers and roles.
template <Gemm kGemm, Quant kQuant, bool kHalf, bool kDirect, class Epilogue>
__device__ __forceinline__ void run_gemm(const CUtensorMap* map, const GemmParams& p) {
  extern __shared__ uint8_t raw[];
  auto& s = *reinterpret_cast<GemmSmem*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t{1023});
  if (threadIdx.x == 0) {
    tma_prefetch_map(map);
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(smem_address(&s.full[i]), 1 + kProducers);
      mbarrier_init(smem_address(&s.empty[i]), kConsumers / 32);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    produce<kGemm, kQuant, kHalf, kGemm == Gemm::kDown && kQuant == Quant::kTensor && !kDirect>(p, map, s);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    pdl_wait();  // nothing may be stored before
    pdl_trigger();
    consume<kGemm, kQuant, kHalf, kDirect, Epilogue>(p, s);
  }
}

}  // namespace hpc::moe

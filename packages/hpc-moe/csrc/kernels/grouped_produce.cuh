// Producers of the grouped GEMMs, and the kernel's frame; grouped_gemm.cuh has the plan.
#pragma once

#include "kernels/grouped_consume.cuh"
#include "kernels/grouped_tasks.cuh"
#include "kernels/grouped_tokens.cuh"

namespace hpc::moe {

// The map's coordinate of a unit: in the groups of weight rows that it is made of, 16 (gate-up; 64 where tokens are M)
// or 32 (down). The maps put rows in an order that leaves neighbouring output columns in one thread's registers
// (launch/weight_map.cu).
template <class T>
__device__ __forceinline__ int weight_coordinate(const GemmParams& p, int expert, int unit) {
  constexpr int kRows = T::kGemm == Gemm::kDown ? 32 : T::kTokens ? 64 : 16;
  return expert * (p.weight_rows / kRows) + unit * (T::kGemm == Gemm::kDown ? 128 / kRows : 64 / kRows);
}

// Bytes of a task's weights in a stage; `units`: TurnTask's.
template <class T>
__device__ __forceinline__ uint32_t weight_bytes(int units) {
  if constexpr (T::kTriples) return 3 * kUnitBytes;
  return units >= kHalfUnit ? kUnitBytes / 2 : units * kUnitBytes;
}

// kTriples: what warpgroup `group` has of three units: its own of the first two, and its half of the third. To both
// CTAs of the cluster where they share it.
template <class T, bool kBoth = false>
__device__ __forceinline__ void load_triple(const GemmParams& p, const CUtensorMap* map, const CUtensorMap* half_map,
                                            int row, int group, int m, int k, uint32_t smem, uint32_t full,
                                            uint64_t policy) {
  smem += group * (kUnitBytes * 3 / 2) + m * (kUnitBytes / 2);
  const CUtensorMap* from = m < 2 ? map : half_map;
  const int at = m < 2 ? row + 4 * group + m * (p.out_columns / 16) : 2 * (row + 8) + 4 * group;
  if constexpr (kBoth) {
    tma_load_4d_multicast(smem, from, full, k * 128, 0, 0, at, 3, policy);
  } else {
    tma_load_4d(smem, from, full, k * 128, 0, 0, at, policy);
  }
}

// Copy `part` of the weights of one stage, by one thread; part 0's has announced the bytes of all. There are up to
// kWeightParts, one for each producer warp: a copy is some 20 instructions that wait for each other. `half_map`: of
// gate-up's half units.
constexpr int kWeightParts = kProducers / 32;
template <class T>
__device__ __forceinline__ void load_weights(const GemmParams& p, const CUtensorMap* map, const CUtensorMap* half_map,
                                             int row, int units, int k, uint32_t smem, uint32_t full, uint64_t policy,
                                             int part) {
  if constexpr (T::kTriples) {
    if (part > 2) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) load_triple<T>(p, map, half_map, row, i, part, k, smem, full, policy);
    return;
  }
  if constexpr (T::kHalfUnits) {
    if (units >= kHalfUnit) {
      if (part == 0) tma_load_4d(smem, half_map, full, k * 128, 0, 0, 2 * row + (units - kHalfUnit) * 4, policy);
      return;
    }
  }
  if constexpr (T::kGemm == Gemm::kDown) {
    if (part >= units) return;
    smem += part * kUnitBytes;
    if constexpr (T::kTokens) {
      tma_load_5d(smem, map, full, k * 128, 0, 0, 0, row + 4 * part, policy);
    } else {
      tma_load_5d(smem, map, full, k * 128, 0, 0, row + 4 * part, 0, policy);
    }
  } else {
    const int unit = part / 2, up = part % 2;
    if (unit >= units) return;
    smem += part * (kUnitBytes / 2);
    if constexpr (T::kTokens) {
      tma_load_5d(smem, map, full, k * 128, 0, 0, 0, row + unit + up * (p.out_columns / 64), policy);
    } else {
      tma_load_4d(smem, map, full, k * 128, 0, 0, row + 4 * unit + up * (p.out_columns / 16), policy);
    }
  }
}

// The same to L2 alone, weights as M.
template <class T>
__device__ __forceinline__ void prefetch_weights(const GemmParams& p, const CUtensorMap* map,
                                                 const CUtensorMap* half_map, int row, int units, int k,
                                                 uint64_t policy, int part) {
  if constexpr (T::kGemm == Gemm::kDown) {
    if (part < units) tma_prefetch_5d(map, k * 128, 0, 0, row + 4 * part, 0, policy);
  } else if (T::kHalfUnits && units >= kHalfUnit) {
    if (part == 0) tma_prefetch_4d(half_map, k * 128, 0, 0, 2 * row + (units - kHalfUnit) * 4, policy);
  } else if (part / 2 < units) {
    tma_prefetch_4d(map, k * 128, 0, 0, row + 4 * (part / 2) + part % 2 * (p.out_columns / 16), policy);
  }
}

// A stage's copy `part` where both CTAs of the cluster want it: each brings a unit, to both.
template <class T>
__device__ __forceinline__ void load_shared_weights(const GemmParams& p, const CUtensorMap* map,
                                                    const CUtensorMap* half_map, int row, int k, uint32_t smem,
                                                    uint32_t full, uint64_t policy, int part) {
  const int mine = static_cast<int>(blockIdx.x % 2);
  if constexpr (T::kTriples) {
    if (part < 3) load_triple<T, true>(p, map, half_map, row, mine, part, k, smem, full, policy);
    return;
  }
  smem += mine * kUnitBytes;
  row += weight_coordinate<T>(p, 0, mine);
  if constexpr (T::kGemm == Gemm::kDown) {
    if (part > 0) return;
    if constexpr (T::kTokens) {
      tma_load_5d_multicast(smem, map, full, k * 128, 0, 0, 0, row, 3, policy);
    } else {
      tma_load_5d_multicast(smem, map, full, k * 128, 0, 0, row, 0, 3, policy);
    }
  } else {
    if (part > 1) return;
    smem += part * (kUnitBytes / 2);
    if constexpr (T::kTokens) {
      tma_load_5d_multicast(smem, map, full, k * 128, 0, 0, 0, row + part * (p.out_columns / 64), 3, policy);
    } else {
      tma_load_4d_multicast(smem, map, full, k * 128, 0, 0, row + part * (p.out_columns / 16), 3, policy);
    }
  }
}

// Asks L2 for the line of an address; whoever writes it later does no harm.
__device__ __forceinline__ void prefetch_line(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

// `b_map`: of rows of B, kRowsBox a copy (down, whose rows of a tile are neighbours); gate-up: of half units. Copies
// pad the end of K with zeros.
template <class T>
__device__ void produce(const GemmParams& p, const CUtensorMap* map, const CUtensorMap* b_map, typename T::Smem& s) {
  constexpr Gemm kGemm = T::kGemm;
  constexpr int kStages = T::kStages, kStageBytes = T::kStageBytes, kWidth = T::kWidth;
  const int thread = threadIdx.x - kConsumers, lane = thread % 32;
  const int chunk = thread % 8, first_row = thread / 8;  // 16-byte chunk of a row, first of the thread's rows
  const uint32_t to = T::kRowsAt + first_row * 128 + ((chunk ^ (first_row & 7)) << 4);  // rows 16 i further: + 2 KB
  const int num_k = (p.k_bytes + 127) / 128;
  const uint32_t full = smem_address(s.full), empty = smem_address(s.empty);
  const uint32_t stages = smem_address(s.stage), scales = smem_address(s.scale);
  const uint64_t policy = p.evict_first ? l2_evict_first() : l2_evict_normal();
  using Tasks = Schedule<T>;
  int prefetched = 0;  // stages whose weights are on their way before the wait
  const int warp = uniform(thread / 32);
  const auto load = [&](int row, int units, bool shared, int k, uint32_t stage, uint32_t barrier, int part) {
    if constexpr (T::kClusters) {
      if (shared) return load_shared_weights<T>(p, map, b_map, row, k, stage, barrier, policy, part);
    }
    load_weights<T>(p, map, b_map, row, units, k, stage, barrier, policy, part);
  };
  // After the wait, while the first rows come and nothing gives a stage back: what follows the ring's first stages goes
  // to L2, so that memory is not idle. `from`: stages before the task; a warp has its part.
  const auto look_ahead = [&](const TurnTask& task, int from) {
    const int row = weight_coordinate<T>(p, task.expert, task.unit);
#pragma unroll 1
    for (int k = max(kStages - from, 0); k < min(kStages + T::kAhead - from, num_k); ++k) {
      prefetch_weights<T>(p, map, b_map, row, task.units, k, policy, warp);
    }
  };
  const auto early_stages = [&](int pairs) { return min(kStages, T::kKept ? num_k * pairs : num_k); };
  const auto prefetch = [&](const TurnTask& task) {
    const int row = weight_coordinate<T>(p, task.expert & ~kFlags, task.unit);
    for (int i = 0; i < early_stages(task.second_rows); ++i) {
      const int pair = T::kKept ? i / num_k : 0;
      if (warp == 0) mbarrier_expect_tx(full + i * 8, weight_bytes<T>(task.units));
      load(row + pair * weight_coordinate<T>(p, 0, 2), task.units, task.expert & kShared, i - pair * num_k,
           stages + i * kStageBytes, full + i * 8, warp);
    }
  };
  [[maybe_unused]] TurnTask guess{};
  [[maybe_unused]] int guessed_tile = Tasks::kNoTile;
  [[maybe_unused]] grouped::TileTask early{};
  if constexpr (kGemm == Gemm::kUp) {
    // Where most experts have rows and few of them two tiles, the CTA's first tasks are known without the index.
    if (!T::kClusters && p.guess) {
      const Tasks likely(p, p.experts, 1.0f);
      guess = likely.likely(0);
      if (guess.units > 0) {
        if (lane == 0) prefetch(guess);
        prefetched = min(kStages, num_k);
      }
      guessed_tile = likely.likely_tile(lane);
      if (T::kTensor && guessed_tile != Tasks::kNoTile) prefetch_line(p.w_scale + guessed_tile);
      if (T::kTensor && thread == 0) {
        prefetch_line(p.b_scale);
        prefetch_line(p.act_scale);
      }
      if (const int line = blockIdx.x * kProducers + thread; line < p.b_lines) prefetch_line(p.b + line * int64_t{128});
    }
    pdl_wait();
    pdl_trigger();
    if (T::kAhead > 0 && prefetched > 0 && lane == 0) look_ahead(guess, 0);
    if (guessed_tile != Tasks::kNoTile) early = p.routing.tiles[guessed_tile];
  }
  const Tasks schedule(p, p.routing.tile_offsets[p.experts],
                       T::kTensor ? *(kGemm == Gemm::kUp ? p.b_scale : p.act_scale) : 1.0f);
  // The CTA's task `turn`; in clusters with what the other CTA's makes of it.
  const auto task_of = [&](int turn, int tile, const grouped::TileTask& known) {
    TurnTask mine = schedule.at(turn, tile, known);
    if constexpr (T::kClusters) {
      const TurnTask other = Tasks(p, schedule.tiles, schedule.scale, static_cast<int>(blockIdx.x ^ 1)).at(turn);
      if (mine.units == 0 && other.units > 0) {
        mine = {0, 0.0f, kIdle, 0, 0, 8, 0, T::kKept ? other.second_rows : uint8_t{0}};
      } else if (mine.units == 2 && other.units == 2 && mine.expert == other.expert && mine.unit == other.unit) {
        if constexpr (T::kThrees) {
          const bool odd = blockIdx.x % 2;
          const int first = odd ? other.row : mine.row, third = odd ? mine.row : other.row;
          const int rows = odd ? mine.rows : other.rows;
          // All of the expert: of more rows it gains nothing.
          if (third == first + 128 && rows <= 64 && first == p.routing.offsets[mine.expert]) {
            mine.expert |= kThree;
            mine.row = first + (odd ? 64 : 0);
            mine.rows = static_cast<uint8_t>(64 + rows);
          }
        }
        mine.expert |= kShared;
      }
    }
    return mine;
  };
  TurnTask found{};  // of turns `base` + lane; in one place, the loop's: code that is fetched in every call is time
  int base = 0, published = 0, slot = 0;
  // kLevel: at most `limit` stages are on their way, of those of which `behind` is the oldest.
  [[maybe_unused]] int limit = kStages, ahead = 0;
  [[maybe_unused]] typename T::Ring behind;
  if constexpr (T::kLevel) {
    const int most = max(schedule.count_of(0), 1);
    limit = min(max((kStages * schedule.count() + most - 1) / most, 2), kStages);
  }
  const auto hold_back = [&](bool waits) {
    if (!T::kLevel || limit == kStages) return;
    if (ahead < limit) {
      ++ahead;
      return;
    }
    if (waits) mbarrier_wait(empty + behind.stage() * 8, behind.phase());
    behind.advance();
  };
  typename T::Ring head;

  // Row `thread` of the task of turn `base` + at, as a slot: asked for one task early.
  const auto field = [&](int value, int at) { return __shfl_sync(~0u, value, at); };
  // Rows of B between a task's first 64 and the others, the other CTA's (kThree).
  const auto gap_of = [&](int flags) { return T::kThrees && (flags & kThree) && blockIdx.x % 2 == 0 ? 64 : 0; };
  const auto slot_of = [&](int at) {
    int row = field(found.row, at);
    const int rows = field(found.rows, at);
    if constexpr (T::kThrees && kGemm == Gemm::kUp) {
      const int gap = gap_of(field(found.expert, at));
      if (thread >= 64) row += gap;
    }
    return kGemm == Gemm::kUp && thread < rows ? p.routing.row_to_slot[row + thread] : 0;
  };
#pragma unroll 1
  for (int turn = 0;; ++turn) {
    if (turn == 0 || turn - base == 31) {  // the last one found only told which rows come next
      base = turn;
      found = task_of(base + lane, guessed_tile, early);
      guessed_tile = Tasks::kNoTile;
      if (turn == 0) {
        if constexpr (kGemm == Gemm::kDown) {
          if (lane == 0 && found.width > 0) prefetch(found);
          prefetched = early_stages(__shfl_sync(~0u, found.second_rows, 0));
          pdl_wait();
          pdl_trigger();
          if (T::kAhead > 0 && lane <= T::kAhead && found.width > 0) look_ahead(found, lane * num_k);
        } else if (prefetched > 0) {
          const TurnTask first = {0,
                                  0.0f,
                                  static_cast<uint16_t>(__shfl_sync(~0u, found.expert, 0)),
                                  static_cast<uint16_t>(__shfl_sync(~0u, found.unit, 0)),
                                  0,
                                  0,
                                  static_cast<uint8_t>(__shfl_sync(~0u, found.units, 0)),
                                  0};
          if (first.expert != guess.expert || first.unit != guess.unit || first.units != guess.units) {
            // Wrong: a task that only gives the stages back.
            if (thread == 0) s.turns[0] = {0, 0.0f, 0, 0, 0, 1, static_cast<uint8_t>(prefetched), 0};
            __syncwarp();
            published = 1;
#pragma unroll 1
            for (; prefetched > 0; --prefetched, head.advance()) {
              hold_back(false);
              mbarrier_arrive(full + head.stage() * 8);
              if (thread == 0) mbarrier_arrive(full + head.stage() * 8);
            }
          }
        }
        slot = slot_of(0);
      }
    }
    const int at = turn - base;
    const int width = field(found.width, at), units = field(found.units, at);
    const int flags = T::kClusters ? field(found.expert, at) & kFlags : 0;
    if (width > 0 && units == 0 && !(flags & kIdle)) {
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
    const int expert = field(found.expert, at) & ~kFlags, unit = field(found.unit, at);
    const int second = T::kTwoTiles ? field(found.second_rows, at) : 0;
    // kTall: rows of B of a task of one unit lie behind it, the second warpgroup's behind the first's.
    const uint32_t back = T::kTall && units != 2 ? kUnitBytes : 0;
    const int height = T::kTall ? rows + second : rows;
    // Where the thread's rows start, in 16 bytes.
    [[maybe_unused]] uint32_t source[T::kTaskRows / 16], source2[T::kTall ? 1 : kWidth / 16];
    const int gap = gap_of(flags);
    int own = tile_row + thread + (thread >= 64 ? gap : 0), own2 = 0;  // rows of B that the tiles' rows `thread` read
    if constexpr (kGemm == Gemm::kUp) {
      own = slot / p.top_k;
      if (second) own2 = thread < second ? p.routing.row_to_slot[tile_row + rows + thread] / p.top_k : 0;
      named_barrier_sync(4, kProducers);  // the tile before has been read
      if (thread < (T::kTall ? rows : kWidth)) s.token[thread] = static_cast<uint16_t>(own);
      if (thread < second) s.token[(T::kTall ? rows : kWidth) + thread] = static_cast<uint16_t>(own2);
      named_barrier_sync(4, kProducers);
      slot = slot_of(at + 1);
    }
#pragma unroll
    for (int i = 0; i < T::kTaskRows / 16 && kGemm == Gemm::kUp; ++i) {
      const int row = first_row + 16 * i;
      source[i] = row < height ? s.token[row] * p.b_stride : kNoRow;
      if constexpr (T::kTwoTiles && !T::kTall) {
        source2[i] = row < second ? s.token[kWidth + row] * p.b_stride : kNoRow;
      }
    }
    uint32_t row_bytes = kGemm == Gemm::kUp ? 0 : (rows + kRowsBox - 1) / kRowsBox * kRowsBox * 128;
    int weights = weight_coordinate<T>(p, expert, unit);
    const int pairs = T::kKept ? field(found.second_rows, at) : 1;
    [[maybe_unused]] uint32_t kept = 0;
    if constexpr (T::kKept) {  // the task before the last has been multiplied
      const int last = published - 1;
      kept = smem_address(s.rows[last % 2]);
      mbarrier_wait(smem_address(&s.read[last % 2]), (last / 2 & 1) ^ 1);
    }
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

    const uint8_t* from = p.b + chunk * 16;  // gate-up: of row 0
#pragma unroll 1
    for (int i = 0, k = 0; i < num_k * pairs; ++i, ++k) {
      if (T::kKept && k == num_k) {  // the next pair of units, with the same rows of B
        k = 0;
        weights += weight_coordinate<T>(p, 0, 2);
        row_bytes = 0;
        if (weight_scale) weight_scale += 2 * p.w_scale_cols;
      }
      mbarrier_wait(empty + head.stage() * 8, head.phase() ^ 1);
      hold_back(true);
      const uint32_t stage = stages + head.stage() * kStageBytes;
      const bool early = prefetched > 0;
      if (early) --prefetched;
      if (lane == 0) {
        if (warp == 0) {  // the task is published
          mbarrier_arrive_expect_tx(full + head.stage() * 8, (early ? 0 : weight_bytes<T>(units)) + row_bytes);
        }
        if (!early) load(weights, units, flags & kShared, k, stage, full + head.stage() * 8, warp);
      }
      if constexpr (kGemm == Gemm::kUp) {
#pragma unroll
        for (int i = 0; i < kWidth / 16; ++i) {
          if (source[i] != kNoRow) cp_async_16(stage - back + to + i * 16 * 128, from + uint64_t{source[i]} * 16);
        }
        if constexpr (T::kTall) {
          if (height > kWidth) {
#pragma unroll
            for (int i = kWidth / 16; i < T::kTaskRows / 16; ++i) {
              if (source[i] != kNoRow) cp_async_16(stage - back + to + i * 16 * 128, from + uint64_t{source[i]} * 16);
            }
          }
        } else if (second) {
#pragma unroll
          for (int i = 0; i < kWidth / 16; ++i) {
            if (source2[i] == kNoRow) continue;
            cp_async_16(stage + to - kUnitBytes + i * 16 * 128, from + uint64_t{source2[i]} * 16);
          }
        }
      } else if (row_bytes > 0 && lane == 0) {  // a warp every fourth copy
        const uint32_t first = T::kKept ? kept + k * kWidth * 128 : stage + 2 * kUnitBytes;
#pragma unroll 1
        for (int row = warp * kRowsBox; row < rows; row += kProducers / 32 * kRowsBox) {
          tma_load_2d(first + shared_row<T>(row) * 128, b_map, full + head.stage() * 8, k * 128,
                      tile_row + row + (row >= 64 ? gap : 0));
        }
      }
      if constexpr (T::kBlock) {
        const uint32_t scale_to = scales + head.stage() * T::Sizes::kScales * 4;
        const uint32_t row_to = scale_to + scale_place(shared_row<T>(thread)) * 4;
        // Addresses that go on by themselves where there is but one of each; two tiles' would be too many.
        constexpr bool kGoOn = !T::kHalf;
#pragma unroll
        for (int g = 0; g < T::kGroups; ++g) {
          const int group = k * T::kGroups + g, at_group = kGoOn ? 0 : group;
          if (kGoOn || group < p.w_scale_cols) {
            if (row_scale) cp_async_4(row_to + g * kWidth * 4, row_scale + at_group * p.b_scale_step);
            if (row_scale2) cp_async_4(row_to + kWidth * 4, row_scale2 + at_group * p.b_scale_step);
            if (weight_scale) cp_async_4(scale_to + (2 * kWidth + g * 4 + thread) * 4, weight_scale + at_group);
          }
        }
        if constexpr (kGoOn) {
          if (row_scale) row_scale += p.b_scale_step;
          if (weight_scale) ++weight_scale;
        }
      }
      // Arrives when this thread's copies have landed: all stages may be on their way, nobody waits for the rows here.
      cp_async_arrive(full + uniform(head.stage()) * 8);
      head.advance();
      from += 128;
    }
  }
  // The end: a stage without data.
  mbarrier_wait(empty + head.stage() * 8, head.phase() ^ 1);
  mbarrier_arrive(full + head.stage() * 8);
  if (thread == 0) mbarrier_arrive(full + head.stage() * 8);
}

// The kernel's frame: barriers and roles.
template <class T, bool kDirect, class Epilogue>
__device__ __forceinline__ void run_gemm(const CUtensorMap* map, const CUtensorMap* b_map, const GemmParams& p) {
  extern __shared__ uint8_t raw[];
  auto& s = *reinterpret_cast<typename T::Smem*>(raw + (-smem_address(raw) & 1023));  // known to be shared
  if (threadIdx.x == 0) {
    tma_prefetch_map(map);
    for (int i = 0; i < T::kStages; ++i) {
      mbarrier_init(smem_address(&s.full[i]), 1 + kProducers);
      mbarrier_init(smem_address(&s.empty[i]), (T::kClusters ? 2 : 1) * kConsumers / 32);
    }
    for (int i = 0; i < 2 && T::kKept; ++i) mbarrier_init(smem_address(&s.read[i]), kConsumers / 32);
    for (int i = 0; i < 2 && (T::kExchange || T::kThrees); ++i) mbarrier_init(smem_address(&s.exchanged[i]), 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  if constexpr (T::kClusters || T::kExchange) {  // the other CTA's barriers are there
    cluster_arrive_relaxed();
    cluster_wait();
  }
  if (threadIdx.x >= kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(T::kExact ? 72 : 88));
    produce<T>(p, map, b_map, s);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(T::kExact ? 216 : 208));
    pdl_wait();  // nothing may be stored before
    pdl_trigger();
    if constexpr (T::kTokens) {
      consume_tokens<T, Epilogue>(p, s);
    } else {
      consume<T, kDirect, Epilogue>(p, s);
    }
  }
  if constexpr (T::kClusters) {  // nobody leaves while the other may write here
    __syncwarp();
    cluster_arrive_relaxed();
    cluster_wait();
  }
}

}  // namespace hpc::moe

// Consumers of the grouped GEMMs: the K loops of a warpgroup; grouped_gemm.cuh has the plan.
//
// Operand descriptors must be built from warp-uniform numbers (uniform()), else each wgmma waits for a dozen moves into
// uniform registers.
#pragma once

#include "kernels/grouped_exact.cuh"

namespace hpc::moe {

// Widest tile of which a warpgroup's two m64 tiles are both on their way at once: their sums must fit beside the
// accumulators. Wider ones take turns in one set of registers.
template <Gemm kGemm, Quant kQuant>
constexpr int kBothTiles = kQuant == Quant::kBlock ? 80 : (kGemm == Gemm::kUp ? 96 : 0);

// The same number, which the compiler then knows to be one for the warp.
__device__ __forceinline__ uint32_t uniform(uint32_t value) {
  return __shfl_sync(~0u, value, 0);
}

// Descriptor of an operand in the 128-byte swizzle; `low` is its address in 16 bytes, with kLowBits. kStride: bytes
// from 8 rows to the next 8.
constexpr uint32_t kLowBits = 1 << 16;
template <uint32_t kStride = 1024>
__device__ __forceinline__ uint64_t descriptor(uint32_t low) {
  return (uint64_t{1} << 62) | (uint64_t{kStride >> 4} << 32) | low;
}

// One m64 tile over kSteps steps of 32 bytes of K from the operands a and b (descriptors' low words): into `d` from
// zero, or on top. kStride: of b.
template <WgmmaType kType, int kSteps, bool kAccumulate, int N, uint32_t kStride = 1024>
__device__ __forceinline__ void multiply(float (&d)[N / 2], uint32_t a, uint32_t b) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    wgmma_ss<kType, N>(d, descriptor(a + 2 * step), descriptor<kStride>(b + 2 * step), kAccumulate || step > 0);
  }
}

// acc += part * weight scale * row scale; a column of the tile is a row of B. `row_scale`: the thread's, by
// scale_place.
template <bool kScaled, int N>
__device__ __forceinline__ void promote(float (&acc)[N / 2], const float (&part)[N / 2], float weight_scale,
                                        const float* row_scale) {
  if constexpr (!kScaled) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) acc[i] += part[i];
  } else {
#pragma unroll
    for (int j = 0; j < N / 8; j += 2) {
      float4 scale;
      if (j + 1 < N / 8) {
        scale = *reinterpret_cast<const float4*>(row_scale + 8 * j);
      } else {
        const float2 last = *reinterpret_cast<const float2*>(row_scale + 8 * j);
        scale = make_float4(last.x, last.y, 0.0f, 0.0f);
      }
      const float of[4] = {scale.x * weight_scale, scale.y * weight_scale, scale.z * weight_scale,
                           scale.w * weight_scale};
#pragma unroll
      for (int i = 0; i < (j + 1 < N / 8 ? 8 : 4); ++i) {
        acc[4 * j + i] = fmaf(part[4 * j + i], of[i / 4 * 2 + i % 2], acc[4 * j + i]);
      }
    }
  }
}

// What a warpgroup multiplies with of each stage, in 16 bytes from the stage's start, and where its scales lie.
struct Operands {
  uint32_t a, b;      // weights, rows of B; with kLowBits
  int rows, weights;  // scales: first of B's, first of the weights'
};

// Where a lane gives stage 0 back: `empty` of this CTA, or of the cluster's CTA `lane`.
template <class T>
__device__ __forceinline__ uint32_t back_address(uint32_t empty) {
  if constexpr (T::kClusters) return cluster_address(empty, threadIdx.x % 2);
  return empty;
}

// Gives a stage back, a warp: to this CTA's producers, or to those of both of the cluster. `back`: back_address() of
// the stage.
template <class T>
__device__ __forceinline__ void give_back(uint32_t back) {
  __syncwarp();
  const uint32_t lane = threadIdx.x % 32;
  if constexpr (T::kClusters) {
    if (lane < 2) mbarrier_arrive_cluster(back);
  } else {
    if (lane == 0) mbarrier_arrive(back);
  }
}

// Waits for the ring's stage. Rows of x were written by the generic proxy, wgmma reads by the asynchronous one.
template <class T>
__device__ __forceinline__ void arrived(uint32_t full, const typename T::Ring& ring) {
  mbarrier_wait(full + ring.stage() * 8, ring.phase());
  if constexpr (T::kGemm == Gemm::kUp) fence_proxy_async();
}

// The same where the stage is there already; else false, without waiting.
template <class T>
__device__ __forceinline__ bool has_arrived(uint32_t full, const typename T::Ring& ring) {
  if (!mbarrier_test(full + ring.stage() * 8, ring.phase())) return false;
  if constexpr (T::kGemm == Gemm::kUp) fence_proxy_async();
  return true;
}

// Stages of a task.
template <class T>
__device__ __forceinline__ int task_stages(const GemmParams& p, const TurnTask& task) {
  return (p.k_bytes + 127) / 128 * (T::kKept ? task.second_rows : 1);
}

// Keeps the barriers of stages in which the warpgroup has nothing to multiply.
template <class T>
__device__ __forceinline__ void skip_stages(typename T::Smem& s, typename T::Ring& ring, int count) {
  const uint32_t back = back_address<T>(smem_address(s.empty));
#pragma unroll 1
  for (; count > 0; --count) {
    mbarrier_wait(smem_address(s.full) + ring.stage() * 8, ring.phase());
    give_back<T>(back + ring.stage() * 8);
    ring.advance();
  }
}

// K loop of one task: acc[m] is the warpgroup's m64 tile m (gate-up: 0 gate, 1 up). kDirect: no promotion.
template <class T, bool kDirect, int N>
__device__ __forceinline__ void multiply_task(const GemmParams& p, typename T::Smem& s, typename T::Ring& ring,
                                              const Operands& at, [[maybe_unused]] bool half_unit,
                                              float (&acc)[2][N / 2]) {
  constexpr Quant kQuant = T::kQuant;
  constexpr uint32_t kTile = kUnitBytes / 2 >> 4;  // from an m64 tile to the next
  const int lane = threadIdx.x % 32;
  const int num_k = (p.k_bytes + 127) / 128;
  const uint32_t full = smem_address(s.full), back = back_address<T>(smem_address(s.empty));
  const uint32_t stages = smem_address(s.stage) >> 4;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) acc[0][i] = acc[1][i] = 0.0f;
  const auto base_of = [&](uint32_t stage) { return stages + uniform(stage * (T::kStageBytes >> 4)); };

  if constexpr (kDirect || kQuant == Quant::kNone) {
    constexpr WgmmaType kType = kQuant == Quant::kNone ? WgmmaType::kBf16 : WgmmaType::kE4m3;
    // A stage is given back while the next is multiplied.
    uint32_t before = 0;  // the stage whose products may still be on their way
    const auto run = [&]<int kCount>(bool first) {
      arrived<T>(full, ring);
      const uint32_t base = base_of(ring.stage()), last = before;
      wgmma_arrive();
      multiply<kType, kCount, true, N>(acc[0], base + at.a, base + at.b);
      multiply<kType, kCount, true, N>(acc[1], base + at.a + kTile, base + at.b);
      wgmma_commit();
      before = ring.stage();
      ring.advance();
      if (first) return;
      wgmma_wait<1>();
      give_back<T>(back + last * 8);
    };
    wgmma_fence(acc[0]);
    wgmma_fence(acc[1]);
    const int whole = p.k_bytes / 128;
#pragma unroll 1
    for (int k = 0; k < whole; ++k) run.template operator()<4>(k == 0);
    if (p.k_bytes % 128) run.template operator()<2>(whole == 0);
    wgmma_wait<0>();
    wgmma_fence(acc[0]);
    wgmma_fence(acc[1]);
    give_back<T>(back + before * 8);
  } else if constexpr (T::kExact) {
#pragma unroll 1
    for (int k = 0; k < num_k; ++k) {
      mbarrier_wait(full + ring.stage() * 8, ring.phase());
      const uint8_t* stage = s.stage[ring.stage()];
      const float* scale = s.scale[ring.stage()];
      constexpr int kTiles = N <= 64 ? 2 : 1;  // side by side; registers are few
#pragma unroll
      for (int m = 0; m < 2; m += kTiles) {
        if (T::kHalfUnits && half_unit) {  // one m64 tile
          if (m == 0) {
            multiply_exact<T, 1, N>(stage + (at.a - kLowBits) * 16, stage + (at.b - kLowBits) * 16, scale + at.rows,
                                    scale + 2 * T::kWidth + at.weights, 0, acc);
          }
          continue;
        }
        multiply_exact<T, kTiles, N>(stage + (at.a - kLowBits) * 16, stage + (at.b - kLowBits) * 16, scale + at.rows,
                                     scale + 2 * T::kWidth + at.weights, m, acc);
      }
      give_back<T>(back + ring.stage() * 8);
      ring.advance();
    }
  } else {
    constexpr int kSteps = 4 / T::kGroups;
    bool ready = false;  // the stage has been waited for
#pragma unroll 1
    for (int k = 0; k < num_k; ++k) {
      if (!ready) arrived<T>(full, ring);
      const uint32_t stage = ring.stage(), base = base_of(stage), a = base + at.a, b = base + at.b;
      const float* scale = s.scale[stage];
      ring.advance();
      // Looks for the next stage while the last products of this one are on their way.
      const auto look = [&](bool last) {
        if (last) ready = k + 1 < num_k && has_arrived<T>(full, ring);
      };
      // One scale group from step `from` on.
      const auto run = [&](int from, int g, bool last) {
        const float* rows = scale + at.rows + g * T::kWidth + 4 * (lane % 4);
        const auto weight = [&](int m) { return T::kBlock ? scale[2 * T::kWidth + g * 4 + at.weights + m] : 1.0f; };
        if constexpr (N <= kBothTiles<T::kGemm, kQuant>) {  // the second is multiplied as the first is promoted
          float first[N / 2], second[N / 2];
          wgmma_fence(first);
          wgmma_arrive();
          multiply<WgmmaType::kE4m3, kSteps, false, N>(first, a + 2 * from, b + 2 * from);
          wgmma_commit();
          wgmma_fence(second);
          wgmma_arrive();
          multiply<WgmmaType::kE4m3, kSteps, false, N>(second, a + kTile + 2 * from, b + 2 * from);
          wgmma_commit();
          look(last);
          wgmma_wait<1>();
          wgmma_fence(first);
          promote<T::kBlock, N>(acc[0], first, weight(0), rows);
          wgmma_wait<0>();
          wgmma_fence(second);
          promote<T::kBlock, N>(acc[1], second, weight(1), rows);
        } else {
          float part[N / 2];
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            wgmma_fence(part);
            wgmma_arrive();
            multiply<WgmmaType::kE4m3, kSteps, false, N>(part, a + m * kTile + 2 * from, b + 2 * from);
            wgmma_commit();
            look(last && m == 1);
            wgmma_wait<0>();
            wgmma_fence(part);
            promote<T::kBlock, N>(acc[m], part, weight(m), rows);
          }
        }
      };
      const bool second = T::kGroups == 2 && (k + 1) * 128 <= p.k_bytes;
      run(0, 0, !second);
      if constexpr (T::kGroups == 2) {
        if (second) run(2, 1, true);
      }
      give_back<T>(back + stage * 8);
    }
  }
}

// K loop of a task of three units (kTriples), at a width of N: acc as above, of the warpgroup's own unit, and its half
// of the third. What is wider stays zero: the epilogue is the same code for all N.
template <class T, int N>
__device__ __forceinline__ void multiply_triple(const GemmParams& p, typename T::Smem& s, typename T::Ring& ring,
                                                uint32_t at_a, uint32_t at_b, float (&acc)[2][T::kWidth / 2],
                                                float (&half)[T::kWidth / 2]) {
  constexpr uint32_t kTile = kUnitBytes / 2 >> 4;
  const int num_k = (p.k_bytes + 127) / 128;
  const uint32_t full = smem_address(s.full), back = back_address<T>(smem_address(s.empty));
  const uint32_t stages = smem_address(s.stage) >> 4;
#pragma unroll
  for (int i = 0; i < T::kWidth / 2; ++i) acc[0][i] = acc[1][i] = half[i] = 0.0f;
  bool ready = false;  // the stage has been waited for
#pragma unroll 1
  for (int k = 0; k < num_k; ++k) {
    if (!ready) arrived<T>(full, ring);
    const uint32_t stage = ring.stage(), base = stages + uniform(stage * (T::kStageBytes >> 4));
    ring.advance();
    float part[N / 2];
#pragma unroll
    for (int m = 0; m < 3; ++m) {
      float (&sums)[T::kWidth / 2] = m == 2 ? half : acc[m];
      wgmma_fence(part);
      wgmma_arrive();
      multiply<WgmmaType::kE4m3, 4, false, N>(part, base + at_a + m * kTile, base + at_b);
      wgmma_commit();
      if (m == 2) ready = k + 1 < num_k && has_arrived<T>(full, ring);
      wgmma_wait<0>();
      wgmma_fence(part);
      if (m == 2) give_back<T>(back + stage * 8);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) sums[i] += part[i];
    }
  }
}

// Calls run.operator()<N>() with the N that a tile of `width` rows is multiplied at: a multiple of 32 from T::kLeastN
// on (with fp32 sums, which take the longer the wider, of 16). Each N is code of its own, which every CTA fetches in
// every call when it first has such a tile: few of them are faster than narrow ones.
template <class T, class Run>
__device__ __forceinline__ void with_width(int width, Run& run) {
  constexpr int kStep = T::kExact ? 16 : 32;
  switch (max((width + kStep - 1) / kStep * kStep, T::kLeastN)) {
#define HPC_MOE_WIDTH(N)                                                                            \
  case N:                                                                                           \
    if constexpr (N >= T::kLeastN && N <= T::kMaxN && N % kStep == 0) run.template operator()<N>(); \
    break;
    HPC_MOE_WIDTH(16)
    HPC_MOE_WIDTH(32)
    HPC_MOE_WIDTH(48)
    HPC_MOE_WIDTH(64)
    HPC_MOE_WIDTH(80)
    HPC_MOE_WIDTH(96)
    HPC_MOE_WIDTH(112)
    HPC_MOE_WIDTH(128)
#undef HPC_MOE_WIDTH
  }
}

// Consumer warps: task after task, as the producers publish them. `Epilogue::run<N>(p, s, tile, parity, acc)` stores a
// unit of a task; it is called by whole warpgroups.
template <class T, bool kDirect, class Epilogue>
__device__ __forceinline__ void consume(const GemmParams& p, typename T::Smem& s) {
  const int group = uniform(threadIdx.x / 128);
  const uint32_t full = smem_address(s.full);
  Epilogue::prepare(p, s);
  typename T::Ring ring;
#pragma unroll 1
  for (int turn = 0;; ++turn) {
    mbarrier_wait(full + ring.stage() * 8, ring.phase());
    const TurnTask& task = s.turns[turn % kTurns];
    if (task.width == 0) break;
    if (task.rows == 0) {  // a guess that was wrong, or a task of the cluster's other CTA alone
      skip_stages<T>(s, ring, T::kClusters && task.units == 0 ? (p.k_bytes + 127) / 128 : task.units);
      continue;
    }
    const bool two_tiles = T::kTwoTiles && task.second_rows > 0;
    if (group > 0 && task.units != 2 && !two_tiles) {
      skip_stages<T>(s, ring, (p.k_bytes + 127) / 128);
      continue;
    }
    if constexpr (T::kTriples) {
      float acc[2][T::kWidth / 2], half[T::kWidth / 2];
      const uint32_t at_a = uniform(kLowBits + group * (kUnitBytes * 3 / 2 >> 4)), at_b = kLowBits + (T::kRowsAt >> 4);
      const auto multiply = [&]<int N>() { multiply_triple<T, N>(p, s, ring, at_a, at_b, acc, half); };
      if (task.width <= 64) {
        multiply.template operator()<64>();
      } else if (task.width <= 80) {
        multiply.template operator()<80>();
      } else if (task.width <= 88) {
        multiply.template operator()<88>();
      } else {
        multiply.template operator()<96>();
      }
      Epilogue::template run<T::kWidth>(p, s, task, group, turn & 1, acc);
      Epilogue::template run_half<T::kWidth>(p, s, task, group, half);
      continue;
    }
    const uint32_t first = two_tiles ? 0 : group;
    // Rows of B; kTall: of a task of one unit behind it, the second warpgroup's behind the first's.
    const uint32_t rows_at =
        T::kTall ? (task.units == 2 ? 2 * kUnitBytes : kUnitBytes) + (two_tiles && group ? task.rows * 128 : 0)
                 : (two_tiles && group ? kUnitBytes : 2 * kUnitBytes);
    const Operands at = {uniform(kLowBits + first * (kUnitBytes >> 4)), uniform(kLowBits + (rows_at >> 4)),
                         two_tiles && group ? T::kWidth : 0, static_cast<int>(first) * 2};
    const auto run = [&]<int N>() {
      float acc[2][N / 2];
      multiply_task<T, kDirect, N>(p, s, ring, at, T::kHalfUnits && task.units >= kHalfUnit, acc);
      Epilogue::template run<N>(p, s, task, group, turn & 1, acc);
    };
    with_width<T>(task.width, run);
  }
}

}  // namespace hpc::moe

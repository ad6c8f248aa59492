// Grouped GEMM of the experts, second (gate-up) and third (down) of the four kernels: weights as M, tokens as N.
//
// The K loop and what it needs; grouped_frame.cuh has tasks, producers and roles.
//
// Grid: one CTA an SM, persistent, tasks by static stride. 384 threads:
//   warps 0-3, 4-7   two consumer warpgroups; each owns one unit of the task's pair and multiplies two m64 tiles of it:
//                    gate-up: 64 columns of I (64 gate rows, then their 64 up rows); down: 128 columns of H;
//   warps 8-11       producers: gather rows of B (tokens through the routing index, or rows of h) by cp.async into the
//                    128-byte swizzle, with the scales; one thread also brings the weights by TMA.
// A task is (expert, pair of units, token tile); token tiles of one expert and pair are neighbours, so that their
// weights come from L2 after the first. Tile widths are multiples of 16 up to 128; a warpgroup without a unit (an odd
// last one) only keeps the barriers. Shared memory: kStages x (32 KB weights + 16 KB rows of B), scales of each stage,
// epilogue buffers, barriers. Barriers: full[s] (the TMA thread's arrival and bytes, one arrival a producer thread,
// when its cp.async have landed),
// empty[s] (one a consumer warp). K order: 128 bytes a stage; block scales are applied and sums promoted to fp32
// registers every scale group (128, or 64 of I), per-tensor sums every 128. It depends on nothing but the shape, so a
// row has the same bits in every tile width. Rows of a tile beyond its count hold whatever shared memory held: they
// only reach their own columns, which nobody stores. PDL: gate-up waits first (the index is its predecessor's). Down
// reads the index (two kernels old) and fills its first stages with weights before it waits for h.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include "hpc/cp_async.cuh"
#include "hpc/mbarrier.cuh"
#include "hpc/pdl.cuh"
#include "hpc/tma.cuh"
#include "hpc/wgmma_ss.cuh"
#include "kernels/params.hpp"
#include "kernels/quantise.cuh"

namespace hpc::moe {

enum class Gemm { kUp, kDown };

constexpr int kStages = 4;
constexpr int kMaxWidth = 128;         // widest token tile
constexpr int kUnitBytes = 128 * 128;  // weights of a unit in a stage: two m64 tiles of 128 bytes a row
constexpr int kStageBytes = 2 * kUnitBytes + kMaxWidth * 128;
constexpr int kScaleFloats = 2 * kMaxWidth + 32;  // a stage's scales: B [2 groups][width], weights [2 groups][4]
constexpr int kConsumers = 256, kProducers = 128;
constexpr int kGemmThreads = kConsumers + kProducers;
constexpr int kOutRow = 64 + 16;  // bytes of a staged output row (64 e4m3), padded against conflicts
constexpr uint32_t kNoRow = ~0u;

// A task as grouped_frame.cuh keeps it: token tile, and `active` (1 or 2) units from `unit` on.
struct TurnTask {
  int32_t row;
  uint16_t expert, unit;
  uint8_t rows, width, active, unused;
};
constexpr int kTurns = 8;

struct GemmSmem {
  alignas(1024) uint8_t stage[kStages][kStageBytes];
  alignas(16) float scale[kStages][kScaleFloats];
  alignas(16) uint8_t out[2][kMaxWidth * kOutRow];  // gate-up: one a warpgroup
  float amax[2][8][kMaxWidth];                      // gate-up: by parity of the task, a row a warp
  float inverse[2][kMaxWidth];                      // gate-up: one a warpgroup
  alignas(8) uint64_t full[kStages];
  uint64_t empty[kStages];
  TurnTask turns[2][kTurns];  // tasks of a warpgroup's next turns
  uint16_t token[kMaxWidth];  // gate-up: tokens of the producers' tile
};
constexpr int kGemmSmemBytes = sizeof(GemmSmem) + 1024;  // the start is aligned by hand
static_assert(kGemmSmemBytes <= 232448, "227 KB a CTA");

// Where a ring of kStages stands: how many stages were passed.
struct Ring {
  uint32_t count = 0;
  __device__ __forceinline__ uint32_t stage() const { return count % kStages; }
  __device__ __forceinline__ uint32_t phase() const { return count / kStages & 1; }
};

struct Task {
  int expert, row, rows, width;  // token tile
  int pair;                      // units 2 * pair and 2 * pair + 1
};

// Elements of I that share a scale are 64 (kHalf) or 128; gate-up's K groups are 128 of H always.
template <Gemm kGemm, Quant kQuant, bool kHalf>
struct Traits {
  static constexpr bool kBlock = kQuant == Quant::kBlock;
  static constexpr int kGroups = kBlock && kHalf && kGemm == Gemm::kDown ? 2 : 1;  // scale groups a stage
  // K may end with half a stage: per tensor the other half is filled with zeros (the copy engine's are anyway), so that
  // the products need no branch; by block it is skipped.
  static constexpr bool kZeroTail = kGemm == Gemm::kDown && kQuant == Quant::kTensor;
  static constexpr int kRowBlock = kGemm == Gemm::kUp && kHalf ? 64 : 128;  // weight rows that share a scale
};

// --- producers ------------------------------------------------------------------------------------------------------

// Weights of one stage, by one thread. `row` is the map's coordinate of the first unit, in the groups of 16 (gate-up)
// or 32 (down) weight rows that the map is made of. The maps put rows in an order that leaves neighbouring output
// columns in one thread's registers (launch/weight_map.cu).
template <Gemm kGemm>
__device__ __forceinline__ void load_weights(const GemmParams& p, const CUtensorMap* map, int row, int active, int k,
                                             uint32_t smem, uint32_t full, uint64_t policy) {
  mbarrier_arrive_expect_tx(full, active * kUnitBytes);
  for (int i = 0; i < active; ++i) {
    if constexpr (kGemm == Gemm::kUp) {
      tma_load_4d(smem + i * kUnitBytes, map, full, k * 128, 0, 0, row + 4 * i, policy);
      tma_load_4d(smem + i * kUnitBytes + kUnitBytes / 2, map, full, k * 128, 0, 0, row + 4 * i + p.out_columns / 16,
                  policy);
    } else {
      tma_load_5d(smem + i * kUnitBytes, map, full, k * 128, 0, 0, row + 4 * i, 0, policy);
    }
  }
}

// --- consumers ------------------------------------------------------------------------------------------------------

// One m64 tile over kSteps steps of 32 bytes of K, into `d` from zero (or on top, kAccumulate).
template <WgmmaType kType, int kSteps, bool kAccumulate, int N>
__device__ __forceinline__ void multiply(float (&d)[N / 2], uint64_t a, uint64_t b) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) wgmma_ss<kType, N>(d, a + 2 * step, b + 2 * step, kAccumulate || step > 0);
}

// acc += part * weight scale * row scale; a column of the tile is a row of B.
template <bool kScaled, int N>
__device__ __forceinline__ void promote(float (&acc)[N / 2], const float (&part)[N / 2], float weight_scale,
                                        const float* row_scale) {
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    float2 scale = make_float2(1.0f, 1.0f);
    if constexpr (kScaled) {
      scale = *reinterpret_cast<const float2*>(row_scale + 8 * j);
      scale.x *= weight_scale;
      scale.y *= weight_scale;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int i = 4 * j + 2 * h;
      acc[i] = kScaled ? fmaf(part[i], scale.x, acc[i]) : acc[i] + part[i];
      acc[i + 1] = kScaled ? fmaf(part[i + 1], scale.y, acc[i + 1]) : acc[i + 1] + part[i + 1];
    }
  }
}

// K loop of one task: acc[m] is the warpgroup's m64 tile m (gate-up: 0 gate, 1 up).
template <Gemm kGemm, Quant kQuant, bool kHalf, int N>
__device__ __forceinline__ void multiply_task(const GemmParams& p, GemmSmem& s, Ring& ring, bool active,
                                              float (&acc)[2][N / 2]) {
  using T = Traits<kGemm, kQuant, kHalf>;
  const int lane = threadIdx.x % 32, group = threadIdx.x / 128;
  const int num_k = (p.k_bytes + 127) / 128;
  const uint32_t full = smem_address(s.full), empty = smem_address(s.empty);
  const uint64_t a0 = wgmma_descriptor(smem_address(s.stage) + group * kUnitBytes);
  const uint64_t b0 = wgmma_descriptor(smem_address(s.stage) + 2 * kUnitBytes);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) acc[0][i] = acc[1][i] = 0.0f;

#pragma unroll 1
  for (int k = 0; k < num_k; ++k) {
    mbarrier_wait(full + ring.stage() * 8, ring.phase());
    fence_proxy_async();  // the rows of B were written by the generic proxy, wgmma reads by the async one
    if (active) {
      const uint64_t a = a0 + ring.stage() * (kStageBytes >> 4), b = b0 + ring.stage() * (kStageBytes >> 4);
      if constexpr (kQuant == Quant::kNone) {
        wgmma_fence(acc[0]);
        wgmma_fence(acc[1]);
        wgmma_arrive();
        multiply<WgmmaType::kBf16, 4, true, N>(acc[0], a, b);
        multiply<WgmmaType::kBf16, 4, true, N>(acc[1], a + (kUnitBytes / 2 >> 4), b);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_fence(acc[0]);
        wgmma_fence(acc[1]);
      } else {
        const float* scale = s.scale[ring.stage()];
        float part[N / 2];
        // One m64 tile over kSteps from step `from`, promoted with scale group g.
        const auto run = [&]<int kSteps>(int from, int g) {
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            wgmma_fence(part);
            wgmma_arrive();
            multiply<WgmmaType::kE4m3, kSteps, false, N>(part, a + m * (kUnitBytes / 2 >> 4) + 2 * from, b + 2 * from);
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_fence(part);
            promote<T::kBlock, N>(acc[m], part, T::kBlock ? scale[2 * kMaxWidth + g * 4 + group * 2 + m] : 1.0f,
                                  scale + g * kMaxWidth + 2 * (lane % 4));
          }
        };
        if constexpr (T::kGroups == 1) {
          run.template operator()<4>(0, 0);
        } else {
          run.template operator()<2>(0, 0);
          if ((k + 1) * 128 <= p.k_bytes) run.template operator()<2>(2, 1);
        }
      }
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(empty + ring.stage() * 8);
    ++ring.count;
  }
}

// Calls run.operator()<N>() with the N of a token tile: its width rounded up to 16.
template <class Run>
__device__ __forceinline__ void with_width(int width, Run& run) {
  switch ((width + 15) / 16) {
    case 1:
      run.template operator()<16>();
      break;
    case 2:
      run.template operator()<32>();
      break;
    case 3:
      run.template operator()<48>();
      break;
    case 4:
      run.template operator()<64>();
      break;
    case 5:
      run.template operator()<80>();
      break;
    case 6:
      run.template operator()<96>();
      break;
    case 7:
      run.template operator()<112>();
      break;
    default:
      run.template operator()<128>();
      break;
  }
}

// Makes the barriers; gate-up also waits for the index.
template <Gemm kGemm>
__device__ __forceinline__ GemmSmem& start_gemm(const CUtensorMap* map) {
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
  if constexpr (kGemm == Gemm::kUp) {
    pdl_wait();
    pdl_trigger();
  }

  return s;
}

}  // namespace hpc::moe

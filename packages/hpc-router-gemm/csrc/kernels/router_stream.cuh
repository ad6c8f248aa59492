// Router GEMM for few tokens: y[m, n] = x[m, k] weight[n, k]^T, the weight streamed once through registers.
//
// Grid    (split, expert tiles of 16 R, token tiles of 8 NB); the `split` CTAs of a tile are one cluster. 256 threads.
// Warps   each of the 8 * split warps of a tile owns a consecutive part of k and shares nothing with the others until
//         the end: no CTA barrier in the loop.
// FIFO    private to a warp, `stages` steps of k = 32: R x 16 weight rows and NB x 8 token rows by cp.async. Rows of
//         fp32 weights are 128 bytes whose 16-byte chunks are exchanged in pairs on odd rows, which frees the fragment
//         reads of bank conflicts; bf16 weights and tokens lie in the lane's own slots.
// Math    m16n8k16 with the weight as A. Within a step k is permuted, for both operands alike: lane (g, t) takes
//         k = 8 t .. 8 t + 7 of rows g and g + 8, of which the first instruction uses 8 t .. 8 t + 3, the second the
//         rest. Products of the smaller terms come first. The tensor core truncates each sum: every step's sum is moved
//         to an ordinary fp32 sum, except for two terms where registers are short (a warp's k is then at most 256).
// Sum     over the warps in shared memory (over the FIFO), then over the cluster: each CTA owns a part of the tile and
//         is sent the others' partial sums of it (cluster.cuh). Order: warps ascending, then ranks ascending.
// PDL     the first stages' weights are requested before pdl_wait() where params.prefetch allows it; x after it.
#pragma once

#include <cuda_bf16.h>

#include "hpc/cluster.cuh"
#include "hpc/cp_async.cuh"
#include "hpc/mbarrier.cuh"
#include "hpc/pdl.cuh"
#include "kernels/params.hpp"
#include "kernels/split.cuh"

namespace hpc::router {

constexpr int kStreamThreads = 32 * kStreamWarps;

template <int R, int NB, Weight kWeight>
struct StreamShape {
  static constexpr int kTerms = weight_terms(kWeight);
  static constexpr bool kPromote = stream_promotes(16 * R, 8 * NB, kWeight);
  // Three terms, few rows and tokens: all of a stage is read, and the stage given back, before the weights are split;
  // and products of the rows are issued in turn, for each waits for the one before it on its sum.
  static constexpr bool kEarly = weight_terms(kWeight) == 3 && R <= 2 && NB == 1;
  static constexpr int kMinCtas = kEarly && R == 2 ? 2 : 0;  // of an SM: registers that fit; 0: as the compiler finds
  static constexpr int kRows = 16 * R;
  static constexpr int kTokens = 8 * NB;
  static constexpr int kWeightBytes = stream_weight_bytes(kRows, kWeight);  // a stage of one warp
  static constexpr int kStageBytes = stream_stage_bytes(kRows, kTokens, kWeight);
  static constexpr int kQuads = R * NB * 32;  // float4 of a tile
};

// Waits until at most `pending` (0 to 7) of this thread's groups are unfinished.
__device__ __forceinline__ void cp_async_wait_runtime(int pending) {
  switch (pending) {
    case 0:
      return cp_async_wait<0>();
    case 1:
      return cp_async_wait<1>();
    case 2:
      return cp_async_wait<2>();
    case 3:
      return cp_async_wait<3>();
    case 4:
      return cp_async_wait<4>();
    case 5:
      return cp_async_wait<5>();
    case 6:
      return cp_async_wait<6>();
    default:
      return cp_async_wait<7>();
  }
}

// 16 bytes, or zeros where `valid` is false (then nothing is read).
__device__ __forceinline__ void cp_async_16_or_zero(uint32_t smem, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t smem) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(smem));
  return v;
}

__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Requests one step's copies: what a lane copies of weights and of tokens, and where in the stage it goes.
template <int R, int NB, Weight kWeight>
struct StreamSource {
  using Shape = StreamShape<R, NB, kWeight>;
  static constexpr bool kFloat = kWeight != Weight::kBf16;
  static constexpr int kRowsPerCopy = kFloat ? 4 : 8;  // rows one copy instruction of the warp covers

  const char* weight;    // this lane's first row and chunk at k = 0
  int64_t weight_step;   // bytes between its rows
  int weight_rows_left;  // rows of the tensor from its first row on
  uint32_t weight_slot;
  int weight_k;
  const char* x;
  int64_t x_step;
  int x_rows_left;
  int x_k;
  const StreamParams& p;

  __device__ __forceinline__ StreamSource(const StreamParams& params, int row0, int64_t token0, int lane) : p(params) {
    const int row = kFloat ? lane / 8 : lane / 4;
    const int chunk = kFloat ? lane % 8 : lane % 4;
    weight_k = chunk * (kFloat ? 4 : 8);
    weight_step = kRowsPerCopy * p.weight_stride * weight_bytes(kWeight);
    weight_rows_left = p.n - row0 - row;
    weight = static_cast<const char*>(p.weight) +
             (static_cast<int64_t>(row0 + row) * p.weight_stride + weight_k) * weight_bytes(kWeight);
    // fp32: row-major chunks, exchanged on odd rows (copies cover 4 rows, so a lane's rows have one parity).
    weight_slot = kFloat ? row * 128 + ((chunk ^ (row & 1)) << 4) : lane * 16;
    x_k = (lane % 4) * 8;
    x_step = 8 * p.x_stride * 2;
    const int64_t tokens_left = p.m - token0 - lane / 4;
    x_rows_left = static_cast<int>(tokens_left < 8 * NB ? tokens_left : 8 * NB);
    x = static_cast<const char*>(p.x) + ((token0 + lane / 4) * p.x_stride + x_k) * 2;
  }

  __device__ __forceinline__ void copy_weight(uint32_t stage, int k0) const {
    const bool inside = k0 + weight_k < p.k;
    const char* source = weight + static_cast<int64_t>(k0) * weight_bytes(kWeight);
#pragma unroll
    for (int i = 0; i < Shape::kRows / kRowsPerCopy; ++i) {
      const bool valid = inside && i * kRowsPerCopy < weight_rows_left;
      cp_async_16_or_zero(stage + weight_slot + i * 512, valid ? source + i * weight_step : p.weight, valid);
    }
  }

  __device__ __forceinline__ void copy_x(uint32_t stage, int k0, int lane) const {
    const bool inside = k0 + x_k < p.k;
#pragma unroll
    for (int b = 0; b < NB; ++b) {
      const bool valid = inside && b * 8 < x_rows_left;
      cp_async_16_or_zero(stage + Shape::kWeightBytes + b * 512 + lane * 16,
                          valid ? x + b * x_step + static_cast<int64_t>(k0) * 2 : p.x, valid);
    }
  }
};

// Four fp32 weights of one row half, for one of a step's instructions.
template <int Terms>
__device__ __forceinline__ void split_quad(uint4 v, int eight, uint32_t (&a)[Terms][4]) {
  uint32_t first[Terms], second[Terms];
  split_pair<Terms>(__uint_as_float(v.x), __uint_as_float(v.y), first);
  split_pair<Terms>(__uint_as_float(v.z), __uint_as_float(v.w), second);
#pragma unroll
  for (int term = 0; term < Terms; ++term) {
    a[term][eight] = first[term];
    a[term][2 + eight] = second[term];
  }
}

// Where a lane's weights of 16 fp32 rows are, of the rows' first half.
__device__ __forceinline__ uint32_t weight_quad(uint32_t rows16, int lane, int half) {
  const int g = lane / 4;
  return rows16 + g * 128 + (((2 * (lane % 4) + half) ^ (g & 1)) << 4);
}

// The A fragments of 16 rows for both instructions of a step: a[half][term].
template <Weight kWeight, int Terms>
__device__ __forceinline__ void load_weight_fragments(uint32_t rows16, int lane, uint32_t (&a)[2][Terms][4]) {
  if constexpr (kWeight == Weight::kBf16) {
    const uint4 low = load_shared_16(rows16 + lane * 16);
    const uint4 high = load_shared_16(rows16 + 512 + lane * 16);
    a[0][0][0] = low.x, a[0][0][1] = high.x, a[0][0][2] = low.y, a[0][0][3] = high.y;
    a[1][0][0] = low.z, a[1][0][1] = high.z, a[1][0][2] = low.w, a[1][0][3] = high.w;
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t address = weight_quad(rows16, lane, half);
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
        split_quad<Terms>(load_shared_16(address + eight * 1024), eight, a[half]);
      }
    }
  }
}

template <int R, int NB, Weight kWeight>
__global__ void __launch_bounds__(kStreamThreads, StreamShape<R, NB, kWeight>::kMinCtas)
    router_stream_kernel(const StreamParams p) {
  using Shape = StreamShape<R, NB, kWeight>;
  constexpr int kTerms = Shape::kTerms;
  extern __shared__ __align__(1024) uint8_t smem_raw[];
  const uint32_t smem = smem_address(smem_raw);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int rank = blockIdx.x;  // the cluster is the grid's x
  const int row0 = blockIdx.y * Shape::kRows;
  const int64_t token0 = static_cast<int64_t>(blockIdx.z) * Shape::kTokens;
  const uint32_t slots = smem + stream_slot_offset(Shape::kRows, Shape::kTokens, kWeight, p.stages);
  const uint32_t barrier = slots + stream_slot_bytes(Shape::kRows, Shape::kTokens, p.split);
  const int part = (Shape::kQuads + p.split - 1) / p.split;  // quads a CTA owns; the last may own fewer, or none
  const int owned = min(part, max(0, Shape::kQuads - rank * part));

  if (p.split > 1) {
    if (threadIdx.x == 0) {
      mbarrier_init(barrier, 1);
      mbarrier_init_fence();
      mbarrier_arrive_expect_tx(barrier, owned * p.split * 16);
    }
    __syncwarp();
    cluster_arrive_relaxed();
  }

  // This warp's steps of k.
  const int steps = (p.k + kStreamStepK - 1) / kStreamStepK;
  const int workers = kStreamWarps * p.split;
  const int worker = rank * kStreamWarps + warp;
  const int begin = static_cast<int>(static_cast<int64_t>(worker) * steps / workers);
  const int count = static_cast<int>(static_cast<int64_t>(worker + 1) * steps / workers) - begin;

  const StreamSource<R, NB, kWeight> source(p, row0, token0, lane);
  const uint32_t fifo = smem + warp * p.stages * Shape::kStageBytes;

  // Groups of copies: one with the weights of the first stages, then one for each stage in order.
  if (!p.prefetch) pdl_wait();
#pragma unroll 1
  for (int i = 0; i < min(p.stages, count); ++i) {
    source.copy_weight(fifo + i * Shape::kStageBytes, (begin + i) * kStreamStepK);
  }
  cp_async_commit();
  if (p.prefetch) pdl_wait();
  pdl_trigger();
#pragma unroll 1
  for (int i = 0; i < p.stages; ++i) {
    if (i < count) source.copy_x(fifo + i * Shape::kStageBytes, (begin + i) * kStreamStepK, lane);
    cp_async_commit();
  }

  float sum[R][NB][4] = {};
  float promoted[Shape::kPromote ? R : 1][Shape::kPromote ? NB : 1][4] = {};
  uint32_t stage = fifo;
  int slot = 0;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    cp_async_wait_runtime(p.stages - 1);
    __syncwarp();
    uint4 xs[NB];
#pragma unroll
    for (int b = 0; b < NB; ++b) xs[b] = load_shared_16(stage + Shape::kWeightBytes + b * 512 + lane * 16);
    const auto refill = [&] {
      __syncwarp();  // all lanes have read the stage
      if (i + p.stages < count) {
        const int k0 = (begin + i + p.stages) * kStreamStepK;
        source.copy_weight(stage, k0);
        source.copy_x(stage, k0, lane);
      }
      cp_async_commit();
    };
    if constexpr (Shape::kEarly) {
      uint4 raw[R][2][2];
#pragma unroll
      for (int j = 0; j < 4 * R; ++j) {
        const uint32_t address = weight_quad(stage + j / 4 * (Shape::kWeightBytes / R), lane, j / 2 % 2);
        raw[j / 4][j / 2 % 2][j % 2] = load_shared_16(address + j % 2 * 1024);
      }
      refill();
      uint32_t a[R][2][kTerms][4];
#pragma unroll
      for (int j = 0; j < 4 * R; ++j) {
        split_quad<kTerms>(raw[j / 4][j / 2 % 2][j % 2], j % 2, a[j / 4][j / 2 % 2]);
      }
#pragma unroll
      for (int term = kTerms - 1; term >= 0; --term) {
#pragma unroll
        for (int r = 0; r < R; ++r) mma_bf16(sum[r][0], a[r][0][term], xs[0].x, xs[0].y);
#pragma unroll
        for (int r = 0; r < R; ++r) mma_bf16(sum[r][0], a[r][1][term], xs[0].z, xs[0].w);
      }
    } else {
#pragma unroll
      for (int r = 0; r < R; ++r) {
        uint32_t a[2][kTerms][4];
        load_weight_fragments<kWeight, kTerms>(stage + r * (Shape::kWeightBytes / R), lane, a);
#pragma unroll
        for (int term = kTerms - 1; term >= 0; --term) {
#pragma unroll
          for (int b = 0; b < NB; ++b) mma_bf16(sum[r][b], a[0][term], xs[b].x, xs[b].y);
#pragma unroll
          for (int b = 0; b < NB; ++b) mma_bf16(sum[r][b], a[1][term], xs[b].z, xs[b].w);
        }
      }
      refill();
    }
    if (++slot == p.stages) {
      slot = 0;
      stage = fifo;
    } else {
      stage += Shape::kStageBytes;
    }
    if constexpr (Shape::kPromote) {
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int b = 0; b < NB; ++b) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            promoted[r][b][e] += sum[r][b][e];
            sum[r][b][e] = 0.0f;
          }
        }
      }
    }
  }
  if constexpr (Shape::kPromote) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int b = 0; b < NB; ++b) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[r][b][e] += promoted[r][b][e];
      }
    }
  }

  // Partial sums of the warps, as [warp][row block][token block][lane] float4, over the FIFO.
  cp_async_wait<0>();
  __syncthreads();
  float4* partials = reinterpret_cast<float4*>(smem_raw);
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int b = 0; b < NB; ++b) {
      partials[warp * Shape::kQuads + (r * NB + b) * 32 + lane] =
          make_float4(sum[r][b][0], sum[r][b][1], sum[r][b][2], sum[r][b][3]);
    }
  }
  __syncthreads();

  // Quad q holds rows g, g + 8 and tokens 2 t, 2 t + 1 of its blocks.
  const auto store = [&](int q, float4 v) {
    const int block = q / 32;
    const int row = row0 + (block / NB) * 16 + (q % 32) / 4;
    const int64_t token = token0 + (block % NB) * 8 + 2 * (q % 4);
    float* y = p.y + token * p.y_stride + row;
    const bool rows[2] = {row < p.n, row + 8 < p.n};
    if (token < p.m) {
      if (rows[0]) y[0] = v.x;
      if (rows[1]) y[8] = v.z;
    }
    if (token + 1 < p.m) {
      if (rows[0]) y[p.y_stride] = v.y;
      if (rows[1]) y[p.y_stride + 8] = v.w;
    }
  };
  const auto add = [](float4& into, float4 v) {
    into.x += v.x;
    into.y += v.y;
    into.z += v.z;
    into.w += v.w;
  };

  if (p.split > 1) cluster_wait();
  for (int q = threadIdx.x; q < Shape::kQuads; q += kStreamThreads) {
    float4 v = partials[q];
#pragma unroll
    for (int w = 1; w < kStreamWarps; ++w) add(v, partials[w * Shape::kQuads + q]);
    if (p.split == 1) {
      store(q, v);
    } else {
      const int owner = q / part;
      const uint32_t slot_address = slots + (rank * part + q - owner * part) * 16;
      store_async_16(cluster_address(slot_address, owner), cluster_address(barrier, owner), v);
    }
  }
  if (p.split == 1 || owned == 0) return;
  mbarrier_wait(barrier, 0);
  const float4* received = reinterpret_cast<const float4*>(smem_raw + (slots - smem));
  for (int i = threadIdx.x; i < owned; i += kStreamThreads) {
    float4 v = received[i];
    for (int r = 1; r < p.split; ++r) add(v, received[r * part + i]);
    store(rank * part + i, v);
  }
}

}  // namespace hpc::router

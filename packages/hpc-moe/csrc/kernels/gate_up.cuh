// Gate-up kernel, second of the four: h = quantise(bf16(silu(gate) * up)) from x and w13; grouped_gemm.cuh has the
// plan.
//
// Reads x (or its quantised copy) through the routing index, w13, scales. Writes h [rows, I] and, for block scales,
// h_scale [rows, I / 128 or I / 64]. A warpgroup's m64 tile 0 is 64 gate rows, tile 1 the up rows of the same columns,
// so gate and up of an element are the same register of the same thread. The tensor map puts weight row 16 w + 2 g + h
// of a unit at shared row 16 w + 8 h + g: a thread (warp w, lane group g) then has columns 16 w + 2 g and + 1, and
// packs them.
#pragma once

#include "kernels/activation.cuh"
#include "kernels/grouped_produce.cuh"

namespace hpc::moe {

template <class T>
struct GateUpEpilogue {
  static constexpr Quant kQuant = T::kQuant;
  static constexpr bool kBlock = T::kBlock, kHalf = T::kHalf;
  using Smem = typename T::Smem;

  // Where a warpgroup's part of a task belongs.
  struct Part {
    int row, rows, unit;
  };

  static __device__ __forceinline__ void prepare(const GemmParams& p, Smem& s) {
    if constexpr (kQuant == Quant::kTensor) {
      if (threadIdx.x == 0) s.fixed_inverse = static_inverse(*p.act_scale);
      named_barrier_sync(1, kConsumers);
    }
  }

  template <int N>
  static __device__ __forceinline__ void run(const GemmParams& p, Smem& s, const TurnTask& task, int group, int parity,
                                             float (&acc)[2][N / 2]) {
    const int lane = threadIdx.x % 32, thread = threadIdx.x % 128;
    const int row = lane / 4, column = 2 * (lane % 4);  // of an 8 x 8 block of the accumulator
    const bool two_tiles = task.second_rows > 0;
    const bool second = two_tiles && group > 0;
    const Part part = {task.row + (second ? task.rows : 0), second ? task.second_rows : task.rows,
                       task.unit + (two_tiles ? 0 : group)};
    const float scale = task.scale, bound = swiglu_bound(p.swiglu_limit);
    // Half a unit: the up values are the other rows of tile 0, and a thread has one column.
    const bool half_unit = T::kHalfUnits && task.units >= kHalfUnit;
    // v[2 i], v[2 i + 1]: the two columns of the thread's token i.
    float v[N / 2];
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const int at = i / 2 * 4 + i % 2;
      float pair[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float gate = acc[0][at + 2 * h], up = h == 0 && half_unit ? acc[0][at + 2] : acc[1][at + 2 * h];
        pair[h] =
            kQuant == Quant::kTensor ? fast_swiglu(gate * scale, up * scale, bound) : fast_swiglu(gate, up, bound);
      }
      const float2 rounded = __bfloat1622float2(__floats2bfloat162_rn(pair[0], pair[1]));
      v[2 * i] = rounded.x;
      v[2 * i + 1] = rounded.y;
    }
    const int first = thread / 32 * 16 + 2 * row;  // of the unit's 64 columns
    if constexpr (kQuant == Quant::kNone) {
      auto* out = static_cast<__nv_bfloat16*>(p.out) + part.unit * 64 + first;
#pragma unroll
      for (int i = 0; i < N / 4; ++i) {  // token of the tile, in this thread's order
        const int token = i / 2 * 8 + column + i % 2;
        if (token < part.rows) {
          *reinterpret_cast<__nv_bfloat162*>(out + static_cast<int64_t>(part.row + token) * p.out_columns) =
              __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
        }
      }
    } else {
      if constexpr (kBlock) {
        group_scales<N>(p, s, part, group, parity, task.units == 1, v);
      } else {
        named_barrier_sync(2 + group, 128);  // the previous task's rows have left s.out
      }
      const float fixed = kBlock ? 0.0f : s.fixed_inverse;
      uint8_t* staged = s.out[group] + (half_unit ? first / 2 : first);
      uint8_t* out = static_cast<uint8_t*>(p.out) + static_cast<int64_t>(part.row) * p.out_columns + part.unit * 64;
      if (half_unit) out += (task.units - kHalfUnit) * 32;
      const int shift = half_unit ? 1 : 2;
      constexpr int kAtOnce = T::kWidth;  // tokens that s.out has room for
#pragma unroll
      for (int from = 0; from < N; from += kAtOnce) {
        if (from > 0) named_barrier_sync(2 + group, 128);
#pragma unroll
        for (int i = from / 4; i < min(N, from + kAtOnce) / 4; ++i) {
          const int token = i / 2 * 8 + column + i % 2;
          const float inverse = kBlock ? s.inverse[group][token] : fixed;
          const uint16_t codes = to_e4m3x2(v[2 * i] * inverse, v[2 * i + 1] * inverse);
          if (half_unit) {
            staged[(token - from) * kOutRow] = static_cast<uint8_t>(codes);
          } else {
            *reinterpret_cast<uint16_t*>(staged + (token - from) * kOutRow) = codes;
          }
        }
        named_barrier_sync(2 + group, 128);
        const int end = min(part.rows, from + kAtOnce);
        for (int i = (from << shift) + thread; i < end << shift; i += 128) {  // 64 or 32 bytes a token, 16 a thread
          const int token = i >> shift, at = (i & ((1 << shift) - 1)) * 16;
          *reinterpret_cast<uint4*>(out + static_cast<int64_t>(token) * p.out_columns + at) =
              *reinterpret_cast<const uint4*>(s.out[group] + (token - from) * kOutRow + at);
        }
      }
    }
  }

  // kTriples: half of the task's third unit. A thread has a column: gate values are rows 0 to 7 of its warp's, up
  // values the others.
  template <int N>
  static __device__ __forceinline__ void run_half(const GemmParams& p, Smem& s, const TurnTask& task, int group,
                                                  const float (&acc)[N / 2]) {
    const int lane = threadIdx.x % 32, thread = threadIdx.x % 128;
    const float scale = task.scale, bound = swiglu_bound(p.swiglu_limit), inverse = s.fixed_inverse;
    uint8_t* staged = s.out[group] + thread / 32 * 8 + lane / 4 + 2 * (lane % 4) * kOutRow;
    named_barrier_sync(2 + group, 128);  // the unit's rows have left s.out
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      float v[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) v[c] = fast_swiglu(acc[4 * j + c] * scale, acc[4 * j + 2 + c] * scale, bound);
      const float2 rounded = __bfloat1622float2(__floats2bfloat162_rn(v[0], v[1]));
      const uint16_t codes = to_e4m3x2(rounded.x * inverse, rounded.y * inverse);
      staged[8 * j * kOutRow] = static_cast<uint8_t>(codes);
      staged[(8 * j + 1) * kOutRow] = static_cast<uint8_t>(codes >> 8);
    }
    named_barrier_sync(2 + group, 128);
    uint8_t* out = static_cast<uint8_t*>(p.out) + static_cast<int64_t>(task.row) * p.out_columns +
                   (task.unit + 2) * 64 + group * 32;
    for (int i = thread; i < task.rows * 2; i += 128) {  // 32 bytes a token
      *reinterpret_cast<uint4*>(out + static_cast<int64_t>(i / 2) * p.out_columns + i % 2 * 16) =
          *reinterpret_cast<const uint4*>(s.out[group] + i / 2 * kOutRow + i % 2 * 16);
    }
  }

  // Block scales of the tile: largest magnitude of each token over 64 columns (this warpgroup's) or 128 (both
  // warpgroups'); stores the scales and leaves the inverses in s.inverse.
  template <int N>
  static __device__ __forceinline__ void group_scales(const GemmParams& p, Smem& s, const Part& part, int group,
                                                      int parity, bool single, const float (&v)[N / 2]) {
    const int lane = threadIdx.x % 32, thread = threadIdx.x % 128;
    float (&amax)[8][T::kWidth] = s.amax[parity];
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      float2 largest =
          make_float2(fmaxf(fabsf(v[4 * j]), fabsf(v[4 * j + 1])), fmaxf(fabsf(v[4 * j + 2]), fabsf(v[4 * j + 3])));
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) {
        largest.x = fmaxf(largest.x, __shfl_xor_sync(~0u, largest.x, mask));
        largest.y = fmaxf(largest.y, __shfl_xor_sync(~0u, largest.y, mask));
      }
      if (lane < 4) *reinterpret_cast<float2*>(&amax[threadIdx.x / 32][8 * j + 2 * lane]) = largest;
    }
    if (kHalf || single) {
      named_barrier_sync(2 + group, 128);
    } else {
      named_barrier_sync(1, kConsumers);
    }
    if constexpr (T::kExchange) {
      if (single) exchange<N>(s, amax);
    }
    if (thread < N) {
      float largest = 0.0f;
#pragma unroll
      for (int w = 0; w < 4; ++w) largest = fmaxf(largest, amax[(kHalf ? group * 4 : 0) + w][thread]);
      if (!kHalf && !single) {
#pragma unroll
        for (int w = 4; w < 8; ++w) largest = fmaxf(largest, amax[w][thread]);
      }
      if (T::kExchange && single) largest = fmaxf(largest, theirs(s)[thread]);
      const GroupScale scale = group_scale(largest);
      s.inverse[group][thread] = scale.inverse;
      if (thread < part.rows && (kHalf || (single ? part.unit % 2 == 0 : group == 0))) {
        constexpr int kGroup = kHalf ? 64 : 128;
        p.out_scale[static_cast<int64_t>(part.row + thread) * (p.out_columns / kGroup) + part.unit * 64 / kGroup] =
            scale.scale;
      }
    }
    named_barrier_sync(2 + group, 128);
  }

  // Where another CTA's largest magnitudes come: no second tile's scales are there.
  static __device__ __forceinline__ float* theirs(Smem& s) { return s.scale[0] + T::kWidth; }

  // A unit of a pair whose other unit is the cluster's other CTA's: gives it this one's largest magnitudes, and waits
  // for its. A CTA has one such task at most.
  template <int N>
  static __device__ __forceinline__ void exchange(Smem& s, const float (&amax)[8][T::kWidth]) {
    const int thread = threadIdx.x % 128;
    const uint32_t exchanged = smem_address(&s.exchanged[0]);
    if (thread == 0) mbarrier_arrive_expect_tx(exchanged, N * 4);
    if (thread < N / 4) {
      float largest[4] = {};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
#pragma unroll
        for (int i = 0; i < 4; ++i) largest[i] = fmaxf(largest[i], amax[w][4 * thread + i]);
      }
      const uint32_t other = static_cast<uint32_t>(blockIdx.x % 2 ^ 1);
      store_async_16(cluster_address(smem_address(theirs(s) + 4 * thread), other), cluster_address(exchanged, other),
                     make_float4(largest[0], largest[1], largest[2], largest[3]));
    }
    mbarrier_wait(exchanged, 0);
  }
};

// By block, where tokens are M: four lanes have a unit's columns of two rows of each block, 16 neighbouring ones a
// thread (the map puts weight row 16 t + 2 j + c at shared row 8 j + 2 t + c), and store without a detour. Half of
// the columns (kThree) are two of every four.
template <class T>
struct GateUpTokens {
  static_assert(T::kBlock);
  using Smem = typename T::Smem;
  static __device__ __forceinline__ void prepare(const GemmParams&, Smem&) {}

  template <int kBlocks>
  static __device__ __forceinline__ void run(const GemmParams& p, Smem& s, const TurnTask& task, int first_unit,
                                             const TokenBlocks& at, int group, float (&acc)[kBlocks][64]) {
    const int lane = threadIdx.x % 32, first_row = threadIdx.x % 128 / 32 * 16 + lane / 4;
    const float bound = swiglu_bound(p.swiglu_limit);
    const int64_t tile_row = task.row + (at.tile ? task.rows : 0);
    float largest[kBlocks][2] = {};  // of the thread's two rows
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 32; i += 2) {
        const float2 rounded = __bfloat1622float2(__floats2bfloat162_rn(
            fast_swiglu(acc[b][i], acc[b][32 + i], bound), fast_swiglu(acc[b][i + 1], acc[b][33 + i], bound)));
        acc[b][i] = rounded.x;
        acc[b][i + 1] = rounded.y;
        largest[b][i / 2 % 2] = fmaxf(largest[b][i / 2 % 2], fmaxf(fabsf(rounded.x), fabsf(rounded.y)));
      }
    }
    group_amax<kBlocks>(s, group, first_row, largest);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      constexpr int kGroup = T::kHalf ? 64 : 128;
      const int column = (first_unit + at.unit[b]) * 64;
      const bool stores_scale = lane % 4 == 0 && (T::kHalf || (kBlocks == 2 ? b == 0 : group == 0));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = at.rows[b] + first_row + 8 * h;
        if (row >= at.live) continue;
        const GroupScale scale = group_scale(largest[b][h]);
        if (stores_scale) p.out_scale[(tile_row + row) * (p.out_columns / kGroup) + column / kGroup] = scale.scale;
        store_unit(p, tile_row + row, column, &acc[b][2 * h], scale.inverse);
      }
    }
  }

  // 16 of a unit's row: v[4 j] and the next, j < 8.
  static __device__ __forceinline__ void store_unit(const GemmParams& p, int64_t row, int column, const float* v,
                                                    float inverse) {
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w, v += 8) {
      words[w] = to_e4m3x2(v[0] * inverse, v[1] * inverse) |
                 static_cast<uint32_t>(to_e4m3x2(v[4] * inverse, v[5] * inverse)) << 16;
    }
    *reinterpret_cast<uint4*>(static_cast<uint8_t*>(p.out) + row * p.out_columns + column + threadIdx.x % 4 * 16) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }

  // In place: activations of Count / 2 columns of the thread's two rows, and the largest magnitudes of each row, over
  // four lanes.
  template <int Count>
  static __device__ __forceinline__ void activate(float bound, float (&v)[Count], float (&largest)[2]) {
    largest[0] = largest[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < Count / 2; i += 2) {
      const float2 rounded = __bfloat1622float2(__floats2bfloat162_rn(
          fast_swiglu(v[i], v[Count / 2 + i], bound), fast_swiglu(v[i + 1], v[Count / 2 + i + 1], bound)));
      v[i] = rounded.x;
      v[i + 1] = rounded.y;
      largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], fmaxf(fabsf(rounded.x), fabsf(rounded.y)));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 1));
      largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 2));
    }
  }

  // kThree: a unit of the CTA's own block, half of the unit's columns of the third, whose scale groups span both CTAs
  // (and both units): they tell each other their largest magnitudes. Places by parity of such tasks, `before` of them
  // so far: who sends for the next but one has had the other's next, sent after these were read.
  static __device__ __forceinline__ void run_three(const GemmParams& p, Smem& s, const TurnTask& task, int first_unit,
                                                   int group, int before, float (&acc)[1][64], float (&third)[32]) {
    constexpr int kGroup = T::kHalf ? 64 : 128;
    const int thread = threadIdx.x % 128, lane = thread % 32, first_row = thread / 32 * 16 + lane / 4;
    const int mine = static_cast<int>(blockIdx.x % 2), column = (first_unit + group) * 64;
    const float bound = swiglu_bound(p.swiglu_limit);
    // By group, 64 rows each: of the own block, of the third, of the third in the other CTA.
    float (*own)[T::kWidth] = s.amax[before % 2] + 2, (*here)[T::kWidth] = own + 2, (*there)[T::kWidth] = own + 4;
    const uint32_t exchanged = smem_address(&s.exchanged[before % 2]);
    float largest[2], of_third[2];
    activate(bound, third, of_third);
    activate(bound, acc[0], largest);
    if (lane % 4 == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        own[group][first_row + 8 * h] = largest[h];
        here[group][first_row + 8 * h] = of_third[h];
      }
    }
    if (T::kHalf) {
      named_barrier_sync(2 + group, 128);
    } else {
      named_barrier_sync(1, kConsumers);
    }
    if (threadIdx.x == 0) mbarrier_arrive_expect_tx(exchanged, 2 * 64 * 4);
    if (thread < 16) {
      const uint32_t other = static_cast<uint32_t>(mine ^ 1);
      store_async_16(cluster_address(smem_address(&there[group][4 * thread]), other), cluster_address(exchanged, other),
                     *reinterpret_cast<const float4*>(&here[group][4 * thread]));
    }
    const auto store_scale = [&](int64_t row, float scale) {
      p.out_scale[row * (p.out_columns / kGroup) + column / kGroup] = scale;
    };
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t row = task.row + first_row + 8 * h;
      if constexpr (!T::kHalf) largest[h] = fmaxf(largest[h], own[1 - group][first_row + 8 * h]);
      const GroupScale scale = group_scale(largest[h]);
      if (lane % 4 == 0 && (T::kHalf || group == 0)) store_scale(row, scale.scale);
      store_unit(p, row, column, &acc[0][2 * h], scale.inverse);
    }
    mbarrier_wait(exchanged, before / 2 % 2);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = first_row + 8 * h;
      if (64 + at >= task.rows) continue;
      float all = fmaxf(of_third[h], there[group][at]);
      if constexpr (!T::kHalf) all = fmaxf(fmaxf(all, there[1 - group][at]), here[1 - group][at]);
      const GroupScale scale = group_scale(all);
      const int64_t row = task.row + (mine ? 64 : 128) + at;
      if (lane % 4 == 0 && mine == 0 && (T::kHalf || group == 0)) store_scale(row, scale.scale);
      auto* out = static_cast<uint8_t*>(p.out) + row * p.out_columns + column + lane % 4 * 16 + 2 * mine;
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // two of every four columns: the other CTA has the others
        const float* v = &third[4 * j + 2 * h];
        *reinterpret_cast<uint16_t*>(out + 4 * j) = to_e4m3x2(v[0] * scale.inverse, v[1] * scale.inverse);
      }
    }
  }

  // From a thread's largest magnitudes to those of its rows' scale groups.
  template <int kBlocks>
  static __device__ __forceinline__ void group_amax(Smem& s, int group, int first_row, float (&largest)[kBlocks][2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (!T::kHalf && kBlocks == 2) {
        largest[0][h] = largest[1][h] = fmaxf(largest[0][h], largest[1][h]);
      }
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        largest[b][h] = fmaxf(largest[b][h], __shfl_xor_sync(~0u, largest[b][h], 1));
        largest[b][h] = fmaxf(largest[b][h], __shfl_xor_sync(~0u, largest[b][h], 2));
      }
    }
    if constexpr (!T::kHalf && kBlocks == 1) {  // each warpgroup has half of the group's columns
      if (threadIdx.x % 4 == 0) {
        s.amax[0][group][first_row] = largest[0][0];
        s.amax[0][group][first_row + 8] = largest[0][1];
      }
      named_barrier_sync(1, kConsumers);
      largest[0][0] = fmaxf(largest[0][0], s.amax[0][1 - group][first_row]);
      largest[0][1] = fmaxf(largest[0][1], s.amax[0][1 - group][first_row + 8]);
      named_barrier_sync(1, kConsumers);
    }
  }
};

template <Quant kQuant, bool kHalf, int kWidth, bool kExact, bool kClusters = false>
__global__ void __launch_bounds__(kGemmThreads, 1)
    gate_up_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ CUtensorMap half_map,
                   const __grid_constant__ GemmParams p) {
  using T = Traits<Gemm::kUp, kQuant, kHalf, kWidth, kExact, false, kClusters>;
  run_gemm<T, false, GateUpEpilogue<T>>(&map, &half_map, p);
}

template <bool kHalf, bool kClusters, bool kThrees = false>
__global__ void __launch_bounds__(kGemmThreads, 1)
    gate_up_tokens_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ GemmParams p) {
  using T = Traits<Gemm::kUp, Quant::kBlock, kHalf, kMaxWidth, false, true, kClusters, false, kThrees>;
  run_gemm<T, false, GateUpTokens<T>>(&map, nullptr, p);
}

}  // namespace hpc::moe

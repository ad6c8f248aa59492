// What both kernels of the low regime do in a warp: rows of B as fp16 fragments, from the lane's ring, or, in calls of
// few pairs, from shared memory, where the CTA has put all of them, quantised if they were bf16.
//
// Orders (hpc/mma.cuh): a lane g, t = lane / 4, lane % 4 takes bytes 16 t of each 64 of K, of row g; word i of them is
// step i of m16n8k16. A (weights) and B (tokens) are loaded in the same order.
#pragma once

#include "hpc/fifo.cuh"
#include "hpc/fp8.cuh"
#include "hpc/mma.cuh"
#include "hpc/pdl.cuh"
#include "kernels/low_route.cuh"

namespace hpc::moe {

// Shared memory of a CTA, of kCtas on an SM (each takes 1 KB more).
template <int kCtas>
constexpr int kLowSmemBytes = 233472 / kCtas - 1024;

// One 64 of K of 8 rows: B fragments of four steps.
struct LowFragment {
  uint32_t b[4][2];

  __device__ __forceinline__ void set(const uint32_t (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) e4m3x4_to_half2x2(words[i], b[i][0], b[i][1]);
  }
};

template <int kChunks, class Ring>
__device__ __forceinline__ void load_fragments(const Ring& ring, int first, LowFragment (&fragment)[kChunks]) {
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const uint4 v = lds128(ring.at(first + c));
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    fragment[c].set(words);
  }
}

// d += the 16 weight rows of vectors `at` (rows g) and `at` + 1 (rows g + 8) times a fragment: 64 of K.
template <class Ring>
__device__ __forceinline__ void multiply_rows(const Ring& ring, int at, const LowFragment& fragment, float (&d)[4]) {
  const uint4 x = lds128(ring.at(at)), y = lds128(ring.at(at + 1));
  const uint32_t low[4] = {x.x, x.y, x.z, x.w}, high[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t a0, a1, a2, a3;
    e4m3x4_to_half2x2(low[i], a0, a2);
    e4m3x4_to_half2x2(high[i], a1, a3);
    mma_m16n8k16<Half::kFp16>(d, a0, a1, a2, a3, fragment.b[i][0], fragment.b[i][1]);
  }
}

__device__ __forceinline__ float lds_float(uint32_t shared) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(shared) : "memory");
  return v;
}

// Rows of B in shared memory: e4m3, `rows` of `columns`, kPad bytes between, so that neighbours use other banks; then
// their scales [rows][columns / kGroup].
__device__ __forceinline__ int staged_pitch(int columns) {
  return columns | 64;
}

// Brings rows there, by all threads of the CTA: load() asks for them, store() puts them down. kBf16: they are bf16 and
// become e4m3 on the way, by group of kGroup (kBlock) or with a static factor. At most kItems * kLowThreads * 8 (bf16)
// or 16 (e4m3) elements.
template <bool kBf16, bool kBlock, int kGroup, int kItems>
struct StagedRows {
  static constexpr int kElements = kBf16 ? 8 : 16;  // of 16 bytes
  int columns, items;                               // of a row; of all rows
  uint4 raw[kItems];

  __device__ __forceinline__ StagedRows(int rows, int row_columns)
      : columns(row_columns / kElements), items(rows * (row_columns / kElements)) {}

  // `stride`: bytes from a row to the next.
  __device__ __forceinline__ void load(const void* from, int64_t stride) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = threadIdx.x + i * kLowThreads, row = item / columns;
      raw[i] = make_uint4(0, 0, 0, 0);
      if (item < items) {
        raw[i] = *reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(from) + row * stride +
                                                 (item - row * columns) * 16);
      }
    }
  }

  __device__ __forceinline__ void store(uint8_t* to, float* scales, float factor) const {
    const int pitch = staged_pitch(columns * kElements);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = threadIdx.x + i * kLowThreads, row = item / columns, at = item - row * columns;
      if constexpr (!kBf16) {
        if (item < items) *reinterpret_cast<uint4*>(to + row * pitch + at * 16) = raw[i];
      } else {
        constexpr int kLanes = kGroup / 8;
        const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&raw[i]);
        float2 v[4];
        float amax = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          v[j] = __bfloat1622float2(pairs[j]);
          amax = fmaxf(amax, fmaxf(fabsf(v[j].x), fabsf(v[j].y)));
        }
        if constexpr (kBlock) {
#pragma unroll
          for (int mask = kLanes / 2; mask; mask /= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, mask));
          const GroupScale scale = group_scale(amax);
          factor = scale.inverse;
          if (item < items && at % kLanes == 0) scales[item / kLanes] = scale.scale;
        }
        if (item < items) {
          uint32_t words[2];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            words[j] = to_e4m3x2(v[2 * j].x * factor, v[2 * j].y * factor) |
                       static_cast<uint32_t>(to_e4m3x2(v[2 * j + 1].x * factor, v[2 * j + 1].y * factor)) << 16;
          }
          *reinterpret_cast<uint2*>(to + row * pitch + at * 8) = make_uint2(words[0], words[1]);
        }
      }
    }
  }
};

// A fragment of each 64 of K from the address of the lane's 16 bytes of the first.
template <int kChunks>
__device__ __forceinline__ void load_staged(uint32_t from, LowFragment (&fragment)[kChunks]) {
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const uint4 v = lds128(from + c * 64);
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    fragment[c].set(words);
  }
}

}  // namespace hpc::moe

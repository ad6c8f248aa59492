// The query as B fragments of m16n8k16, in the order of k that the keys' 16-byte chunks imply.
#pragma once

#include "../config/decode.hpp"
#include "decode_params.cuh"
#include "hpc/fp8.cuh"
#include "hpc/mma.cuh"

namespace hpc::attention {

// Where a query row (of a KV head: token of the request, then head of the group) lies.
struct RowPlace {
  int32_t token;  // of the request, 0 .. q_len - 1
  int32_t head;   // query head
};
__device__ __forceinline__ RowPlace row_place(const DecodeParams& p, int32_t kv_head, int32_t row) {
  const int32_t token = row / p.group;
  return {token, kv_head * p.group + row - token * p.group};
}

// Two fp16 values (one register) of two bf16 values times a power of two.
__device__ __forceinline__ uint32_t scaled_half2(uint32_t bf16x2, float power) {
  return pack_half2<Half::kFp16>(__uint_as_float(bf16x2 << 16) * power, __uint_as_float(bf16x2 & 0xffff0000u) * power);
}

// Lane (g, t) loads its part of row g of a row tile: kDim / 8 registers, two for each 16 of k. `factor` belongs to row
// g and multiplies its scores. A bf16 query against an e4m3 cache is multiplied by the power of two that brings the
// row's largest element into [2^14, 2^15) and rounded to fp16: exact for elements down to 2^-31 of the largest.
template <KvKind kKind, int kDim>
__device__ __forceinline__ void load_query(const DecodeParams& p, int32_t request, int32_t kv_head, int32_t row,
                                           int32_t t, uint32_t (&fragment)[kDim / 8], float& factor) {
  factor = 1.0f;
  if (row >= p.rows) {
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) fragment[i] = 0;
    return;
  }
  const RowPlace place = row_place(p, kv_head, row);
  const int64_t token = static_cast<int64_t>(request) * p.q_len + place.token;
  const int64_t element = token * p.q_token_stride + place.head * p.q_head_stride;
  if constexpr (kKind != KvKind::kE4m3) {
    const char* source = p.q + 2 * element;
#pragma unroll
    for (int chunk = 0; chunk < kDim / 32; ++chunk) {
      const uint4 v = *reinterpret_cast<const uint4*>(source + 16 * (t + 4 * chunk));
      fragment[4 * chunk] = v.x, fragment[4 * chunk + 1] = v.y;
      fragment[4 * chunk + 2] = v.z, fragment[4 * chunk + 3] = v.w;
    }
  } else if (p.query == QueryKind::kE4m3) {
    const char* source = p.q + element;
#pragma unroll
    for (int chunk = 0; chunk < kDim / 64; ++chunk) {
      const uint4 v = *reinterpret_cast<const uint4*>(source + 16 * (t + 4 * chunk));
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        e4m3x4_to_half2x2(words[i], fragment[8 * chunk + 2 * i], fragment[8 * chunk + 2 * i + 1]);
      }
    }
    factor = p.q_scale[token * p.q_scale_token_stride + place.head * p.q_scale_head_stride];
  } else {
    const char* source = p.q + 2 * element;
#pragma unroll
    for (int chunk = 0; chunk < kDim / 64; ++chunk) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 v = *reinterpret_cast<const uint4*>(source + 32 * (t + 4 * chunk) + 16 * half);
        const int at = 8 * chunk + 4 * half;
        fragment[at] = v.x, fragment[at + 1] = v.y, fragment[at + 2] = v.z, fragment[at + 3] = v.w;
      }
    }
  }
}

// The second half of load_query for a bf16 query against an e4m3 cache, apart because all lanes must call it
// (shuffles).
template <int kDim>
__device__ __forceinline__ void scale_query(uint32_t (&fragment)[kDim / 8], float& factor) {
  uint32_t largest = 0;  // |bf16| as bits order like the numbers
#pragma unroll
  for (int i = 0; i < kDim / 8; ++i) {
    largest = max(largest, max((fragment[i] & 0x7fffu) << 16, fragment[i] & 0x7fff0000u));
  }
  largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
  largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
  const int32_t exponent = max(static_cast<int32_t>(largest >> 23) - 127 - 14, -112);
  const float power = __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23);
  factor = __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
#pragma unroll
  for (int i = 0; i < kDim / 8; ++i) fragment[i] = scaled_half2(fragment[i], power);
}

}  // namespace hpc::attention

// The query as B fragments of m16n8k16, in the order of k that the keys' 16-byte chunks imply.
#pragma once

#include "../config/decode.hpp"
#include "decode_params.cuh"
#include "hpc/fifo.cuh"
#include "hpc/fp8.cuh"
#include "hpc/mma.cuh"

namespace hpc::attention {

// Where a query row (of a KV head: token of the request, then head of the group) lies.
struct RowPlace {
  int32_t token;  // of the request, 0 .. q_len - 1
  int32_t head;   // query head
};
// row / group, exact for rows up to 128.
__device__ __forceinline__ int32_t row_token(const DecodeParams& p, int32_t row) {
  return row * p.group_inverse >> 16;
}
__device__ __forceinline__ RowPlace row_place(const DecodeParams& p, int32_t kv_head, int32_t row) {
  const int32_t token = row_token(p, row);
  return {token, kv_head * p.group + row - token * p.group};
}

// Two fp16 values (one register) of two bf16 values times powers of two. (The product is exact; but what becomes a
// subnormal bf16 may be rounded, and is 0 as fp16 either way.)
__device__ __forceinline__ uint32_t scaled_half2(uint32_t bf16x2, uint32_t powers) {
  const uint32_t scaled = multiply_bf16x2(bf16x2, powers);
  return pack_half2<Half::kFp16>(__uint_as_float(scaled << 16), __uint_as_float(scaled & 0xffff0000u));
}

// A lane's part of a query row as it lies in memory: lane (g, t) of a row tile takes the elements of row g that belong
// to the keys' 16-byte columns t + 4 j.
template <int kDim>
struct QueryRow {
  uint32_t words[kDim / 8];  // 16-bit pairs; of an e4m3 query the first half, four elements a word
};

// Takes a lane's part of a row, whose 16 bytes at an offset are load16(offset); zeros where there is no row.
template <KvKind kKind, int kDim, typename Load16>
__device__ __forceinline__ void read_query(const DecodeParams& p, const Load16& load16, bool any, int32_t t,
                                           QueryRow<kDim>& query) {
#pragma unroll
  for (int i = 0; i < kDim / 8; ++i) query.words[i] = 0;
  if (!any) return;
  const auto load = [&](int at, int offset) {
    const uint4 v = load16(offset);
    query.words[at] = v.x, query.words[at + 1] = v.y, query.words[at + 2] = v.z, query.words[at + 3] = v.w;
  };
  if (kKind == KvKind::kE4m3 && p.query == QueryKind::kE4m3) {
#pragma unroll
    for (int chunk = 0; chunk < kDim / 64; ++chunk) load(4 * chunk, 16 * t + 64 * chunk);
  } else if constexpr (kKind == KvKind::kE4m3) {  // a column of 16 keys' elements is 32 bytes of the query
#pragma unroll
    for (int chunk = 0; chunk < kDim / 64; ++chunk) {
      load(8 * chunk, 32 * t + 128 * chunk);
      load(8 * chunk + 4, 32 * t + 128 * chunk + 16);
    }
  } else {
#pragma unroll
    for (int chunk = 0; chunk < kDim / 32; ++chunk) load(4 * chunk, 16 * t + 64 * chunk);
  }
}

// The first of a (request, KV head)'s rows, and a row's bytes.
template <KvKind kKind, int kDim>
__device__ __forceinline__ int32_t query_row_bytes(const DecodeParams& p) {
  return kKind == KvKind::kE4m3 && p.query == QueryKind::kE4m3 ? kDim : 2 * kDim;
}
template <KvKind kKind, int kDim>
__device__ __forceinline__ const char* query_row(const DecodeParams& p, int32_t request, int32_t kv_head, int32_t row) {
  const RowPlace place = row_place(p, kv_head, row);
  const int64_t token = static_cast<int64_t>(request) * p.q_len + place.token;
  const int64_t element = token * p.q_token_stride + place.head * p.q_head_stride;
  return p.q + element * (query_row_bytes<kKind, kDim>(p) / kDim);
}

// The part of query_fragment for a bf16 query against an e4m3 cache. All lanes call it together (shuffles).
template <int kDim>
__device__ __forceinline__ void scale_query(uint32_t (&fragment)[kDim / 8], float& factor) {
  constexpr int kChains = 4;  // of them none waits for another
  uint32_t chains[kChains];
#pragma unroll
  for (int i = 0; i < kDim / 8; ++i) {
    chains[i % kChains] = i < kChains ? fragment[i] : larger_bf16x2(chains[i % kChains], fragment[i]);
  }
  uint32_t largest = larger_bf16x2(larger_bf16x2(chains[0], chains[1]), larger_bf16x2(chains[2], chains[3]));
  largest = max(largest << 16 & 0x7fff0000u, largest & 0x7fff0000u);  // |bf16| as bits order like the numbers
  largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
  largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
  const int32_t exponent = max(static_cast<int32_t>(largest >> 23) - 127 - 14, -112);
  const uint32_t powers = static_cast<uint32_t>(127 - exponent) * 0x00800080u;
  factor = __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
#pragma unroll
  for (int i = 0; i < kDim / 8; ++i) fragment[i] = scaled_half2(fragment[i], powers);
}

// Makes fragments of loaded rows: two registers for each 16 of k. All lanes call it together. A bf16 query against an
// e4m3 cache is multiplied by the power of two that brings the row's largest element into [2^14, 2^15) and rounded to
// fp16: exact for elements down to 2^-31 of the largest. `factor` multiplies the row's scores.
template <KvKind kKind, int kDim>
__device__ __forceinline__ void query_fragment(const DecodeParams& p, const QueryRow<kDim>& query,
                                               uint32_t (&fragment)[kDim / 8], float& factor) {
  factor = 1.0f;
#pragma unroll
  for (int i = 0; i < kDim / 8; ++i) fragment[i] = query.words[i];
  if constexpr (kKind == KvKind::kE4m3) {
    if (p.query == QueryKind::kBf16) {
      scale_query<kDim>(fragment, factor);
    } else if (p.query == QueryKind::kE4m3) {
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) e4m3x4_to_half2x2(query.words[i], fragment[2 * i], fragment[2 * i + 1]);
    }
  }
}

}  // namespace hpc::attention

// Results of row pairs: where they lie in partial results, how partial results are added, how they become the output.
//
// A row tile's unnormalised output (8 rows x D) is 2 D vectors of four floats. Vector `position` belongs to columns
// d = 2 (position / 4) and d + 1 and to rows 2t and 2t + 1, t = position % 4, in the accumulators' order:
// (d, 2t) (d, 2t+1) (d+1, 2t) (d+1, 2t+1). Its (max, sum) vector t is m(2t) l(2t) m(2t+1) l(2t+1), in units of log2.
#pragma once

#include "decode_query.cuh"

namespace hpc::attention {

__device__ __forceinline__ float4 lds_float4(uint32_t shared) {
  const uint4 v = lds128(shared);
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}

// Adds b's result to a's: both unnormalised, each with the maximum and the sum it is relative to.
__device__ __forceinline__ void add_result(float4& a, float4& a_ml, const float4& b, const float4& b_ml) {
  const float m0 = fmaxf(a_ml.x, b_ml.x), m1 = fmaxf(a_ml.z, b_ml.z);
  const float a0 = exp2_approx(a_ml.x - m0), a1 = exp2_approx(a_ml.z - m1);
  const float b0 = exp2_approx(b_ml.x - m0), b1 = exp2_approx(b_ml.z - m1);
  // Rounded step by step, so that every kernel that is compiled from this gives the same bits.
  a = make_float4(__fmaf_rn(b.x, b0, __fmul_rn(a.x, a0)), __fmaf_rn(b.y, b1, __fmul_rn(a.y, a1)),
                  __fmaf_rn(b.z, b0, __fmul_rn(a.z, a0)), __fmaf_rn(b.w, b1, __fmul_rn(a.w, a1)));
  a_ml =
      make_float4(m0, __fmaf_rn(b_ml.y, b0, __fmul_rn(a_ml.y, a0)), m1, __fmaf_rn(b_ml.w, b1, __fmul_rn(a_ml.w, a1)));
}

// Two neighbouring 16-bit outputs.
__device__ __forceinline__ uint32_t output_pair(const DecodeParams& p, float low, float high) {
  return p.out_fp16 ? pack_half2<Half::kFp16>(low, high) : pack_half2<Half::kBf16>(low, high);
}
__device__ __forceinline__ void store_pair(const DecodeParams& p, int64_t element, float low, float high) {
  *reinterpret_cast<uint32_t*>(p.out + 2 * element) = output_pair(p, low, high);
}

// Where a query row's output goes.
struct OutputPlace {
  int64_t token;
  int32_t head;
  int64_t element;
};
__device__ __forceinline__ OutputPlace output_place(const DecodeParams& p, int32_t request, int32_t kv_head,
                                                    int32_t row) {
  const RowPlace place = row_place(p, kv_head, row);
  const int64_t token = static_cast<int64_t>(request) * p.q_len + place.token;
  return {token, place.head, token * p.out_token_stride + place.head * p.out_head_stride};
}

// What a row's unnormalised output is multiplied by. m, l: its maximum and sum. A row that sees nothing (sum 0) gives
// zeros. Sinks join the denominator, not lse.
__device__ __forceinline__ float output_factor(const DecodeParams& p, const OutputPlace& place, float m, float l,
                                               float v_scale, bool with_sinks) {
  float denominator = l;
  if (with_sinks) denominator += exp2_approx(p.sinks[place.head] * kLog2e - m);
  return l == 0.0f ? 0.0f : __fdividef(v_scale, denominator);
}

// The row's lse; -inf where it sees nothing.
__device__ __forceinline__ void store_lse(const DecodeParams& p, const OutputPlace& place, float m, float l) {
  const float lse = l == 0.0f ? __uint_as_float(0xff800000u) : (m + log2_approx(l)) * kLn2;
  p.lse[place.token * p.lse_token_stride + place.head * p.lse_head_stride] = lse;
}

// Where vector `position` of a row tile goes: elements d and d + 1 of two rows, as far as there are such rows.
struct ResultPlace {
  OutputPlace rows[2];
  bool any[2];
  int32_t d;
};
__device__ __forceinline__ ResultPlace result_place(const DecodeParams& p, int32_t request, int32_t kv_head,
                                                    int32_t row_tile, int32_t position) {
  ResultPlace to = {};
  to.d = 2 * (position >> 2);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int32_t row = row_tile * kRowTile + 2 * (position & 3) + i;
    to.any[i] = row < p.rows;
    to.rows[i] = output_place(p, request, kv_head, min(row, p.rows - 1));
  }
  return to;
}

// Normalises a vector and writes output and lse.
__device__ __forceinline__ void store_result(const DecodeParams& p, const ResultPlace& to, int32_t kv_head,
                                             const float4& o, const float4& ml) {
  const float v_scale = p.v_scale != nullptr ? p.v_scale[kv_head * p.v_scale_head_stride] : p.v_factor;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!to.any[i]) continue;
    const float m = i == 0 ? ml.x : ml.z, l = i == 0 ? ml.y : ml.w;
    const float factor = output_factor(p, to.rows[i], m, l, v_scale, p.sinks != nullptr);
    const uint32_t pair = output_pair(p, (i == 0 ? o.x : o.y) * factor, (i == 0 ? o.z : o.w) * factor);
    *reinterpret_cast<uint32_t*>(p.out + 2 * (to.rows[i].element + to.d)) = pair;
    if (p.lse != nullptr && to.d == 0) store_lse(p, to.rows[i], m, l);
  }
}

}  // namespace hpc::attention

// What the decode and combine kernels are given. Strides of the caches count 16-byte units, all others elements.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "hpc/schedule.hpp"

namespace hpc::attention {

enum class QueryKind : int32_t { kBf16, kFp16, kE4m3 };

// One cache, logically [pages, page_size, Hkv, D].
struct CacheView {
  const char* data;  // 16-byte aligned
  uint32_t page_stride;
  uint32_t token_stride;
  uint32_t head_stride;
};

struct DecodeParams {
  // The plan's map, on the device.
  const DecodeHeader* header;
  const DecodeRequest* requests;  // [batch + 1]
  const DecodeCta* ctas;          // [num_ctas]
  const DecodeSplit* splits;      // [header->num_splits]

  const char* q;  // [batch * q_len, Hq, D]
  int64_t q_token_stride;
  int64_t q_head_stride;
  const float* q_scale;  // [batch * q_len, Hq] for an e4m3 query, else null
  int64_t q_scale_token_stride;
  int64_t q_scale_head_stride;

  CacheView k;
  CacheView v;
  const int32_t* page_table;  // [batch, max_pages]
  int64_t page_table_stride;
  int32_t capacity;    // tokens a row of the page table holds; lengths are clamped to it
  uint32_t last_page;  // pages of the pool - 1; ids are clamped to it
  int32_t page_shift;  // log2(page_size): 0 or 4 .. 8

  const float* k_scale;  // null: 1; else per head (strides of page and token 0), or per token
  int64_t k_scale_page_stride;
  int64_t k_scale_token_stride;
  int64_t k_scale_head_stride;
  const float* v_scale;  // null: 1; else per head
  int64_t v_scale_head_stride;
  const float* sinks;  // [Hq] or null

  char* out;  // [batch * q_len, Hq, D], 16 bits
  int64_t out_token_stride;
  int64_t out_head_stride;
  float* lse;  // [batch * q_len, Hq] or null
  int64_t lse_token_stride;
  int64_t lse_head_stride;

  float4* partial;     // [slots][row tiles][2 D]: see position_of() in decode_merge.cuh
  float4* partial_ml;  // [slots][row tiles][4]: (max, sum) of rows 2t and 2t + 1

  float scale;     // sm_scale times k_scale where that is a number; times log2(e) without softcap
  float v_factor;  // v_scale where that is a number
  float softcap;   // 0: none
  int32_t batch;   // requests of this call
  int32_t num_kv_heads;
  int32_t q_len;          // 1 .. 8
  int32_t group;          // query heads a KV head, 1 .. 16
  int32_t group_inverse;  // ceil(65536 / group)
  int32_t rows;           // q_len * group
  int32_t row_tiles;      // ceil(rows / 8), of all row groups together
  int32_t row_groups;     // CTAs that share a run of tiles
  int32_t window;         // 0: none
  QueryKind query;
  bool batch_invariant;
  bool out_fp16;         // else bf16
  bool per_token_scale;  // k_scale is per token
  bool one_page;         // every slice lies in one page
  // Slices a warp asks for before its wait; 0: the plan or the cache's older tokens are written by the kernel just
  // before.
  int32_t early_slices;
};

// What most calls are: no softcap, window or sinks, scales that are numbers, slices in one page each, an ordinary plan,
// query and output bf16 (fp16 with an fp16 cache). A kernel that knows this leaves out a quarter of its
// instructions, and what is left lies closer together: each call fetches them again, beside the flood of its keys and
// values. So such a kernel works on a copy of its parameters in which these are constants.
__device__ __forceinline__ DecodeParams plain_params(const DecodeParams& given, bool fp16) {
  DecodeParams p = given;
  p.softcap = 0.0f;
  p.window = 0;
  p.sinks = nullptr;
  p.per_token_scale = false;
  p.one_page = true;
  p.batch_invariant = false;
  p.query = fp16 ? QueryKind::kFp16 : QueryKind::kBf16;
  p.q_scale = nullptr;
  p.k_scale = nullptr;
  p.v_scale = nullptr;
  p.out_fp16 = fp16;
  return p;
}

// In which order a CTA takes its run. With the last piece first, where that is a cut pair's and no longer than the
// others together: what ends the run is then long enough to hide the merging of everything before it.
struct RunOrder {
  DecodeCta first;
  DecodeCta rest;  // count 0: nothing
};
__device__ __forceinline__ RunOrder run_order(const DecodeCta& run, const DecodeCta& after, bool batch_invariant) {
  RunOrder order = {run, {}};
  const bool other = after.request != run.request || after.kv_head != run.kv_head;
  if (other && after.tile > 0 && 2 * after.tile <= run.count && !batch_invariant) {
    order.first = {after.request, after.kv_head, 0, after.tile};
    order.rest = run;
    order.rest.count -= after.tile;
  }
  return order;
}

// Whether CTAs 2c and 2c + 1 have one pair of `num_tiles` tiles between them, cut in two, and nothing else. (Not in
// batch-invariant plans.) Where they are a cluster they add its pieces themselves (ClusterSum), and the combine kernel
// leaves that pair out. run: the row of one of them, of the second where `second`; other_count: of the other's.
__device__ __forceinline__ bool is_couple(const DecodeCta& run, bool second, int32_t other_count, int32_t num_tiles) {
  // What comes before a run that begins inside a pair is that pair's beginning; what comes behind the other, its rest.
  return other_count > 0 && run.tile == (second ? other_count : 0) && run.count + other_count == num_tiles;
}

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// The lowest max of a row that has seen nothing. Finite, so that differences of two of them are 0 and never NaN.
constexpr float kNoMax = -3.402823466e38f;

}  // namespace hpc::attention

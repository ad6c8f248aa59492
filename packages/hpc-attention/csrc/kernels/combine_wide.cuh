// The combine kernel where there are many query rows: more is to be added than one or two CTAs an SM load at once, but
// there is no room for more beside the attention kernel's. Those that find none come when that one's leave, and the
// next call's behind them. So the grid is what fits. Where it would go through units of one vector a thread more than
// once, a thread has four vectors of a row tile, which have their (max, sum) in common, and loads two pieces of each at
// once; where a pair has no more, a unit is two row tiles. See combine.cuh for all else.
//
// Registers are few: a spilled one would be read back behind all that the SM has asked for.
#pragma once

#include "combine.cuh"

namespace hpc::attention {

constexpr int kLogWideColumns = 2, kWideColumns = 1 << kLogWideColumns;

// How a pair's vectors and pieces are shared out: 2^log_parts CTAs for 2^log_tiles row tiles, 2^log_shares threads a
// vector.
struct WideForm {
  int32_t log_parts;
  int32_t log_shares;
  int32_t log_tiles;

  __device__ __forceinline__ int32_t units(int32_t row_tiles) const {
    return (row_tiles + (1 << log_tiles) - 1) >> log_tiles << log_parts;
  }
};
// log_columns: log2 of a thread's vectors.
template <int kDim>
__device__ __forceinline__ WideForm wide_form(int32_t log_shares, int32_t log_columns) {
  constexpr int kLogVectors = kDim == 64 ? 7 : (kDim == 128 ? 8 : 9), kLogThreads = 7;
  const int32_t log_parts = kLogVectors - kLogThreads + log_shares - log_columns;
  return {max(log_parts, 0), log_shares, max(-log_parts, 0)};
}
// As many threads a vector as let each add at most 2^log_most pieces.
template <int kDim>
__device__ __forceinline__ WideForm wide_form_of(int32_t pieces, int32_t log_most, int32_t log_columns) {
  return wide_form<kDim>(min(32 - __clz((pieces - 1) >> log_most), 5), log_columns);
}
// Of batch-invariant plans: four threads a vector in every pair.
template <int kDim>
__device__ __forceinline__ WideForm wide_form_invariant() {
  return wide_form<kDim>(2, kLogWideColumns);
}

// Units of all pairs, and log2 of the pieces that a thread adds at most. 0: four pieces of one vector, where the grid
// goes through its units once. Else two pieces of four vectors, or four or eight (two at once, the others one by one)
// where that is needed for the units to be as few as the grid.
struct WideUnits {
  int32_t count;
  int32_t log_most;

  template <int kDim>
  __device__ __forceinline__ WideForm form(int32_t pieces) const {
    return wide_form_of<kDim>(pieces, log_most == 0 ? 2 : log_most, log_most == 0 ? 0 : kLogWideColumns);
  }
};
template <int kDim>
__device__ __forceinline__ WideUnits count_wide_units(const DecodeParams& p, const DecodeHeader& header) {
  if (header.batch_invariant) {
    return {header.batch * header.num_kv_heads * wide_form_invariant<kDim>().units(p.row_tiles), 1};
  }
  constexpr int kForms = 4;
  int32_t units[kForms] = {};
#pragma unroll 1
  for (int32_t i = static_cast<int32_t>(threadIdx.x) % 32; i < header.num_splits; i += 32) {
    const int32_t pieces = p.splits[i].pieces;
#pragma unroll
    for (int j = 0; j < kForms; ++j) units[j] += WideUnits{0, j}.form<kDim>(pieces).units(p.row_tiles);
  }
#pragma unroll
  for (int j = 0; j < kForms; ++j) units[j] = __reduce_add_sync(0xffffffffu, units[j]);
#pragma unroll
  for (int j = 0; j + 1 < kForms; ++j) {
    if (units[j] <= static_cast<int32_t>(gridDim.x)) return {units[j], j};
  }
  return {units[kForms - 1], kForms - 1};
}

// Where a unit that there is lies: which pair, and which of its units (as find_unit() in combine.cuh).
// units_of(pieces): units of a pair; each: of every pair of a batch-invariant plan.
struct UnitInPair {
  int32_t index;   // of the pair
  int32_t inside;  // number of its unit
  int32_t pieces;  // of the pair (not of a batch-invariant plan)
};
template <typename UnitsOf>
__device__ __forceinline__ UnitInPair find_in_pairs(const DecodeParams& p, const DecodeHeader& header, int32_t unit,
                                                    int32_t each, const UnitsOf& units_of) {
  constexpr unsigned kAllLanes = 0xffffffffu;
  if (header.batch_invariant) {
    const int32_t index = unit / each;
    return {index, unit - index * each, 0};
  }
  const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
#pragma unroll 1
  for (int32_t first = 0;; first += 32) {
    int32_t pieces = 1, units = 0;
    if (first + lane < header.num_splits) {
      pieces = p.splits[first + lane].pieces;
      units = units_of(pieces);
    }
    int32_t end = units;
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) {
      const int32_t before = __shfl_up_sync(kAllLanes, end, delta);
      if (lane >= delta) end += before;
    }
    const unsigned behind = __ballot_sync(kAllLanes, unit < end);
    if (behind != 0 || first + 32 >= header.num_splits) {
      const int32_t own = __ffs(behind) - 1;
      const int32_t inside = unit - __shfl_sync(kAllLanes, end - units, own);
      return {first + own, inside, __shfl_sync(kAllLanes, pieces, own)};
    }
    unit -= __shfl_sync(kAllLanes, end, 31);
  }
}
// A unit's place: row tile (the first of two) and part of a pair.
struct WideUnit {
  int32_t row_tile;
  int32_t part;
  WideForm form;

  // The pair's unit behind it.
  __device__ __forceinline__ void next() {
    ++part;
    if (part >> form.log_parts == 0) return;
    part = 0;
    row_tile += 1 << form.log_tiles;
  }
};
// A unit's place and its pair.
struct WideTask {
  WideUnit place;
  CombineJob job;
};
// Returns how many units of its pair come behind it.
template <int kDim>
__device__ __forceinline__ int32_t find_wide_task(const DecodeParams& p, const DecodeHeader& header, int32_t unit,
                                                  const WideUnits& units, WideTask& task) {
  const WideForm invariant = wide_form_invariant<kDim>();
  const UnitInPair at = find_in_pairs(p, header, unit, invariant.units(p.row_tiles),
                                      [&](int32_t pieces) { return units.form<kDim>(pieces).units(p.row_tiles); });
  const WideForm form = header.batch_invariant ? invariant : units.form<kDim>(at.pieces);
  task.place = {at.inside >> form.log_parts << form.log_tiles, at.inside & ((1 << form.log_parts) - 1), form};
  task.job = combine_job(p, header, at.index);
  return form.units(p.row_tiles) - 1 - at.inside;
}

// A thread's sums of kColumns vectors of one row tile, relative to the same (max, sum).
template <int kColumns>
struct CombineSums {
  float4 o[kColumns];
  float4 ml;
};
template <int kColumns>
__device__ __forceinline__ void add_sums(CombineSums<kColumns>& a, const CombineSums<kColumns>& b) {
  const float4 ml = a.ml;
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    a.ml = ml;
    add_result(a.o[j], a.ml, b.o[j], b.ml);
  }
}

// Sums of all warps but the first, of two vectors at most: beside the attention kernel there is room for no more.
template <int kColumns>
struct SumsBuffer {
  static constexpr int kAtOnce = kColumns < 2 ? kColumns : 2;
  float4 o[kAtOnce][kCombineThreads - 32];
  float4 ml[kCombineThreads - 32];
};

// The sums of what a thread loads at once: pieces that lie rows[i] row tiles behind the first, negative: none. step:
// vectors from one column to the next.
template <int kDim, int kLoads, int kColumns>
__device__ __forceinline__ void load_columns(const float4* outputs, const float4* pairs, const int32_t (&rows)[kLoads],
                                             int32_t step, CombineSums<kColumns>& sums) {
  float4 v[kColumns][kLoads], w[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    w[i] = make_float4(kNoMax, 0.0f, kNoMax, 0.0f);
    if (rows[i] >= 0) w[i] = pairs[static_cast<int64_t>(rows[i]) * 4];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      v[j][i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (rows[i] >= 0) v[j][i] = outputs[static_cast<int64_t>(rows[i]) * (2 * kDim) + j * step];
    }
  }
  float m0 = w[0].x, m1 = w[0].z;
#pragma unroll
  for (int i = 1; i < kLoads; ++i) m0 = fmaxf(m0, w[i].x), m1 = fmaxf(m1, w[i].z);
  float4& ml = sums.ml;
  ml = make_float4(m0, 0.0f, m1, 0.0f);
#pragma unroll
  for (int j = 0; j < kColumns; ++j) sums.o[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const float f0 = exp2_approx(w[i].x - m0), f1 = exp2_approx(w[i].z - m1);
    ml.y = __fmaf_rn(w[i].y, f0, ml.y), ml.w = __fmaf_rn(w[i].w, f1, ml.w);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      float4& o = sums.o[j];
      o.x = __fmaf_rn(v[j][i].x, f0, o.x), o.y = __fmaf_rn(v[j][i].y, f1, o.y);
      o.z = __fmaf_rn(v[j][i].z, f0, o.z), o.w = __fmaf_rn(v[j][i].w, f1, o.w);
    }
  }
}

// Adds one part of a row tile (or all of two) of a pair, kLoads pieces of kColumns vectors a thread at once. Everything
// that does not depend on partial results comes before the wait.
template <int kDim, int kLoads, int kColumns>
__device__ __forceinline__ void combine_columns(const DecodeParams& p, const CombineJob& job, const WideUnit& unit,
                                                SumsBuffer<kColumns>& buffer, bool& waited) {
  constexpr unsigned kAllLanes = 0xffffffffu;
  constexpr bool kWide = kColumns > 1;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t shares = 1 << unit.form.log_shares;
  // Vectors from a thread's to its next.
  const int32_t vectors = min(2 * kDim / kColumns, kCombineThreads >> unit.form.log_shares);
  const int32_t group = thread / vectors, share = kWide && unit.form.log_tiles > 0 ? 0 : group;
  const int32_t row_tile = unit.row_tile + (kWide ? group - share : 0);
  const int32_t position = unit.part * (kColumns * vectors) + thread % vectors;
  const int64_t first = job.first_slot * p.row_tiles + row_tile;
  const float4* outputs = p.partial + first * (2 * kDim) + position;
  const float4* pairs = p.partial_ml + first * 4 + (position & 3);
  ResultPlace to = result_place(p, job.request, job.kv_head, row_tile, position);
  const auto find = [&](int32_t piece) {
    return to.any[0] && piece < job.pieces ? job.distance(piece) * p.row_tiles : -1;
  };
  int32_t rows[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) rows[i] = find(share + shares * i);
  if (!waited) {
    pdl_wait();
    waited = true;
  }
  CombineSums<kColumns> sums;
  load_columns<kDim>(outputs, pairs, rows, vectors, sums);
  constexpr int kMore = kWide ? 1 : kLoads;  // (no registers for two)
#pragma unroll 1
  for (int32_t base = share + shares * kLoads; base < job.pieces; base += shares * kMore) {
    int32_t others[kMore];
#pragma unroll
    for (int i = 0; i < kMore; ++i) others[i] = find(base + shares * i);
    CombineSums<kColumns> more;
    load_columns<kDim>(outputs, pairs, others, vectors, more);
    add_sums(sums, more);
  }
#pragma unroll 1
  for (int32_t distance = vectors; distance < 32; distance *= 2) {
    const auto other = [&](const float4& x) {
      return make_float4(__shfl_xor_sync(kAllLanes, x.x, distance), __shfl_xor_sync(kAllLanes, x.y, distance),
                         __shfl_xor_sync(kAllLanes, x.z, distance), __shfl_xor_sync(kAllLanes, x.w, distance));
    };
    CombineSums<kColumns> more;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) more.o[j] = other(sums.o[j]);
    more.ml = other(sums.ml);
    add_sums(sums, more);  // what the lower lane of a pair gets is used
  }
  if (shares > 1) {
    constexpr int kAtOnce = SumsBuffer<kColumns>::kAtOnce;
    const int32_t stride = max(vectors, 32);  // threads that hold a sum of the vectors
    const float4 own = sums.ml;
#pragma unroll
    for (int from = 0; from < kColumns; from += kAtOnce) {
      __syncthreads();  // the sums before have been read
      if (thread >= stride) {
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) buffer.o[j][thread - 32] = sums.o[from + j];
        buffer.ml[thread - 32] = own;
      }
      __syncthreads();
      if (thread >= vectors) continue;
      CombineSums<kAtOnce> part;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) part.o[j] = sums.o[from + j];
      part.ml = own;
#pragma unroll 1
      for (int32_t i = stride + thread; i < kCombineThreads; i += stride) {
        CombineSums<kAtOnce> more;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) more.o[j] = buffer.o[j][i - 32];
        more.ml = buffer.ml[i - 32];
        add_sums(part, more);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) sums.o[from + j] = part.o[j];
      sums.ml = part.ml;
    }
    if (thread >= vectors) return;
  }
  // Of several vectors addresses are made here: before, each would take a register.
  if (kWide) asm volatile("" : "+r"(to.d), "+r"(to.rows[0].head), "+r"(to.rows[1].head));
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    store_result(p, to, job.kv_head, sums.o[j], sums.ml);
    to.d += vectors / 2;
  }
}

template <int kDim>
__device__ __forceinline__ void combine_wide(const DecodeParams& p) {
  __shared__ union {
    SumsBuffer<1> narrow;
    SumsBuffer<kWideColumns> wide;
  } buffers;
  __shared__ WideTask kept;                          // the current unit's
  __shared__ volatile int32_t end, left, num_empty;  // wanted behind the wait: no registers for them
  pdl_trigger();
  DecodeHeader header = *p.header;
  header.num_kv_heads = p.num_kv_heads, header.batch_invariant = p.batch_invariant;
  const WideUnits units = count_wide_units<kDim>(p, header);
  // Where the grid goes through its units more than once, a CTA's follow one another: most are then of the pair before
  // (of which `left` are left), and need not be looked up.
  const int32_t each = (units.count + static_cast<int32_t>(gridDim.x) - 1) / static_cast<int32_t>(gridDim.x);
  int32_t unit = static_cast<int32_t>(blockIdx.x) * each;
  if (threadIdx.x == 0) end = min(units.count, unit + each), left = 0, num_empty = header.num_empty;
  __syncthreads();
  bool waited = false;
#pragma unroll 1
  for (; unit < end; ++unit) {
    const bool follows = left > 0;
    __syncthreads();
    if (follows) {
      if (threadIdx.x == 0) kept.place.next(), left = left - 1;
    } else {
      WideTask task;
      const int32_t behind = find_wide_task<kDim>(p, header, unit, units, task);
      if (threadIdx.x == 0) kept = task, left = behind;
    }
    __syncthreads();
    const WideTask task = kept;
    if (task.job.pieces == 0) continue;
    if (units.log_most > 0) {
      combine_columns<kDim, 2>(p, task.job, task.place, buffers.wide, waited);
    } else {
      combine_columns<kDim, kCombineLoads>(p, task.job, task.place, buffers.narrow, waited);
    }
  }
  // Of CTAs without work one waits, for the kernel's end is the attention kernel's too; the others leave their SMs.
  if (!waited && (blockIdx.x == 0 || num_empty > 0)) pdl_wait();
  if (num_empty > 0) write_empty<kDim>(p, *p.header);
}

// kPlain: see plain_params().
template <int kDim, bool kPlain = false>
__global__ void __launch_bounds__(kCombineThreads, 6) combine_wide_kernel(const __grid_constant__ DecodeParams p) {
  if constexpr (kPlain) {
    combine_wide<kDim>(plain_params(p, false));
  } else {
    combine_wide<kDim>(p);
  }
}

}  // namespace hpc::attention

// Adds the partial results of split (request, head) pairs and writes the rows of requests without tokens.
//
// Unit of work: some of the vectors (see decode_merge.cuh) of one row tile of one pair, for one CTA. A thread loads up
// to 4 pieces of a vector at once and adds them; a second round of loads would be one more trip to memory for the whole
// kernel, so a pair with many pieces has more threads a vector (up to 32), whatever other pairs have. Then the threads
// of a vector are added: in pairs within a warp, then the warps in their order. Order and shares depend on the numbers
// of pieces of the plan's pairs, in batch-invariant plans on the pair's own number alone.
//
// Programmatic launch: both kernels of decode let their successor go at once, before they wait (the attention kernel
// only where it may start early itself, so never right behind a plan.update). What starts early behind decode may so
// run beside what came before decode; it must not read before its own wait what a kernel before decode writes. The wait
// is enough for everything else: this kernel ends after the attention kernel, and that one after what came before. The
// list of splits is read before the wait, partial results after it. Few registers and little shared memory: CTAs of
// this kernel find room beside the attention kernel's, and the next call's beside both.
#pragma once

#include "decode_merge.cuh"
#include "hpc/pdl.cuh"

namespace hpc::attention {

constexpr int kCombineThreads = 128;
constexpr int kCombineLoads = 4;  // pieces that a thread loads at once

// How the vectors of a row tile and a pair's pieces are shared out: 2^log_parts CTAs a row tile, 2^log_shares threads a
// vector.
struct CombineForm {
  int32_t log_parts;
  int32_t log_shares;
};
template <int kDim>
__device__ __forceinline__ CombineForm combine_form(int32_t log_shares) {
  constexpr int kLogVectors = kDim == 64 ? 7 : (kDim == 128 ? 8 : 9), kLogThreads = 7;
  return {kLogVectors - kLogThreads + log_shares, log_shares};
}
// As many threads a vector as let each load at most 2^log_most pieces.
template <int kDim>
__device__ __forceinline__ CombineForm form_of_pieces(int32_t pieces, int32_t log_most) {
  return combine_form<kDim>(min(32 - __clz((pieces - 1) >> log_most), 5));
}

// Pieces of a split pair; 0: the attention kernel has added them.
template <bool kCouples>
__device__ __forceinline__ int32_t pieces_to_add(const DecodeParams& p, const DecodeSplit& split) {
  if (kCouples && split.pieces == 2 && split.first_cta % 2 == 0) {
    const DecodeCta* ctas = p.ctas + split.first_cta;
    if (is_couple(ctas[0], false, ctas[1].count, p.requests[split.request].num_tiles)) return 0;
  }
  return split.pieces;
}

// Units of all pairs, and log2 of the pieces that a thread loads at most: four, for as few threads a vector as can be;
// two where that makes no more of them.
struct CombineUnits {
  int32_t count;
  int32_t log_most;
};
template <int kDim, bool kCouples>
__device__ __forceinline__ CombineUnits count_units(const DecodeParams& p, const DecodeHeader& header) {
  if (header.batch_invariant) {  // four threads a vector in every pair
    return {header.batch * header.num_kv_heads * (p.row_tiles << combine_form<kDim>(2).log_parts), 0};
  }
  int32_t units[2] = {};
#pragma unroll 1
  for (int32_t i = static_cast<int32_t>(threadIdx.x) % 32; i < header.num_splits; i += 32) {
    const int32_t pieces = pieces_to_add<kCouples>(p, p.splits[i]);
    if (kCouples && pieces == 0) continue;
#pragma unroll
    for (int j = 0; j < 2; ++j) units[j] += p.row_tiles << form_of_pieces<kDim>(pieces, 1 + j).log_parts;
  }
  const int32_t more = __reduce_add_sync(0xffffffffu, units[0]), fewer = __reduce_add_sync(0xffffffffu, units[1]);
  return {fewer, more == fewer ? 1 : 2};
}

// A unit's place: row tile and part of the split pair number `index`.
struct CombineUnit {
  int32_t index;
  int32_t row_tile;
  int32_t part;
  CombineForm form;
};
__device__ __forceinline__ CombineUnit combine_unit(int32_t index, int32_t inside, const CombineForm& form) {
  return {index, inside >> form.log_parts, inside & ((1 << form.log_parts) - 1), form};
}

// The place of a unit that there is. Every warp looks it up by itself: a scan over the pairs, 32 at once.
template <int kDim, bool kCouples>
__device__ __forceinline__ CombineUnit find_unit(const DecodeParams& p, const DecodeHeader& header, int32_t unit,
                                                 int32_t log_most) {
  constexpr unsigned kAllLanes = 0xffffffffu;
  if (header.batch_invariant) {
    const CombineForm form = combine_form<kDim>(2);
    const int32_t each = p.row_tiles << form.log_parts, index = unit / each;
    return combine_unit(index, unit - index * each, form);
  }
  const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
#pragma unroll 1
  for (int32_t first = 0;; first += 32) {
    int32_t pieces = 1, units = 0;
    if (first + lane < header.num_splits) {
      pieces = pieces_to_add<kCouples>(p, p.splits[first + lane]);
      if (!kCouples || pieces > 0) units = p.row_tiles << form_of_pieces<kDim>(pieces, log_most).log_parts;
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
      return combine_unit(first + own, inside, form_of_pieces<kDim>(__shfl_sync(kAllLanes, pieces, own), log_most));
    }
    unit -= __shfl_sync(kAllLanes, end, 31);
  }
}

// The pieces of a split (request, head) pair.
struct CombineJob {
  int32_t request;
  int32_t kv_head;
  int32_t pieces;      // 0: nothing to add
  int32_t second;      // slots from piece 0's to piece 1's
  int32_t step;        // slots between the following pieces'
  int64_t first_slot;  // of piece 0

  // Slots from piece 0's.
  __device__ __forceinline__ int32_t distance(int32_t piece) const {
    return piece == 0 ? 0 : second + (piece - 1) * step;
  }
};

// The split (request, head) pair number `index`.
__device__ __forceinline__ CombineJob combine_job(const DecodeParams& p, const DecodeHeader& header, int32_t index) {
  CombineJob job = {};
  if (header.batch_invariant) {
    job.request = index / header.num_kv_heads;
    job.kv_head = index - job.request * header.num_kv_heads;
    const DecodeRequest& request = p.requests[job.request];
    job.pieces = request.num_pieces > 1 ? request.num_pieces : 0;
    job.first_slot = static_cast<int64_t>(header.num_kv_heads) * request.piece_begin +
                     static_cast<int64_t>(job.kv_head) * request.num_pieces;
    job.second = job.step = 1;
  } else {
    const DecodeSplit split = p.splits[index];
    job.request = split.request;
    job.kv_head = split.kv_head;
    job.pieces = split.pieces;
    // Only the first piece can start elsewhere than at its CTA's first tile.
    const DecodeCta first = p.ctas[split.first_cta];
    const bool at_start = first.request == split.request && first.kv_head == split.kv_head;
    job.first_slot = 2 * static_cast<int64_t>(split.first_cta) + (at_start ? 0 : 1);
    job.second = at_start ? 2 : 1;
    job.step = 2;
  }
  return job;
}

struct CombineBuffer {
  float4 o[kCombineThreads];
  float4 ml[kCombineThreads];
};

// The sum of what a thread loads at once: pieces `piece`, piece + shares, ...; `rows`: how far each lies from piece 0,
// negative where there is none.
template <int kDim, int kLoads>
__device__ __forceinline__ void load_pieces(const float4* outputs, const float4* pairs, const int32_t (&rows)[kLoads],
                                            float4& o, float4& ml) {
  float4 v[kLoads], w[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    w[i] = make_float4(kNoMax, 0.0f, kNoMax, 0.0f);
    v[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (rows[i] >= 0) w[i] = pairs[rows[i] * 4];
    if (rows[i] >= 0) v[i] = outputs[static_cast<int64_t>(rows[i]) * (2 * kDim)];
  }
  float m0 = w[0].x, m1 = w[0].z;
#pragma unroll
  for (int i = 1; i < kLoads; ++i) m0 = fmaxf(m0, w[i].x), m1 = fmaxf(m1, w[i].z);
  o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  ml = make_float4(m0, 0.0f, m1, 0.0f);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const float f0 = exp2_approx(w[i].x - m0), f1 = exp2_approx(w[i].z - m1);
    ml.y = __fmaf_rn(w[i].y, f0, ml.y), ml.w = __fmaf_rn(w[i].w, f1, ml.w);
    o.x = __fmaf_rn(v[i].x, f0, o.x), o.y = __fmaf_rn(v[i].y, f1, o.y);
    o.z = __fmaf_rn(v[i].z, f0, o.z), o.w = __fmaf_rn(v[i].w, f1, o.w);
  }
}

// Adds one part of a row tile of a pair, kLoads pieces a thread at once. Everything that does not depend on partial
// results comes before the wait.
template <int kDim, int kLoads>
__device__ __forceinline__ void combine_part(const DecodeParams& p, const CombineJob& job, const CombineUnit& unit,
                                             CombineBuffer& buffer, bool& waited) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t shares = 1 << unit.form.log_shares, vectors = kCombineThreads >> unit.form.log_shares;
  const int32_t share = thread / vectors, position = unit.part * vectors + thread % vectors, t = position & 3;
  const int64_t first = job.first_slot * p.row_tiles + unit.row_tile;
  const float4* outputs = p.partial + first * (2 * kDim) + position;
  const float4* pairs = p.partial_ml + first * 4 + t;
  const ResultPlace to = result_place(p, job.request, job.kv_head, unit.row_tile, position);
  int32_t rows[kLoads];
  const auto find = [&](int32_t base) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int32_t piece = base + shares * i;
      rows[i] = to.any[0] && piece < job.pieces ? job.distance(piece) * p.row_tiles : -1;
    }
  };
  find(share);
  if (!waited) {
    pdl_wait();
    waited = true;
  }
  float4 o, ml;
  load_pieces<kDim, kLoads>(outputs, pairs, rows, o, ml);
  if (shares == 1 && job.pieces <= kLoads) {  // most pairs: without jumps over what others need
    store_result(p, to, job.kv_head, o, ml);
    return;
  }
#pragma unroll 1
  for (int32_t base = share + shares * kLoads; base < job.pieces; base += shares * kLoads) {
    find(base);
    float4 more, more_ml;
    load_pieces<kDim, kLoads>(outputs, pairs, rows, more, more_ml);
    add_result(o, ml, more, more_ml);
  }
  constexpr unsigned kAllLanes = 0xffffffffu;
#pragma unroll 1
  for (int32_t distance = vectors; distance < 32; distance *= 2) {
    float4 other, other_ml;
    other.x = __shfl_xor_sync(kAllLanes, o.x, distance), other.y = __shfl_xor_sync(kAllLanes, o.y, distance);
    other.z = __shfl_xor_sync(kAllLanes, o.z, distance), other.w = __shfl_xor_sync(kAllLanes, o.w, distance);
    other_ml.x = __shfl_xor_sync(kAllLanes, ml.x, distance), other_ml.y = __shfl_xor_sync(kAllLanes, ml.y, distance);
    other_ml.z = __shfl_xor_sync(kAllLanes, ml.z, distance), other_ml.w = __shfl_xor_sync(kAllLanes, ml.w, distance);
    add_result(o, ml, other, other_ml);  // what the lower lane of a pair gets is used
  }
  if (shares > 1) {
    const int32_t stride = max(vectors, 32);  // threads that hold a sum of the vectors
    __syncthreads();                          // the sums of the part before have been read
    buffer.o[thread] = o;
    buffer.ml[thread] = ml;
    __syncthreads();
    if (thread >= vectors) return;
#pragma unroll 1
    for (int32_t i = stride; i < kCombineThreads; i += stride) {
      add_result(o, ml, buffer.o[i + thread], buffer.ml[i + thread]);
    }
  }
  store_result(p, to, job.kv_head, o, ml);
}

// Zeros and lse -inf for requests without tokens; a CTA a request, all heads.
template <int kDim>
__device__ __forceinline__ void write_empty(const DecodeParams& p, const DecodeHeader& header) {
  const int32_t heads = header.num_kv_heads * p.group;
#pragma unroll 1
  for (int32_t request = static_cast<int32_t>(blockIdx.x); request < header.batch;
       request += static_cast<int32_t>(gridDim.x)) {
    if (p.requests[request].num_tiles != 0) continue;
#pragma unroll 1
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < p.q_len * heads * (kDim / 2); i += kCombineThreads) {
      const int32_t row = i / (kDim / 2), pair = i % (kDim / 2);
      const int64_t token = static_cast<int64_t>(request) * p.q_len + row / heads;
      const int32_t head = row % heads;
      store_pair(p, token * p.out_token_stride + head * p.out_head_stride + 2 * pair, 0.0f, 0.0f);
      if (p.lse != nullptr && pair == 0) {
        p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = __uint_as_float(0xff800000u);
      }
    }
  }
}

template <int kDim, bool kCouples>
__device__ __forceinline__ void combine(const DecodeParams& p) {
  __shared__ CombineBuffer buffer;
  pdl_trigger();
  DecodeHeader header = *p.header;
  header.num_kv_heads = p.num_kv_heads, header.batch_invariant = p.batch_invariant;
  const CombineUnits units = count_units<kDim, kCouples>(p, header);
  bool waited = false;
#pragma unroll 1
  for (auto unit = static_cast<int32_t>(blockIdx.x); unit < units.count; unit += static_cast<int32_t>(gridDim.x)) {
    const CombineUnit place = find_unit<kDim, kCouples>(p, header, unit, units.log_most);
    const CombineJob job = combine_job(p, header, place.index);
    if (job.pieces == 0) continue;
    if (units.log_most == 1) {
      combine_part<kDim, 2>(p, job, place, buffer, waited);
    } else {
      combine_part<kDim, kCombineLoads>(p, job, place, buffer, waited);
    }
  }
  // Of CTAs without work one waits, for the kernel's end is the attention kernel's too; the others leave their SMs.
  if (!waited && (blockIdx.x == 0 || header.num_empty > 0)) pdl_wait();
  if (header.num_empty > 0) write_empty<kDim>(p, header);
}

// kPlain: see plain_params(). kCouples: the attention kernel's CTAs go in clusters of two.
template <int kDim, bool kPlain = false, bool kCouples = false>
__global__ void __launch_bounds__(kCombineThreads, 6) combine_kernel(const __grid_constant__ DecodeParams p) {
  if constexpr (kPlain) {
    combine<kDim, kCouples>(plain_params(p, false));
  } else {
    combine<kDim, kCouples>(p);
  }
}

}  // namespace hpc::attention

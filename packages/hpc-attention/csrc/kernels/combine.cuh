// Adds the partial results of split (request, head) pairs and writes the rows of requests without tokens.
//
// Unit of work: some vectors (see decode_merge.cuh) of one row tile of one split pair. Few pieces: 32 vectors, a warp.
// More: 32 vectors, the four warps of a CTA share the pieces. Many: 8 vectors, and the four quarters of each warp share
// them too. A lane loads four pieces at once, so up to 4, 16 and 64 pieces take one trip to memory. What is added in
// which order depends on the number of pieces alone; batch-invariant plans (and their many pairs) always take the
// second form.
//
// Programmatic launch: the successor is let go before the wait. It can start when every CTA of the attention kernel has
// seen the end of what came before that kernel, so only this decode's two kernels may still run beside it. The list of
// splits is read before the wait for the same reason, partial results after it.
#pragma once

#include "decode_feed.cuh"
#include "decode_merge.cuh"
#include "hpc/pdl.cuh"

namespace hpc::attention {

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

constexpr int kCombineThreads = 128;
constexpr int kCombineWarps = 4;

// How a pair's vectors and pieces are shared out.
struct CombineForm {
  int32_t vectors;  // of a unit
  int32_t shares;   // warps of a unit
};
__device__ __forceinline__ CombineForm combine_form(int32_t pieces, bool batch_invariant) {
  if (batch_invariant) return {32, kCombineWarps};
  return {pieces <= 16 ? 32 : 8, pieces <= 4 ? 1 : kCombineWarps};
}
// CTAs of a row tile.
template <int kDim>
__device__ __forceinline__ int32_t combine_ctas(const CombineForm& form) {
  return 2 * kDim / form.vectors * form.shares / kCombineWarps;
}

// Finds the pair that CTAs begin .. of the grid's work belong to; all lanes of a warp search together. Goes forward
// only.
template <int kDim>
class CombineSearch {
 public:
  __device__ __forceinline__ CombineSearch(const DecodeParams& p, const DecodeHeader& header)
      : p_(p), header_(header) {}

  // False where there is no work number `index`; else its pair, and which of the pair's CTAs it is.
  __device__ __forceinline__ bool find(int32_t index, CombineJob& job, int32_t& part) {
    if (header_.batch_invariant) {
      const int32_t each = p_.row_tiles * combine_ctas<kDim>(combine_form(0, true));
      part = index % each;
      if (index / each >= header_.batch * header_.num_kv_heads) return false;
      job = combine_job(p_, header_, index / each);
      return true;
    }
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
    for (; chunk_ < header_.num_splits; chunk_ += 32) {
      int32_t ctas = 0;
      if (chunk_ + lane < header_.num_splits) {
        ctas = p_.row_tiles * combine_ctas<kDim>(combine_form(p_.splits[chunk_ + lane].pieces, false));
      }
      int32_t end = ctas;  // CTAs of this chunk up to this lane's pair
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int32_t before = __shfl_up_sync(kAllLanes, end, step);
        if (lane >= step) end += before;
      }
      const int32_t total = __shfl_sync(kAllLanes, end, 31);
      if (index < before_ + total) {
        const int32_t owner = __ffs(__ballot_sync(kAllLanes, before_ + end > index)) - 1;
        part = index - before_ - __shfl_sync(kAllLanes, end - ctas, owner);
        job = combine_job(p_, header_, chunk_ + owner);
        return true;
      }
      before_ += total;
    }
    return false;
  }

 private:
  const DecodeParams& p_;
  const DecodeHeader& header_;
  int32_t chunk_ = 0;   // pairs before the current 32
  int32_t before_ = 0;  // their CTAs
};

struct CombineBuffer {
  float4 o[kCombineWarps][32];
  float4 ml[kCombineWarps][4];
};

// A warp's sum of pieces `share`, share + shares, ... of a unit, as a result relative to (max, sum). kVectors: of the
// unit; 32 / kVectors groups of lanes then take different pieces. Every lane gets the vector `position` of the sum.
template <int kDim, int kVectors>
__device__ __forceinline__ void sum_pieces(const DecodeParams& p, const CombineJob& job, int32_t row_tile,
                                           int32_t position, int32_t share, int32_t shares, float4& o, float4& ml) {
  constexpr int kGroups = 32 / kVectors;
  constexpr int kLoads = 4;                  // outputs that a lane loads at once
  constexpr int kPieces = kLoads * kGroups;  // of a round: 4 or 16
  constexpr int kPairs = (kPieces + 7) / 8;  // (max, sum) vectors that a lane loads at once: lane 4 i + t, piece i
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32, t = lane & 3, group = lane / kVectors;
  const bool live = row_tile * kRowTile + 2 * t < p.rows;
  const int64_t first = job.first_slot * p.row_tiles + row_tile;
  const float4* all_outputs = p.partial + first * (2 * kDim) + position;
  const float4* all_pairs = p.partial_ml + first * 4 + t;
  o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  ml = make_float4(kNoMax, 0.0f, kNoMax, 0.0f);
#pragma unroll 1
  for (int32_t base = share; base < job.pieces; base += shares * kPieces) {
    float4 outputs[kLoads], pairs[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int32_t number = 8 * i + (lane >> 2), piece = base + shares * number;
      pairs[i] = make_float4(kNoMax, 0.0f, kNoMax, 0.0f);
      if (live && number < kPieces && piece < job.pieces) pairs[i] = all_pairs[job.distance(piece) * p.row_tiles * 4];
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int32_t piece = base + shares * (kGroups * i + group);
      outputs[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (live && piece < job.pieces) outputs[i] = all_outputs[job.distance(piece) * p.row_tiles * (2 * kDim)];
    }
    // The largest of this round and of those before, the same in all lanes of a t.
    float m0 = ml.x, m1 = ml.z;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) m0 = fmaxf(m0, pairs[i].x), m1 = fmaxf(m1, pairs[i].z);
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) {
      m0 = fmaxf(m0, __shfl_xor_sync(kAllLanes, m0, mask));
      m1 = fmaxf(m1, __shfl_xor_sync(kAllLanes, m1, mask));
    }
    const float old0 = exp2_approx(ml.x - m0), old1 = exp2_approx(ml.z - m1);
    float w0[kPairs], w1[kPairs], l0 = 0.0f, l1 = 0.0f;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      w0[i] = exp2_approx(pairs[i].x - m0), w1[i] = exp2_approx(pairs[i].z - m1);
      l0 = __fmaf_rn(pairs[i].y, w0[i], l0), l1 = __fmaf_rn(pairs[i].w, w1[i], l1);
    }
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) {
      l0 += __shfl_xor_sync(kAllLanes, l0, mask);
      l1 += __shfl_xor_sync(kAllLanes, l1, mask);
    }
    ml = make_float4(m0, __fmaf_rn(ml.y, old0, l0), m1, __fmaf_rn(ml.w, old1, l1));
    o = make_float4(o.x * old0, o.y * old1, o.z * old0, o.w * old1);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      // Output i of a group is piece kGroups * i + group of the round, whose weights lie in lane 4 (piece mod 8) + t.
      const int32_t from = ((kGroups * i + group) % 8) * 4 + t;
      const float f0 = __shfl_sync(kAllLanes, w0[kGroups * i / 8], from);
      const float f1 = __shfl_sync(kAllLanes, w1[kGroups * i / 8], from);
      o.x = __fmaf_rn(outputs[i].x, f0, o.x), o.y = __fmaf_rn(outputs[i].y, f1, o.y);
      o.z = __fmaf_rn(outputs[i].z, f0, o.z), o.w = __fmaf_rn(outputs[i].w, f1, o.w);
    }
  }
#pragma unroll
  for (int mask = kVectors; mask < 32; mask *= 2) {
    o.x += __shfl_xor_sync(kAllLanes, o.x, mask), o.y += __shfl_xor_sync(kAllLanes, o.y, mask);
    o.z += __shfl_xor_sync(kAllLanes, o.z, mask), o.w += __shfl_xor_sync(kAllLanes, o.w, mask);
  }
}

// CTA number `part` of a pair.
template <int kDim, int kVectors>
__device__ __forceinline__ void combine_part(const DecodeParams& p, const CombineJob& job, int32_t part, int32_t shares,
                                             CombineBuffer& buffer) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32, lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t each = combine_ctas<kDim>({kVectors, shares});
  const int32_t row_tile = part / each, unit = (part % each * kCombineWarps + warp) / shares;
  const int32_t position = unit * kVectors + lane % kVectors;
  float4 o, ml;
  sum_pieces<kDim, kVectors>(p, job, row_tile, position, warp % shares, shares, o, ml);
  if (shares > 1) {
    __syncthreads();  // the sums of the part before have been read
    buffer.o[warp][lane] = o;
    if (lane < 4) buffer.ml[warp][lane] = ml;
    __syncthreads();
    if (warp > 0) return;
    for (int32_t i = 1; i < min(shares, job.pieces); ++i) add_result(o, ml, buffer.o[i][lane], buffer.ml[i][lane & 3]);
  }
  if (lane < kVectors) store_result(p, job.request, job.kv_head, row_tile, position, o, ml);
}

// Zeros and lse -inf for requests without tokens; a CTA a request, all heads.
template <int kDim>
__device__ __forceinline__ void write_empty(const DecodeParams& p, const DecodeHeader& header) {
  const int32_t heads = header.num_kv_heads * p.group;
  for (int32_t request = static_cast<int32_t>(blockIdx.x); request < header.batch;
       request += static_cast<int32_t>(gridDim.x)) {
    if (p.requests[request].num_tiles != 0) continue;
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < p.q_len * heads * (kDim / 2); i += kCombineThreads) {
      const int32_t row = i / (kDim / 2), pair = i % (kDim / 2);
      const int64_t token = static_cast<int64_t>(request) * p.q_len + row / heads;
      const int32_t head = row % heads;
      store_pair(p, token, head, 2 * pair, 0.0f, 0.0f);
      if (p.lse != nullptr && pair == 0) {
        p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = __uint_as_float(0xff800000u);
      }
    }
  }
}

template <int kDim>
__global__ void __launch_bounds__(kCombineThreads, 6) combine_kernel(const __grid_constant__ DecodeParams p) {
  __shared__ CombineBuffer buffer;
  pdl_trigger();
  const DecodeHeader& header = *p.header;
  CombineSearch<kDim> search(p, header);
  CombineJob job;
  int32_t part, index = static_cast<int32_t>(blockIdx.x);
  bool found = search.find(index, job, part);
  pdl_wait();
  while (found) {
    const CombineForm form = combine_form(job.pieces, header.batch_invariant);
    if (job.pieces > 0) {
      if (form.vectors == 32) {
        combine_part<kDim, 32>(p, job, part, form.shares, buffer);
      } else {
        combine_part<kDim, 8>(p, job, part, form.shares, buffer);
      }
    }
    index += static_cast<int32_t>(gridDim.x);
    found = search.find(index, job, part);
  }
  if (header.num_empty > 0) write_empty<kDim>(p, header);
}

}  // namespace hpc::attention

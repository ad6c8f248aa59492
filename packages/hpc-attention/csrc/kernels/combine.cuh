// Adds the partial results of split (request, head) pairs and writes the rows of requests without tokens.
//
// Unit of work: 32 vectors (a warp's worth: 16 columns of 8 rows) of one row tile of one split pair. W warps share a
// unit's pieces, 8 / W units a CTA; W is 8 where few pairs are split and falls to 2 where many are. Whatever W is,
// piece i belongs to sum i mod 8, each sum is added in order, and the eight sums are added in order: the result does
// not depend on what else is in the batch.
//
// Programmatic launch: the list of splits is read before the wait (this kernel only starts early when the attention
// kernel has seen the end of everything before it, the plan included), partial results after it.
#pragma once

#include "decode_merge.cuh"
#include "hpc/fifo.cuh"
#include "hpc/pdl.cuh"

namespace hpc::attention {

constexpr int kSums = 8;

struct CombineJob {
  int32_t request;
  int32_t kv_head;
  int32_t pieces;       // 0: nothing to add
  int64_t first_slot;   // slot of piece 0
  int64_t second_slot;  // of piece 1; the following are slot_step apart
  int32_t slot_step;
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
    job.second_slot = job.first_slot + 1;
    job.slot_step = 1;
  } else {
    const DecodeSplit split = p.splits[index];
    job.request = split.request;
    job.kv_head = split.kv_head;
    job.pieces = split.pieces;
    // Only the first piece can start elsewhere than at its CTA's first tile.
    const DecodeCta first = p.ctas[split.first_cta];
    const bool at_start = first.request == split.request && first.kv_head == split.kv_head;
    job.first_slot = 2 * static_cast<int64_t>(split.first_cta) + (at_start ? 0 : 1);
    job.second_slot = 2 * (static_cast<int64_t>(split.first_cta) + 1);
    job.slot_step = 2;
  }
  return job;
}

// One CTA's share of a row tile of a split pair: units `first_unit` .. first_unit + 8 / kShare - 1, 32 vectors each.
template <int kDim, int kShare>
__device__ __forceinline__ void combine_units(const DecodeParams& p, const CombineJob& job, int32_t row_tile,
                                              int32_t first_unit, float4 (&sums)[2][kSums * 4][32]) {
  constexpr int kUnits = kDecodeWarps / kShare;  // of a CTA
  constexpr int kMine = kSums / kShare;          // sums that this warp forms
  constexpr int kBatch = 4;                      // pieces loaded at once
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32, lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t unit = warp / kShare, share = warp % kShare;
  const int32_t position = (first_unit + unit) * 32 + lane;
  const bool live = row_tile * kRowTile + 2 * (position & 3) < p.rows;

  float4 o[kMine], ml[kMine];
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    o[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    ml[i] = make_float4(kNoMax, 0.0f, kNoMax, 0.0f);
  }
  for (int32_t base = share; base < job.pieces; base += kShare * kBatch) {
    float4 piece_o[kBatch], piece_ml[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int32_t piece = base + kShare * i;
      piece_o[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      piece_ml[i] = make_float4(kNoMax, 0.0f, kNoMax, 0.0f);
      if (live && piece < job.pieces) {
        const int64_t slot =
            piece == 0 ? job.first_slot : job.second_slot + static_cast<int64_t>(piece - 1) * job.slot_step;
        const int64_t at = slot * p.row_tiles + row_tile;
        piece_o[i] = p.partial[at * (2 * kDim) + position];
        piece_ml[i] = p.partial_ml[at * 4 + (position & 3)];
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (base + kShare * i < job.pieces) add_result(o[i % kMine], ml[i % kMine], piece_o[i], piece_ml[i]);
    }
  }
  __syncthreads();  // the sums of the job before have been read
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    // Piece `share` + kShare * i is in sum (share + kShare * i) mod 8.
    sums[0][unit * kSums + share + kShare * i][lane] = o[i];
    sums[1][unit * kSums + share + kShare * i][lane] = ml[i];
  }
  __syncthreads();
  if (warp < kUnits) {
    const int32_t mine = (first_unit + warp) * 32 + lane;
    float4 total = sums[0][warp * kSums][lane], total_ml = sums[1][warp * kSums][lane];
    for (int32_t i = 1; i < min(job.pieces, kSums); ++i) {
      add_result(total, total_ml, sums[0][warp * kSums + i][lane], sums[1][warp * kSums + i][lane]);
    }
    store_result(p, job.request, job.kv_head, row_tile, mine, total, total_ml);
  }
}

// Zeros and lse -inf for requests without tokens; a CTA a request, all heads.
template <int kDim>
__device__ __forceinline__ void write_empty(const DecodeParams& p, const DecodeHeader& header) {
  const int32_t heads = header.num_kv_heads * p.group;
  for (int32_t request = static_cast<int32_t>(blockIdx.x); request < header.batch;
       request += static_cast<int32_t>(gridDim.x)) {
    if (p.requests[request].num_tiles != 0) continue;
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < p.q_len * heads * (kDim / 2); i += kDecodeThreads) {
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
__global__ void __launch_bounds__(kDecodeThreads, 2) combine_kernel(const __grid_constant__ DecodeParams p) {
  __shared__ float4 sums[2][kSums * 4][32];  // 32 KB
  const DecodeHeader header = *p.header;
  const int32_t jobs = header.batch_invariant ? header.batch * header.num_kv_heads : header.num_splits;
  constexpr int kUnits = kDim / 16;  // of a row tile
  // As many warps a unit as still give every unit a CTA at once.
  const int64_t units = static_cast<int64_t>(jobs) * p.row_tiles * kUnits;
  const int64_t grid = gridDim.x;
  const int32_t share = units <= grid ? 8 : (units <= 2 * grid ? 4 : 2);
  const int32_t ctas_a_tile = kUnits * share / kDecodeWarps;
  const int64_t work = static_cast<int64_t>(jobs) * p.row_tiles * ctas_a_tile;
  CombineJob job = {};
  int64_t index = blockIdx.x;
  if (index < work) job = combine_job(p, header, static_cast<int32_t>(index / (p.row_tiles * ctas_a_tile)));
  pdl_wait();
  pdl_trigger();
  while (index < work) {
    const int32_t part = static_cast<int32_t>(index % (p.row_tiles * ctas_a_tile));
    const int32_t row_tile = part / ctas_a_tile, first_unit = part % ctas_a_tile * (kDecodeWarps / share);
    if (job.pieces > 0) {
      if (share == 8) {
        combine_units<kDim, 8>(p, job, row_tile, first_unit, sums);
      } else if (share == 4) {
        combine_units<kDim, 4>(p, job, row_tile, first_unit, sums);
      } else {
        combine_units<kDim, 2>(p, job, row_tile, first_unit, sums);
      }
    }
    index += grid;
    if (index < work) job = combine_job(p, header, static_cast<int32_t>(index / (p.row_tiles * ctas_a_tile)));
  }
  if (header.num_empty > 0) write_empty<kDim>(p, header);
}

}  // namespace hpc::attention

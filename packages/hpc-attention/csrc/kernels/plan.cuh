// The plan kernel: seq_lens of this step -> decode task map (hpc/schedule.hpp), byte for byte what the host planner
// writes.
//
// Grid: thread blocks that all do the same scan; block b writes the request rows of every gridDim-th warp, block 0 also
//   the CTAs' runs, the cut (request, head) pairs and the header. One block serves up to 1,023 requests.
// Threads: T >= CTAs of the attention kernel. Thread i scans requests [i * kItems, (i + 1) * kItems) and writes the row
//   of CTA i.
// Shared memory: tile_begin of every request (16 KB at 4,096); line_begin, where they begin on the line of CTAs
//   of a dealt plan or on a weighed line; there also run_begin, of each CTA; per-warp sums.
// Steps: 1. lengths -> tiles, sums of each warp | barrier | 2. total and share, tile_begin to shared memory; where a
//   dealt plan may be made, the parts of each request with each of its budgets, scanned in the warp | barrier |
//   3. the first budget that fits, line_begin to shared memory | barrier | 4. request rows; thread c searches the place
//   of CTA c | barrier | 5. cut pairs at their index (a ballot scan), header, zeros; on a weighed line the runs, each
//   of which ends where the next one begins. (There line_begin is written in step 2; plans are either dealt or
//   weighed.)
// Chains of dependent instructions are what takes time here: sums of warps by REDUX, searches by quarters, divisions
//   without signs, and values that all threads share kept out of the uniform registers.
// Sums fit 32 bits per KV head (4,096 x 16,384 tiles); positions over all heads are int64.
// PDL: waits before it reads seq_lens or writes the map, which the attention kernel of the step before may still read;
//   triggers right after. Whoever comes next sees the map after its own wait.
#pragma once

#include <cuda_runtime.h>

#include "config/plan.hpp"
#include "hpc/pdl.cuh"
#include "hpc/schedule.hpp"

namespace hpc::attention {

struct PlanParams {
  const int32_t* seq_lens;  // [shape.batch]
  unsigned char* map;       // decode_map_bytes(shape.max_batch, shape.num_ctas), 16-byte aligned
  DecodeShape shape;
};

// Rows of the map are whole multiples of 16 bytes.
template <typename Row>
__device__ __forceinline__ void store_row(unsigned char* to, const Row& row) {
  static_assert(sizeof(Row) % 16 == 0, "16-byte stores");
  const int4* words = reinterpret_cast<const int4*>(&row);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Row) / 16); ++i) reinterpret_cast<int4*>(to)[i] = words[i];
}

__device__ __forceinline__ int32_t warp_inclusive_scan(int32_t value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int32_t below = __shfl_up_sync(0xffffffffu, value, step);
    if (lane >= step) value += below;
  }
  return value;
}

// Sums over the warps of a block, one value a warp: of all, and of those before `warp`.
struct WarpSums {
  int32_t all;
  int32_t before;
};
__device__ __forceinline__ WarpSums sum_warps(const int32_t* per_warp, int warp, int num_warps, int lane) {
  const int32_t value = lane < num_warps ? per_warp[lane] : 0;
  WarpSums sums = {__reduce_add_sync(0xffffffffu, value), __reduce_add_sync(0xffffffffu, lane < warp ? value : 0)};
  // Not in uniform registers: chains of dependent instructions are longer there.
  asm volatile("" : "+r"(sums.all), "+r"(sums.before));
  return sums;
}

// Sum number `number` of three a word.
__device__ __forceinline__ int32_t field(int32_t word, int number) {
  return (word >> (10 * (number % 3))) & 1023;
}

// kDeals: whether the step may have a dealt plan (may_deal()); else its line may be weighed.
template <bool kBatchInvariant, int kItems, bool kDeals>
__global__ void __launch_bounds__(kPlanThreads) plan_kernel(PlanParams params) {
  __shared__ int32_t tile_begin[kItems * kPlanThreads + 1];
  static_assert(!kDeals || (!kBatchInvariant && kItems == 1));
  constexpr bool kWeighs = !kBatchInvariant && !kDeals;
  // Of a weighed line or a dealt plan; where each CTA's run begins on a weighed line.
  __shared__ int32_t line_begin[kBatchInvariant ? 1 : kItems * kPlanThreads + 1];
  __shared__ uint32_t run_begin[kWeighs ? kPlanThreads : 1];
  __shared__ int32_t warp_tiles[32], warp_pieces[32], warp_empty[32], warp_splits[32], warp_used[32];
  __shared__ int32_t warp_bits[32], warp_long[32];
  __shared__ int32_t warp_longest[32], warp_parts[2][32];
  DecodeShape shape = params.shape;
  shape.batch_invariant = kBatchInvariant;  // known to the compiler from here on
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int num_threads = static_cast<int>(blockDim.x), num_warps = num_threads / 32;
  const int block = static_cast<int>(blockIdx.x), num_blocks = static_cast<int>(gridDim.x);
  const int batch = shape.batch, first = thread * kItems;

  pdl_wait();
  pdl_trigger();

  // 1. Tiles of each request, and each warp's sum.
  DecodeRequest rows[kItems];
  int32_t tiles = 0, pieces = 0, empty = 0, bits = 0, packed = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int32_t length = first + i < batch ? __ldcg(params.seq_lens + first + i) : 0;
    rows[i] = decode_request(length, shape);
    tiles += rows[i].num_tiles;
    pieces += rows[i].num_pieces;
    bits |= rows[i].num_tiles;
    packed += kWeighs ? rows[i].num_tiles << 8 | (rows[i].num_tiles > kShortTiles) : rows[i].num_tiles;
    empty += first + i < batch && rows[i].num_tiles == 0;
  }
  const bool own_empty = empty > 0;
  empty = __reduce_add_sync(0xffffffffu, empty);
  // Of a warp's requests: tiles, and on weighed lines the number of those with more than kShortTiles, in a word.
  const int32_t all_packed = __reduce_add_sync(0xffffffffu, packed);
  const int32_t all_pieces = kBatchInvariant ? __reduce_add_sync(0xffffffffu, pieces) : 0;
  const int32_t all_bits = kWeighs ? __reduce_or_sync(0xffffffffu, bits) : 0;
  // Also where it is not wanted: under a condition ptxas (13.0) takes the branch's below, and leaves lane 0 out.
  const int32_t own_longest = kDeals ? __reduce_max_sync(0xffffffffu, tiles) : 0;
  if (lane == 0) {
    warp_longest[warp] = own_longest;
    warp_tiles[warp] = kWeighs ? all_packed >> 8 : all_packed;
    warp_long[warp] = all_packed & 255;
    warp_pieces[warp] = all_pieces;
    warp_empty[warp] = empty;
    warp_bits[warp] = all_bits;
  }
  __syncthreads();

  // 2. The first tile of each request, per KV head; entries from `batch` on hold the total.
  const WarpSums tile_sums = sum_warps(warp_tiles, warp, num_warps, lane);
  const WarpSums piece_sums = kBatchInvariant ? sum_warps(warp_pieces, warp, num_warps, lane) : WarpSums{0, 0};
  packed = warp_inclusive_scan(packed, lane) - packed;
  tiles = tile_sums.before + (kWeighs ? packed >> 8 : packed);
  pieces = piece_sums.before + (kBatchInvariant ? warp_inclusive_scan(pieces, lane) : 0) - pieces;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    rows[i].tile_begin = tiles;
    rows[i].piece_begin = pieces;
    if (first + i <= batch) tile_begin[first + i] = tiles;
    tiles += rows[i].num_tiles;
    pieces += rows[i].num_pieces;
  }
  if (thread == num_threads - 1 && batch == first + kItems) tile_begin[batch] = tiles;
  const int64_t total = static_cast<int64_t>(tile_sums.all) * shape.num_kv_heads;
  const int32_t share = tiles_share(total, shape.num_ctas), least = dealt_least(total, shape.min_tiles);
  const bool weighable = kWeighs && may_weigh(share, shape);
  const WarpSums longs = kWeighs ? sum_warps(warp_long, warp, num_warps, lane) : WarpSums{0, 0};
  if (weighable) {  // the same with what pairs cost beside their tiles
    int32_t begin = rows[0].tile_begin + (longs.before + (packed & 255)) * pair_extra(true, shape.min_tiles);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (first + i <= batch) line_begin[first + i] = begin;
      begin += rows[i].num_tiles + pair_extra(rows[i].num_tiles > kShortTiles, shape.min_tiles);
    }
    if (thread == num_threads - 1 && batch == first + kItems) line_begin[batch] = begin;
  }
  int32_t floor = 0, budget = 0;
  // Parts of the requests up to and including this thread's, within the warp, with each budget of a dealt plan: three
  // sums a word.
  uint32_t parts[2] = {}, parts_to_here[2] = {};
  if constexpr (kDeals) {
#pragma unroll
    for (int i = 0; i < kFits; ++i) {
      const int32_t wanted = dealt_parts(rows[0].num_tiles, dealt_budget(i, share, least, shape.min_tiles));
      parts[i / 3] += static_cast<uint32_t>(wanted) << (10 * (i % 3));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      parts_to_here[i] = static_cast<uint32_t>(warp_inclusive_scan(static_cast<int32_t>(parts[i]), lane));
      if (lane == 31) warp_parts[i][warp] = static_cast<int32_t>(parts_to_here[i]);
    }
  }
  __syncthreads();

  // 3. The first CTA of each request, per KV head, in a dealt plan.
  bool dealt = false;
  if constexpr (kDeals) {
    WarpSums sums[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) sums[i] = sum_warps(warp_parts[i], warp, num_warps, lane);
    const WarpSums empties = sum_warps(warp_empty, warp, num_warps, lane);
    int32_t longest = __reduce_max_sync(0xffffffffu, lane < num_warps ? warp_longest[lane] : 0);
    asm volatile("" : "+r"(longest));
    int number = kFits;
#pragma unroll
    for (int i = kFits - 1; i >= 0; --i) {
      if (field(sums[i / 3].all, i) * shape.num_kv_heads <= shape.num_ctas) number = i;
    }
    dealt = number < kFits && total > 0;
    int32_t all = 0, before = 0;
    if (dealt) {
      const bool low = number < 3;
      all = field(low ? sums[0].all : sums[1].all, number);
      before = field((low ? sums[0].before : sums[1].before) +
                         static_cast<int32_t>(low ? parts_to_here[0] - parts[0] : parts_to_here[1] - parts[1]),
                     number);
      floor = budget = dealt_budget(number, share, least, shape.min_tiles);
      const unsigned empty_lanes = __ballot_sync(0xffffffffu, own_empty);
      if (dealt_whole(longest, budget, all * shape.num_kv_heads, shape.min_tiles)) {
        floor = budget = longest;
        all = batch - empties.all;
        before = first - empties.before - __popc(empty_lanes & ((1u << lane) - 1));
      }
    }
    if (may_couple(shape)) {
      if (!dealt) budget = decode_budget(total, share, floor_tiles(total, share, shape.min_tiles));
      if (dealt_in_couples(longest, budget, shape.min_tiles)) {
        dealt = true;
        floor = budget = ceil_div(longest, 2);
        all = 2 * batch;
        before = 2 * first;
      }
    }
    if (dealt) {
      if (first < batch) line_begin[first] = before;
      if (thread == 0) line_begin[batch] = all;
      __syncthreads();
    }
  }
  bool weighed = false;
  if (!dealt) {
    floor = floor_tiles(total, share, shape.min_tiles);
    budget = decode_budget(total, share, floor);
    if (weighable) {
      weighed =
          weighs(share, floor, __reduce_or_sync(0xffffffffu, lane < num_warps ? warp_bits[lane] : 0), shape.min_tiles);
      if (weighed) {
        floor = 2 * shape.min_tiles;
        const int64_t extra = static_cast<int64_t>(longs.all) * pair_extra(true, shape.min_tiles);
        budget = tiles_share(total + extra * shape.num_kv_heads, shape.num_ctas);
      }
    }
  }

  // 4. Request rows, and zeros behind the row that ends them.
  unsigned char* to = params.map + requests_offset();
  if (num_blocks == 1 || warp % num_blocks == block) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (first + i < batch) {
        rows[i].next = next_request(first + i, tile_begin, batch);
        store_row(to + sizeof(DecodeRequest) * (first + i), rows[i]);
      }
    }
  }
  for (int row = batch + block * num_threads + thread; row <= shape.max_batch; row += num_blocks * num_threads) {
    DecodeRequest last = {};
    if (row == batch) {
      last.tile_begin = tile_sums.all;
      last.piece_begin = piece_sums.all;
    }
    store_row(to + sizeof(DecodeRequest) * row, last);
  }
  if (block != 0) return;

  DecodeAssignment assignment = {};
  const bool owns_cta = thread < shape.num_ctas;
  if (owns_cta) {
    const DecodeLine line = {dealt || weighed ? line_begin : tile_begin, dealt, weighed};
    assignment = decode_assignment(thread, budget, total, tile_begin, line, shape);
    if (!weighed) store_row(params.map + ctas_offset(shape.max_batch) + sizeof(DecodeCta) * thread, assignment.run);
  }
  if (weighed && owns_cta) run_begin[thread] = assignment.begin;
  const bool cuts = !kBatchInvariant && assignment.split.pieces > 0;
  const unsigned cutting = __ballot_sync(0xffffffffu, cuts);
  const unsigned used = __ballot_sync(0xffffffffu, assignment.run.count > 0);
  if (lane == 0) {
    warp_splits[warp] = __popc(cutting);
    warp_used[warp] = __popc(used);
  }
  __syncthreads();

  if (weighed && owns_cta) {
    const uint32_t end = thread + 1 < shape.num_ctas ? run_begin[thread + 1] : static_cast<uint32_t>(total);
    if (assignment.run.count > 0) number_run(assignment.run, assignment.begin, end);
    store_row(params.map + ctas_offset(shape.max_batch) + sizeof(DecodeCta) * thread, assignment.run);
  }

  // 5. Cut pairs in the order of the CTAs that cut them, zeros behind them, and the header.
  const WarpSums splits = sum_warps(warp_splits, warp, num_warps, lane);
  to = params.map + splits_offset(shape.max_batch, shape.num_ctas);
  if (cuts) {
    const int index = splits.before + __popc(cutting & ((1u << lane) - 1));
    store_row(to + sizeof(DecodeSplit) * index, assignment.split);
  }
  if (owns_cta && thread >= splits.all) store_row(to + sizeof(DecodeSplit) * thread, DecodeSplit{});
  if (warp == num_warps - 1) {
    const int32_t used_ctas = sum_warps(warp_used, warp, num_warps, lane).all;
    const int32_t num_empty = sum_warps(warp_empty, warp, num_warps, lane).all;
    if (lane == 0) {
      const DecodeHeader header = {
          total,           batch,           shape.num_kv_heads, shape.num_ctas, budget,
          used_ctas,       splits.all,      shape.q_len,        shape.window,   shape.max_seq_len,
          shape.max_batch, kBatchInvariant, num_empty,          floor,          shape.min_tiles};
      store_row(params.map, header);
    }
  }
}

}  // namespace hpc::attention

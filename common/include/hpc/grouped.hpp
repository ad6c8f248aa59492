// Routing index and tile task map of a grouped GEMM (mixture of experts), as pure functions for host and device.
//
// Problem: topk_ids [tokens, top_k] name global experts. This rank owns the experts [first, first + num_local). The
// GEMMs want the (token, slot) pairs of each expert as consecutive rows, and a list of tiles that covers those rows.
// Callers: the host planner (bindings, CPU operators, tests) runs build_index(); the device's index kernel makes the
// same arrays in parallel from the same local_expert(), num_tiles(), tile_rows() and tile_span(). There is no second
// copy of any of these rules.
//
// What holds (grouped.py's check_index() checks all of it):
//   * every (token, slot) whose id this rank owns has exactly one row; every other pair has none (-1);
//   * expert e's rows are [offsets[e], offsets[e + 1]), in ascending order of token * top_k + slot (stable);
//   * expert e has num_tiles(count_e) tiles of one width tile_rows(count_e), consecutive, none empty, each row in one;
//   * the tiles of all experts number at most max_tiles(tokens * top_k, num_local).
// Sizes: tokens * top_k stays below 2^31 (262,144 tokens of 32 slots are 2^23), so rows are int32.
#pragma once

#include <cstdint>

#ifndef HPC_HD
#ifdef __CUDACC__
#define HPC_HD __host__ __device__ __forceinline__
#else
#define HPC_HD inline
#endif
#endif

namespace hpc::grouped {

// How an expert's rows are cut into tiles. A tile's width is what the kernel multiplies (the tail is padding).
struct TileRule {
  int32_t max_rows;  // widest tile, a multiple of granule
  int32_t granule;   // widths are multiples of this, and it divides max_rows (8: the smallest N of the matrix
                     // instruction; 64: its M)
  int32_t even;      // nonzero: from two tiles up their number is even, so that pairs share the weights they load
};

// The rule of the tensor-core GEMMs: weights are M, tokens are N of at most 128.
HPC_HD constexpr TileRule default_rule() {
  return {128, 8, 1};
}

// One tile: rows [row, row + rows) of the routing index, all of `expert`, multiplied `width` wide.
struct TileTask {
  int32_t expert;  // local, [0, num_local)
  int32_t row;     // first row, counted over all experts
  int32_t rows;    // rows that exist, 1 to width
  int32_t width;   // tile_rows() of the expert's count
};

// Rows of one tile, counted from the expert's first row.
struct TileSpan {
  int32_t first;
  int32_t rows;
};

// The local expert of a global id, or -1 where this rank does not own it (another rank's, -1, out of range).
// Unsigned compare: one test rejects both ends, and an id near INT64_MIN cannot wrap into the range.
HPC_HD constexpr int32_t local_expert(int64_t id, int64_t first, int32_t num_local) {
  if (id < first) return -1;
  const uint64_t offset = static_cast<uint64_t>(id) - static_cast<uint64_t>(first);
  return offset < static_cast<uint64_t>(num_local) ? static_cast<int32_t>(offset) : -1;
}

// Number of tiles of an expert with `count` rows: ceil(count / max_rows), made even from two up if the rule says so.
HPC_HD constexpr int32_t num_tiles(int32_t count, TileRule rule) {
  const int32_t tiles = count / rule.max_rows + (count % rule.max_rows != 0);
  return (rule.even && tiles > 1) ? tiles + (tiles & 1) : tiles;
}

// Width of every tile of an expert with `count` rows (0 for none): the fair share of a tile, rounded up to the granule.
// This is the one function that picks a tile size.
HPC_HD constexpr int32_t tile_rows(int32_t count, TileRule rule) {
  const int32_t tiles = num_tiles(count, rule);
  if (tiles == 0) return 0;
  const int32_t share = count / tiles + (count % tiles != 0);
  return (share + rule.granule - 1) / rule.granule * rule.granule;
}

// Rows of tile `tile`: granules are dealt evenly (the first tiles take one more; the last may hold a part of one), so
// that no tile is empty; cutting at multiples of the width would leave empty ones (count = 32,640: 255 full tiles and
// one of nothing). Single rows are dealt where an even number of tiles is more than there are granules.
HPC_HD constexpr TileSpan tile_span(int32_t count, int32_t tile, TileRule rule) {
  const int32_t tiles = num_tiles(count, rule), granules = count / rule.granule + (count % rule.granule != 0);
  const int32_t dealt = granules < tiles ? 1 : rule.granule, pieces = granules < tiles ? count : granules;
  const int32_t share = pieces / tiles, extra = pieces % tiles;
  const int32_t first = (tile * share + (tile < extra ? tile : extra)) * dealt;
  const int32_t rows = (share + (tile < extra ? 1 : 0)) * dealt;
  return {first, rows < count - first ? rows : count - first};
}

// Most tiles that `rows` rows over `experts` experts can make, whatever the routing: sizes the task list and the grid.
// The cheapest tile is an expert's first (one row). After it, without `even`, each max_rows rows make one more. With
// it, an expert's next 2 * max_rows rows make three (1 -> 4), later ones two, and a rest of max_rows one (1 -> 2);
// where the rest is one short of 2 * max_rows, giving up another expert's single row for it gains one.
HPC_HD constexpr int64_t max_tiles(int64_t rows, int32_t experts, TileRule rule) {
  const int64_t hit = rows < experts ? rows : experts;
  const int64_t rest = rows - hit;
  if (!rule.even) return hit + rest / rule.max_rows;
  const int64_t pair = 2 * static_cast<int64_t>(rule.max_rows);
  const int64_t pairs = rest / pair;
  const int64_t left = rest % pair;
  return hit + 2 * pairs + (pairs < hit ? pairs : hit) + (left >= rule.max_rows ? 1 : 0) + (left == pair - 1 ? 1 : 0);
}

// topk_ids as they lie in memory; strides in elements.
template <class Id>
struct IdView {
  const Id* data;        // [tokens, top_k], global ids
  int64_t tokens;        // >= 0
  int32_t top_k;         // >= 1
  int64_t token_stride;  // elements from a token to the next
  int64_t slot_stride;   // elements from a slot to the next
  int64_t first;         // first global expert of this rank (ep_rank * num_local)
  int32_t num_local;     // experts on this rank

  HPC_HD int32_t expert(int64_t token, int32_t slot) const {
    return local_expert(static_cast<int64_t>(data[token * token_stride + slot * slot_stride]), first, num_local);
  }
};

// The arrays of an index. Nothing is assumed of what they hold on entry; entries past num_rows and num_tiles of
// row_to_slot and tasks are not written.
struct IndexArrays {
  int32_t* offsets;      // [num_local + 1], first row of each expert; the last is num_rows
  int32_t* row_to_slot;  // [tokens * top_k], row -> token * top_k + slot
  int32_t* slot_to_row;  // [tokens * top_k], token * top_k + slot -> row, or -1
  TileTask* tasks;       // [task_capacity], experts ascending, tiles of an expert ascending
  int64_t task_capacity;
};

struct IndexCounts {
  int32_t num_rows;   // live (token, slot) pairs
  int32_t num_tiles;  // -1: task_capacity was too small and tasks are incomplete
};

// Tasks of all experts from their offsets. Returns the number of tiles, or -1 where they exceed `capacity`.
HPC_HD int32_t emit_tiles(const int32_t* offsets, int32_t num_local, TileRule rule, TileTask* tasks, int64_t capacity) {
  int64_t used = 0;
  for (int32_t expert = 0; expert < num_local; ++expert) {
    const int32_t count = offsets[expert + 1] - offsets[expert];
    const int32_t tiles = num_tiles(count, rule), width = tile_rows(count, rule);
    if (used + tiles > capacity) return -1;
    for (int32_t tile = 0; tile < tiles; ++tile) {
      const TileSpan span = tile_span(count, tile, rule);
      tasks[used++] = {expert, offsets[expert] + span.first, span.rows, width};
    }
  }
  return static_cast<int32_t>(used);
}

// The whole index, one thread: a counting sort of the pairs by expert. O(tokens * top_k + num_local).
// `cursor` [num_local] is scratch.
template <class Id>
HPC_HD IndexCounts build_index(const IdView<Id>& ids, TileRule rule, const IndexArrays& out, int32_t* cursor) {
  for (int32_t expert = 0; expert <= ids.num_local; ++expert) out.offsets[expert] = 0;
  for (int64_t token = 0; token < ids.tokens; ++token) {
    for (int32_t slot = 0; slot < ids.top_k; ++slot) {
      const int32_t expert = ids.expert(token, slot);
      if (expert >= 0) ++out.offsets[expert + 1];
    }
  }
  for (int32_t expert = 0; expert < ids.num_local; ++expert) {
    out.offsets[expert + 1] += out.offsets[expert];
    cursor[expert] = out.offsets[expert];
  }
  for (int64_t token = 0; token < ids.tokens; ++token) {
    for (int32_t slot = 0; slot < ids.top_k; ++slot) {
      const int64_t pair = token * ids.top_k + slot;
      const int32_t expert = ids.expert(token, slot);
      const int32_t row = expert >= 0 ? cursor[expert]++ : -1;
      out.slot_to_row[pair] = row;
      if (row >= 0) out.row_to_slot[row] = static_cast<int32_t>(pair);
    }
  }
  return {out.offsets[ids.num_local], emit_tiles(out.offsets, ids.num_local, rule, out.tasks, out.task_capacity)};
}

}  // namespace hpc::grouped

// The decode planner on a host, and the static split-KV schedules it is compared with.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "hpc/checks.hpp"
#include "hpc/schedule.hpp"

namespace hpc {

// Throws std::invalid_argument unless every field of `shape` is in its range. The last check keeps a CTA's count in 32
// bits; it can only fail for more than 16 KV heads on a handful of CTAs.
inline void check_decode_shape(const char* where, const DecodeShape& shape) {
  const auto range = [where](const char* name, int64_t value, int64_t low, int64_t high) {
    check(value >= low && value <= high, where, name, text("an int in [", low, ", ", high, "]"), value);
  };
  range("max_batch", shape.max_batch, 1, kMaxBatch);
  range("batch", shape.batch, 0, shape.max_batch);
  range("num_kv_heads", shape.num_kv_heads, 1, kMaxKvHeads);
  range("q_len", shape.q_len, 1, 8);
  range("max_seq_len", shape.max_seq_len, 1, kMaxSeqLen);
  range("window", shape.window, 0, kMaxSeqLen);
  range("num_ctas", shape.num_ctas, 1, kMaxCtas);
  range("min_tiles", shape.min_tiles, 1, 64);
  const int64_t most = static_cast<int64_t>(shape.max_batch) * ceil_div(shape.max_seq_len, kTileTokens) *
                       shape.num_kv_heads / shape.num_ctas;
  range("num_ctas: tiles a CTA", most, 0, (int64_t{1} << 31) - 1 - kMaxPieces * 64);
}

// Throws std::invalid_argument naming the first length outside [0, shape.max_seq_len].
inline void check_seq_lens(const char* where, const int32_t* seq_lens, const DecodeShape& shape) {
  for (int32_t r = 0; r < shape.batch; ++r) {
    if (seq_lens[r] < 0 || seq_lens[r] > shape.max_seq_len) {
      fail(where, "seq_lens", text("lengths in [0, ", shape.max_seq_len, "]"), text(seq_lens[r], " (request ", r, ")"));
    }
  }
}

inline int32_t longest_of(const DecodeRequest* rows, const DecodeShape& shape) {
  int32_t longest = 0;
  for (int32_t r = 0; r < shape.batch; ++r) longest = std::max(longest, rows[r].num_tiles);
  return longest;
}

// The budget of this step's dealt plan; 0: it has none.
inline int32_t find_deal(const DecodeRequest* rows, int64_t total_tiles, int32_t share, const DecodeShape& shape) {
  if (total_tiles == 0 || !may_deal(shape)) return 0;
  const int32_t least = dealt_least(total_tiles, shape.min_tiles);
  const int32_t longest = longest_of(rows, shape);
  for (int32_t number = 0; number < kFits; ++number) {
    const int32_t budget = dealt_budget(number, share, least, shape.min_tiles);
    int32_t parts = 0;
    for (int32_t r = 0; r < shape.batch; ++r) parts += dealt_parts(rows[r].num_tiles, budget) * shape.num_kv_heads;
    if (parts <= shape.num_ctas) return dealt_whole(longest, budget, parts, shape.min_tiles) ? longest : budget;
  }
  return 0;
}

// Writes the map of this step, decode_map_bytes(max_batch, num_ctas) bytes, every one of them.
// seq_lens: [shape.batch], clamped to [0, max_seq_len]. The shape must have passed check_decode_shape.
inline void plan_decode(const int32_t* seq_lens, const DecodeShape& shape, void* map) {
  auto* bytes = static_cast<unsigned char*>(map);
  std::memset(bytes, 0, static_cast<size_t>(decode_map_bytes(shape.max_batch, shape.num_ctas)));
  DecodeHeader header = {};
  std::vector<DecodeRequest> rows(shape.batch + 1);
  std::vector<int32_t> tile_begin(shape.batch + 1);
  int32_t tiles = 0, pieces = 0;
  for (int32_t r = 0; r < shape.batch; ++r) {
    rows[r] = decode_request(seq_lens[r], shape);
    rows[r].tile_begin = tile_begin[r] = tiles;
    rows[r].piece_begin = pieces;
    tiles += rows[r].num_tiles;
    pieces += rows[r].num_pieces;
    header.num_empty += rows[r].num_tiles == 0;
  }
  rows[shape.batch].tile_begin = tile_begin[shape.batch] = tiles;
  rows[shape.batch].piece_begin = pieces;
  for (int32_t r = 0; r < shape.batch; ++r) rows[r].next = next_request(r, tile_begin.data(), shape.batch);

  header.total_tiles = static_cast<int64_t>(tiles) * shape.num_kv_heads;
  header.batch = shape.batch;
  header.num_kv_heads = shape.num_kv_heads;
  header.num_ctas = shape.num_ctas;
  header.q_len = shape.q_len;
  header.window = shape.window;
  header.max_seq_len = shape.max_seq_len;
  header.max_batch = shape.max_batch;
  header.batch_invariant = shape.batch_invariant;
  header.min_tiles = shape.min_tiles;
  const int32_t share = tiles_share(header.total_tiles, shape.num_ctas);
  header.floor = floor_tiles(header.total_tiles, share, shape.min_tiles);
  header.budget = decode_budget(header.total_tiles, share, header.floor);

  std::vector<DecodeCta> ctas(shape.num_ctas);
  std::vector<DecodeSplit> splits;
  std::vector<int32_t> line_begin(shape.batch + 1);
  int32_t dealt = find_deal(rows.data(), header.total_tiles, share, shape);
  const int32_t longest = longest_of(rows.data(), shape);
  const bool couples =
      may_couple(shape) && dealt_in_couples(longest, dealt > 0 ? dealt : header.budget, shape.min_tiles);
  if (couples) dealt = ceil_div(longest, 2);
  if (dealt > 0) {
    header.floor = header.budget = dealt;
    for (int32_t r = 0; r < shape.batch; ++r) {
      line_begin[r + 1] = line_begin[r] + (couples ? 2 : dealt_parts(rows[r].num_tiles, dealt));
    }
  }
  bool weighed = false;
  if (may_weigh(share, shape)) {
    int32_t bits = 0;
    for (int32_t r = 0; r < shape.batch; ++r) {
      bits |= rows[r].num_tiles;
      line_begin[r + 1] =
          line_begin[r] + rows[r].num_tiles + pair_extra(rows[r].num_tiles > kShortTiles, shape.min_tiles);
    }
    weighed = weighs(share, header.floor, bits, shape.min_tiles);
    if (weighed) {
      header.floor = 2 * shape.min_tiles;
      header.budget = tiles_share(static_cast<int64_t>(line_begin[shape.batch]) * shape.num_kv_heads, shape.num_ctas);
    }
  }
  const DecodeLine line = {dealt > 0 || weighed ? line_begin.data() : tile_begin.data(), dealt > 0, weighed};
  uint32_t end = static_cast<uint32_t>(header.total_tiles);
  for (int32_t c = shape.num_ctas - 1; c >= 0; --c) {
    DecodeAssignment assignment =
        decode_assignment(c, header.budget, header.total_tiles, tile_begin.data(), line, shape);
    if (weighed && assignment.run.count > 0) number_run(assignment.run, assignment.begin, end);
    end = assignment.begin;
    ctas[c] = assignment.run;
    header.used_ctas += assignment.run.count > 0;
    if (assignment.split.pieces > 0) splits.push_back(assignment.split);
  }
  header.num_splits = static_cast<int32_t>(splits.size());
  std::reverse(splits.begin(), splits.end());

  std::memcpy(bytes, &header, sizeof(header));
  std::memcpy(bytes + requests_offset(), rows.data(), rows.size() * sizeof(DecodeRequest));
  std::memcpy(bytes + ctas_offset(shape.max_batch), ctas.data(), ctas.size() * sizeof(DecodeCta));
  if (!splits.empty()) {
    std::memcpy(bytes + splits_offset(shape.max_batch, shape.num_ctas), splits.data(),
                splits.size() * sizeof(DecodeSplit));
  }
}

// ---- Static split-KV, for comparison ----

struct StaticSchedule {
  std::vector<int64_t> loads;  // tiles that each resident CTA slot runs
  int64_t makespan = 0;        // the largest load
  int64_t pieces = 0;          // launched CTAs that have tiles
  int64_t empty_pieces = 0;    // launched CTAs that have none
};

// Every (request, KV head) is cut the same way, and each piece is a CTA of one grid, dispatched in grid order to the
// slot that frees first, as the hardware does. Exactly one of the two sizes is positive:
//   splits: so many pieces for every (request, head), of ceil(num_tiles / splits) tiles; short requests leave empty
//   ones. piece_tiles: pieces of so many tiles; the grid is sized by the longest request, so shorter ones leave empty
//   ones.
inline StaticSchedule static_schedule(const int32_t* seq_lens, const DecodeShape& shape, int32_t splits,
                                      int32_t piece_tiles) {
  StaticSchedule result;
  result.loads.assign(shape.num_ctas, 0);
  std::vector<int32_t> tiles(shape.batch);
  for (int32_t r = 0; r < shape.batch; ++r) tiles[r] = decode_request(seq_lens[r], shape).num_tiles;
  const int32_t longest = tiles.empty() ? 0 : *std::max_element(tiles.begin(), tiles.end());
  const int32_t grid_pieces = splits > 0 ? splits : ceil_div(longest, piece_tiles);

  using Slot = std::pair<int64_t, int32_t>;  // (busy until, slot)
  std::priority_queue<Slot, std::vector<Slot>, std::greater<Slot>> free_at;
  for (int32_t c = 0; c < shape.num_ctas; ++c) free_at.push({0, c});
  for (int32_t r = 0; r < shape.batch; ++r) {
    const int32_t size = splits > 0 ? ceil_div(tiles[r], splits) : piece_tiles;
    const int32_t pieces = size > 0 ? ceil_div(tiles[r], size) : 0;
    for (int32_t head = 0; head < shape.num_kv_heads; ++head) {
      result.pieces += pieces;
      result.empty_pieces += grid_pieces - pieces;
      for (int32_t piece = 0; piece < pieces; ++piece) {
        const auto [busy, slot] = free_at.top();
        free_at.pop();
        const int64_t load = busy + std::min(size, tiles[r] - piece * size);
        result.loads[slot] = load;
        free_at.push({load, slot});
      }
    }
  }
  result.makespan = *std::max_element(result.loads.begin(), result.loads.end());
  return result;
}

}  // namespace hpc

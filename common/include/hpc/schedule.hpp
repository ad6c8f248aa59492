// The decode task map: which tiles of which request and KV head every CTA of the attention kernel reads.
//
// One source for host and device: the host planner below and the plan kernel of hpc-attention call the same functions
// of this header, so their maps are equal byte for byte. No CUDA header is needed to compile it on a host.
//
// Tiles: every (request, KV head) is cut into tiles of 64 tokens; all tiles lie on one line, requests outermost, then
// KV heads, then tiles. Tile t of head h of request r has the index  Hkv * tile_begin[r] + h * num_tiles[r] + t.
//
// Ordinary plans: budget = max(ceil(total / CTAs), floor), and CTA c runs the tiles [c * budget, (c + 1) * budget).
// Equal requests whose tiles divide the budget stay whole; a long one spreads over many CTAs in proportion.
// A piece is what a CTA runs of one (request, head); a CTA has at most two pieces of cut ones, its first and its last,
// so a partial result has the slot  2 * c + (the piece does not start at the CTA's first tile).
//
// Weighed lines: where there are more pairs than CTAs, what a piece costs beside its tiles counts as some tiles more in
// front of each pair, so that a CTA with many short pieces has fewer tiles. See weighs(), pair_extra().
//
// Dealt plans: where the pairs are no more than the CTAs, and a little more than the even share lets every pair have
// CTAs of its own, it gets ceil(its tiles / budget) of them, which share its tiles evenly: no run goes from one pair
// into the next. Short pairs stay whole, one a CTA, where that costs less than adding pieces. See dealt_budget(). Or
// each has two, see dealt_in_couples().
//
// Batch-invariant plans: a (request, head) is cut into pieces of piece_tiles(its own tiles), and CTA c runs the pieces
// that start in [c * budget, (c + 1) * budget). Slot: Hkv * piece_begin[r] + h * num_pieces[r] + piece.
//
// Rows are aligned to 16 bytes, as a map must be. The map: header | requests[max_batch + 1] | ctas[num_ctas] |
// splits[num_ctas]; every byte not named is zero.
#pragma once

#include <cstdint>

#include "hpc/schedule_map.hpp"

namespace hpc {

// Of numbers that are not negative; without signs a division is shorter on the device.
HPC_HD int32_t divide(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b));
}
HPC_HD int32_t ceil_div(int32_t a, int32_t b) {
  const int32_t quotient = divide(a, b);
  return quotient + (quotient * b != a);
}

// The least power of two from `value` (at least 1) on.
HPC_HD int32_t power_of_two_from(int32_t value) {
#if defined(__CUDA_ARCH__)
  return 1 << (32 - __clz(value - 1));
#else
  int32_t power = 1;
  while (power < value) power *= 2;
  return power;
#endif
}

// Tiles that so many CTAs share: ceil(total / CTAs).
HPC_HD int32_t tiles_share(int64_t total_tiles, int32_t num_ctas) {
  // 32 bits where they do: a division of 64 is a long subroutine on the device.
  return total_tiles < (int64_t{1} << 31) ? ceil_div(static_cast<int32_t>(total_tiles), num_ctas)
                                          : static_cast<int32_t>((total_tiles + num_ctas - 1) / num_ctas);
}

// Floor of a CTA's work in tiles, for a plan (its CTAs, and min_tiles, which the tile's bytes decide) a function of the
// total alone.
// Small totals: combining partials costs more than reading less in parallel saves. One CTA on each of 132 SMs gets up
// to 2 * min_tiles tiles before a second CTA an SM gets any, and never fewer than min_tiles.
// Others: a CTA whose run goes from one request into the next ends later than one that has a few tiles more. So the
// CTAs' share is rounded up to a multiple of the least power of two of which it has at most 8, where that adds at most
// 1/16 (and the share is at most 2^24): cuts then fall on the ends of requests whose lengths are such multiples.
// share: tiles_share() of the plan's CTAs.
HPC_HD int32_t floor_tiles(int64_t total_tiles, int32_t share, int32_t min_tiles) {
  constexpr int kWave = 132;  // SMs of an H100 or H200
  if (total_tiles <= static_cast<int64_t>(kWave) * min_tiles) return min_tiles;
  const bool small = total_tiles < static_cast<int64_t>(kWave) * 2 * min_tiles;
  const int32_t least = small ? ceil_div(static_cast<int32_t>(total_tiles), kWave) : 2 * min_tiles;
  if (share > 1 << 24) return least;
  const int32_t step = power_of_two_from((share + 7) / 8), rounded = (share + step - 1) & -step;
  return rounded > least && rounded - share <= share / 16 ? rounded : least;
}

// Tiles a CTA.
HPC_HD int32_t decode_budget(int64_t total_tiles, int32_t share, int32_t floor) {
  return total_tiles == 0 ? 0 : (share > floor ? share : floor);
}

// ---- Weighed lines ----

// What a pair costs beside its tiles, in tiles: its merge, which takes about as long whatever a tile's bytes. Short
// ones go side by side, a warp each.
constexpr int kShortTiles = 2;
HPC_HD int32_t pair_extra(bool is_long, int32_t min_tiles) {
  return is_long ? 3 * min_tiles : 0;
}
// Whether a step's pairs may be weighed: where there are more of them than CTAs, and more to read than cuts cost.
HPC_HD bool may_weigh(int32_t share, const DecodeShape& shape) {
  return !shape.batch_invariant && shape.batch * shape.num_kv_heads > shape.num_ctas && share > 3 * shape.min_tiles &&
         share <= 1 << 24;
}
// Whether they are: not where there is little to read, and not where all cuts fall on ends as it is (see
// floor_tiles()). all_bits: the requests' tiles, or-ed.
HPC_HD bool weighs(int32_t share, int32_t floor, int32_t all_bits, int32_t min_tiles) {
  const int32_t step = power_of_two_from((share + 7) / 8);
  return floor > min_tiles && (floor <= 2 * min_tiles || (all_bits & (step - 1)) != 0);
}

// The line on which the CTAs' shares lie one behind the other.
struct DecodeLine {
  const int32_t* begin;  // [batch + 1] where the requests begin, per KV head; in dealt plans counted in CTAs
  bool dealt;
  bool weighed;  // begin counts pair_extra() with the tiles
};

// ---- Dealt plans ----

// Whether a step may have a dealt plan: there is a CTA for every (request, head). (The plan kernel adds parts in 10
// bits: at most two a CTA with the least budget.)
constexpr int kMaxDealt = 511;
HPC_HD bool may_deal(const DecodeShape& shape) {
  return !shape.batch_invariant && shape.num_ctas <= kMaxDealt && shape.batch * shape.num_kv_heads <= shape.num_ctas;
}

constexpr int kHalf = 66;  // of an H200's SMs
// Least tiles of a CTA. The more CTAs read, the later come the pieces that are added behind them: with up to 4 *
// min_tiles each, half of the SMs are enough.
HPC_HD int32_t dealt_least(int64_t total_tiles, int32_t min_tiles) {
  if (total_tiles > static_cast<int64_t>(kHalf) * 4 * min_tiles) return 2 * min_tiles;
  const int32_t least = ceil_div(static_cast<int32_t>(total_tiles), kHalf);
  return least > min_tiles ? least : min_tiles;
}

// Budgets that a dealt plan may have, least first: a CTA's share (dealt_least() where that is more), and up to 5/32
// more, where it is small 5/32 of 16 * min_tiles. The first one is taken for whose parts there are CTAs enough.
constexpr int kFits = 6;
HPC_HD int32_t dealt_budget(int32_t number, int32_t share, int32_t least, int32_t min_tiles) {
  const int32_t base = share > least ? share : least, unit = 16 * min_tiles > base ? 16 * min_tiles : base;
  return base + (number * unit + 31) / 32;
}

// CTAs of a pair: ceil(num_tiles / budget), both less than 2^15. By floats, for on the device that is shorter; and
// exact: half a tile keeps the quotient further from whole numbers than all roundings bring it.
HPC_HD int32_t dealt_parts(int32_t num_tiles, int32_t budget) {
  const auto divisor = static_cast<float>(budget);
#if defined(__CUDA_ARCH__)
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(divisor));
#else
  const float inverse = 1.0f / divisor;
#endif
  return static_cast<int32_t>((static_cast<float>(num_tiles) - 0.5f + divisor) * inverse);
}

// Whether all pairs stay whole, though `parts` CTAs would have a budget's tiles: where reading alone what the longest
// has more takes no longer than adding so many pieces would.
HPC_HD bool dealt_whole(int32_t longest, int32_t budget, int32_t parts, int32_t min_tiles) {
  return 36 * (longest - budget) <= parts * min_tiles;
}

// Couples: of a few pairs less than half of the CTAs each can have two of its own, pair i the CTAs 2i and 2i + 1. A
// kernel whose CTAs go in clusters of two then adds all pieces itself. So it is where that makes no CTA's work more
// than min_tiles more than in the plan that there would be otherwise, if that one cuts a pair at all.
constexpr int kLeastCouples = 57;
HPC_HD bool may_couple(const DecodeShape& shape) {
  return !shape.batch_invariant && shape.num_ctas == 2 * kHalf && shape.num_kv_heads == 1 &&
         shape.batch >= kLeastCouples && shape.batch <= kHalf;
}
// budget: of the other plan.
HPC_HD bool dealt_in_couples(int32_t longest, int32_t budget, int32_t min_tiles) {
  return longest > budget && ceil_div(longest, 2) <= budget + min_tiles;
}

// Tiles of a piece in a batch-invariant plan, from the request's own tiles: 512 tokens, doubled until at most 256
// pieces remain.
constexpr int kMaxPieces = 256;
constexpr int kMinPieceTiles = 8;
HPC_HD int32_t piece_tiles(int32_t num_tiles) {
  int32_t tiles = kMinPieceTiles;
  while (tiles * kMaxPieces < num_tiles) tiles *= 2;
  return tiles;
}

// Most pieces that a (request, head) of up to max_tiles tiles has in a batch-invariant plan.
HPC_HD int32_t max_pieces(int32_t max_tiles) {
  const int32_t pieces = ceil_div(max_tiles, kMinPieceTiles);
  return pieces < kMaxPieces ? pieces : kMaxPieces;
}

// ---- The plan itself: pure functions of the lengths and the shape ----

// Row of a request, without tile_begin, piece_begin and next.
HPC_HD DecodeRequest decode_request(int32_t seq_len, const DecodeShape& shape) {
  DecodeRequest row = {};
  row.seq_len = seq_len < 0 ? 0 : (seq_len > shape.max_seq_len ? shape.max_seq_len : seq_len);
  if (shape.window > 0) {
    // Query row 0 sees the fewest tokens, up to seq_len - q_len, so it reaches back furthest.
    const int32_t first_key = row.seq_len - shape.q_len + 1 - shape.window;
    if (first_key > 0) row.first_tile = first_key / kTileTokens;
  }
  row.num_tiles = ceil_div(row.seq_len, kTileTokens) - row.first_tile;
  if (shape.batch_invariant && row.num_tiles > 0) {
    row.piece_tiles = piece_tiles(row.num_tiles);
    row.num_pieces = ceil_div(row.num_tiles, row.piece_tiles);
  }
  return row;
}

struct DecodePlace {
  int32_t request;
  int32_t kv_head;
  int32_t tile;       // counted from the request's first_tile
  int32_t num_tiles;  // of the request
};

// The place of the tile with index `position` < total. tile_begin: [batch + 1], as in the request rows.
HPC_HD DecodePlace locate_tile(int64_t position, const int32_t* tile_begin, int32_t batch, int32_t num_kv_heads) {
  // The last request that begins at or before the position; of several that begin there, the last has the tiles. A
  // quarter is left after each step, whose three reads don't wait for each other.
  const auto begins = [=](int32_t request) {
    return static_cast<uint64_t>(static_cast<uint32_t>(tile_begin[request])) * static_cast<uint32_t>(num_kv_heads);
  };
  const auto at = static_cast<uint64_t>(position);
  int32_t low = 0, high = batch;
  while (high - low > 1) {
    const int32_t step = (high - low + 3) / 4, first = low + step;
    const int32_t second = first + step < high ? first + step : high;
    const int32_t third = second + step < high ? second + step : high;
    const bool one = begins(first) <= at, two = begins(second) <= at, three = begins(third) <= at;
    const int32_t below = low;
    low = three ? third : (two ? second : (one ? first : below));
    high = three ? high : (two ? third : (one ? second : first));
  }
  DecodePlace place;
  place.request = low;
  place.num_tiles = tile_begin[low + 1] - tile_begin[low];
  const auto inside = static_cast<int32_t>(position - static_cast<int64_t>(tile_begin[low]) * num_kv_heads);
  place.kv_head = num_kv_heads == 1 ? 0 : divide(inside, place.num_tiles);
  place.tile = inside - place.kv_head * place.num_tiles;
  return place;
}

// The first request after `request` that has tiles, else `batch`.
HPC_HD int32_t next_request(int32_t request, const int32_t* tile_begin, int32_t batch) {
  const int32_t next = request + 1;
  const int32_t begin = tile_begin[next];
  if (begin == tile_begin[batch]) return batch;
  if (tile_begin[next + 1] != begin) return next;
  return locate_tile(begin, tile_begin, batch, 1).request;
}

// What CTA `cta` runs, and the split row that it adds: of the (request, head) cut first by the beginning of this CTA.
struct DecodeAssignment {
  DecodeCta run;
  DecodeSplit split;  // pieces 0: none
  // Weighed lines: the tile that the run begins with, of all; modulo 2^32. The run ends where the next one begins, its
  // count is left to number_run().
  uint32_t begin;
};
HPC_HD void number_run(DecodeCta& run, uint32_t begin, uint32_t end) {
  run.count = static_cast<int32_t>(end - begin);
}

// Batch-invariant plans: the first piece that starts at or after `position`, as a tile index and a place.
HPC_HD int64_t piece_at_or_after(int64_t position, int64_t total_tiles, const int32_t* tile_begin,
                                 const DecodeShape& shape, DecodePlace* place) {
  if (position >= total_tiles) return total_tiles;
  *place = locate_tile(position, tile_begin, shape.batch, shape.num_kv_heads);
  const int32_t tiles = piece_tiles(place->num_tiles);
  const int32_t first = ceil_div(place->tile, tiles) * tiles;
  if (first < place->num_tiles) {
    position += first - place->tile;
    place->tile = first;
    return position;
  }
  position += place->num_tiles - place->tile;  // the next head or request begins with a piece
  if (position < total_tiles) *place = locate_tile(position, tile_begin, shape.batch, shape.num_kv_heads);
  return position;
}

HPC_HD DecodeAssignment decode_assignment(int32_t cta, int32_t budget, int64_t total_tiles, const int32_t* tile_begin,
                                          const DecodeLine& line, const DecodeShape& shape) {
  DecodeAssignment result = {};
  DecodePlace place;
  const int64_t all = static_cast<int64_t>(line.begin[shape.batch]) * shape.num_kv_heads;
  result.begin = static_cast<uint32_t>(total_tiles);
  int64_t begin = line.dealt ? cta : static_cast<int64_t>(cta) * budget;
  if (begin >= all) return result;
  if (shape.batch_invariant) {
    DecodePlace end_place;
    begin = piece_at_or_after(begin, total_tiles, tile_begin, shape, &place);
    const int64_t end =
        piece_at_or_after((static_cast<int64_t>(cta) + 1) * budget, total_tiles, tile_begin, shape, &end_place);
    if (begin == end) return result;
    result.run.count = static_cast<int32_t>(end - begin);
  } else {
    place = locate_tile(begin, line.begin, shape.batch, shape.num_kv_heads);
    if (line.weighed) {  // what comes in front of a pair's tiles belongs to its first one
      const int32_t extra = pair_extra(place.num_tiles > kShortTiles, shape.min_tiles);
      place.num_tiles -= extra;
      place.tile = place.tile > extra ? place.tile - extra : 0;
      result.begin = (static_cast<uint32_t>(tile_begin[place.request]) * static_cast<uint32_t>(shape.num_kv_heads)) +
                     static_cast<uint32_t>(place.kv_head * place.num_tiles + place.tile);
      result.run.count = 1;
    }
    if (line.dealt) {  // a place on the line of CTAs: number `tile` of the num_tiles CTAs of its pair
      const int32_t number = place.tile, parts = place.num_tiles;
      const int32_t tiles = tile_begin[place.request + 1] - tile_begin[place.request];
      const int32_t each = divide(tiles, parts), more = tiles - each * parts;
      place.tile = number * each + (number < more ? number : more);
      result.run.count = each + (number < more);
      if (result.run.count == 0) return result;
      if (number == 1) result.split = {place.request, place.kv_head, cta - 1, parts};
    } else {
      const int64_t left = total_tiles - begin;
      if (!line.weighed) result.run.count = left < budget ? static_cast<int32_t>(left) : budget;
      // The (request, head) began in the CTA before, and no earlier CTA boundary cut it.
      if (place.tile > 0 && place.tile <= budget) {
        const int32_t rest = place.num_tiles - place.tile;
        result.split = {place.request, place.kv_head, cta - 1, 1 + ceil_div(rest, budget)};
      }
    }
  }
  result.run.request = place.request;
  result.run.kv_head = place.kv_head;
  result.run.tile = place.tile;
  return result;
}

// ---- Reading a map: the pieces of a CTA, one after the other ----

// The part of one (request, head) that a CTA runs without a break.
struct DecodePiece {
  int32_t request;
  int32_t kv_head;
  int32_t tile_begin;  // counted from the request's first_tile
  int32_t tile_end;
  int64_t slot;  // of its partial result; not used where the piece is whole
  bool whole;    // the piece is all of its (request, head): its result is final
};

struct DecodeCursor {
  int32_t cta;
  int32_t request;
  int32_t kv_head;
  int32_t tile;
  int32_t left;   // tiles not yet returned
  int32_t count;  // of the run
};

HPC_HD DecodeCursor decode_cursor(int32_t cta, const DecodeCta& run) {
  return {cta, run.request, run.kv_head, run.tile, run.count, run.count};
}

// The next piece of a CTA; false where there is none. requests: the map's rows.
HPC_HD bool next_piece(DecodeCursor& cursor, const DecodeHeader& header, const DecodeRequest* requests,
                       DecodePiece* piece) {
  if (cursor.left <= 0) return false;
  const DecodeRequest& row = requests[cursor.request];
  const int32_t most = header.batch_invariant ? row.piece_tiles : cursor.left;
  const int32_t rest = row.num_tiles - cursor.tile;
  const int32_t tiles = rest < most ? rest : most;
  piece->request = cursor.request;
  piece->kv_head = cursor.kv_head;
  piece->tile_begin = cursor.tile;
  piece->tile_end = cursor.tile + tiles;
  piece->whole = tiles == row.num_tiles;
  if (header.batch_invariant) {
    piece->slot = static_cast<int64_t>(header.num_kv_heads) * row.piece_begin +
                  static_cast<int64_t>(cursor.kv_head) * row.num_pieces + cursor.tile / row.piece_tiles;
  } else {
    piece->slot = 2 * static_cast<int64_t>(cursor.cta) + (cursor.left != cursor.count);
  }
  cursor.left -= tiles;
  cursor.tile += tiles;
  if (cursor.tile == row.num_tiles) {
    cursor.tile = 0;
    if (++cursor.kv_head == header.num_kv_heads) {
      cursor.kv_head = 0;
      cursor.request = row.next;
    }
  }
  return true;
}

// Slots for partial results that any step of a plan can need.
HPC_HD int64_t partial_slots(const DecodeShape& shape) {
  if (!shape.batch_invariant) return 2 * static_cast<int64_t>(shape.num_ctas);
  int32_t most = ceil_div(shape.max_seq_len, kTileTokens);
  if (shape.window > 0) {
    // q_len rows see window + q_len - 1 keys between them; n keys in a row touch at most ceil((n - 1) / 64) + 1 tiles.
    const int32_t seen = ceil_div(shape.window + shape.q_len - 2, kTileTokens) + 1;
    most = seen < most ? seen : most;
  }
  return static_cast<int64_t>(shape.num_kv_heads) * shape.max_batch * max_pieces(most);
}

}  // namespace hpc

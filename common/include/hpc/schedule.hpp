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
// Batch-invariant plans: a (request, head) is cut into pieces of piece_tiles(its own tiles), and CTA c runs the pieces
// that start in [c * budget, (c + 1) * budget). Slot: Hkv * piece_begin[r] + h * num_pieces[r] + piece.
//
// The map: header | requests[max_batch + 1] | ctas[num_ctas] | splits[num_ctas]; every byte not named is zero.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define HPC_HD __host__ __device__ __forceinline__
#else
#define HPC_HD inline
#endif

namespace hpc {

constexpr int kTileTokens = 64;
constexpr int kMaxBatch = 4096;
constexpr int kMaxCtas = 1024;
constexpr int kMaxSeqLen = 1 << 20;
constexpr int kMaxKvHeads = 128;

// What a plan is made for. All lengths in tokens.
struct DecodeShape {
  int32_t batch;            // requests of this step, 0 .. max_batch
  int32_t num_kv_heads;     // 1 .. kMaxKvHeads
  int32_t q_len;            // query rows a request, 1 .. 8
  int32_t window;           // keys a row sees, itself included; 0: all
  int32_t max_seq_len;      // lengths are clamped to it, 1 .. kMaxSeqLen
  int32_t num_ctas;         // resident CTAs of the attention kernel, 1 .. kMaxCtas
  bool batch_invariant;     // cut a request by its own length alone
  int32_t max_batch;        // rows of the map, 1 .. kMaxBatch
  int32_t min_tiles = 2;    // lower end of the floor of a CTA's work, see floor_tiles()
};

// Row r: request r. Row `batch` ends the list: tile_begin and piece_begin hold the totals, the rest is 0.
struct DecodeRequest {
  int32_t tile_begin;   // tiles of the requests before this one, per KV head
  int32_t seq_len;      // clamped to [0, max_seq_len]
  int32_t first_tile;   // first tile that any row sees (not 0 only with a window), from position 0
  int32_t num_tiles;    // tiles from first_tile to ceil(seq_len / 64)
  int32_t piece_begin;  // batch-invariant plans, else 0: pieces of the requests before this one, per KV head
  int32_t piece_tiles;  // batch-invariant plans, else 0: tiles of a piece (the last one may have fewer)
  int32_t num_pieces;   // batch-invariant plans, else 0: ceil(num_tiles / piece_tiles)
  int32_t next;         // the next request that has tiles, `batch` where there is none
};

// Row c: the run of `count` consecutive tiles of CTA c, from the given tile on. count 0: all fields 0.
struct DecodeCta {
  int32_t request;
  int32_t kv_head;
  int32_t tile;  // counted from the request's first_tile
  int32_t count;
};

// One row for each (request, head) that more than one CTA runs, in order; not in batch-invariant plans.
struct DecodeSplit {
  int32_t request;
  int32_t kv_head;
  int32_t first_cta;  // the pieces belong to CTAs first_cta .. first_cta + pieces - 1
  int32_t pieces;     // at least 2
};

struct DecodeHeader {
  int64_t total_tiles;  // of all requests and KV heads
  int32_t batch;
  int32_t num_kv_heads;
  int32_t num_ctas;
  int32_t budget;      // tiles a CTA, 0 where there is no tile
  int32_t used_ctas;   // CTAs that have tiles
  int32_t num_splits;  // rows in `splits`
  int32_t q_len;
  int32_t window;
  int32_t max_seq_len;
  int32_t max_batch;
  int32_t batch_invariant;  // 0 or 1
  int32_t num_empty;        // requests without tiles: their rows are zeros with lse -inf
  int32_t floor;            // floor_tiles() of this step
  int32_t min_tiles;
};

static_assert(sizeof(DecodeHeader) == 64 && sizeof(DecodeRequest) == 32, "rows of the map");
static_assert(sizeof(DecodeCta) == 16 && sizeof(DecodeSplit) == 16, "rows of the map");

// Byte offsets inside a map, and its size.
HPC_HD int64_t requests_offset() { return sizeof(DecodeHeader); }
HPC_HD int64_t ctas_offset(int32_t max_batch) {
  return requests_offset() + static_cast<int64_t>(sizeof(DecodeRequest)) * (max_batch + 1);
}
HPC_HD int64_t splits_offset(int32_t max_batch, int32_t num_ctas) {
  return ctas_offset(max_batch) + static_cast<int64_t>(sizeof(DecodeCta)) * num_ctas;
}
HPC_HD int64_t decode_map_bytes(int32_t max_batch, int32_t num_ctas) {
  return splits_offset(max_batch, num_ctas) + static_cast<int64_t>(sizeof(DecodeSplit)) * num_ctas;
}

HPC_HD int32_t ceil_div(int32_t a, int32_t b) { return a / b + (a % b != 0); }

// Floor of a CTA's work in tiles: below it, combining partials costs more than reading less in parallel saves.
// A function of the total alone (and of min_tiles, which the tile's bytes decide): one CTA on each of 132 SMs gets up
// to 2 * min_tiles tiles before a second CTA an SM gets any, and never fewer than min_tiles.
HPC_HD int32_t floor_tiles(int64_t total_tiles, int32_t min_tiles) {
  constexpr int kWave = 132;  // SMs of an H100 or H200
  if (total_tiles <= static_cast<int64_t>(kWave) * min_tiles) return min_tiles;
  if (total_tiles >= static_cast<int64_t>(kWave) * 2 * min_tiles) return 2 * min_tiles;
  return ceil_div(static_cast<int32_t>(total_tiles), kWave);
}

// Tiles a CTA.
HPC_HD int32_t decode_budget(int64_t total_tiles, int32_t num_ctas, int32_t floor) {
  if (total_tiles == 0) return 0;
  const int64_t share = (total_tiles + num_ctas - 1) / num_ctas;
  return share > floor ? static_cast<int32_t>(share) : floor;
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

}  // namespace hpc

// The decode task map's layout (hpc/schedule.hpp has its rules): what a plan is made for, the rows, their places.
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
  int32_t batch;          // requests of this step, 0 .. max_batch
  int32_t num_kv_heads;   // 1 .. kMaxKvHeads
  int32_t q_len;          // query rows a request, 1 .. 8
  int32_t window;         // keys a row sees, itself included; 0: all
  int32_t max_seq_len;    // lengths are clamped to it, 1 .. kMaxSeqLen
  int32_t num_ctas;       // resident CTAs of the attention kernel, 1 .. kMaxCtas
  bool batch_invariant;   // cut a request by its own length alone
  int32_t max_batch;      // rows of the map, 1 .. kMaxBatch
  int32_t min_tiles = 2;  // lower end of the floor of a CTA's work, see floor_tiles()
};

// Row r: request r. Row `batch` ends the list: tile_begin and piece_begin hold the totals, the rest is 0.
struct alignas(16) DecodeRequest {
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
struct alignas(16) DecodeCta {
  int32_t request;
  int32_t kv_head;
  int32_t tile;  // counted from the request's first_tile
  int32_t count;
};

// One row for each (request, head) that more than one CTA runs, in order; not in batch-invariant plans.
struct alignas(16) DecodeSplit {
  int32_t request;
  int32_t kv_head;
  int32_t first_cta;  // the pieces belong to CTAs first_cta .. first_cta + pieces - 1
  int32_t pieces;     // at least 2
};

struct alignas(16) DecodeHeader {
  int64_t total_tiles;  // of all requests and KV heads
  int32_t batch;
  int32_t num_kv_heads;
  int32_t num_ctas;
  int32_t budget;      // most tiles of a CTA, 0 where there is no tile; on a weighed line with what pairs have in front
  int32_t used_ctas;   // CTAs that have tiles
  int32_t num_splits;  // rows in `splits`
  int32_t q_len;
  int32_t window;
  int32_t max_seq_len;
  int32_t max_batch;
  int32_t batch_invariant;  // 0 or 1
  int32_t num_empty;        // requests without tiles: their rows are zeros with lse -inf
  int32_t floor;            // floor_tiles() of this step; in a dealt plan its budget, on a weighed line its least
  int32_t min_tiles;
};

static_assert(sizeof(DecodeHeader) == 64 && sizeof(DecodeRequest) == 32, "rows of the map");
static_assert(sizeof(DecodeCta) == 16 && sizeof(DecodeSplit) == 16, "rows of the map");

// Byte offsets inside a map, and its size.
HPC_HD int64_t requests_offset() {
  return sizeof(DecodeHeader);
}
HPC_HD int64_t ctas_offset(int32_t max_batch) {
  return requests_offset() + static_cast<int64_t>(sizeof(DecodeRequest)) * (max_batch + 1);
}
HPC_HD int64_t splits_offset(int32_t max_batch, int32_t num_ctas) {
  return ctas_offset(max_batch) + static_cast<int64_t>(sizeof(DecodeCta)) * num_ctas;
}
HPC_HD int64_t decode_map_bytes(int32_t max_batch, int32_t num_ctas) {
  return splits_offset(max_batch, num_ctas) + static_cast<int64_t>(sizeof(DecodeSplit)) * num_ctas;
}

}  // namespace hpc

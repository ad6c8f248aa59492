// Decode attention, host side: Problem -> Config. Pure functions, no CUDA call.
#pragma once

#include <cstdint>

#include "hpc/schedule.hpp"

namespace hpc::attention {

enum class KvKind : int32_t { kBf16, kFp16, kE4m3 };

constexpr int kDecodeThreads = 256;
constexpr int kDecodeWarps = 8;
constexpr int kSliceTokens = 16;  // what a warp handles at a time
constexpr int kRowTile = 8;       // query rows of one tensor-core column tile

struct DecodeProblem {
  KvKind kv;
  int32_t head_dim;      // 64, 128, 256
  int32_t rows;          // q_len * query heads a KV head, 1 .. 128
  bool per_token_scale;  // keys have a scale of their own
  int32_t stages = 0;    // slices in flight a warp; 0: decode_stages()
};

struct DecodeConfig {
  int32_t row_tiles;   // row tiles of 8 that a CTA handles at once: 1, 2, 4
  int32_t row_groups;  // CTAs that share a run of tiles, each with its own rows
  int32_t stages;      // slices of keys and values in flight a warp
  int32_t smem_bytes;  // dynamic shared memory
};

constexpr int kv_bytes(KvKind kv) {
  return kv == KvKind::kE4m3 ? 1 : 2;
}

// CTAs of an SM that share a plan's work, where more would fit too: one with all of the SM's loads in flight leaves
// fewer partial results, and room for the next call's CTA, which fills its rings while this one ends.
constexpr int kDecodeCtasPerSm = 1;

// Slices in flight a warp: 64 KB a CTA (128 KB for large rows, which come in larger stages).
constexpr int decode_stages(KvKind kv, int head_dim) {
  const int bytes = 2 * kSliceTokens * head_dim * kv_bytes(kv) * kDecodeWarps;  // a stage of a CTA
  return bytes <= 16 * 1024 ? 4 : (bytes <= 64 * 1024 ? 2 : 1);
}

// Row tiles of 8 a CTA: as few as hold the rows; what registers hold at most (4, but 2 at head_dim 256).
constexpr int decode_row_tiles(int head_dim, int rows) {
  const int most = head_dim == 256 ? 2 : 4;
  const int tiles = rows <= 8 ? 1 : (rows <= 16 ? 2 : 4);
  return tiles < most ? tiles : most;
}

// Query fragments stay in registers up to 32 of them; above, they are read from shared memory for each slice.
constexpr bool decode_query_in_smem(int head_dim, int row_tiles) {
  return row_tiles * head_dim / 8 > 32;
}

// Bytes of the warps' rings, the merge buffer (each warp's output of one row tile, padded by 4 vectors every 32) with
// its (max, sum) pairs, and the query with its row factors.
constexpr int decode_ring_bytes(KvKind kv, int head_dim, int stages) {
  // 16 bytes a lane and vector; e4m3 values of head_dim 64 use half of each.
  const int v_vectors = 4 * (head_dim * kv_bytes(kv) / 8 > 16 ? head_dim * kv_bytes(kv) / 128 : 1);
  const int k_vectors = 2 * (head_dim * kv_bytes(kv) / 64);
  return kDecodeWarps * stages * (k_vectors + v_vectors) * 512;
}
constexpr int decode_merge_bytes(int head_dim) {
  return kDecodeWarps * (head_dim / 16) * 36 * 16;
}
constexpr int kDecodeStateBytes = kDecodeWarps * 192;  // the warps' places in their CTA's pieces
constexpr int kDecodeMlBytes = kDecodeWarps * 4 * 16;
constexpr int decode_query_bytes(int head_dim, int row_tiles) {
  return decode_query_in_smem(head_dim, row_tiles) ? row_tiles * (head_dim / 32 * 512 + 8 * 4) : 0;
}
constexpr int decode_smem_bytes(KvKind kv, int head_dim, int row_tiles, int stages) {
  return kDecodeStateBytes + decode_ring_bytes(kv, head_dim, stages) + decode_merge_bytes(head_dim) + kDecodeMlBytes +
         decode_query_bytes(head_dim, row_tiles);
}

inline DecodeConfig decode_config(const DecodeProblem& problem) {
  DecodeConfig config = {};
  config.row_tiles = decode_row_tiles(problem.head_dim, problem.rows);
  config.row_groups = ceil_div(problem.rows, kRowTile * config.row_tiles);
  config.stages = problem.stages > 0 ? problem.stages : decode_stages(problem.kv, problem.head_dim);
  config.smem_bytes = decode_smem_bytes(problem.kv, problem.head_dim, config.row_tiles, config.stages);
  if (problem.per_token_scale) config.smem_bytes += kDecodeWarps * config.stages * 32 * 8;
  return config;
}

// Partial results of one piece: for each row tile of 8 (the last one padded), 8 * head_dim floats of unnormalised
// output and 8 (max, sum) pairs. A plan's workspace is this for each of its slots: first all outputs, then all pairs.
constexpr int64_t decode_slot_bytes(int32_t head_dim, int32_t rows) {
  return static_cast<int64_t>((rows + kRowTile - 1) / kRowTile) * kRowTile * (head_dim + 2) * 4;
}

}  // namespace hpc::attention

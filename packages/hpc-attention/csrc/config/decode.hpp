// Decode attention, host side: Problem -> Config. Pure functions, no CUDA call.
#pragma once

#include <cstdint>

#include "hpc/schedule.hpp"

namespace hpc::attention {

enum class KvKind : int32_t { kBf16, kFp16, kE4m3 };

constexpr int kDecodeWarps = 8;  // of a CTA
constexpr int kDecodeThreads = 32 * kDecodeWarps;
constexpr int kRowTile = 8;  // query rows of one tensor-core column tile

struct DecodeProblem {
  KvKind kv;
  int32_t head_dim;      // 64, 128, 256
  int32_t rows;          // q_len * query heads a KV head, 1 .. 128
  bool per_token_scale;  // keys have a scale of their own
  int32_t stages = 0;    // slices in flight a warp; 0: decode_stages()
  int32_t num_kv_heads = 1;
  bool plain = false;         // nothing is asked for that a plain kernel leaves out: see plain_params()
  int32_t cluster = 1;        // CTAs of each pair's cluster: see decode_cluster(); 1: none
  int32_t longest = 1 << 30;  // most tokens of a request in any step
};

struct DecodeConfig {
  int32_t row_tiles;   // row tiles of 8 that a CTA handles at once: 1, 2, 4
  int32_t row_groups;  // CTAs that share a run of tiles, each with its own rows
  int32_t stages;      // slices of keys and values in flight a warp
  bool plain;          // a kernel without the code of options (kernels/decode_params.cuh)
  bool abreast;        // whole pairs of several heads of a request go abreast (kernels/decode.cuh)
  int32_t cluster;     // CTAs of a cluster; 1: none
  bool alone;          // the kernel is kernels/decode_alone.cuh's
  int32_t smem_bytes;  // dynamic shared memory
};

constexpr int kv_bytes(KvKind kv) {
  return kv == KvKind::kE4m3 ? 1 : 2;
}

// CTAs of an SM that share a plan's work. One, with more than half of the SM's shared memory: the next call's CTAs then
// enter one by one as these end, never two on one SM beside an idle one.
constexpr int kDecodeCtasPerSm = 1;
constexpr int kDecodeLeastSmem = 116 * 1024;

// With many query rows a slice belongs to a team of warps (kernels/decode_team.cuh), else to one.
constexpr int kDecodeTeamWarps = 4;
constexpr bool decode_has_teams(int head_dim, int row_tiles) {
  return head_dim == 128 && row_tiles >= 2;
}
// What takes slices side by side in a CTA: teams or warps.
constexpr int decode_workers(int head_dim, int row_tiles) {
  return decode_has_teams(head_dim, row_tiles) ? kDecodeWarps / kDecodeTeamWarps : kDecodeWarps;
}

// Slices in flight a worker. A team has two of 32 KB. A warp: as many as 128 KB a CTA hold with 32 tokens each, one at
// least. With head_dim 128 and 16 bits two of half as many tokens, so that half of them can be asked for before the
// wait (with 256, e4m3 spills so).
constexpr int decode_stages(KvKind kv, int head_dim, int row_tiles) {
  if (decode_has_teams(head_dim, row_tiles)) return 2;
  const int slices = 128 * 1024 / (kDecodeWarps * 2 * 32 * head_dim * kv_bytes(kv));
  return slices > 1 ? slices : (head_dim == 128 ? 2 : 1);
}

// For measurements with head_dim 128: the same bytes in slices of the other size (see decode_slice_tokens()).
constexpr int decode_other_stages(KvKind kv) {
  return kv == KvKind::kE4m3 ? 2 * decode_stages(kv, 128, 1) : 1;
}

// A slice: the tokens that a worker handles at a time, and its bytes of keys and values. A warp: 32, 16 of a
// tensor-core product where 32 in so many stages would not fit in 128 KB. A team: 32 a warp, 16 in 16-bit caches.
constexpr int decode_slice_tokens(KvKind kv, int head_dim, int row_tiles, int stages) {
  if (decode_has_teams(head_dim, row_tiles)) return 128 / kv_bytes(kv);
  return stages * kDecodeWarps * 2 * 32 * head_dim * kv_bytes(kv) > 128 * 1024 ? 16 : 32;
}
constexpr int decode_slice_bytes(KvKind kv, int head_dim, int row_tiles, int stages) {
  return 2 * decode_slice_tokens(kv, head_dim, row_tiles, stages) * head_dim * kv_bytes(kv);
}

// Of these, how many are asked for before the wait for what comes before: half. More would queue in front of the
// combine kernel that is waited for.
constexpr int decode_early_slices(int stages) {
  return (stages + 1) / 2;
}

// A CTA with so many tiles asks for half as much again before the wait, by half of its warps, which bring their next
// slices' keys into L2 as well, but where pairs are split not at once: values of a warp's first slice so many cycles
// behind its keys, the second slices so many behind these. What is asked for in one go stands in front of what is
// waited for: behind 64 KB of its own SM a load takes 3,000 cycles, and 400 else.
struct DecodePace {
  int32_t least_tiles, values, second;
};
constexpr DecodePace decode_pace(KvKind kv) {
  return kv == KvKind::kE4m3 ? DecodePace{16, 1000, 1000} : DecodePace{4, 1000, 1000};
}

// Registers of a thread. Those of one row tile, and of two in teams, leave an SM room for two CTAs of the combine
// kernel (128 threads of 80 registers) beside the attention kernel's, so that the next call can start as this one's
// CTAs end; 216 leave room for one.
constexpr int decode_registers(KvKind kv, int head_dim, int row_tiles) {
  if (row_tiles == 1) return 176;
  if (decode_has_teams(head_dim, row_tiles)) return row_tiles == 4 && kv == KvKind::kE4m3 ? 216 : 176;
  return row_tiles == 2 ? 216 : 255;
}

// Whether a thread of the combine kernel may have several vectors (kernels/combine.cuh): where there is so much to add.
constexpr bool decode_combines_wide(int head_dim, int row_tiles) {
  return decode_has_teams(head_dim, row_tiles) && row_tiles == 4;
}
// CTAs of the combine kernel on each SM: what fits beside the attention kernel's; where that is nothing, more, for
// there is much to add.
constexpr int decode_combine_ctas_per_sm(KvKind kv, int head_dim, int row_tiles) {
  if (decode_combines_wide(head_dim, row_tiles)) return kv == KvKind::kE4m3 ? 1 : 2;
  return row_tiles <= 2 ? 2 : 4;
}

// Row tiles of 8 a CTA: as few as hold the rows; what registers hold at most (4, but 2 at head_dim 256).
constexpr int decode_row_tiles(int head_dim, int rows) {
  const int most = head_dim == 256 ? 2 : 4;
  const int tiles = rows <= 8 ? 1 : (rows <= 16 ? 2 : 4);
  return tiles < most ? tiles : most;
}

// Query fragments stay in registers up to 32 of them; above, they are read from shared memory for each slice.
constexpr bool decode_query_in_smem(int head_dim, int row_tiles) {
  return decode_has_teams(head_dim, row_tiles) || row_tiles * head_dim / 8 > 32;
}

// What a CTA keeps of the plan: the list of its next pieces, and the first of its requests' rows.
constexpr int kDecodePieces = 64;
constexpr int kDecodePieceBytes = 48;
constexpr int decode_cached_requests(int head_dim) {
  return head_dim == 256 ? 64 : 256;
}

// Pieces go in groups of kDecodeEpoch, with a barrier between two groups. Query rows are fetched a group ahead (where
// there are few rows a piece), each padded by 16 bytes against bank conflicts.
constexpr int kDecodeEpoch = 8;
constexpr int decode_query_pitch(int head_dim) {
  return 2 * head_dim + 16;
}
constexpr int decode_query_depth(int head_dim, int row_tiles) {
  if (decode_query_in_smem(head_dim, row_tiles)) return head_dim == 256 ? 1 : 2;
  return row_tiles == 1 && head_dim <= 128 ? 2 * kDecodeEpoch : 2;
}

// A piece that is a whole (request, head) of at most so many slices (128 tokens) is one warp's alone, where that warp's
// registers hold all rows: no other warp waits for it. It counts as so many slices, however few it has.
constexpr int decode_solo_slices(int slice_tokens) {
  return 128 / slice_tokens;
}
constexpr bool decode_has_solos(int head_dim, int row_tiles) {
  return row_tiles == 1 && head_dim <= 128;
}

// Which caches have plain kernels (each is compiled once more for it), and the pages that their slices need.
constexpr bool decode_has_plain(KvKind kv, int head_dim) {
  return head_dim == 128 && kv != KvKind::kFp16;
}
constexpr int decode_plain_page(KvKind kv) {
  return kv == KvKind::kE4m3 ? 32 : 16;
}

// Where a plan is for one request, each of its (request, head) pairs can have a cluster's CTAs, which then add its
// pieces through distributed shared memory (kernels/decode_cluster.cuh): 16 where it is the only one; 8, with which
// they have half of the SMs, where there are 8 to 15, as many such clusters as an H200 has room for at once. Not where
// the request is long: all SMs then read sooner.
constexpr int kDecodeCluster = 16, kDecodeHeadsCluster = 8;
constexpr int kDecodeClusterTokens = 4096;
constexpr bool decode_has_clusters(int head_dim, int row_tiles) {
  return head_dim == 128 && row_tiles == 1;
}
// CTAs of a pair's cluster; 1: none.
constexpr int decode_cluster(int head_dim, int rows, int max_batch, int num_kv_heads, bool batch_invariant) {
  if (!decode_has_clusters(head_dim, decode_row_tiles(head_dim, rows)) || max_batch != 1 || batch_invariant) return 1;
  return num_kv_heads == 1 ? kDecodeCluster : (num_kv_heads >= 8 && num_kv_heads <= 15 ? kDecodeHeadsCluster : 1);
}
// CTAs go in clusters of two where most pairs of a batch can have two CTAs of their own, of which an H200 has room for
// 66 at once: such a pair's pieces are added within its cluster, too, and nothing is left for the combine kernel where
// all are so. Plain calls have kernels for it. A cluster's launch costs short calls more than that gains.
constexpr int kDecodeCouple = 2;
constexpr int kDecodeCouples = 66;
inline bool decode_couples(const DecodeProblem& problem, int64_t pairs, int num_ctas) {
  return problem.plain && decode_has_plain(problem.kv, problem.head_dim) && problem.rows <= kRowTile &&
         pairs >= kLeastCouples && pairs <= kDecodeCouples && num_ctas == 2 * kDecodeCouples;
}
// Bytes of a CTA for what the others' results are in its share.
constexpr int decode_cluster_bytes(int head_dim, int cluster) {
  return (2 * head_dim / cluster + 4) * (cluster + 4) * 16;
}

// Shared memory of a CTA, in this order: barriers and the walk over its pieces; its pieces; rows of requests; the
// workers' rings of slices; the merge buffer (each worker's output of one row tile, a team's of all, padded by 4
// vectors every 32) with the warps' (max, sum) pairs; query rows of the next pieces; a cluster's pieces; the query as
// fragments with its row factors; of teams P^T and the warps' largest scores; rings of key scales.
struct DecodeSmem {
  int walk, pieces, requests, rings, merge, pairs, rows, cluster, query, weights, largest, scales, bytes;
};
constexpr int kDecodeWalkBytes = 256;
constexpr DecodeSmem decode_smem(KvKind kv, int head_dim, int row_tiles, int stages, bool per_token_scale) {
  DecodeSmem smem = {};
  smem.pieces = smem.walk + kDecodeWalkBytes;
  smem.requests = smem.pieces + kDecodePieces * kDecodePieceBytes;
  smem.rings = smem.requests + decode_cached_requests(head_dim) * static_cast<int>(sizeof(DecodeRequest));
  const bool teams = decode_has_teams(head_dim, row_tiles);
  const int workers = decode_workers(head_dim, row_tiles), merged = teams ? row_tiles : 1;
  smem.merge = smem.rings + workers * stages * decode_slice_bytes(kv, head_dim, row_tiles, stages);
  smem.pairs = smem.merge + workers * merged * (head_dim / 16) * 36 * 16;
  smem.rows = smem.pairs + kDecodeWarps * merged * 4 * 16;
  smem.cluster =
      smem.rows + decode_query_depth(head_dim, row_tiles) * row_tiles * kRowTile * decode_query_pitch(head_dim);
  static_assert(decode_cluster_bytes(128, kDecodeHeadsCluster) >= decode_cluster_bytes(128, kDecodeCluster));
  smem.query = smem.cluster +
               (decode_has_clusters(head_dim, row_tiles) ? decode_cluster_bytes(head_dim, kDecodeHeadsCluster) : 0);
  smem.weights = smem.query;
  if (decode_query_in_smem(head_dim, row_tiles)) smem.weights += row_tiles * (head_dim / 32 * 512 + kRowTile * 4);
  smem.largest =
      smem.weights + (teams ? workers * row_tiles * 16 * decode_slice_tokens(kv, head_dim, row_tiles, stages) : 0);
  smem.scales = smem.largest + (teams ? kDecodeWarps * row_tiles * kRowTile * 4 : 0);
  smem.bytes =
      smem.scales + (per_token_scale ? workers * stages * decode_slice_tokens(kv, head_dim, row_tiles, stages) * 4 : 0);
  return smem;
}

// Where no step has more tokens than the clusters of a plan's one request hold in registers, so many a CTA, plain calls
// have a kernel of their own (kernels/decode_alone.cuh).
constexpr int kDecodeAloneTokens = 256;
// Its shared memory: rows of values, padded against bank conflicts; weights; the rows' largest scores and sums of each
// warp; the cluster's pieces; their barrier.
constexpr int decode_alone_pitch(KvKind kv) {
  return 128 * kv_bytes(kv) + 16;
}
struct DecodeAloneSmem {
  int values, weights, largest, sums, cluster, barrier, bytes;
};
constexpr DecodeAloneSmem decode_alone_smem(KvKind kv, int cluster) {
  DecodeAloneSmem smem = {};
  smem.weights = smem.values + kDecodeAloneTokens * decode_alone_pitch(kv);
  smem.largest = smem.weights + kDecodeThreads * 16;
  smem.sums = smem.largest + kDecodeWarps * kRowTile * 4;
  smem.cluster = smem.sums + kDecodeWarps * kRowTile * 4;
  smem.barrier = smem.cluster + decode_cluster_bytes(128, cluster);
  smem.bytes = smem.barrier + 8;
  return smem;
}
static_assert(decode_alone_smem(KvKind::kBf16, kDecodeHeadsCluster).bytes <= kDecodeLeastSmem);

inline DecodeConfig decode_config(const DecodeProblem& problem) {
  DecodeConfig config = {};
  config.row_tiles = decode_row_tiles(problem.head_dim, problem.rows);
  config.row_groups = ceil_div(problem.rows, kRowTile * config.row_tiles);
  config.stages = problem.stages > 0 ? problem.stages : decode_stages(problem.kv, problem.head_dim, config.row_tiles);
  config.plain = problem.plain && problem.stages == 0 && decode_has_plain(problem.kv, problem.head_dim);
  config.cluster = problem.cluster;
  config.abreast = config.plain && problem.num_kv_heads > 1 && decode_has_solos(problem.head_dim, config.row_tiles);
  config.alone =
      config.plain && config.cluster > kDecodeCouple && problem.longest <= kDecodeAloneTokens * config.cluster;
  const int used =
      decode_smem(problem.kv, problem.head_dim, config.row_tiles, config.stages, problem.per_token_scale).bytes;
  config.smem_bytes = used > kDecodeLeastSmem && !config.alone ? used : kDecodeLeastSmem;
  return config;
}

// Partial results of one piece: for each row tile of 8 (the last one padded), 8 * head_dim floats of unnormalised
// output and 8 (max, sum) pairs. A plan's workspace is this for each of its slots: first all outputs, then all pairs.
constexpr int64_t decode_slot_bytes(int32_t head_dim, int32_t rows) {
  return static_cast<int64_t>((rows + kRowTile - 1) / kRowTile) * kRowTile * (head_dim + 2) * 4;
}

}  // namespace hpc::attention

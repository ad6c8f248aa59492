// Problem -> Config of a decode plan: grid of the plan kernel, sizes of map and workspace. Host only, no CUDA.
#pragma once

#include <algorithm>
#include <cstdint>

#include "config/decode.hpp"
#include "hpc/schedule_host.hpp"

namespace hpc::attention {

struct PlanProblem {
  int32_t max_batch;
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t q_len;
  int32_t window;    // keys a row sees; 0: all
  int32_t kv_bytes;  // of a cache element: 1 or 2
  int32_t num_ctas;  // resident CTAs of the attention kernel
  int32_t max_seq_len;
  bool batch_invariant;
};

struct PlanConfig {
  DecodeShape shape;  // of every step; its batch is max_batch
  int32_t rows;       // query rows of one KV head: q_len * num_q_heads / num_kv_heads
  int64_t map_bytes;
  int64_t partial_slots;
  int64_t workspace_bytes;  // of the partial results, see decode_slot_bytes
};

// Lower end of the floor of a CTA's work (see floor_tiles), from a tile's bytes: 32 KB of keys and values. That is two
// tiles of an e4m3 cache with head_dim 128, one of a 16-bit cache.
inline int32_t min_tiles(int32_t head_dim, int32_t kv_bytes) {
  const int32_t tile_bytes = 2 * kTileTokens * head_dim * kv_bytes;
  return std::max(1, 32 * 1024 / tile_bytes);
}

// Whether no step of a plan has tiles, or pairs, for more than kHalf CTAs, half of the SMs (see dealt_least()). With at
// most 8 query rows the combine kernel then has no more than kHalf units.
inline bool plan_leaves_half(int32_t max_batch, int32_t num_kv_heads, int32_t longest, int32_t least) {
  const int64_t pairs = static_cast<int64_t>(max_batch) * num_kv_heads;
  return pairs <= kHalf && pairs * ceil_div(longest, kTileTokens) <= static_cast<int64_t>(kHalf) * 4 * least;
}

inline PlanConfig plan_config(const char* where, const PlanProblem& p) {
  check(p.kv_bytes == 1 || p.kv_bytes == 2, where, "kv_bytes", "1 or 2", p.kv_bytes);
  check(p.head_dim >= 8 && p.head_dim <= 256, where, "head_dim", "an int in [8, 256]", p.head_dim);
  PlanConfig config = {};
  config.shape = {p.max_batch,
                  p.num_kv_heads,
                  p.q_len,
                  std::min(p.window, p.max_seq_len),  // a window as long as the longest request is none
                  p.max_seq_len,
                  p.num_ctas,
                  p.batch_invariant,
                  p.max_batch,
                  min_tiles(p.head_dim, p.kv_bytes)};
  check_decode_shape(where, config.shape);
  check(p.num_q_heads > 0 && p.num_q_heads % p.num_kv_heads == 0, where, "num_q_heads", "a multiple of num_kv_heads",
        p.num_q_heads);
  config.rows = p.q_len * (p.num_q_heads / p.num_kv_heads);
  config.map_bytes = decode_map_bytes(p.max_batch, p.num_ctas);
  config.partial_slots = partial_slots(config.shape);
  config.workspace_bytes = config.partial_slots * decode_slot_bytes(p.head_dim, config.rows);
  return config;
}

// The plan kernel's launch for one step. A thread writes one CTA's row, so there are at least num_ctas threads; each
// also scans `items` requests. Further thread blocks repeat the scan to share the writing of many request rows.
struct PlanLaunch {
  int32_t grid;
  int32_t threads;
  int32_t items;  // 1 or 4
};

constexpr int kPlanThreads = 1024;
static_assert(kPlanThreads >= kMaxCtas && 4 * kPlanThreads >= kMaxBatch, "one thread a CTA, four requests a thread");

inline PlanLaunch plan_launch(const DecodeShape& shape) {
  const int32_t wanted = std::max({shape.num_ctas, shape.batch, 128});
  const int32_t threads = std::min(ceil_div(wanted, 32) * 32, kPlanThreads);
  return {ceil_div(shape.max_batch + 1, kPlanThreads), threads, shape.batch <= threads ? 1 : 4};
}

}  // namespace hpc::attention

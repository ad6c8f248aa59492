// What one call is decided to be: Problem -> Config. Pure host code, no CUDA call; bound to Python and tested there.
//
// Two kernels. `stream` (kernels/router_stream.cuh) for few tokens: mma.sync, tiles of 16, 32 or 48 experts, k split
// over the 8 warps of a CTA and over a cluster. `tile` (kernels/router_tile.cuh) for many: wgmma, 64 or 128 experts x
// 32 to 208 tokens, or 56 x 64 (kernels/router_tile_tokens.cuh). choose() takes what measured.hpp has for a size, else
// the candidate that a small model says is fastest.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>

#include "config/layout.hpp"
#include "config/measured.hpp"
#include "hpc/checks.hpp"

namespace hpc::router {

enum class Kernel { kStream, kTile };

struct Problem {
  int64_t m = 0;
  int n = 0;
  int k = 0;
  Weight weight = Weight::kFloat2;
  bool presplit = false;         // an fp32 weight's terms are in memory too, for the tile kernel to read instead
  bool batch_invariant = false;  // the order of every sum must not depend on m
  bool overlapping_x = false;    // rows of x closer than k: no tensor map describes them
  // CTAs of one an SM that are resident at once in clusters of size [i]; 0 where that size is not used. These are an
  // H200's; the caller asks the device.
  std::array<int, kMaxCluster + 1> resident = {0, 132, 132, 117, 120, 110, 102, 105, 120, 0, 0, 0, 0, 0, 0, 0, 112};
};

struct Config {
  Kernel kernel = Kernel::kStream;
  int rows = 16;     // experts of a CTA's tile
  int tokens = 8;    // tokens of it
  int k_groups = 1;  // tile: consumer warpgroups that share the rows and each stage's k
  int split = 1;     // CTAs that share a tile's k
  // tile: the split's sums (where two warpgroups divide the tokens, the first's) have memory of their own, so a rank
  // sends its part when it has it; else they lie over the stages, once everybody is through with those.
  bool sums_apart = false;
  bool presplit = false;  // tile: reads the weight's terms instead of the weight
  // tile that reads terms: the CTAs of two neighbouring token tiles take turns to copy a stage's weights to both, or,
  // with `pairs_experts`, those of two expert tiles a stage's tokens.
  bool paired = false;
  bool pairs_experts = false;
  int stages = 4;
  int smem_bytes = 0;
  int64_t ctas = 0;
};

// The weight that a Config reads.
constexpr Weight weight_read(const Problem& p, const Config& c) {
  if (!c.presplit) return p.weight;
  if (c.pairs_experts && p.weight == Weight::kFloat2) return Weight::kPairedExperts2;
  if (c.paired) return p.weight == Weight::kFloat3 ? Weight::kPairedTerms3 : Weight::kPairedTerms2;
  return p.weight == Weight::kFloat3 ? Weight::kTerms3 : Weight::kTerms2;
}

// CTAs of a cluster: those that share a tile's k, of one tile or of two.
constexpr int cluster_ctas(const Config& c) {
  return c.split * (c.paired ? 2 : 1);
}

// The tiles that are compiled.
struct StreamTile {
  int rows, tokens;
};
struct WgmmaTile {
  int rows, k_groups, tokens;
  int terms = 3;  // the most it is compiled for: where registers would spill, fewer
  int least_terms = 1;
  constexpr bool takes(int count) const { return count >= least_terms && count <= terms; }
  constexpr int token_groups() const { return tile_token_groups(rows, k_groups, tokens); }
  // Experts are the N of wgmma then, and tokens its M: kernels/router_tile_tokens.cuh.
  constexpr bool tokens_first() const { return rows % 64 != 0; }
  // With one warpgroup two CTAs fit on an SM.
  constexpr bool light() const { return rows == 64 && k_groups == 1 && token_groups() == 1; }
};
constexpr StreamTile kStreamTiles[] = {{16, 8},  {16, 16}, {16, 32}, {16, 64}, {32, 8}, {32, 16},
                                       {32, 32}, {32, 64}, {48, 8},  {48, 16}, {48, 32}};
constexpr WgmmaTile kWgmmaTiles[] = {{64, 1, 32},  {64, 1, 48, 3, 3}, {64, 1, 64},     {64, 1, 96},   {64, 1, 104},
                                     {64, 1, 128}, {64, 1, 208},      {64, 2, 32},     {64, 2, 48},   {64, 2, 64},
                                     {64, 2, 104}, {64, 2, 128},      {64, 2, 192, 2}, {128, 1, 128}, {128, 1, 192}};
// Those that read the terms.
constexpr WgmmaTile kTermTiles[] = {{64, 1, 64},  {64, 1, 104}, {64, 1, 128},     {64, 1, 176},
                                    {64, 1, 192}, {64, 1, 208}, {56, 1, 64, 3, 3}};
// Those that copy them in pairs.
constexpr WgmmaTile kPairedTiles[] = {{64, 1, 64}, {64, 1, 104}, {64, 1, 128}, {56, 1, 64, 3, 3}};
// Those whose pairs are of expert tiles.
constexpr WgmmaTile kPairedExpertTiles[] = {{64, 1, 104, 2, 2}};

// Whether two CTAs of a Config fit on an SM, so that the next call's start beside this one's.
inline bool shares_sm(const Config& c) {
  const bool light = c.kernel == Kernel::kStream || WgmmaTile{c.rows, c.k_groups, c.tokens}.light();
  return light && c.smem_bytes <= kSmemLimitOfTwo;
}

// Fills in stages (unless `stages` is given: the most that are of use and, except for the large wgmma tiles, let two
// CTAs share an SM, so that the next call can start on it), shared memory and grid. Returns what is wrong with a Config
// that no kernel was compiled for or that does not fit, else nullptr.
inline const char* complete(const Problem& p, Config& c, int stages = 0) {
  const bool stream = c.kernel == Kernel::kStream;
  const Weight weight = weight_read(p, c);
  if (c.presplit && (stream || !p.presplit || weight_terms(p.weight) < 2 || p.weight == Weight::kBf16)) {
    return "a tile and a weight of two or three terms in memory to read these";
  }
  if (c.paired && !c.presplit) return "terms in memory for CTAs that copy in pairs";
  if (c.pairs_experts && !c.paired) return "pairs for pairs of expert tiles";
  bool compiled = false, light = stream;
  if (stream) {
    for (const StreamTile& t : kStreamTiles) compiled = compiled || (t.rows == c.rows && t.tokens == c.tokens);
    compiled = compiled && c.k_groups == 1;
  } else {
    const std::span<const WgmmaTile> tiles = c.pairs_experts ? std::span<const WgmmaTile>(kPairedExpertTiles)
                                             : c.paired      ? std::span<const WgmmaTile>(kPairedTiles)
                                             : c.presplit    ? std::span<const WgmmaTile>(kTermTiles)
                                                             : kWgmmaTiles;
    for (const WgmmaTile& t : tiles) {
      if (t.rows != c.rows || t.k_groups != c.k_groups || t.tokens != c.tokens) continue;
      if (!t.takes(weight_terms(weight))) continue;
      compiled = true;
      light = t.light();
    }
  }
  if (!compiled) return "one of the compiled tiles";
  const bool wide = !stream && cluster_ctas(c) == kMaxCluster;
  if (c.split < 1 || (cluster_ctas(c) > kPortableCluster && !wide)) {
    return "a cluster of 1 to 8 CTAs, or of 16 for a tile";
  }
  if (c.sums_apart && (stream || c.split == 1)) return "a tile with a split for sums that lie apart";
  if (!stream && p.overlapping_x) return "the stream kernel for rows that overlap";
  if (!stream && c.split > ceil_div(p.k, kTileBlockK)) return "a block of k for each CTA of a split";
  const auto smem = [&](int s) {
    return stream ? stream_smem_bytes(c.rows, c.tokens, weight, s, c.split)
                  : tile_smem_bytes(c.rows, c.k_groups, c.tokens, weight, s) +
                        (c.sums_apart ? tile_sum_bytes(c.rows, c.k_groups, c.tokens, c.split) : 0);
  };
  const int block_stages = stream ? 1 : tile_block_stages(c.rows, c.k_groups, c.tokens, weight);
  const int least = c.k_groups * block_stages;
  const int64_t steps = stream ? ceil_div(ceil_div(p.k, kStreamStepK), kStreamWarps * c.split)
                               : ceil_div(ceil_div(p.k, kTileBlockK), c.split) * block_stages;
  const int limit = stream ? kStreamMaxStages : kTileMaxStages;
  c.stages = stages > 0 ? stages : static_cast<int>(std::clamp<int64_t>(steps, least, limit));
  if (stages <= 0) {
    light = light && smem(least) <= kSmemLimitOfTwo;
    while (c.stages > 1 && smem(c.stages) > (light ? kSmemLimitOfTwo : kSmemLimit)) --c.stages;
  }
  c.smem_bytes = smem(c.stages);
  if (c.stages > limit || c.smem_bytes > kSmemLimit) return "stages that fit in shared memory";
  if (c.stages < least) return "the stages of 8 steps of a consumer";
  const int over_stages = tile_token_groups(c.rows, c.k_groups, c.tokens) - c.sums_apart;  // token groups' sums
  const int sum_bytes = stream ? 0 : over_stages * tile_sum_bytes(c.rows, c.k_groups, c.tokens, c.split);
  if (sum_bytes > c.stages * tile_stage_bytes(c.rows, c.k_groups, c.tokens, weight)) {
    return "stages that can hold the sums of a split";
  }
  const int pair_tokens = c.paired && !c.pairs_experts ? 2 : 1, pair_experts = c.pairs_experts ? 2 : 1;
  const int64_t token_tiles = ceil_div(p.m, pair_tokens * c.tokens) * pair_tokens;
  const int64_t expert_tiles = ceil_div(p.n, pair_experts * c.rows) * pair_experts;
  c.ctas = token_tiles * expert_tiles * c.split;
  if (token_tiles > kMaxGrid || expert_tiles > kMaxGrid) return "a grid that a launch can have";
  return nullptr;
}

// Estimated microseconds of a Config on an H200. The constants were fitted to 870 measured ones of an earlier tile
// kernel: 15 % off in the rms, and its choice 4 % slower than the best. Microseconds, bytes and cycles.
inline double estimate(const Problem& p, const Config& c) {
  constexpr double kLoadRate = 118e3, kLoadLatency = 2.0;  // an SM's copies: the bytes in flight arrive in a latency
  constexpr double kMemoryRate = 4.4e6, kClusterRate = 38e3;
  constexpr double kClock = 1.66e3;
  constexpr double kLoop = 1.39, kPresplitLoop = 1.2;  // a step's cycles over what is counted below
  const bool stream = c.kernel == Kernel::kStream;
  const Weight weight = weight_read(p, c);
  const int terms = weight_terms(weight);
  const double part_k = static_cast<double>(ceil_div(p.k, c.split));
  const double ctas = static_cast<double>(ceil_div(c.ctas, p.resident[cluster_ctas(c)]));  // of the busiest SM
  const bool light = shares_sm(c);
  const double weight_row = static_cast<double>(weight_bytes(weight));
  const double cta_bytes = part_k * (c.rows * weight_row + c.tokens * 2.0);
  const double fifo_bytes = stream ? kStreamWarps * c.stages * stream_stage_bytes(c.rows, c.tokens, weight)
                                   : c.stages * tile_stage_bytes(c.rows, c.k_groups, c.tokens, weight);
  const double in_flight = std::min(cta_bytes, fifo_bytes) * (light ? std::min(ctas, 2.0) : 1.0);
  const double load = ctas * cta_bytes / std::min(kLoadRate, in_flight / kLoadLatency);
  double math;
  if (stream) {
    // 7 cycles an instruction and scheduler; about 80 issue slots to split a fragment.
    math = ctas * part_k / 16 * (c.rows / 16) * (terms * c.tokens / 8 * 7 + 83) / 4 / kClock;
  } else {
    // Of 64 rows and 16 of k: the tensor cores, or shared memory (copies in, weights out, tokens read for each term).
    const double tensor = terms * (c.tokens >= 64 ? c.tokens / 2.0 : 16 + c.tokens / 4.0);
    const int readers = WgmmaTile{c.rows, c.k_groups, c.tokens}.token_groups();  // of a weight
    const double smem =
        (64 * 16 * weight_row * (1 + readers) + c.tokens * 32.0 / (c.rows / 64.0)) / 128 + terms * c.tokens / 4.0;
    math = ctas * part_k / 16 * (c.rows / 64.0) *
           (c.presplit ? tensor * kPresplitLoop : std::max(tensor, smem) * kLoop) / kClock;
  }
  const double memory =
      (static_cast<double>(p.n) * p.k * weight_row + static_cast<double>(p.m) * (p.k * 2.0 + p.n * 4.0)) / kMemoryRate;
  const double reduce = c.split > 1 ? ctas * c.rows * c.tokens * 4.0 / kClusterRate : 0.0;
  // The next call starts under this one where there is room: beside it, or on other SMs.
  const double start = (light && ctas <= 1) || c.ctas <= p.resident[1] / 2 ? 1.3 : 2.1;
  return start + std::max({memory, load, math}) + reduce + 1.2 * (ctas - 1);
}

// The Config of a call with m >= 1 tokens.
inline Config choose(const Problem& p) {
  constexpr const char* where = "hpc_router_gemm.config";
  check(p.m >= 1 && p.m < (int64_t{1} << 31), where, "m", "1 to 2^31 - 1 tokens", p.m);
  check(p.n >= 1 && p.n <= (1 << 20), where, "n", "1 to 2^20 experts", p.n);
  check(p.k >= 8 && p.k % 8 == 0 && p.k <= (1 << 24), where, "k", "a multiple of 8 up to 2^24", p.k);
  const bool known = !p.batch_invariant && p.weight >= Weight::kFloat2 && p.resident[1] == kMeasuredSms;
  // The first row that serves these tokens and whose Config can run.
  const auto measured = [&](int terms, Config& c) {
    for (const Measured& row : kMeasured) {
      if (row.n != p.n || row.k != p.k || p.m > row.m_to || row.terms != terms) continue;
      if (row.presplit && !p.presplit) continue;
      c = {.kernel = row.stream ? Kernel::kStream : Kernel::kTile,
           .rows = row.rows,
           .tokens = row.tokens,
           .k_groups = row.k_groups,
           .split = row.split,
           .sums_apart = row.sums_apart,
           .presplit = row.presplit,
           .paired = row.paired,
           .pairs_experts = row.pairs_experts};
      if (complete(p, c, row.stages) != nullptr && complete(p, c) != nullptr) continue;
      // A cluster of more CTAs than a GPU takes, or than are free on a partitioned one.
      const int cluster = cluster_ctas(c);
      if (cluster == 1 || c.ctas <= int64_t{p.resident[cluster]} * (shares_sm(c) ? 2 : 1)) return true;
    }
    return false;
  };
  Config best;
  if (known && (measured(weight_terms(p.weight), best) || measured(2, best))) return best;
  best = {};
  double best_time = 0;
  const auto consider = [&](const Config& candidate) {
    for (const int stages : {0, 3, 4, 5, 6, 7}) {
      Config c = candidate;
      if (complete(p, c, stages) != nullptr) continue;
      if (stages != 0 && c.smem_bytes <= kSmemLimitOfTwo) continue;  // fewer than what complete() takes gain nothing
      const double time = estimate(p, c);
      if (best_time == 0 || time < best_time) best = c, best_time = time;
    }
  };

  // How k is split may not depend on m for a batch-invariant call: the same problem with one token decides it.
  int fixed_split = 0;
  if (p.batch_invariant && p.m != 1) {
    Problem one = p;
    one.m = 1;
    fixed_split = choose(one).split;
  }
  for (int split = 1; split <= kMaxCluster; ++split) {
    if (p.resident[split] == 0 || (fixed_split != 0 && split != fixed_split)) continue;
    const bool short_parts =
        ceil_div(ceil_div(p.k, kStreamStepK), kStreamWarps * split) * kStreamStepK <= kStreamMaxPartK;
    for (const StreamTile& t : kStreamTiles) {
      const bool promotes = stream_promotes(t.rows, t.tokens, p.weight);
      if (!promotes && (!short_parts || p.batch_invariant)) continue;
      consider({.kernel = Kernel::kStream, .rows = t.rows, .tokens = t.tokens, .split = split});
    }
    if (p.batch_invariant) continue;
    for (const WgmmaTile& t : kWgmmaTiles) {
      consider({.kernel = Kernel::kTile, .rows = t.rows, .tokens = t.tokens, .k_groups = t.k_groups, .split = split});
    }
    if (!p.presplit) continue;
    for (const WgmmaTile& t : kTermTiles) {
      if (t.tokens_first()) continue;  // for sizes that were measured
      consider({.kernel = Kernel::kTile,
                .rows = t.rows,
                .tokens = t.tokens,
                .k_groups = t.k_groups,
                .split = split,
                .presplit = true});
    }
  }
  check(best_time > 0, where, "problem", "sizes that a kernel takes", text("m ", p.m, ", n ", p.n, ", k ", p.k));
  return best;
}

}  // namespace hpc::router

// Problem -> Config of one fused_moe call: regime, tile rule, grids, chunks and the workspace's layout.
//
// Pure host code without CUDA, computed once a call and passed down: the Python side, the CPU implementation and every
// launcher read this one struct, so a tile size, a grid and a workspace size cannot disagree. Counts per expert are not
// known here (they live on the device); the tile of an expert comes from hpc::grouped::tile_rows() with `rule`.
//
// The regime is a function of tokens, top_k and the *global* number of experts alone. So every rank of an
// expert-parallel group takes the same one as a single rank would, and a row's bits do not depend on the split.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "hpc/checks.hpp"
#include "hpc/grouped.hpp"

namespace hpc::moe {

constexpr int64_t kMaxTokens = 262144;
constexpr int64_t kChunkTokens = 32768;  // tokens a chunk: bounds the workspace
constexpr int32_t kMaxTopK = 32;
constexpr int32_t kMaxLocalExperts = 512;
constexpr int32_t kMaxExperts = 1 << 16;  // over all ranks
constexpr int32_t kMaxDim = 1 << 17;      // H and I
constexpr int32_t kScaleK = 128;          // elements of H that share a scale
constexpr int32_t kIndexCluster = 8;      // CTAs that make the index of a larger call together
// Calls of the low regime whose kernels take half an SM's shared memory each and hold x and h there (Config::few).
constexpr int32_t kLowFewPairs = 32;                        // most pairs,
constexpr int32_t kLowFewX = 16 << 10, kLowFewH = 8 << 10;  // elements of x, and of h
constexpr int64_t kLowMaxTokens = 128;                      // of the low regime, and
constexpr int32_t kLowMaxPairs = 1024;  // (token, slot) pairs of the low regime: every CTA routes them itself
// Beyond these the mid regime is faster: rows an expert on average, and pairs where an expert has kLowLargeBytes.
constexpr int64_t kLowRows = 4, kLowRowsBlock = 5, kLowLargePairs = 448, kLowLargeBytes = 4 << 20;

// Token tiles of the grouped GEMMs. Where experts have few rows, tiles are at most 32 or 64 rows: shared memory then
// holds more stages of weights. Where they have several tiles, two neighbours share weights: per tensor, of an average
// of 3, 5, ... tiles one more is made; with even averages, fewer and wider tiles are faster.
constexpr grouped::TileRule kTileRule = {128, 8, 0};
// By block, wide tiles are M (tokens_are_m()): then a scale of a row of x serves all of a thread's sums.
constexpr grouped::TileRule kTokenTileRule = {128, 64, 0};
// Per tensor, a layer of so many columns of I: gate-up's tasks are all of them, for tiles of kTripleRule, two
// or four or more of an expert, where the average one has at least two thirds of their rows.
constexpr int32_t kTripleColumns = 192;
constexpr grouped::TileRule kTripleRule = {96, 8, 1};
constexpr int64_t kRowsFor32 = 22, kRowsFor64 = 48;  // most rows an expert, on average, for such tiles
constexpr int64_t kRowsForThrees = 192;              // and for Config::threes (more than 128)

// Down in clusters with tokens as M and scale groups of 64: rows of h of up to so many columns stay in shared memory
// for kKeptPairs pairs of 128 columns of H (or fewer, which divide them).
constexpr int32_t kKeptColumns = 256, kKeptPairs = 4;

// I for which down takes two rows of w2 as whole lines, in token tiles of at most 64 rows.
constexpr int32_t kShortColumns = 192;

// Bytes of y, as expected, that the reduction drops from L2 where weights leave it first (kMid): they would be written
// to memory beside the next call's weights. Of more, most have been written before they are read.
constexpr int64_t kDiscardFrom = 6 << 20, kDiscardTo = 80 << 20;
// Of so many up to a panel's, in one panel, y is asked to leave L2 last until then.
constexpr int64_t kKeepFrom = 24 << 20;

// Beyond, while an expert has but one tile: in panels of columns of H of at most so many bytes, as expected, one after
// the other through the down kernel and the reduction. A panel stays in L2 in between, and is dropped.
constexpr int64_t kPanelBytes = 34 << 20;
constexpr int32_t kPanelGranule = 256;  // columns: a pair of down's units

// Rounding. The tensor core adds e4m3 products in about 14 bits; now and then an activation rounds to its neighbour for
// it. Over many activations that is little, but in a small call one step may be a percent of the output. So the low
// regime, whose sums are fp32, goes on to kLowAgainPairs where its tiles of 8 rows read at most kLowAgainBytes of
// weights in all; and beyond it gate-up sums in fp32 (exact) in small calls of at most kExactRows an expert on average,
// of at most kFewActivations, or of at most kFewOfFewColumns in layers of at most kFewColumns columns of I over all
// experts.
constexpr int64_t kLowAgainBytes = 32 << 20, kLowAgainPairs = 512;
constexpr int64_t kExactRows = 8, kFewActivations = 1 << 18, kFewOfFewColumns = 1 << 20, kFewColumns = 16 << 10;

enum class Quant : int32_t { kNone = 0, kBlock = 1, kTensor = 2 };

// kLow: few rows an expert; weights stream through registers, routing is found in the gate-up kernel's prologue.
// kMid: index kernel, then tensor-core GEMMs with weights as M and tokens as N of at most 128.
// kLarge: the same; several token tiles share an expert's weights by L2, which they therefore do not leave first.
enum class Regime : int32_t { kLow = 0, kMid = 1, kLarge = 2 };

struct Problem {
  int64_t tokens;        // T, 0 to kMaxTokens
  int32_t top_k;         // 1 to kMaxTopK
  int32_t num_local;     // E, experts on this rank, 1 to kMaxLocalExperts
  int32_t num_experts;   // over all ranks, >= num_local
  int32_t hidden;        // H, a multiple of 128
  int32_t intermediate;  // I, a multiple of 64
  Quant quant;
  bool x_is_bf16;        // x comes as bf16 (with quant != kNone it is quantised inside)
  bool batch_invariant;  // one regime at every batch size
  int32_t num_sms;       // of the device; 0 on a CPU (grids are then 0)
};

// Byte offsets into the workspace, multiples of 256. Regions of size 0 share the next one's offset.
struct Layout {
  int64_t counters;      // int32 [64]: num_rows, num_tiles, then tickets; zeroed by the call's first kernel
  int64_t offsets;       // int32 [E + 1]
  int64_t tile_offsets;  // int32 [E + 1], first tile of each expert
  int64_t slot_to_row;   // int32 [chunk_rows]
  int64_t row_to_slot;   // int32 [chunk_rows]
  int64_t tasks;         // TileTask [max_tiles]
  int64_t x_q;           // e4m3 [chunk_tokens, H], where x_in_workspace
  int64_t x_scale;       // fp32 [chunk_tokens, H / 128], where x_in_workspace and quant is kBlock
  int64_t h;             // [chunk_rows, I]: bf16 where h_is_bf16, else e4m3
  int64_t h_q;           // e4m3 [chunk_rows, I], where h_quantised
  int64_t h_scale;       // fp32 [chunk_rows, I / act_group], where quant is kBlock and h is e4m3 or h_quantised
  int64_t y;             // bf16 [chunk_rows, panel_columns]: down's rows before the reduction, undefined after it
                         // (discard)
  int64_t bytes;         // of the whole workspace
};

struct Config {
  Regime regime;
  grouped::TileRule rule;
  int32_t act_group;      // elements of I that share a scale, weights' and activations' alike: 128, or 64
  bool x_in_workspace;    // x is quantised by a step of its own into x_q (else in the gate-up kernel, or not at all)
  bool h_is_bf16;         // the activation is stored as bf16: bf16 weights, or it is quantised later
  bool h_quantised;       // bf16 h is quantised by a step of its own into h_q (else in the down kernel, or not at all)
  int32_t num_chunks;     // 0 where there are no tokens
  int64_t chunk_tokens;   // tokens of every chunk but the last, which has no more
  int64_t chunk_rows;     // chunk_tokens * top_k: most rows of a chunk
  int64_t max_tiles;      // most token tiles of a chunk
  int32_t up_columns;     // columns of the activation a gate-up task makes
  int32_t down_columns;   // columns of H a down task makes
  int32_t up_grid;        // CTAs of the gate-up kernel
  int32_t down_grid;      // CTAs of the down kernel
  bool few;               // low: kernels of few pairs, which quantise x and h in each CTA
  bool up_clusters;       // the gate-up kernel's CTAs share weights by twos
  bool down_clusters;     // the down kernel's
  bool threes;            // in clusters, of experts of three blocks of 64 rows each CTA takes half
  bool short_rows;        // down: the kernel for rows of w2 of kShortColumns, a task a stage
  int32_t kept_pairs;     // down: pairs of 128 columns of H for which rows of h stay in shared memory; 0: they do not
  bool discard;           // the reduction drops y from L2 once read
  bool keep_y;            // y leaves L2 last until then
  int32_t panel_columns;  // of H, for which down and the reduction run; the last panel has no more. H: one panel
  bool exact;             // gate-up's sums are fp32, not the tensor core's of e4m3 products
  bool guess;             // gate-up CTAs load weights of their likely first task while the index is made
  int32_t index_ctas;     // CTAs of the index kernel (one cluster); 0 where the gate-up kernel routes for itself
  Layout layout;
};

namespace detail {

inline void check_range(const char* argument, int64_t value, int64_t low, int64_t high) {
  check(value >= low && value <= high, "hpc_moe.config", argument, text("an int in [", low, ", ", high, "]"), value);
}

inline void check_problem(const Problem& p) {
  check_range("num_tokens", p.tokens, 0, kMaxTokens);
  check_range("top_k", p.top_k, 1, kMaxTopK);
  check_range("num_local_experts", p.num_local, 1, kMaxLocalExperts);
  check_range("num_experts", p.num_experts, p.num_local, kMaxExperts);
  check_range("hidden", p.hidden, 128, kMaxDim);
  check_range("intermediate", p.intermediate, 64, kMaxDim);
  check(p.hidden % 128 == 0, "hpc_moe.config", "hidden", "a multiple of 128", p.hidden);
  check(p.intermediate % 64 == 0, "hpc_moe.config", "intermediate", "a multiple of 64", p.intermediate);
  check_range("num_sms", p.num_sms, 0, 1 << 16);
}

inline int32_t ceil_div(int64_t a, int64_t b) {
  return static_cast<int32_t>((a + b - 1) / b);
}

inline int32_t grid(int64_t resident, int64_t tasks) {
  return static_cast<int32_t>(resident < tasks ? resident : tasks);
}

inline Layout make_layout(const Problem& p, const Config& c) {
  int64_t end = 0;
  auto take = [&end](int64_t bytes) {
    const int64_t begin = end;
    end = (end + bytes + 255) / 256 * 256;
    return begin;
  };
  const bool block = p.quant == Quant::kBlock;
  const int64_t x_tokens = c.x_in_workspace ? c.chunk_tokens : 0;
  Layout l{};
  l.counters = take(64 * sizeof(int32_t));
  l.offsets = take((p.num_local + 1) * static_cast<int64_t>(sizeof(int32_t)));
  l.tile_offsets = take((p.num_local + 1) * static_cast<int64_t>(sizeof(int32_t)));
  l.slot_to_row = take(c.chunk_rows * static_cast<int64_t>(sizeof(int32_t)));
  l.row_to_slot = take(c.chunk_rows * static_cast<int64_t>(sizeof(int32_t)));
  l.tasks = take(c.max_tiles * static_cast<int64_t>(sizeof(grouped::TileTask)));
  l.x_q = take(x_tokens * p.hidden);
  l.x_scale = take(block ? x_tokens * (p.hidden / kScaleK) * 4 : 0);
  l.h = take(c.chunk_rows * p.intermediate * (c.h_is_bf16 ? 2 : 1));
  l.h_q = take(c.h_quantised ? c.chunk_rows * p.intermediate : 0);
  l.h_scale = take(block && (!c.h_is_bf16 || c.h_quantised) ? c.chunk_rows * (p.intermediate / c.act_group) * 4 : 0);
  l.y = take(c.chunk_rows * c.panel_columns * 2);
  l.bytes = p.tokens == 0 ? 0 : end;
  return l;
}

}  // namespace detail

inline int64_t expert_bytes(const Problem& p) {
  return 3 * static_cast<int64_t>(p.intermediate) * p.hidden;
}

// Most (token, slot) pairs of at most `most` or, of no more than kLowMaxTokens tokens, as many as an expert can have;
// more where reading an expert's weights for every 8 rows is cheap, since the low regime's sums are fp32.
inline int64_t few_pairs(const Problem& p, int64_t most) {
  const int64_t tokens = kLowMaxTokens * p.top_k, again = 8 * (kLowAgainBytes / expert_bytes(p));
  const int64_t few = most < tokens ? most : tokens, more = again < kLowAgainPairs ? again : kLowAgainPairs;
  const int64_t pairs = few > more ? few : more;
  return pairs < kLowMaxPairs ? pairs : kLowMaxPairs;
}

// Most (token, slot) pairs of the low regime: of few rows an expert. None where it must not depend on the batch.
inline int64_t low_pairs(const Problem& p) {
  if (p.batch_invariant) return 0;
  const int64_t rows = (p.quant == Quant::kBlock ? kLowRowsBlock : kLowRows) * p.num_experts;
  return few_pairs(p, expert_bytes(p) >= kLowLargeBytes && rows > kLowLargePairs ? kLowLargePairs : rows);
}

// Most pairs for which sums are fp32, in the low regime or above it: at most 8 rows an expert, or few activations.
inline int64_t exact_pairs(const Problem& p) {
  const bool few_columns = static_cast<int64_t>(p.num_experts) * p.intermediate <= kFewColumns;
  const int64_t activations = (few_columns ? kFewOfFewColumns : kFewActivations) / p.intermediate;
  const int64_t few = few_pairs(p, kExactRows * p.num_experts);
  return activations > few ? activations : few;
}

// Tiles of kTileRule that an expert has on average, of `rows` rows over all ranks.
inline int64_t average_tiles(const Problem& p, int64_t rows) {
  return (rows + kTileRule.max_rows * p.num_experts - 1) / (kTileRule.max_rows * static_cast<int64_t>(p.num_experts));
}

// Whether the low regime's kernels are used on a GPU (num_sms > 0). They multiply FP8 alone: bf16 weights take kMid.
constexpr bool kLowOnGpu = true;

// Whether gate-up's tasks are all columns of I (kTripleRule), for `rows` rows over all ranks; not where sums are fp32.
inline bool takes_triples(const Problem& p, int64_t rows) {
  if (p.quant != Quant::kTensor || p.intermediate != kTripleColumns) return false;
  const int64_t each = kTripleRule.max_rows * static_cast<int64_t>(p.num_experts);
  const int64_t tiles = (rows + 2 * each - 1) / (2 * each) * 2;  // of the average expert
  return rows >= kTileRule.max_rows * static_cast<int64_t>(p.num_experts) && 3 * rows >= 2 * tiles * each;
}

// Rule of the token tiles above the low regime, for `rows` rows over all ranks. `exact`: Config's.
inline grouped::TileRule tile_rule(const Problem& p, int64_t rows, bool exact) {
  grouped::TileRule rule = kTileRule;
  if (p.quant == Quant::kNone) return rule;
  if (p.quant == Quant::kBlock && !exact && rows > kRowsFor64 * p.num_experts) return kTokenTileRule;
  if (!exact && takes_triples(p, rows)) return kTripleRule;
  if (rows <= kRowsFor64 * p.num_experts) rule.max_rows = 64;
  if (rows <= kRowsFor32 * p.num_experts) rule.max_rows = 32;
  const int64_t tiles = average_tiles(p, rows);
  rule.even = p.quant == Quant::kTensor && !exact && tiles > 1 && tiles % 2 == 1;
  return rule;
}

// Whether the GEMMs multiply tiles of a rule with tokens as M; else weights are M.
constexpr bool tokens_are_m(const grouped::TileRule& rule) {
  return rule.granule == kTokenTileRule.granule;
}

inline Regime choose_regime(const Problem& p, int64_t chunk_tokens) {
  const int64_t pairs = chunk_tokens * p.top_k;
  if (p.batch_invariant) return Regime::kMid;
  const bool low = p.num_sms == 0 || (kLowOnGpu && p.quant != Quant::kNone);
  if (low && pairs <= low_pairs(p)) return Regime::kLow;
  // kLarge: more than 128 rows an expert on average (by block, and where it has two narrower tiles, from 128 on), so
  // that pairs of tiles are common.
  const int64_t tile = 128 * static_cast<int64_t>(p.num_experts);
  const bool large = pairs > tile || (p.quant == Quant::kBlock && pairs == tile) || takes_triples(p, pairs);
  return large ? Regime::kLarge : Regime::kMid;
}

// Bytes of y of a call of `rows` pairs, as expected: those of this rank's share of them.
inline int64_t expected_y_bytes(const Problem& p, int64_t rows) {
  return rows * p.num_local / p.num_experts * p.hidden * 2;
}

// Columns of a panel of y.
inline int32_t choose_panel_columns(const Problem& p, Regime regime, int64_t rows) {
  const int64_t bytes = expected_y_bytes(p, rows);
  const bool one_tile = regime == Regime::kMid && rows <= kTileRule.max_rows * static_cast<int64_t>(p.num_experts);
  if (p.num_sms == 0 || !one_tile || p.quant == Quant::kNone || bytes <= kPanelBytes) return p.hidden;
  const int32_t granules = detail::ceil_div(p.hidden, kPanelGranule);
  const auto fit = static_cast<int32_t>(kPanelBytes / (bytes / p.hidden) / kPanelGranule);
  const int32_t panels = detail::ceil_div(granules, fit > 1 ? fit : 1);
  return panels > 1 ? detail::ceil_div(granules, panels) * kPanelGranule : p.hidden;
}

// The one place where a call's shape is turned into sizes. Throws std::invalid_argument for a Problem out of range.
inline Config make_config(const Problem& p) {
  detail::check_problem(p);
  Config c{};
  c.num_chunks = detail::ceil_div(p.tokens, kChunkTokens);
  c.chunk_tokens = c.num_chunks ? detail::ceil_div(p.tokens, c.num_chunks) : 0;
  c.chunk_rows = c.chunk_tokens * p.top_k;
  c.regime = choose_regime(p, c.chunk_tokens);
  const bool low = c.regime == Regime::kLow;
  c.exact = !low && p.quant != Quant::kNone && (p.batch_invariant || c.chunk_rows <= exact_pairs(p));
  c.rule = low ? grouped::TileRule{8, 8, 0} : tile_rule(p, c.chunk_rows, c.exact);
  c.act_group = p.intermediate % 128 == 0 ? 128 : 64;
  c.few = low && c.chunk_rows <= kLowFewPairs && c.chunk_tokens * p.hidden <= kLowFewX &&
          c.chunk_rows * p.intermediate <= kLowFewH;
  c.x_in_workspace = p.quant != Quant::kNone && p.x_is_bf16 && !c.few;
  // In the low regime an activation group spans several gate-up tasks, so its amax is found later.
  c.h_is_bf16 = p.quant == Quant::kNone || (p.quant == Quant::kBlock && low);
  c.h_quantised = p.quant == Quant::kBlock && low && !c.few;
  c.max_tiles = grouped::max_tiles(c.chunk_rows, p.num_local, c.rule);

  c.up_columns = !low ? c.act_group : c.few ? 16 : 32;
  c.down_columns = low ? (p.hidden <= 2048 ? 16 : 32) : 256;
  const int64_t up_tasks = c.max_tiles * detail::ceil_div(p.intermediate, c.up_columns);
  c.panel_columns = choose_panel_columns(p, c.regime, c.chunk_rows);
  const int64_t down_tasks =
      (low ? 1 : c.max_tiles) * static_cast<int64_t>(detail::ceil_div(c.panel_columns, c.down_columns));
  c.up_grid = detail::grid(p.num_sms, up_tasks);
  c.down_grid = detail::grid(p.num_sms, down_tasks);
  // Where experts have several tiles, in clusters of two CTAs. With one pair of units (I of 192) neighbouring tasks are
  // neighbouring tiles: of an odd number of tiles many would have nothing in common, and only wait for each other.
  const bool share = c.regime == Regime::kLarge && p.quant != Quant::kNone && !c.exact;
  const bool even = c.rule.even || average_tiles(p, c.chunk_rows) % 2 == 0;
  c.up_clusters = share && c.up_grid > 1 && (p.intermediate / 128 > 1 || even);
  c.down_clusters = share && c.down_grid > 1;
  // By block, where the average expert has three blocks of 64 rows; code of its own, which slows others down.
  c.threes = share && tokens_are_m(c.rule) && c.chunk_rows > 128 * static_cast<int64_t>(p.num_experts) &&
             c.chunk_rows <= kRowsForThrees * p.num_experts;
  // Weights as M, by block: CTAs of a cluster share scale groups of single units.
  const bool exchange = !low && p.quant == Quant::kBlock && c.act_group == 128 && !tokens_are_m(c.rule);
  if (exchange && c.up_grid % 2 && p.num_sms > 1) c.up_grid += c.up_grid < p.num_sms ? 1 : -1;
  if (c.up_clusters) c.up_grid &= ~1;
  if (c.down_clusters) c.down_grid &= ~1;
  c.index_ctas = low || p.tokens == 0 ? 0 : (c.chunk_rows > 2048 ? kIndexCluster : 1);
  // With 2 rows an expert on average most have rows: the first tasks are known before the index is, nearly. (The
  // weights of a guess that is wrong are mostly another CTA's, which then finds them in L2.)
  c.guess = c.regime == Regime::kMid && c.chunk_rows >= 2 * static_cast<int64_t>(p.num_experts);
  if (c.down_clusters && tokens_are_m(c.rule) && c.act_group == 64 && p.intermediate <= kKeptColumns &&
      p.hidden >= 256) {
    for (c.kept_pairs = kKeptPairs; p.hidden / 256 % c.kept_pairs; --c.kept_pairs) {
    }
  }
  c.short_rows = !low && p.quant != Quant::kNone && p.intermediate == kShortColumns && c.rule.max_rows <= 64;
  const int64_t y_bytes = expected_y_bytes(p, c.chunk_rows);
  c.discard =
      c.panel_columns < p.hidden || (c.regime == Regime::kMid && y_bytes >= kDiscardFrom && y_bytes <= kDiscardTo);
  c.keep_y = c.discard && c.panel_columns >= p.hidden && y_bytes >= kKeepFrom && y_bytes <= kPanelBytes;
  c.layout = detail::make_layout(p, c);
  return c;
}

// Bytes that a call of any number of tokens up to p.tokens finds enough. Within a regime and a tile rule the size grows
// with the chunk; the largest low call may need more than the smallest mid one (a bf16 activation), the last of narrow
// tiles more than the first of wider ones, that of an odd number of tiles more than the next, those of triples more
// than the next, and chunks end at kChunkTokens. Panels only need less than a CPU's call of as many tokens.
inline int64_t max_workspace_bytes(const Problem& p) {
  Problem at = p;
  const int64_t largest = p.tokens < kChunkTokens ? p.tokens : kChunkTokens;
  int64_t bytes = make_config(p).layout.bytes;
  const int64_t tile = kTileRule.max_rows * static_cast<int64_t>(p.num_experts);  // a tile an expert
  const int64_t tiles = largest * p.top_k / tile, odd = tiles % 2 == 1 ? tiles : tiles - 1;
  const int64_t triple = kTripleRule.max_rows * static_cast<int64_t>(p.num_experts);
  for (const int64_t tokens :
       {largest, low_pairs(p) / p.top_k, kRowsFor32 * p.num_experts / p.top_k, kRowsFor64 * p.num_experts / p.top_k,
        odd > 0 ? odd * tile / p.top_k : 0, 2 * triple / p.top_k, 4 * triple / p.top_k}) {
    at.tokens = tokens < largest ? tokens : largest;
    for (const int32_t num_sms : {0, 1}) {  // a CPU's and a GPU's regimes may differ
      at.num_sms = num_sms;
      const int64_t need = make_config(at).layout.bytes;
      bytes = need > bytes ? need : bytes;
    }
  }
  return bytes;
}

}  // namespace hpc::moe

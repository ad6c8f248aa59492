// What one call is decided to be: Problem -> Config. Pure host code, no CUDA call; bound to Python and tested there.
//
// Two kernels. `stream` (kernels/router_stream.cuh) for few tokens: mma.sync, tiles of 16, 32 or 48 experts, k split
// over the 8 warps of a CTA and over a cluster. `tile` (kernels/router_tile.cuh) for many: wgmma, 64 or 128 experts x
// 32 to 192 tokens. choose() takes the candidate that a small model of the card says is fastest; the model's constants
// are measurements of an H200, and it only has to order candidates.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "hpc/checks.hpp"

namespace hpc::router {

// Element type of the weight as the kernels see it, with the number of bf16 terms an element becomes.
enum class Weight { kBf16, kFloat1, kFloat2, kFloat3 };

constexpr int weight_terms(Weight weight) {
  return weight == Weight::kBf16 ? 1 : static_cast<int>(weight);
}
constexpr int weight_bytes(Weight weight) {
  return weight == Weight::kBf16 ? 2 : 4;
}

enum class Kernel { kStream, kTile };

constexpr int kMaxCluster = 8;
constexpr int kMaxGrid = 65535;              // a grid's y and z
constexpr int kSmemLimit = 227 * 1024;       // a CTA's, of a GPU of compute capability 9.0
constexpr int kSmemLimitOfTwo = 113 * 1024;  // for two CTAs of an SM

constexpr int kStreamWarps = 8;
constexpr int kStreamStepK = 32;
constexpr int kStreamMaxStages = 8;
// With two terms the stream kernel does not promote; this bounds the k of one accumulator.
constexpr int kStreamMaxPartK = 256;

constexpr int kTileStageK = 64;
constexpr int kTileBlockK = 128;
constexpr int kTileMaxStages = 16;

struct Problem {
  int64_t m = 0;
  int n = 0;
  int k = 0;
  Weight weight = Weight::kFloat2;
  bool batch_invariant = false;  // the order of every sum must not depend on m
  bool overlapping_x = false;    // rows of x closer than k: no tensor map describes them
  // CTAs of one an SM that are resident at once in clusters of size [i]; [0] is unused. These are an H200's; the caller
  // asks the device.
  std::array<int, kMaxCluster + 1> resident = {0, 132, 132, 117, 120, 110, 102, 105, 120};
};

struct Config {
  Kernel kernel = Kernel::kStream;
  int rows = 16;     // experts of a CTA's tile
  int tokens = 8;    // tokens of it
  int k_groups = 1;  // tile: consumer warpgroups that share the rows and alternate over k
  int split = 1;     // CTAs that share a tile's k
  int stages = 4;
  int smem_bytes = 0;
  int64_t ctas = 0;
};

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Shared memory. The kernels take their layout from the same functions.

// One warp's stage: weights, then 16 bytes a lane for 8 tokens.
constexpr int stream_weight_bytes(int rows, Weight weight) {
  return rows * kStreamStepK * weight_bytes(weight);
}
constexpr int stream_stage_bytes(int rows, int tokens, Weight weight) {
  return stream_weight_bytes(rows, weight) + tokens * kStreamStepK * 2;
}
// The warps' partial sums lie over their stages.
constexpr int stream_slot_offset(int rows, int tokens, Weight weight, int stages) {
  const int fifo = kStreamWarps * stages * stream_stage_bytes(rows, tokens, weight);
  const int partials = kStreamWarps * rows * tokens * 4;
  return fifo > partials ? fifo : partials;
}
// Partial sums received from a cluster, in parts of whole float4.
constexpr int stream_slot_bytes(int rows, int tokens, int split) {
  return split > 1 ? split * static_cast<int>(ceil_div(rows * tokens / 4, split)) * 16 : 0;
}
constexpr int stream_smem_bytes(int rows, int tokens, Weight weight, int stages, int split) {
  return stream_slot_offset(rows, tokens, weight, stages) + stream_slot_bytes(rows, tokens, split) + 16;
}

constexpr int tile_stage_bytes(int rows, int tokens, Weight weight) {
  return kTileStageK * (rows * weight_bytes(weight) + tokens * 2);
}
// Blocks of 64 rows x 8 tokens that one rank of a split sum owns.
constexpr int tile_sum_part(int rows, int tokens, int split) {
  return static_cast<int>(ceil_div(rows / 64 * (tokens / 8), split));
}
// Stages, full and empty barriers and one for the sums; 1,024 bytes to align the stages. Sums lie over the stages.
constexpr int tile_smem_bytes(int rows, int tokens, Weight weight, int stages) {
  return stages * tile_stage_bytes(rows, tokens, weight) + (2 * kTileMaxStages + 1) * 8 + 1024;
}

// The tiles that are compiled.
struct StreamTile {
  int rows, tokens;
};
struct WgmmaTile {
  int rows, k_groups, tokens;
  // With one warpgroup two CTAs fit on an SM.
  constexpr bool light() const { return rows == 64 && k_groups == 1; }
};
constexpr StreamTile kStreamTiles[] = {{16, 8},  {16, 16}, {16, 32}, {16, 64}, {32, 8}, {32, 16},
                                       {32, 32}, {32, 64}, {48, 8},  {48, 16}, {48, 32}};
constexpr WgmmaTile kWgmmaTiles[] = {{64, 1, 32},  {64, 1, 64},  {64, 1, 104},  {64, 1, 128}, {64, 2, 104},
                                     {64, 2, 128}, {64, 2, 192}, {128, 1, 128}, {128, 1, 192}};

// Fills in stages (unless `stages` is given: the most that are of use and, except for the large wgmma tiles, let two
// CTAs share an SM, so that the next call can start on it), shared memory and grid. Returns what is wrong with a Config
// that no kernel was compiled for or that does not fit, else nullptr.
inline const char* complete(const Problem& p, Config& c, int stages = 0) {
  const bool stream = c.kernel == Kernel::kStream;
  bool compiled = false, light = stream;
  if (stream) {
    for (const StreamTile& t : kStreamTiles) compiled = compiled || (t.rows == c.rows && t.tokens == c.tokens);
    compiled = compiled && c.k_groups == 1;
  } else {
    for (const WgmmaTile& t : kWgmmaTiles) {
      if (t.rows != c.rows || t.k_groups != c.k_groups || t.tokens != c.tokens) continue;
      compiled = true;
      light = t.light();
    }
  }
  if (!compiled) return "one of the compiled tiles";
  if (c.split < 1 || c.split > kMaxCluster) return "a cluster of 1 to 8 CTAs";
  if (!stream && p.overlapping_x) return "the stream kernel for rows that overlap";
  if (!stream && c.split > ceil_div(p.k, kTileBlockK)) return "a block of k for each CTA of a split";
  const auto smem = [&](int s) {
    return stream ? stream_smem_bytes(c.rows, c.tokens, p.weight, s, c.split)
                  : tile_smem_bytes(c.rows, c.tokens, p.weight, s);
  };
  const int64_t steps = stream ? ceil_div(ceil_div(p.k, kStreamStepK), kStreamWarps * c.split)
                               : 2 * ceil_div(ceil_div(p.k, kTileBlockK), c.split);
  const int limit = stream ? kStreamMaxStages : kTileMaxStages;
  c.stages = stages > 0 ? stages : static_cast<int>(std::clamp<int64_t>(steps, stream ? 1 : 2 * c.k_groups, limit));
  if (stages <= 0) {
    c.stages -= c.stages % c.k_groups;
    while (c.stages > c.k_groups && smem(c.stages) > (light ? kSmemLimitOfTwo : kSmemLimit)) c.stages -= c.k_groups;
  }
  c.smem_bytes = smem(c.stages);
  if (c.stages > limit || c.smem_bytes > kSmemLimit) return "stages that fit in shared memory";
  // Each k group has a ring of its own, and holds a stage until it has begun the next one.
  if (!stream && (c.stages < 2 * c.k_groups || c.stages % c.k_groups != 0))
    return "two stages or more for each k group";
  const int64_t token_tiles = ceil_div(p.m, c.tokens);
  const int64_t expert_tiles = ceil_div(p.n, c.rows);
  c.ctas = token_tiles * expert_tiles * c.split;
  if (token_tiles > kMaxGrid || expert_tiles > kMaxGrid) return "a grid that a launch can have";
  return nullptr;
}

// Estimated microseconds of a Config, of the order of what an H200 takes.
inline double estimate(const Problem& p, const Config& c) {
  constexpr double kClock = 1.75e3;       // cycles a microsecond under load
  constexpr double kL2Bytes = 70e3;       // an SM from L2, bytes a microsecond
  constexpr double kMemoryBytes = 4.4e6;  // all SMs from memory
  constexpr double kClusterBytes = 38e3;  // an SM to another's shared memory
  const int terms = weight_terms(p.weight);
  const double part_k = static_cast<double>(ceil_div(p.k, c.split));
  const double waves = static_cast<double>(ceil_div(c.ctas, p.resident[c.split]));
  const double weight_row = part_k * weight_bytes(p.weight), token_row = part_k * 2;
  const double shared_bytes = c.rows * weight_row + c.tokens * token_row;
  const double l2 = (c.rows * weight_row + c.tokens * token_row) / kL2Bytes;
  double math;
  if (c.kernel == Kernel::kStream) {
    // 7 cycles an instruction and scheduler, two warps each; about 60 issue slots a fragment to split.
    math = part_k / 16 * (c.rows / 16) * (terms * c.tokens / 8 * 7 + 60) / 4 / kClock;
  } else {
    const double width = c.tokens >= 64 ? c.tokens / 2.0 : 16 + c.tokens / 4.0;
    const double tensor = terms * width;                                                      // a 64-row k16 step
    const double smem = (shared_bytes / part_k * 16 / (c.rows / 64) + 64 * 16 * 4.0) / 128 +  // copies in, weights out,
                        terms * c.tokens * 32 / 128.0;                                        // token reads
    math = part_k / 16 * (c.rows / 64) * std::max(tensor, smem) / kClock;
  }
  const double memory =
      (static_cast<double>(p.n) * p.k * weight_bytes(p.weight) + static_cast<double>(p.m) * (p.k * 2.0 + p.n * 4.0)) /
      kMemoryBytes;
  const double reduce = c.split > 1 ? 0.4 + c.rows * c.tokens * 4.0 / kClusterBytes : 0.0;
  // A call whose CTAs fit beside the last one's starts under it.
  const double start = c.smem_bytes <= kSmemLimitOfTwo ? 1.7 : 3.5;
  return start + std::max(memory, waves * (std::max(l2, math) + 0.3)) + waves * reduce;
}

// The Config of a call with m >= 1 tokens.
inline Config choose(const Problem& p) {
  constexpr const char* where = "hpc_router_gemm.config";
  check(p.m >= 1 && p.m < (int64_t{1} << 31), where, "m", "1 to 2^31 - 1 tokens", p.m);
  check(p.n >= 1 && p.n <= (1 << 20), where, "n", "1 to 2^20 experts", p.n);
  check(p.k >= 8 && p.k % 8 == 0 && p.k <= (1 << 24), where, "k", "a multiple of 8 up to 2^24", p.k);
  const int64_t k_blocks = ceil_div(p.k, kTileBlockK);
  Config best;
  double best_time = 0;
  const auto consider = [&](Config c) {
    if (complete(p, c) != nullptr) return;
    const double time = estimate(p, c);
    if (best_time == 0 || time < best_time) best = c, best_time = time;
  };

  // How k is split may not depend on m for a batch-invariant call: the same problem with one token decides it.
  int fixed_split = 0;
  if (p.batch_invariant && p.m != 1) {
    Problem one = p;
    one.m = 1;
    fixed_split = choose(one).split;
  }
  for (int split = 1; split <= kMaxCluster; ++split) {
    if (fixed_split != 0 && split != fixed_split) continue;
    const bool short_parts =
        ceil_div(ceil_div(p.k, kStreamStepK), kStreamWarps * split) * kStreamStepK <= kStreamMaxPartK;
    for (const StreamTile& t : kStreamTiles) {
      if (p.weight == Weight::kFloat2 && !short_parts && split < kMaxCluster && !p.overlapping_x) continue;
      consider({.kernel = Kernel::kStream, .rows = t.rows, .tokens = t.tokens, .split = split});
    }
    if (p.batch_invariant || split > k_blocks) continue;
    for (const WgmmaTile& t : kWgmmaTiles) {
      consider({.kernel = Kernel::kTile, .rows = t.rows, .tokens = t.tokens, .k_groups = t.k_groups, .split = split});
    }
  }
  check(best_time > 0, where, "problem", "sizes that a kernel takes", text("m ", p.m, ", n ", p.n, ", k ", p.k));
  return best;
}

}  // namespace hpc::router

// What the kernels are told: one struct a kernel, filled by its launcher from a Config.
#pragma once

#include <cstdint>

#include "config/config.hpp"

namespace hpc::router {

struct StreamParams {
  const void* weight;     // [n, k], rows `weight_stride` elements apart, 16-byte aligned
  const void* x;          // [m, k] bf16, rows `x_stride` elements apart, 16-byte aligned
  float* y;               // [m, n], rows `y_stride` elements apart
  int64_t weight_stride;  // elements, of 16 bytes' multiple
  int64_t x_stride;
  int64_t y_stride;
  int64_t m;
  int n;
  int k;         // multiple of 8
  int split;     // CTAs of a cluster, each with a part of k: 1 to 8
  int stages;    // of each warp's FIFO: 1 to 8
  int prefetch;  // 1: weights may be read before the predecessor has ended
};

// What the start of a CTA needs comes first: it shares lines of the constant cache.
struct TileParams {
  int k_blocks;        // of 128 that every CTA of a split has at least; the first `k_extra` ranks have one more. The
  int k_extra;         // last block of all may be partly outside, where copies bring zeros
  int stages;          // of the ring, or of that of the weights
  int token_stages;    // of the tokens' ring, of twice the k; 0 where there is one
  int prefetch;        // 1: weights may be read before the predecessor has ended
  int weight_columns;  // of one weight copy: 64 where k is a multiple of 32 (fp32), else one 128-byte box
  int l2_prefetch;     // 1: what the first stages don't hold is brought to L2 before the predecessor has ended
  int split;           // CTAs of a cluster that share a tile, each with a part of the k blocks
  int sum_blocks;      // of a token group's split sum that a rank owns at least: the first `sum_extra` ranks have one
  int sum_extra;       // more; see router_tile_sum.cuh
  int sums_offset;     // of a split's sums from the stages: 0 where they lie over these, else behind the barriers
  int sum_part;        // blocks that a rank owns at most
  int n;
  int64_t m;
  float* y;  // [m, n], rows `y_stride` elements apart
  int64_t y_stride;
  int token_prefetch;  // first stages whose tokens are brought to L2 then, where two terms are read
};

struct TopkParams {
  const float* scores;  // [m, n] dense
  const float* bias;    // [n] or null
  int32_t* ids;         // [m, k] dense
  float* weights;       // [m, k] dense
  int64_t m;
  int n, k;
  int num_groups, topk_groups;
  int sigmoid;      // else softmax
  int renormalize;  // divide by the sum of the chosen
  float scale;
};

}  // namespace hpc::router

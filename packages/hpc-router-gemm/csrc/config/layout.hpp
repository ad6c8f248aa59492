// The weight as the kernels see it, and what of a CTA's shared memory lies where. Kernels and config take it from here.
#pragma once

#include <cstdint>

namespace hpc::router {

// The weight as the kernels see it: its element type with the number of bf16 terms an element becomes, or those terms,
// each a bf16 matrix of its own in memory; pairs of CTAs may copy those for each other, or (kPairedExperts) tokens.
enum class Weight { kBf16, kFloat1, kFloat2, kFloat3, kTerms2, kTerms3, kPairedTerms2, kPairedTerms3, kPairedExperts2 };

constexpr bool weight_pairs_experts(Weight weight) {
  return weight == Weight::kPairedExperts2;
}
constexpr bool weight_is_paired(Weight weight) {
  return weight == Weight::kPairedTerms2 || weight == Weight::kPairedTerms3 || weight_pairs_experts(weight);
}
constexpr bool weight_is_split(Weight weight) {
  return weight == Weight::kTerms2 || weight == Weight::kTerms3 || weight_is_paired(weight);
}
constexpr int weight_terms(Weight weight) {
  if (weight_is_split(weight)) return weight == Weight::kTerms3 || weight == Weight::kPairedTerms3 ? 3 : 2;
  return weight == Weight::kBf16 ? 1 : static_cast<int>(weight);
}
// Whether the terms lie in memory as [ceil(k / 64), terms, n, 64], zeros behind k, and not as [terms, n, k]: what a CTA
// brings at once is then in one piece for each term, which matters where memory decides.
constexpr bool weight_in_chunks(Weight weight) {
  return weight_is_split(weight) && weight_terms(weight) == 3;
}
// Of an element, all its terms together.
constexpr int weight_bytes(Weight weight) {
  if (weight_is_split(weight)) return 2 * weight_terms(weight);
  return weight == Weight::kBf16 ? 2 : 4;
}

constexpr int kMaxCluster = 16;
constexpr int kPortableCluster = 8;          // more than this needs a GPU that can
constexpr int kMaxGrid = 65535;              // a grid's y and z
constexpr int kSmemLimit = 227 * 1024;       // a CTA's, of a GPU of compute capability 9.0
constexpr int kSmemLimitOfTwo = 113 * 1024;  // for two CTAs of an SM

constexpr int kStreamWarps = 8;
constexpr int kStreamStepK = 32;
constexpr int kStreamMaxStages = 8;
constexpr int kStreamMaxPartK = 256;  // k of one accumulator where the stream kernel does not promote

constexpr int kTileMaxStages = 16;
constexpr int kTileMaxSlots = 24;  // of one ring or of two
// The tile kernel's unit of k. Consumer warpgroups that share it take 64 each.
constexpr int kTileBlockK = 128;

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Whether the stream kernel moves the tensor cores' sums to fp32 sums at every step: always but for large tiles and two
// terms. It decides a score's last bits.
constexpr bool stream_promotes(int rows, int tokens, Weight weight) {
  return weight_terms(weight) != 2 || rows * tokens <= 16 * 32;
}

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

// k of a stage. Tiles of one warpgroup have small stages: few large ones wait for each other. Terms do not: a row of 64
// bytes takes the copy engine as long as one of 128.
constexpr int tile_stage_k(int rows, int k_groups, int tokens, Weight weight) {
  if (weight_is_split(weight)) return 64;
  const bool small = rows == 64 && k_groups == 1 && tokens >= 64 && tokens <= 128;
  return small && weight != Weight::kBf16 ? 32 : 64;
}
// Tiles whose weights and tokens have rings of their own where two CTAs share an SM: `stages` stages of weights, given
// back as soon as they are split, and half as many of tokens, of twice the k (rows of 128 bytes instead of 64). Where a
// CTA has its SM alone, and in wider tiles, the barriers more that are waited for cost more than that gains.
constexpr bool tile_has_two_rings(int rows, int k_groups, int tokens, Weight weight) {
  const bool split = weight == Weight::kFloat2 || weight == Weight::kFloat3;
  return split && rows == 64 && k_groups == 1 && tokens == 64;
}
// Whole units of the swizzles' 1,024 bytes.
constexpr int tile_stage_bytes(int rows, int k_groups, int tokens, Weight weight) {
  return (tile_stage_k(rows, k_groups, tokens, weight) * (rows * weight_bytes(weight) + tokens * 2) + 1023) / 1024 *
         1024;
}
// Stages of a block of k. The fewest that work are those of 8 k16 steps of a consumer: some are read while others are
// multiplied.
constexpr int tile_block_stages(int rows, int k_groups, int tokens, Weight weight) {
  return kTileBlockK / tile_stage_k(rows, k_groups, tokens, weight);
}
// Consumer warpgroups that share the rows of a tile and divide its tokens.
constexpr int tile_token_groups(int rows, int k_groups, int tokens) {
  return rows == 64 && k_groups == 1 && tokens > 128 ? 2 : 1;
}
// Blocks of 64 rows x 8 tokens of a token group's split sum; those that one rank owns at most; bytes of all ranks.
constexpr int kSumBlockBytes = 64 * 8 * 4;
constexpr int tile_sum_blocks(int rows, int k_groups, int tokens) {
  return rows * tokens / (64 * 8) / tile_token_groups(rows, k_groups, tokens);
}
constexpr int tile_sum_part(int rows, int k_groups, int tokens, int split) {
  return static_cast<int>(ceil_div(tile_sum_blocks(rows, k_groups, tokens), split));
}
constexpr int tile_sum_bytes(int rows, int k_groups, int tokens, int split) {
  return split == 1 ? 0 : split * tile_sum_part(rows, k_groups, tokens, split) * kSumBlockBytes;
}
// Stages, full and empty barriers of slots and two for each token group's sums; 1,024 bytes to align the stages. Sums
// lie over the stages, or behind the barriers.
constexpr int kTileBarrierBytes = (2 * kTileMaxSlots + 4) * 8;
constexpr int tile_sums_offset(int rows, int k_groups, int tokens, Weight weight, int stages) {
  return stages * tile_stage_bytes(rows, k_groups, tokens, weight) + kTileBarrierBytes;
}
constexpr int tile_smem_bytes(int rows, int k_groups, int tokens, Weight weight, int stages) {
  return tile_sums_offset(rows, k_groups, tokens, weight, stages) + 1024;
}

}  // namespace hpc::router

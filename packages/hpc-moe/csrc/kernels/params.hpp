// What the kernels of one call are given. Pointers are device addresses; sizes in elements unless bytes are named.
#pragma once

#include <cstdint>

#include "config/config.hpp"
#include "hpc/grouped.hpp"

namespace hpc::moe {

// The routing index and the tile list, made by the index kernel and read by all others.
struct Routing {
  int32_t* offsets;          // [E + 1] first row of each local expert; the last is the number of live rows
  int32_t* tile_offsets;     // [E + 1] first tile of each local expert; the last is the number of tiles
  int32_t* row_to_slot;      // [T * k] row -> token * k + slot
  int32_t* slot_to_row;      // [T * k] token * k + slot -> row, or -1 where this rank does not own the expert
  grouped::TileTask* tiles;  // [max_tiles(T * k, E)]
};

struct IndexParams {
  const void* topk_ids;  // [T, k] int32 or int64, global expert ids
  int64_t id_token_stride;
  int64_t id_slot_stride;
  int64_t first_expert;  // ep_rank * E
  int32_t num_pairs;     // T * k
  int32_t top_k;
  int32_t num_experts;  // E, local
  int32_t ctas;         // of the index: 1 or kIndexCluster
  Routing routing;
};

// Quantisation of bf16 x, done by the index kernel's other CTAs, or of other rows (low regime).
struct QuantiseParams {
  const void* x;  // [T, H] bf16; null: x came quantised
  int64_t x_stride;
  void* x_quant;         // [T, H] e4m3
  float* x_quant_scale;  // [T, H / 128] (kBlock)
  const float* x_scale;  // [1] (kTensor)
  int32_t num_tokens;
  int32_t hidden;
};

constexpr int kRowsBox = 8;  // rows of h that a copy of the down kernel brings

// One grouped GEMM: rows of B (tokens) against the weights of their expert.
struct GemmParams {
  Routing routing;
  const uint8_t* b;        // gate-up: rows of the B operand (down has a map of h)
  uint32_t b_stride;       // gate-up: from a row to the next, in 16 bytes
  const float* b_scale;    // kBlock: [rows, K groups]; kTensor: [1]
  int64_t b_scale_stride;  // kBlock: elements from a row's scales to the next's
  int64_t b_scale_step;    // kBlock: elements from a K group to the next
  const float* w_scale;    // kBlock: [E, M blocks, K groups]; kTensor: [E]
  int32_t w_scale_rows;    // kBlock: M blocks of an expert
  int32_t w_scale_cols;    // kBlock: K groups
  const float* act_scale;  // kTensor: [1], scale of the activations between the GEMMs
  void* out;               // gate-up: h [rows, I]; down: y [rows, out_columns] bf16
  float* out_scale;        // gate-up, kBlock: [rows, I groups]
  int32_t k_bytes;         // bytes of K: a row of B and of the weights
  bool threes;             // experts of three blocks of 64 rows are shared evenly by a cluster's CTAs (kThree)
  int32_t pairs;           // down: pairs of units of a task for which rows of h are kept; 0: they are not
  int32_t units;           // 64-column units of I (gate-up) or 128-column units of H (down)
  int32_t out_columns;     // I or H; down of a panel (panels.hpp): its columns
  int32_t weight_rows;     // weight rows of an expert: 2 I or H
  int32_t experts;         // E, local
  bool evict_first;        // weights leave L2 first
  bool keep_out;           // down: y leaves L2 last, in kernels that can (kKeep); the reduction must drop all of it
  bool guess;              // gate-up: weights of the likely first task are asked for before the index is there
  int32_t b_lines;         // gate-up: lines of 128 bytes of B asked for with them
  bool singles_first;      // tasks of single units before those of pairs
  int32_t top_k;
  float swiglu_limit;  // negative: none
};

struct ReduceParams {
  const void* y;               // [rows, hidden] bf16
  const int32_t* slot_to_row;  // [T * k]
  const float* topk_weights;   // [T, k]
  int64_t weight_token_stride;
  int64_t weight_slot_stride;
  const void* shared_output;  // [T, H] bf16 or null
  int64_t shared_stride;
  void* out;  // [T, H] bf16
  int64_t out_stride;
  float routed_scaling_factor;
  int32_t num_tokens;
  int32_t hidden;  // H, or a panel's columns: out and shared_output begin at its first
  int32_t top_k;
};

// The low regime's gate-up and down kernels: everything of a call.
struct LowParams {
  IndexParams index;     // `routing` is not used: both kernels find the index for themselves
  const uint8_t* x;      // [T, H] bf16 or e4m3
  int64_t x_stride;      // bytes
  const float* x_scale;  // kBlock, x e4m3: [T, H / 128]; kTensor: [1]
  int64_t x_scale_stride, x_scale_step;
  bool x_is_predecessors;  // the kernel before gate-up makes x, and nothing else
  const uint8_t* w13;      // [E, 2 I, H]
  const uint8_t* w2;       // [E, H, I]
  const float* w13_scale;  // kBlock: [E, 2 I / b, H / 128]; kTensor: [E]
  const float* w2_scale;   // kBlock: [E, H / 128, I / b]; kTensor: [E]
  const float* act_scale;  // kTensor: [1]
  void* h;                 // [rows, I] bf16 (kBlock) or e4m3 (kTensor)
  const void* h_quant;     // what the down kernel reads as e4m3: [rows, I]
  const float* h_scale;    // its scales (kBlock): [rows, I / b]
  int32_t hidden;
  int32_t intermediate;
  float swiglu_limit;   // negative: none
  ReduceParams reduce;  // y and slot_to_row are not used
};

}  // namespace hpc::moe

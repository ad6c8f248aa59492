// One fused_moe call on a GPU: its tensors as addresses, and the function that launches its kernels.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "config/config.hpp"

namespace hpc::moe {

// Strides in elements. Scales are null where the quantisation has none.
struct Call {
  Quant quant;
  int64_t tokens;
  int32_t top_k;
  int32_t num_local;     // E
  int32_t hidden;        // H
  int32_t intermediate;  // I
  int32_t ep_rank;
  const void* x;  // [tokens, H]
  int64_t x_stride;
  bool x_is_bf16;
  const void* w13;       // [E, 2 I, H]
  const void* w2;        // [E, H, I]
  const void* topk_ids;  // [tokens, k]
  bool ids_are_int64;
  int64_t id_token_stride, id_slot_stride;
  const float* topk_weights;  // [tokens, k]
  int64_t weight_token_stride, weight_slot_stride;
  const float* w13_scale;
  const float* w2_scale;
  const float* x_scale;  // kBlock with e4m3 x: [tokens, H / 128]; kTensor: [1]
  int64_t x_scale_stride, x_scale_step;
  const float* act_scale;
  float swiglu_limit;         // negative: none
  const void* shared_output;  // [tokens, H] bf16 or null
  int64_t shared_stride;
  float routed_scaling_factor;
  void* workspace;  // config.layout.bytes
  void* out;        // [tokens, H] bf16
  int64_t out_stride;
  // Bits of the chunk's kernels to launch (index, gate-up, down, reduction), so that benchmarks can time them apart.
  uint32_t kernels = ~0u;
};

// Launches the call on the current device: two kernels a chunk and two for each of its panels; two to four where the
// regime is low. Throws std::invalid_argument for what the kernels cannot address, std::runtime_error with CUDA's text.
void run(const Call& call, const Config& config, int num_sms, cudaStream_t stream);

}  // namespace hpc::moe

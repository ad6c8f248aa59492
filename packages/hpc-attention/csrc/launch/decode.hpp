// Launches decode attention: the attention kernel, then the kernel that adds its partial results.
#pragma once

#include <cuda_runtime.h>

#include "config/decode.hpp"
#include "kernels/decode_params.cuh"

namespace hpc::attention {

using DecodeKernel = void (*)(DecodeParams);

// The attention kernel for a kind of cache; null where there is none. One source file a kind.
DecodeKernel decode_kernel_bf16(int32_t head_dim, const DecodeConfig& config);
DecodeKernel decode_kernel_fp16(int32_t head_dim, const DecodeConfig& config);
DecodeKernel decode_kernel_e4m3(int32_t head_dim, const DecodeConfig& config);
// Those of config.alone.
DecodeKernel decode_kernel_alone(KvKind kv, const DecodeConfig& config);

// CTAs of the attention kernel on one SM of the current device that a plan should count on: resident at once, and at
// most kDecodeCtasPerSm.
int decode_ctas_per_sm(const DecodeProblem& problem);

// Whether the current device, number `device`, has room for a cluster of so many CTAs (kDecodeCluster or
// kDecodeHeadsCluster), or for kDecodeCouples of kDecodeCouple; found out once.
bool decode_cluster_fits(int device, int cluster);

// Both kernels on the current device; no allocation, no synchronisation. num_ctas: rows of the map's `ctas`.
// combine_ctas: grid of the second kernel; negative: it is left out, for measurements. A cluster needs none.
void launch_decode(const DecodeProblem& problem, const DecodeParams& params, int32_t num_ctas, int32_t combine_ctas,
                   cudaStream_t stream);

}  // namespace hpc::attention

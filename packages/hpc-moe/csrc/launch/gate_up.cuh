// Launcher of kernels/gate_up.cuh; one instantiation a .cu file, so that they compile side by side.
#pragma once

#include "hpc/launch.hpp"
#include "launch/moe.hpp"

#include "kernels/gate_up.cuh"
#include "launch/widest.cuh"

namespace hpc::moe {

template <Quant kQuant, bool kHalf>
void launch_gate_up_as(const CUtensorMap& map, const CUtensorMap& half_map, const GemmParams& p, bool tokens,
                       bool clusters, int widest, bool exact, int grid, cudaStream_t stream) {
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(grid));
  config.block = dim3(kGemmThreads);
  config.stream = stream;
  if constexpr (kQuant == Quant::kBlock) {
    if (tokens) {
      config.smem_bytes = kGemmSmemBytes<kMaxWidth>;
      config.cluster = clusters ? 2 : 1;
      p.threes   ? launch(&gate_up_tokens_kernel<kHalf, true, true>, config, map, p)
      : clusters ? launch(&gate_up_tokens_kernel<kHalf, true>, config, map, p)
                 : launch(&gate_up_tokens_kernel<kHalf, false>, config, map, p);
      return;
    }
  }
  if constexpr (kQuant == Quant::kTensor) {
    if (clusters) {
      config.cluster = 2;
      if (widest == kTripleWidth) {
        config.smem_bytes = kGemmSmemBytes<kTripleWidth>;
        launch(&gate_up_kernel<kQuant, kHalf, kTripleWidth, false, true>, config, map, half_map, p);
        return;
      }
      config.smem_bytes = kGemmSmemBytes<kMaxWidth>;
      launch(&gate_up_kernel<kQuant, kHalf, kMaxWidth, false, true>, config, map, half_map, p);
      return;
    }
  }
  config.cluster = kQuant == Quant::kBlock && !kHalf ? 2 : 1;
  with_widest<kQuant>(widest, [&]<int kWidth>() {
    config.smem_bytes = kGemmSmemBytes<kWidth>;
    if constexpr (kQuant != Quant::kNone) {
      if (exact) {
        launch(&gate_up_kernel<kQuant, kHalf, kWidth, true>, config, map, half_map, p);
        return;
      }
    }
    launch(&gate_up_kernel<kQuant, kHalf, kWidth, false>, config, map, half_map, p);
  });
}

}  // namespace hpc::moe

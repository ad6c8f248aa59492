// Launcher of kernels/down.cuh; one instantiation a .cu file, so that they compile side by side.
#pragma once

#include "hpc/launch.hpp"
#include "launch/moe.hpp"

#include "kernels/down.cuh"

namespace hpc::moe {

template <Quant kQuant, bool kHalf>
void launch_down_as(const CUtensorMap& map, const GemmParams& p, int grid, cudaStream_t stream) {
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(grid));
  config.block = dim3(kGemmThreads);
  config.smem_bytes = kGemmSmemBytes;
  config.stream = stream;
  if constexpr (kQuant == Quant::kTensor) {
    if (p.k_bytes <= kDirectK) {
      launch(&down_kernel<kQuant, kHalf, true>, config, map, p);
      return;
    }
  }
  launch(&down_kernel<kQuant, kHalf, false>, config, map, p);
}

}  // namespace hpc::moe

// Launcher of kernels/down.cuh; one instantiation a .cu file, so that they compile side by side.
#pragma once

#include "hpc/launch.hpp"
#include "kernels/down.cuh"
#include "launch/moe.hpp"

namespace hpc::moe {

template <Quant kQuant, bool kHalf>
void launch_down_as(const CUtensorMap& map, const GemmParams& p, int experts, int grid, cudaStream_t stream) {
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(grid));
  config.block = dim3(kGemmThreads);
  config.smem_bytes = kGemmSmemBytes;
  config.stream = stream;
  launch(&down_kernel<kQuant, kHalf>, config, map, p, experts);
}

}  // namespace hpc::moe

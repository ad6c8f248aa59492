// Launcher of kernels/gate_up.cuh; one instantiation a .cu file, so that they compile side by side.
#pragma once

#include "hpc/launch.hpp"
#include "launch/moe.hpp"

#include "kernels/gate_up.cuh"

namespace hpc::moe {

template <Quant kQuant, bool kHalf>
void launch_gate_up_as(const CUtensorMap& map, const GemmParams& p, int grid, cudaStream_t stream) {
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(grid));
  config.block = dim3(kGemmThreads);
  config.smem_bytes = kGemmSmemBytes;
  config.stream = stream;
  launch(&gate_up_kernel<kQuant, kHalf>, config, map, p);
}

}  // namespace hpc::moe

// Launcher of kernels/down.cuh; one instantiation a .cu file, so that they compile side by side.
#pragma once

#include "hpc/launch.hpp"
#include "launch/moe.hpp"

#include "kernels/down.cuh"
#include "launch/widest.cuh"

namespace hpc::moe {

template <Quant kQuant, bool kHalf>
void launch_down_as(const CUtensorMap& map, const CUtensorMap& h_map, const GemmParams& p, bool tokens, bool clusters,
                    int widest, int grid, cudaStream_t stream) {
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(grid));
  config.block = dim3(kGemmThreads);
  config.stream = stream;
  if constexpr (kQuant == Quant::kBlock) {
    if (tokens) {
      if constexpr (kHalf) {
        if (p.pairs > 0) {
          config.smem_bytes = kGemmSmemBytes<kMaxWidth, true>;
          config.cluster = 2;
          p.threes ? launch(&down_tokens_kernel<kHalf, true, true, true>, config, map, h_map, p)
                   : launch(&down_tokens_kernel<kHalf, true, true>, config, map, h_map, p);
          return;
        }
      }
      config.smem_bytes = kGemmSmemBytes<kMaxWidth>;
      config.cluster = clusters ? 2 : 1;
      if constexpr (!kHalf) {
        if (p.threes) {
          launch(&down_tokens_kernel<kHalf, true, false, true>, config, map, h_map, p);
          return;
        }
      }
      clusters     ? launch(&down_tokens_kernel<kHalf, true>, config, map, h_map, p)
      : p.keep_out ? launch(&down_tokens_kernel<kHalf, false, false, false, true>, config, map, h_map, p)
                   : launch(&down_tokens_kernel<kHalf, false>, config, map, h_map, p);
      return;
    }
  }
  if constexpr (kQuant == Quant::kTensor) {
    if (clusters) {
      config.cluster = 2;
      config.smem_bytes = kGemmSmemBytes<kMaxWidth>;
      if (p.k_bytes <= kDirectK) {
        launch(&down_kernel<kQuant, kHalf, kMaxWidth, true, true>, config, map, h_map, p);
      } else {
        launch(&down_kernel<kQuant, kHalf, kMaxWidth, false, true>, config, map, h_map, p);
      }
      return;
    }
  }
  with_widest<kQuant>(widest, [&]<int kWidth>() {
    config.smem_bytes = kGemmSmemBytes<kWidth>;
    if constexpr (kQuant == Quant::kTensor) {
      if (p.k_bytes <= kDirectK) {
        if constexpr (kWidth == kMaxWidth) {
          if (p.keep_out) {
            launch(&down_kernel<kQuant, kHalf, kWidth, true, false, true>, config, map, h_map, p);
            return;
          }
        }
        launch(&down_kernel<kQuant, kHalf, kWidth, true>, config, map, h_map, p);
        return;
      }
    }
    launch(&down_kernel<kQuant, kHalf, kWidth, false>, config, map, h_map, p);
  });
}

}  // namespace hpc::moe

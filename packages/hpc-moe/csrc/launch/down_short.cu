#include "kernels/down_short.cuh"

#include "hpc/launch.hpp"
#include "launch/moe.hpp"

namespace hpc::moe {

void launch_down_short(Quant quant, const CUtensorMap& map, const CUtensorMap& h_map, const GemmParams& p, int widest,
                       int grid, cudaStream_t stream) {
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(grid));
  config.block = dim3(kShortThreads);
  config.stream = stream;
  const auto run = [&]<Quant kQuant, int kWidth, bool kKeep>() {
    config.smem_bytes = kShortSmemBytes<kWidth, kQuant == Quant::kBlock>;
    launch(&down_short_kernel<kQuant, kWidth, kKeep>, config, map, h_map, p);
  };
  const auto with_quant = [&]<Quant kQuant>() {
    if (widest > 32) return run.template operator()<kQuant, 64, false>();
    p.keep_out ? run.template operator()<kQuant, 32, true>() : run.template operator()<kQuant, 32, false>();
  };
  quant == Quant::kBlock ? with_quant.operator()<Quant::kBlock>() : with_quant.operator()<Quant::kTensor>();
}

}  // namespace hpc::moe

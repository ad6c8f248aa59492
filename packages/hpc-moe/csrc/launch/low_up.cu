#include "kernels/low_up.cuh"

#include "hpc/launch.hpp"
#include "launch/low.hpp"

namespace hpc::moe {

void launch_low_up(Quant quant, bool bf16_x, bool wide_ids, const LowParams& p, int grid, cudaStream_t stream) {
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(grid));
  config.block = dim3(kLowThreads);
  config.stream = stream;
  const auto run = [&]<Quant kQuant, bool kBf16X>() {
    config.smem_bytes = LowUp<kQuant, kBf16X>::kSmemBytes;
    wide_ids ? launch(&low_up_kernel<int64_t, kQuant, kBf16X>, config, p)
             : launch(&low_up_kernel<int32_t, kQuant, kBf16X>, config, p);
  };
  if (quant == Quant::kBlock) {
    bf16_x ? run.operator()<Quant::kBlock, true>() : run.operator()<Quant::kBlock, false>();
  } else {
    bf16_x ? run.operator()<Quant::kTensor, true>() : run.operator()<Quant::kTensor, false>();
  }
}

}  // namespace hpc::moe

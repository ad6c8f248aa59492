#include "kernels/low_up.cuh"

#include "hpc/launch.hpp"
#include "launch/low.hpp"

namespace hpc::moe {

void launch_low_up(Quant quant, bool bf16_x, bool few, bool wide_ids, const LowParams& p, int grid,
                   cudaStream_t stream) {
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(grid));
  config.block = dim3(kLowThreads);
  config.stream = stream;
  config.shared_carveout = true;  // as the kernels around it
  const auto run = [&]<Quant kQuant, bool kBf16X, bool kFew>() {
    config.smem_bytes = LowUp<kQuant, kBf16X, kFew>::kSmemBytes;
    wide_ids ? launch(&low_up_kernel<int64_t, kQuant, kBf16X, kFew>, config, p)
             : launch(&low_up_kernel<int32_t, kQuant, kBf16X, kFew>, config, p);
  };
  const auto with_quant = [&]<Quant kQuant>() {
    if (!few) return run.template operator()<kQuant, false, false>();
    bf16_x ? run.template operator()<kQuant, true, true>() : run.template operator()<kQuant, false, true>();
  };
  quant == Quant::kBlock ? with_quant.operator()<Quant::kBlock>() : with_quant.operator()<Quant::kTensor>();
}

}  // namespace hpc::moe

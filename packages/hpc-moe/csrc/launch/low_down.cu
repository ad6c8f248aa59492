#include "kernels/low_down.cuh"

#include "hpc/launch.hpp"
#include "launch/low.hpp"

namespace hpc::moe {

namespace {

// Warps that share a tile's `groups` scale groups: each has at least three of them where that leaves any to share.
int splits_of(int groups) {
  int splits = 1;
  while (splits < kLowWarps && groups / (2 * splits) >= 3) splits *= 2;
  return splits;
}

}  // namespace

void launch_low_down(Quant quant, bool wide_ids, const LowParams& p, int columns, cudaStream_t stream) {
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(p.hidden / columns));
  config.block = dim3(kLowThreads);
  config.stream = stream;
  const bool half = p.intermediate % 128 != 0;
  const int splits = splits_of(p.intermediate / (half ? 64 : 128));
  const auto run = [&]<Quant kQuant, bool kHalf, int kFragments>() {
    config.smem_bytes = LowDown<kQuant, kHalf, kFragments>::kSmemBytes;
    wide_ids ? launch(&low_down_kernel<int64_t, kQuant, kHalf, kFragments>, config, p, splits)
             : launch(&low_down_kernel<int32_t, kQuant, kHalf, kFragments>, config, p, splits);
  };
  const auto with_columns = [&]<Quant kQuant, bool kHalf>() {
    columns == 16 ? run.template operator()<kQuant, kHalf, 1>() : run.template operator()<kQuant, kHalf, 2>();
  };
  if (quant == Quant::kBlock) {
    half ? with_columns.operator()<Quant::kBlock, true>() : with_columns.operator()<Quant::kBlock, false>();
  } else {
    half ? with_columns.operator()<Quant::kTensor, true>() : with_columns.operator()<Quant::kTensor, false>();
  }
}

}  // namespace hpc::moe

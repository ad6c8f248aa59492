#include "kernels/low_down.cuh"

#include "hpc/launch.hpp"
#include "launch/low.hpp"

namespace hpc::moe {

namespace {

// Warps that share a tile's `groups` scale groups. Sharing costs a barrier for every few tiles, so a tile of fewer than
// 12 groups is one warp's (measured with 6); of a longer one a warp has at least three.
int splits_of(int groups) {
  if (groups < 12) return 1;
  int splits = 1;
  while (splits < kLowWarps && groups / (2 * splits) >= 3) splits *= 2;
  return splits;
}

}  // namespace

void launch_low_down(Quant quant, bool bf16_h, bool wide_ids, const LowParams& p, int columns, cudaStream_t stream) {
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(p.hidden / columns));
  config.block = dim3(kLowThreads);
  config.stream = stream;
  const bool half = p.intermediate % 128 != 0;
  const int splits = splits_of(p.intermediate / (half ? 64 : 128));
  const auto run = [&]<Quant kQuant, bool kBf16H, bool kHalf, int kFragments>() {
    config.smem_bytes = LowDown<kQuant, kBf16H, kHalf, kFragments>::kSmemBytes;
    wide_ids ? launch(&low_down_kernel<int64_t, kQuant, kBf16H, kHalf, kFragments>, config, p, splits)
             : launch(&low_down_kernel<int32_t, kQuant, kBf16H, kHalf, kFragments>, config, p, splits);
  };
  const auto with_shape = [&]<Quant kQuant, bool kBf16H>() {
    if (half) {
      columns == 16 ? run.template operator()<kQuant, kBf16H, true, 1>()
                    : run.template operator()<kQuant, kBf16H, true, 2>();
    } else {
      columns == 16 ? run.template operator()<kQuant, kBf16H, false, 1>()
                    : run.template operator()<kQuant, kBf16H, false, 2>();
    }
  };
  if (quant == Quant::kTensor) {
    with_shape.operator()<Quant::kTensor, false>();
  } else {
    bf16_h ? with_shape.operator()<Quant::kBlock, true>() : with_shape.operator()<Quant::kBlock, false>();
  }
}

}  // namespace hpc::moe

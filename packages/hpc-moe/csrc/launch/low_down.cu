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

// Whether a slot is three scale groups. Only where a tile is one warp's either way, for the order of sums is the
// shape's alone. Of many pairs per tensor slots of one group of 64 are faster (hy3-tp8: 32 tokens 87.1 us, with
// three 86.1; 128 123.1, 125.9).
bool large_slots(Quant quant, const LowParams& p, int columns) {
  constexpr int kMostPairs = 256;
  const bool half = p.intermediate % 128 != 0;
  const int groups = p.intermediate / (half ? 64 : 128);
  if (groups % 3 != 0 || splits_of(groups) > 1) return false;
  return half ? quant == Quant::kBlock || p.index.num_pairs <= kMostPairs : columns == 16;
}

}  // namespace

void launch_low_down(Quant quant, bool few, bool wide_ids, const LowParams& p, int columns, cudaStream_t stream) {
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(p.hidden / columns));
  config.block = dim3(kLowThreads);
  config.stream = stream;
  config.shared_carveout = true;  // as the kernels around it
  const bool half = p.intermediate % 128 != 0;
  const bool three = !few && large_slots(quant, p, columns);
  const int splits = splits_of(p.intermediate / (half ? 64 : 128));
  const auto run_as = [&]<Quant kQuant, bool kHalf, int kFragments, bool kFew, bool kThree>() {
    config.smem_bytes = LowDown<kQuant, kHalf, kFragments, kFew, kThree>::kSmemBytes;
    wide_ids ? launch(&low_down_kernel<int64_t, kQuant, kHalf, kFragments, kFew, kThree>, config, p, splits)
             : launch(&low_down_kernel<int32_t, kQuant, kHalf, kFragments, kFew, kThree>, config, p, splits);
  };
  const auto run = [&]<Quant kQuant, bool kHalf, int kFragments, bool kFew>() {
    if constexpr (!kFew && (kHalf || kFragments == 1)) {
      if (three) return run_as.template operator()<kQuant, kHalf, kFragments, kFew, true>();
    }
    run_as.template operator()<kQuant, kHalf, kFragments, kFew, false>();
  };
  const auto with_columns = [&]<Quant kQuant, bool kHalf, bool kFew>() {
    columns == 16 ? run.template operator()<kQuant, kHalf, 1, kFew>()
                  : run.template operator()<kQuant, kHalf, 2, kFew>();
  };
  const auto with_shape = [&]<Quant kQuant, bool kHalf>() {
    few ? with_columns.template operator()<kQuant, kHalf, true>()
        : with_columns.template operator()<kQuant, kHalf, false>();
  };
  const auto with_quant = [&]<Quant kQuant>() {
    half ? with_shape.template operator()<kQuant, true>() : with_shape.template operator()<kQuant, false>();
  };
  quant == Quant::kTensor ? with_quant.operator()<Quant::kTensor>() : with_quant.operator()<Quant::kBlock>();
}

}  // namespace hpc::moe

// From the widest token tile of a call to a grouped GEMM's instance for it.
#pragma once

#include "kernels/grouped_gemm.cuh"

namespace hpc::moe {

// Calls run.operator()<kWidth>() with the instance's kWidth, at least `widest`. bf16 weights have but one.
template <Quant kQuant, class Run>
void with_widest(int widest, Run&& run) {
  if constexpr (kQuant != Quant::kNone) {
    if (widest <= 32) return run.template operator()<32>();
    if (widest <= 64) return run.template operator()<64>();
  }
  run.template operator()<kMaxWidth>();
}

}  // namespace hpc::moe

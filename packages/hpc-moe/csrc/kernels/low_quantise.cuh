// Low regime, between its kernels: quantises bf16 rows once, where each task doing it again would cost more than a
// launch.
//
// Grid: enough CTAs of 256 threads for all groups; kGroup / 8 lanes to a group. Rows past the live ones hold what
// memory held and are quantised too; nobody reads them. PDL: kEarly lets the successor start before this kernel's own
// wait. That is for the rows of h, between the gate-up and the down kernel: gate-up triggers after its wait, so
// whatever came before it is complete when this kernel runs, and that is all that the down kernel reads before its own
// wait (which waits for this kernel, hence for gate-up).
#pragma once

#include "hpc/pdl.cuh"
#include "kernels/quantise.cuh"

namespace hpc::moe {

constexpr int kLowQuantiseThreads = 256;

template <Quant kQuant, int kGroup, bool kEarly>
__global__ void __launch_bounds__(kLowQuantiseThreads) low_quantise_kernel(const QuantiseParams q) {
  if constexpr (kEarly) pdl_trigger();
  pdl_wait();
  if constexpr (!kEarly) pdl_trigger();
  constexpr int kLanes = kGroup / 8;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kLowQuantiseThreads + threadIdx.x) / kLanes;
  quantise_rows<kQuant, kGroup>(q, first, static_cast<int64_t>(gridDim.x) * (kLowQuantiseThreads / kLanes));
}

}  // namespace hpc::moe

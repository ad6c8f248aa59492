#include "launch/plan.hpp"

#include "config/plan.hpp"
#include "hpc/launch.hpp"
#include "kernels/plan.cuh"

namespace hpc::attention {

void launch_plan(const int32_t* seq_lens, const DecodeShape& shape, void* map, cudaStream_t stream) {
  const PlanLaunch config = plan_launch(shape);
  const bool one = config.items == 1;
  const auto kernel = shape.batch_invariant ? (one ? plan_kernel<true, 1, false> : plan_kernel<true, 4, false>)
                      : may_deal(shape)     ? plan_kernel<false, 1, true>
                                            : (one ? plan_kernel<false, 1, false> : plan_kernel<false, 4, false>);
  launch(kernel,
         LaunchConfig{.grid = dim3(config.grid), .block = dim3(config.threads), .smem_bytes = 0, .stream = stream},
         PlanParams{seq_lens, static_cast<unsigned char*>(map), shape});
}

}  // namespace hpc::attention

#include "kernels/router_topk.cuh"

#include "hpc/launch.hpp"
#include "launch/router.hpp"

namespace hpc::router {

namespace {

template <int Items>
void launch_small(const TopkParams& params, cudaStream_t stream) {
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(params.m));
  config.block = dim3(kTopkSmallThreads);
  config.stream = stream;
  launch(router_topk_small_kernel<Items>, config, params);
}

}  // namespace

void launch_topk(const TopkParams& params, cudaStream_t stream) {
  if (params.n <= kTopkSmallExperts && params.k <= kTopkSmallChoices && params.num_groups <= kTopkSmallGroups) {
    if (params.n <= 256) return launch_small<2>(params, stream);
    if (params.n <= 512) return launch_small<4>(params, stream);
    return launch_small<8>(params, stream);
  }
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(params.m));
  config.block = dim3(kTopkThreads);
  config.smem_bytes = params.num_groups > 1 ? params.num_groups * static_cast<int>(sizeof(float)) : 0;
  config.stream = stream;
  check(config.smem_bytes <= 200 * 1024, "hpc_router_gemm.route", "num_groups", "at most 51200", params.num_groups);
  launch(router_topk_large_kernel, config, params);
}

}  // namespace hpc::router

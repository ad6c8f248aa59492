#include "kernels/router_topk.cuh"

#include <algorithm>

#include "hpc/launch.hpp"
#include "launch/router.hpp"

namespace hpc::router {

namespace {

// Up to so many tokens 4 warps have one; of more tokens 2, which is less work in all.
constexpr int64_t kTopkFewTokens = 256;

template <int Threads, int Items>
void launch_small(const TopkParams& params, cudaStream_t stream) {
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(params.m));
  config.block = dim3(Threads);
  config.stream = stream;
  if (params.m > kTopkFewTokens) {
    // CTAs start while the predecessor's fill most SMs, and would pile up on the few that are free: shared memory that
    // nobody uses keeps each SM to its share.
    int device;
    cuda_check(cudaGetDevice(&device), "cudaGetDevice");
    const int64_t share = ceil_div(params.m, device_properties(device).num_sms);
    const int64_t used = 1024 + static_cast<int64_t>(sizeof(TopkShared<Threads, Items>));  // 1 KB by the system
    config.smem_bytes = static_cast<int>(std::clamp<int64_t>(kSmemLimit / share - used, 0, 48 * 1024));
    // With what the kernel has itself it may be more than 48 KB, which launch() does not see.
    cuda_check(cudaFuncSetAttribute(router_topk_small_kernel<Threads, Items>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, 48 * 1024),
               "cudaFuncSetAttribute(MaxDynamicSharedMemorySize)");
  }
  launch(router_topk_small_kernel<Threads, Items>, config, params);
}

template <int Items>
void launch_items(const TopkParams& params, cudaStream_t stream) {
  if (params.m > kTopkFewTokens) return launch_small<64, 2 * Items>(params, stream);
  launch_small<128, Items>(params, stream);
}

}  // namespace

void launch_topk(const TopkParams& params, cudaStream_t stream) {
  if (params.n <= kTopkSmallExperts && params.k <= kTopkSmallChoices && params.num_groups <= kTopkSmallGroups) {
    if (params.n <= 256) return launch_items<2>(params, stream);
    if (params.n <= 512) return launch_items<4>(params, stream);
    return launch_items<8>(params, stream);
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

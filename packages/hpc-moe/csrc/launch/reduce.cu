#include "hpc/launch.hpp"
#include "launch/moe.hpp"

#include "kernels/reduce.cuh"

namespace hpc::moe {

void launch_reduce(const ReduceParams& p, cudaStream_t stream) {
  LaunchConfig config;
  const auto ceil_div = [](int a, int b) { return static_cast<unsigned>((a + b - 1) / b); };
  config.grid.x = ceil_div(p.num_tokens, kReduceTokens) * ceil_div(p.hidden, kReduceColumns);
  config.block = dim3(kReduceThreads);
  config.stream = stream;
  launch(&reduce_kernel, config, p);
}

}  // namespace hpc::moe

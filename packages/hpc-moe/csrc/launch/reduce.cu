#include <algorithm>

#include "hpc/launch.hpp"
#include "launch/moe.hpp"

#if HPC_MOE_NEXT
#include "kernels/next/reduce.cuh"
#else
#include "kernels/reduce.cuh"
#endif

namespace hpc::moe {

void launch_reduce(const ReduceParams& p, int num_sms, cudaStream_t stream) {
  LaunchConfig config;
#if HPC_MOE_NEXT
  const auto ceil_div = [](int a, int b) { return static_cast<unsigned>((a + b - 1) / b); };
  config.grid.x = ceil_div(p.num_tokens, kReduceTokens) * ceil_div(p.hidden, kReduceColumns);
#else
  constexpr int kCtasPerSm = 4;  // 64 registers a thread
  config.grid.x = static_cast<unsigned>(std::min<int64_t>(p.num_tokens, static_cast<int64_t>(num_sms) * kCtasPerSm));
#endif
  config.block = dim3(kReduceThreads);
  config.stream = stream;
  launch(&reduce_kernel, config, p);
}

}  // namespace hpc::moe

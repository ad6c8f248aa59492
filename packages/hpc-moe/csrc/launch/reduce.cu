#include <algorithm>

#include "hpc/launch.hpp"
#include "launch/moe.hpp"

#include "kernels/reduce.cuh"

namespace hpc::moe {

void launch_reduce(const ReduceParams& p, int num_sms, cudaStream_t stream) {
  constexpr int kCtasPerSm = 4;  // 64 registers a thread
  LaunchConfig config;
  config.grid.x = static_cast<unsigned>(std::min<int64_t>(p.num_tokens, static_cast<int64_t>(num_sms) * kCtasPerSm));
  config.block = dim3(kReduceThreads);
  config.stream = stream;
  launch(&reduce_kernel, config, p);
}

}  // namespace hpc::moe

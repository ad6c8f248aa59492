#include <algorithm>

#include "hpc/launch.hpp"
#include "launch/moe.hpp"

#include "kernels/reduce.cuh"

namespace hpc::moe {

void launch_reduce(const ReduceParams& p, bool discard, int num_sms, cudaStream_t stream) {
  constexpr int kCtasPerSm = 4;  // 64 registers a thread
  const int64_t spans = (p.hidden + kReduceSpan - 1) / kReduceSpan;
  const int64_t ctas = (p.num_tokens * spans + kReduceWarps - 1) / kReduceWarps;
  LaunchConfig config;
  config.grid.x = static_cast<unsigned>(std::min<int64_t>(ctas, static_cast<int64_t>(num_sms) * kCtasPerSm));
  config.block = dim3(kReduceThreads);
  config.stream = stream;
  discard ? launch(&reduce_kernel<true>, config, p) : launch(&reduce_kernel<false>, config, p);
}

}  // namespace hpc::moe

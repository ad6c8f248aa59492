#include <algorithm>

#include "hpc/launch.hpp"
#include "launch/moe.hpp"

#include "kernels/reduce.cuh"
#include "kernels/reduce_compact.cuh"

namespace hpc::moe {

namespace {

void launch_as(void (*kernel)(ReduceParams), const ReduceParams& p, int num_sms, cudaStream_t stream) {
  constexpr int kCtasPerSm = 4;  // 64 registers a thread
  const int64_t spans = (p.hidden + kReduceSpan - 1) / kReduceSpan;
  const int64_t ctas = (p.num_tokens * spans + kReduceWarps - 1) / kReduceWarps;
  LaunchConfig config;
  config.grid.x = static_cast<unsigned>(std::min<int64_t>(ctas, static_cast<int64_t>(num_sms) * kCtasPerSm));
  config.block = dim3(kReduceThreads);
  config.stream = stream;
  launch(kernel, config, p);
}

}  // namespace

void launch_reduce(const ReduceParams& p, bool compact, bool discard, int num_sms, cudaStream_t stream) {
  const auto kernel = compact ? &reduce_compact_kernel : discard ? &reduce_kernel<true> : &reduce_kernel<false>;
  launch_as(kernel, p, num_sms, stream);
}

}  // namespace hpc::moe

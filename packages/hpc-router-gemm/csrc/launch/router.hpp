// Launchers of the router's kernels. They run on the current device, in `stream`.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "config/config.hpp"
#include "kernels/params.hpp"

namespace hpc::router {

// y[m, n] = x[m, k] weight[n, k]^T. Row strides in elements; `config` is of this problem.
struct Gemm {
  const void* x;       // bf16
  const void* weight;  // fp32 or bf16, see Weight; terms as RouterWeight.split has them
  float* y;
  int64_t x_stride, weight_stride, y_stride;
  int64_t m;
  int n, k;
  bool prefetch;  // whether weights may be read before the predecessor in the stream has ended
};

template <Weight kWeight>
void launch_stream(const Gemm& gemm, const Config& config, cudaStream_t stream);

template <Weight kWeight>
void launch_tile(const Gemm& gemm, const Config& config, cudaStream_t stream);

// The k best experts of each token.
void launch_topk(const TopkParams& params, cudaStream_t stream);

// CTAs of a kernel with one CTA an SM that are resident at once in clusters of `cluster`, on the current device; 0
// where it takes no such cluster.
int resident_ctas(int cluster);

}  // namespace hpc::router

#include "kernels/index.cuh"

#include <algorithm>

#include "hpc/launch.hpp"
#include "launch/moe.hpp"

namespace hpc::moe {

void launch_index(Quant quant, const IndexParams& p, const QuantiseParams& q, grouped::TileRule rule, bool wide_ids,
                  int num_sms, cudaStream_t stream) {
  LaunchConfig config;
  config.block = dim3(kIndexThreads);
  config.smem_bytes = index_smem_bytes(p.num_experts);
  config.stream = stream;
  config.shared_carveout = true;  // a GEMM follows
  if (q.x == nullptr) quant = Quant::kNone;
  config.cluster = p.ctas;
  int64_t ctas = p.ctas;
  if (quant != Quant::kNone) {
    const int64_t groups = static_cast<int64_t>(q.num_tokens) * (q.hidden / 128);
    const int64_t per_cta = kIndexThreads / 16;
    ctas += std::min<int64_t>((groups + per_cta - 1) / per_cta, std::max(num_sms - p.ctas, 1));
    ctas = (ctas + p.ctas - 1) / p.ctas * p.ctas;  // whole clusters
  }
  config.grid.x = static_cast<unsigned>(ctas);
  const auto run = [&](auto* kernel) {
    // Here, not by launch(): with the kernel's static arrays the default limit is passed before 48 KB.
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, config.smem_bytes),
               "cudaFuncSetAttribute(index_kernel)");
    launch(kernel, config, p, q, rule);
  };
  const auto with_quant = [&]<Quant kQuant>() {
    wide_ids ? run(&index_kernel<int64_t, kQuant>) : run(&index_kernel<int32_t, kQuant>);
  };
  switch (quant) {
    case Quant::kBlock:
      with_quant.operator()<Quant::kBlock>();
      break;
    case Quant::kTensor:
      with_quant.operator()<Quant::kTensor>();
      break;
    case Quant::kNone:
      with_quant.operator()<Quant::kNone>();
      break;
  }
}

}  // namespace hpc::moe

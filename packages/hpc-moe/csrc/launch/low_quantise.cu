#include "kernels/low_quantise.cuh"

#include <algorithm>

#include "hpc/launch.hpp"
#include "launch/low.hpp"

namespace hpc::moe {

namespace {

template <Quant kQuant, int kGroup, bool kEarly>
void run(const QuantiseParams& q, int num_sms, cudaStream_t stream) {
  constexpr int64_t kColumns = 8 * kLowQuantiseThreads;  // a CTA's
  const int64_t columns = static_cast<int64_t>(q.num_tokens) * q.hidden;
  LaunchConfig config;
  config.grid.x = static_cast<unsigned>(std::min<int64_t>((columns + kColumns - 1) / kColumns, 2 * num_sms));
  config.block = dim3(kLowQuantiseThreads);
  config.stream = stream;
  config.shared_carveout = true;  // a GEMM follows
  launch(&low_quantise_kernel<kQuant, kGroup, kEarly>, config, q);
}

}  // namespace

void launch_low_quantise_x(Quant quant, const QuantiseParams& q, int num_sms, cudaStream_t stream) {
  quant == Quant::kBlock ? run<Quant::kBlock, 128, false>(q, num_sms, stream)
                         : run<Quant::kTensor, 128, false>(q, num_sms, stream);
}

void launch_low_quantise_h(const QuantiseParams& q, int group, int num_sms, cudaStream_t stream) {
  group == 128 ? run<Quant::kBlock, 128, true>(q, num_sms, stream) : run<Quant::kBlock, 64, true>(q, num_sms, stream);
}

}  // namespace hpc::moe

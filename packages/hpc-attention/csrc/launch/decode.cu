#include "launch/decode.hpp"

#include <algorithm>
#include <array>
#include <mutex>

#include "hpc/launch.hpp"
#include "kernels/combine_wide.cuh"

namespace hpc::attention {
namespace {

DecodeKernel find_kernel(const DecodeProblem& problem, const DecodeConfig& config) {
  if (config.alone) return decode_kernel_alone(problem.kv, config);
  const auto find = problem.kv == KvKind::kBf16   ? decode_kernel_bf16
                    : problem.kv == KvKind::kFp16 ? decode_kernel_fp16
                                                  : decode_kernel_e4m3;
  const DecodeKernel kernel = find(problem.head_dim, config);
  check(kernel != nullptr, "hpc_attention.decode", "head_dim, stages", "a compiled combination",
        text(problem.head_dim, ", ", config.stages));
  return kernel;
}

}  // namespace

int decode_ctas_per_sm(const DecodeProblem& problem) {
  const DecodeConfig config = decode_config(problem);
  const int resident = resident_ctas_per_sm(find_kernel(problem, config), kDecodeThreads, config.smem_bytes);
  check(resident > 0, "hpc_attention.decode", "device", text(config.smem_bytes, " bytes of shared memory a block"),
        "less");
  return std::min(resident, kDecodeCtasPerSm);
}

bool decode_cluster_fits(int device, int cluster) {
  static std::array<std::array<bool, 3>, kMaxDevices> fits;
  static std::array<std::array<std::once_flag, 3>, kMaxDevices> once;
  device_properties(device);  // checks the index
  const bool couple = cluster == kDecodeCouple;
  const int which = couple ? 2 : (cluster == kDecodeCluster ? 0 : 1);
  std::call_once(once[device][which], [device, cluster, which, couple] {
    const DecodeProblem problem = {.kv = KvKind::kE4m3,
                                   .head_dim = 128,
                                   .rows = 1,
                                   .per_token_scale = !couple,
                                   .plain = couple,
                                   .cluster = cluster};
    const DecodeConfig config = decode_config(problem);
    fits[device][which] = resident_clusters(find_kernel(problem, config), kDecodeThreads, config.smem_bytes, cluster) >=
                          (couple ? kDecodeCouples : 1);
  });
  return fits[device][which];
}

void launch_decode(const DecodeProblem& problem, const DecodeParams& params, int32_t num_ctas, int32_t combine_ctas,
                   cudaStream_t stream) {
  const DecodeConfig config = decode_config(problem);
  launch(find_kernel(problem, config),
         LaunchConfig{.grid = dim3(static_cast<unsigned>(num_ctas * config.row_groups)),
                      .block = dim3(kDecodeThreads),
                      .smem_bytes = config.smem_bytes,
                      .stream = stream,
                      .cluster = config.cluster},
         params);
  if (combine_ctas < 0 || config.cluster > kDecodeCouple) return;
  const DecodeKernel combine = problem.head_dim == 64    ? combine_kernel<64>
                               : problem.head_dim == 256 ? combine_kernel<256>
                               : decode_combines_wide(problem.head_dim, config.row_tiles)
                                   ? (config.plain ? combine_wide_kernel<128, true> : combine_wide_kernel<128>)
                               : config.cluster > 1 ? combine_kernel<128, true, true>
                               : config.plain       ? combine_kernel<128, true>
                                                    : combine_kernel<128>;
  launch(
      combine,
      LaunchConfig{.grid = dim3(static_cast<unsigned>(combine_ctas)), .block = dim3(kCombineThreads), .stream = stream},
      params);
}

}  // namespace hpc::attention

#include "launch/decode_instances.cuh"

namespace hpc::attention {

DecodeKernel decode_kernel_e4m3(int32_t head_dim, const DecodeConfig& config) {
  return decode_instance<KvKind::kE4m3>(head_dim, config);
}

}  // namespace hpc::attention

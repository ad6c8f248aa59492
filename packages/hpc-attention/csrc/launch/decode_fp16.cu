#include "launch/decode_instances.cuh"

namespace hpc::attention {

DecodeKernel decode_kernel_fp16(int32_t head_dim, const DecodeConfig& config) {
  return decode_instance<KvKind::kFp16>(head_dim, config);
}

}  // namespace hpc::attention

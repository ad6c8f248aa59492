#include "launch/decode_instances.cuh"

namespace hpc::attention {

DecodeKernel decode_kernel_e4m3(int32_t head_dim, int32_t row_tiles, int32_t stages) {
  return decode_instance<KvKind::kE4m3>(head_dim, row_tiles, stages);
}

}  // namespace hpc::attention

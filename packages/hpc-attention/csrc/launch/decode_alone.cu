#include "kernels/decode_alone.cuh"

#include "launch/decode.hpp"

namespace hpc::attention {
namespace {

template <KvKind kKind>
DecodeKernel kernel_of(int32_t cluster) {
  return cluster == kDecodeCluster ? decode_alone_kernel<kKind, kDecodeCluster>
                                   : decode_alone_kernel<kKind, kDecodeHeadsCluster>;
}

}  // namespace

DecodeKernel decode_kernel_alone(KvKind kv, const DecodeConfig& config) {
  return kv == KvKind::kE4m3 ? kernel_of<KvKind::kE4m3>(config.cluster) : kernel_of<KvKind::kBf16>(config.cluster);
}

}  // namespace hpc::attention

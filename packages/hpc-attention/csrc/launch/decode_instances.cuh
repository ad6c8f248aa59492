// The attention kernel's instantiations for one kind of cache; each launch/decode_<kind>.cu includes this.
#pragma once

#include "kernels/decode.cuh"
#include "launch/decode.hpp"

namespace hpc::attention {

// Two CTAs an SM where 128 registers a thread are enough: one row tile, and 64 KB in flight or less.
template <KvKind kKind, int kDim, int kRowTiles, int kStages>
constexpr int min_ctas() {
  return kRowTiles == 1 && 2 * decode_smem_bytes(kKind, kDim, kRowTiles, kStages) <= 220 * 1024 ? 2 : 1;
}

template <KvKind kKind, int kDim, int kRowTiles, int kStages = decode_stages(kKind, kDim)>
constexpr DecodeKernel kDecodeInstance =
    decode_kernel<kKind, kDim, kRowTiles, kStages, min_ctas<kKind, kDim, kRowTiles, kStages>()>;

template <KvKind kKind>
DecodeKernel decode_instance(int32_t head_dim, int32_t row_tiles, int32_t stages) {
  // Other depths for the commonest shape, for measurements.
  if (head_dim == 128 && row_tiles == 1) {
    if constexpr (kKind == KvKind::kE4m3) {
      if (stages == 3) return kDecodeInstance<kKind, 128, 1, 3>;
      if (stages == 4) return kDecodeInstance<kKind, 128, 1, 4>;
    } else {
      if (stages == 1) return kDecodeInstance<kKind, 128, 1, 1>;
    }
  }
  if (stages != decode_stages(kKind, head_dim)) return nullptr;
  switch (head_dim) {
    case 64:
      return row_tiles == 1   ? kDecodeInstance<kKind, 64, 1>
             : row_tiles == 2 ? kDecodeInstance<kKind, 64, 2>
                              : kDecodeInstance<kKind, 64, 4>;
    case 128:
      return row_tiles == 1   ? kDecodeInstance<kKind, 128, 1>
             : row_tiles == 2 ? kDecodeInstance<kKind, 128, 2>
                              : kDecodeInstance<kKind, 128, 4>;
    case 256:
      return row_tiles == 1 ? kDecodeInstance<kKind, 256, 1> : kDecodeInstance<kKind, 256, 2>;
    default:
      return nullptr;
  }
}

}  // namespace hpc::attention

// The attention kernel's instantiations for one kind of cache; each launch/decode_<kind>.cu includes this.
#pragma once

#include "kernels/decode_kernel.cuh"
#include "launch/decode.hpp"

namespace hpc::attention {

template <KvKind kKind, int kDim, int kRowTiles, bool kPlain = false, bool kAbreast = false>
constexpr DecodeKernel kDecodeInstance =
    decode_kernel<kKind, kDim, kRowTiles, decode_stages(kKind, kDim, kRowTiles), kPlain, kAbreast>;

template <KvKind kKind>
DecodeKernel decode_instance(int32_t head_dim, const DecodeConfig& config) {
  const int32_t row_tiles = config.row_tiles;
  if (head_dim == 128 && row_tiles == 1 && config.stages == decode_other_stages(kKind)) {
    return decode_kernel<kKind, 128, 1, decode_other_stages(kKind)>;
  }
  if (config.stages != decode_stages(kKind, head_dim, row_tiles)) return nullptr;
  if (config.cluster > 1) {
    constexpr int kStages = decode_stages(kKind, 128, 1);
    if (head_dim != 128 || row_tiles != 1) return nullptr;
    if (config.cluster == kDecodeCouple) {
      if constexpr (decode_has_plain(kKind, 128)) {
        return config.abreast ? decode_kernel<kKind, 128, 1, kStages, true, true, kDecodeCouple>
                              : decode_kernel<kKind, 128, 1, kStages, true, false, kDecodeCouple>;
      }
      return nullptr;
    }
    const bool one = config.cluster == kDecodeCluster;
    if constexpr (decode_has_plain(kKind, 128)) {
      if (config.plain) {
        return one ? decode_kernel<kKind, 128, 1, kStages, true, false, kDecodeCluster>
                   : decode_kernel<kKind, 128, 1, kStages, true, false, kDecodeHeadsCluster>;
      }
    }
    return one ? decode_kernel<kKind, 128, 1, kStages, false, false, kDecodeCluster>
               : decode_kernel<kKind, 128, 1, kStages, false, false, kDecodeHeadsCluster>;
  }
  if constexpr (decode_has_plain(kKind, 128)) {
    if (config.plain) {
      return config.abreast   ? kDecodeInstance<kKind, 128, 1, true, true>
             : row_tiles == 1 ? kDecodeInstance<kKind, 128, 1, true>
             : row_tiles == 2 ? kDecodeInstance<kKind, 128, 2, true>
                              : kDecodeInstance<kKind, 128, 4, true>;
    }
  }
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

// Stand-in for hpc/fp8.cuh.
#pragma once

#include "emulation.hpp"

namespace hpc {

inline void e4m3x4_to_half2x2(uint32_t bytes, uint32_t& low, uint32_t& high) {
  const auto half = [&](int at) {
    return uint32_t{__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(bytes >> 8 * at), __NV_E4M3).x};
  };
  low = half(0) | half(1) << 16;
  high = half(2) | half(3) << 16;
}

}  // namespace hpc

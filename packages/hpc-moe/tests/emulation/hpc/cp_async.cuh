// Stand-in for hpc/cp_async.cuh.
#pragma once

#include "emulation.hpp"

namespace hpc {

inline void cp_async_16(uint32_t smem, const void* global) {
  emulation::copy(smem, global, 16, 16);
}
inline void cp_async_16_zfill(uint32_t smem, const void* global, int bytes) {
  emulation::copy(smem, global, 16, bytes);
}
inline void cp_async_4(uint32_t smem, const void* global) {
  emulation::copy(smem, global, 4, 4);
}
inline void cp_async_arrive(uint32_t barrier) {
  emulation::arrive_after_copies(barrier);
}

}  // namespace hpc

// For the emulation: clusters of one CTA.
#pragma once

#include "emulation.hpp"

namespace hpc {

inline uint32_t cluster_address(uint32_t shared, int) {
  return shared;
}
inline int32_t load_cluster_s32(uint32_t) {
  emulation::check(false, "clusters are not emulated");
  return 0;
}
inline void cluster_arrive_release() {}
inline void cluster_arrive_relaxed() {}
inline void cluster_wait() {}

}  // namespace hpc

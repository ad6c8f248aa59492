// Stand-in for hpc/cluster.cuh: clusters of two, where the run has them. A cluster address has the block's number in
// the upper bits.
#pragma once

#include "emulation.hpp"

namespace hpc {

inline void cluster_arrive_relaxed() {
  emulation::cluster_arrive();
}
inline void cluster_arrive_release() {
  emulation::cluster_arrive();
}
inline void cluster_wait() {
  emulation::cluster_wait();
}
inline uint32_t cluster_address(uint32_t shared, uint32_t rank) {
  return emulation::clusters ? shared | rank << 24 : shared;
}
inline int32_t load_cluster_s32(uint32_t) {
  emulation::check(false, "reads from other blocks are not emulated");
  return 0;
}
inline void mbarrier_arrive_cluster(uint32_t address) {
  emulation::cluster_mbarrier_arrive(address & 0xFFFFFF, address >> 24);
}
inline void store_async_16(uint32_t address, uint32_t barrier, float4 v) {
  emulation::check(address >> 24 != (blockIdx.x & 1), "stores to the own block are not emulated");
  std::vector<uint8_t> contents(16);
  std::memcpy(contents.data(), &v, 16);
  emulation::peer_bulk_copy(address & 0xFFFFFF, std::move(contents), barrier & 0xFFFFFF);
}

}  // namespace hpc

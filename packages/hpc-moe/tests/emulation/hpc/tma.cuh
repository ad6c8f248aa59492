// Stand-in for hpc/tma.cuh: a CUtensorMap holds an EmulatedMap; boxes land in the 128-byte swizzle.
#pragma once

#include <array>

#include "emulation.hpp"

// As TensorMapSpec of hpc/tensor_map.hpp, of bytes.
struct EmulatedMap {
  const uint8_t* base;
  uint64_t shape[5], stride[5];
  uint32_t box[5];
};
static_assert(sizeof(EmulatedMap) <= sizeof(CUtensorMap));

namespace hpc {

inline void tma_prefetch_map(const CUtensorMap*) {}
inline void tma_prefetch_4d(const CUtensorMap*, int, int, int, int, uint64_t) {}
inline void tma_prefetch_5d(const CUtensorMap*, int, int, int, int, int, uint64_t) {}
inline uint64_t l2_evict_first() {
  return 1;
}
inline uint64_t l2_evict_normal() {
  return 2;
}

inline void tma_load(uint32_t smem, const CUtensorMap* map, uint32_t barrier, std::array<int, 5> first,
                     bool both = false) {
  EmulatedMap m;
  std::memcpy(&m, map, sizeof(m));
  std::vector<uint8_t> contents;
  std::array<uint32_t, 5> at = {};
  for (;;) {
    uint64_t offset = 0;
    bool inside = true;
    for (int d = 0; d < 5; ++d) {
      const int64_t place = first[static_cast<size_t>(d)] + static_cast<int64_t>(at[static_cast<size_t>(d)]);
      inside &= place >= 0 && place < static_cast<int64_t>(m.shape[d]);
      offset += static_cast<uint64_t>(place) * m.stride[d];
    }
    contents.push_back(inside ? m.base[offset] : 0);
    size_t d = 0;
    while (d < 5 && ++at[d] == m.box[d]) at[d++] = 0;
    if (d == 5) break;
  }
  std::vector<uint8_t> swizzled(contents.size());
  for (size_t i = 0; i < contents.size(); ++i) {
    const size_t row = i / 128, chunk = i / 16 % 8;
    swizzled[row * 128 + ((chunk ^ (row & 7)) << 4) + i % 16] = contents[i];
  }
  if (both) emulation::peer_bulk_copy(smem, swizzled, barrier);
  emulation::bulk_copy(smem, std::move(swizzled), barrier);
}

inline void tma_load_2d(uint32_t smem, const CUtensorMap* map, uint32_t barrier, int c0, int c1) {
  tma_load(smem, map, barrier, {c0, c1, 0, 0, 0});
}
inline void tma_load_4d(uint32_t smem, const CUtensorMap* map, uint32_t barrier, int c0, int c1, int c2, int c3,
                        uint64_t) {
  tma_load(smem, map, barrier, {c0, c1, c2, c3, 0});
}
inline void tma_load_5d(uint32_t smem, const CUtensorMap* map, uint32_t barrier, int c0, int c1, int c2, int c3, int c4,
                        uint64_t) {
  tma_load(smem, map, barrier, {c0, c1, c2, c3, c4});
}
inline void tma_load_4d_multicast(uint32_t smem, const CUtensorMap* map, uint32_t barrier, int c0, int c1, int c2,
                                  int c3, uint16_t, uint64_t) {
  tma_load(smem, map, barrier, {c0, c1, c2, c3, 0}, true);
}
inline void tma_load_5d_multicast(uint32_t smem, const CUtensorMap* map, uint32_t barrier, int c0, int c1, int c2,
                                  int c3, int c4, uint16_t, uint64_t) {
  tma_load(smem, map, barrier, {c0, c1, c2, c3, c4}, true);
}

}  // namespace hpc

// Stand-in for hpc/wgmma_ss.cuh: each thread computes its own elements, in fp32, when the group is waited for.
#pragma once

#include <array>

#include "emulation.hpp"

namespace hpc {

enum class WgmmaType { kE4m3, kBf16 };

inline float e4m3_value(uint8_t code) {
  static const std::array<float, 256> table = [] {
    std::array<float, 256> values;
    for (int i = 0; i < 256; ++i) {
      __nv_fp8_e4m3 value;
      value.__x = static_cast<__nv_fp8_storage_t>(i);
      values[static_cast<size_t>(i)] = static_cast<float>(value);
    }
    return values;
  }();
  return table[code];
}
inline float bf16_value(const uint8_t* bytes) {
  uint16_t half;
  std::memcpy(&half, bytes, 2);
  return __int_as_float(half << 16);
}

template <int Count>
void wgmma_fence(float (&)[Count]) {}
inline void wgmma_arrive() {}
inline void wgmma_commit() {
  emulation::commit_products();
}
template <int Pending>
void wgmma_wait() {
  emulation::wait_for_products(Pending);
}
inline uint64_t wgmma_descriptor(uint32_t smem) {
  return (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 16) | ((smem >> 4) & 0x3FFF);
}

// Value k of a row of the operand that a descriptor's address and step name.
template <WgmmaType Type>
float operand(uint64_t descriptor, int row, int k) {
  const uint32_t address = static_cast<uint32_t>(descriptor & 0x3FFF) << 4, start = address & ~1023u;
  const uint32_t byte = (address & 1023u) + static_cast<uint32_t>(Type == WgmmaType::kE4m3 ? k : 2 * k);
  const uint32_t chunk = (byte >> 4) ^ static_cast<uint32_t>(row & 7);
  const uint32_t stride = static_cast<uint32_t>(descriptor >> 32 & 0x3FFF) << 4, eight = static_cast<uint32_t>(row) / 8;
  const uint8_t* at =
      emulation::shared(start + eight * stride + static_cast<uint32_t>(row) % 8 * 128 + (chunk << 4) + (byte & 15), 2);
  return Type == WgmmaType::kE4m3 ? e4m3_value(*at) : bf16_value(at);
}

template <WgmmaType Type, int N>
void wgmma_ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
  const uint64_t stride = uint64_t{0x3FFF} << 32;
  emulation::check(((a ^ wgmma_descriptor(0)) & ~stride) >> 16 == 0 && ((b ^ wgmma_descriptor(0)) & ~stride) >> 16 == 0,
                   "descriptor");
  const int lane = emulation::lane(), warp = static_cast<int>(threadIdx.x) % 128 / 32;
  float* out = d;
  emulation::products([=] {
    constexpr int kK = Type == WgmmaType::kE4m3 ? 32 : 16;
    float rows[2][kK];
    for (int h = 0; h < 2; ++h) {
      for (int k = 0; k < kK; ++k) rows[h][k] = operand<Type>(a, 16 * warp + lane / 4 + 8 * h, k);
    }
    for (int j = 0; j < N / 8; ++j) {
      for (int c = 0; c < 2; ++c) {
        float column[kK];
        for (int k = 0; k < kK; ++k) column[k] = operand<Type>(b, 8 * j + 2 * (lane % 4) + c, k);
        for (int h = 0; h < 2; ++h) {
          float& sum = out[4 * j + 2 * h + c];
          if (!accumulate) sum = 0.0f;
          for (int k = 0; k < kK; ++k) sum += rows[h][k] * column[k];
        }
      }
    }
  });
}

}  // namespace hpc

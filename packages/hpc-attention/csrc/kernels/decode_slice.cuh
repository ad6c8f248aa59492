// Where a slice of keys and values lies in shared memory.
#pragma once

#include "../config/decode.hpp"

namespace hpc::attention {

// A slice in shared memory: rows of keys, then rows of values, each row its bytes in global memory. Every
// 128-byte line is filled by neighbouring lanes from neighbouring addresses. Inside a line the 16-byte columns are
// exchanged by an XOR with a function of the row, so that neither the filling nor the reading of fragments meets a bank
// twice:
//   keys   lane (g, t) reads columns t + 4 j of rows g and g + 8 of 16         XOR 4 (row mod 2)
//   values lane (g, t) reads column g of rows 2t, 2t + 1, 2t + 8, 2t + 9 of 16 XOR 2 (row / 2 mod 4)
// (Rows of 64 bytes lie two in a line; keys then need no exchange, and a lane reads 8 bytes of values.)
template <KvKind kKind, int kDim, int kTokensOfSlice>
struct SliceLayout {
  static constexpr int kTokens = kTokensOfSlice;
  static constexpr int kElementBytes = kv_bytes(kKind);
  static constexpr int kRowBytes = kDim * kElementBytes;
  static constexpr int kValuesAt = kTokens * kRowBytes;
  static constexpr int kSlotBytes = 2 * kValuesAt;
  // Filling: instruction i takes rows i * kRows + lane / kLanes, 16 bytes a lane.
  static constexpr int kLanes = kRowBytes / 16;
  static constexpr int kRows = 32 / kLanes;
  static constexpr int kFills = kTokens / kRows;
  // Reading.
  static constexpr int kKeyChunks = kRowBytes / 64;
  static constexpr int kValueChunkBytes = kRowBytes / 8 < 16 ? kRowBytes / 8 : 16;
  static constexpr int kValueChunks = kRowBytes / 8 / kValueChunkBytes;
  static constexpr int kValueElements = kValueChunkBytes / kElementBytes;  // of a chunk

  // Where a lane's 16 bytes of instruction i go: fill_of(at, i), `at` being fill_from(lane) plus the beginning of the
  // keys or the values, a multiple of 128 bytes. So an instruction's place costs no arithmetic of its own.
  static __device__ __forceinline__ uint32_t fill_from(bool values, uint32_t lane) {
    const uint32_t own = lane / kLanes;  // row of the instruction: row = i * kRows + own, the sum never carries
    return (lane * 16) ^ 16 * (values ? 2 * (own / 2 % 4) : (kRowBytes > 64 ? 4 * (own % 2) : 0));
  }
  static __device__ __forceinline__ uint32_t fill_of(bool values, uint32_t from, int i) {
    return (from ^ 16 * (values ? 2 * (i * kRows / 2 % 4) : (kRowBytes > 64 ? 4 * (i * kRows % 2) : 0))) + i * 512;
  }
  // Where a lane reads keys of row g in 16-byte column t + 4 * chunk; row g + 8 lies 8 rows on.
  static __device__ __forceinline__ uint32_t key_at(int chunk, int32_t g, int32_t t) {
    const uint32_t at = g * kRowBytes + 16 * t + (kRowBytes > 64 ? 64 * (g & 1) : 0);
    return (at ^ (64 * (chunk & 1))) + 128 * (chunk / 2);
  }
  // Where a lane reads its chunk of row 2t + odd; rows 2t + 8 and 2t + 9 lie 8 rows on.
  static __device__ __forceinline__ uint32_t value_at(int chunk, int odd, int32_t g, int32_t t) {
    if constexpr (kRowBytes == 64) {
      return (t * 128 + 16 * ((g >> 1) ^ (2 * t)) + 8 * (g & 1)) ^ (64 * odd);
    } else {
      return 2 * t * kRowBytes + 16 * (g ^ (2 * t)) + odd * kRowBytes + 128 * chunk;
    }
  }
};

}  // namespace hpc::attention

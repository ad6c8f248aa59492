// Rows of y in 10 bits a value, where they cross memory (Config::compact).
//
// A piece is 16 values in five words: 9 bits each, and a scale of 14, a float's exponent and 6 bits, the largest
// magnitude / 255 rounded up. A value is 256 + v / scale to nearest, 1 to 511: off by at most 1 / 510 of the largest,
// by 0.0020 in rms of normal values (a bf16 by 0.0016). A thread of the down kernel has columns 32 i + 8 t + k of a
// unit of 128 (t its lane of four, i < 4, k < 8), two pieces: of i / 2 = 0 and 1.
//
// A row: the pieces' first four words, a line a unit, [i / 2][t]; then their fifth, 64 bytes for each two units, [t]
// [unit][i / 2]. Whole sectors all.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/activation.cuh"
#include "kernels/params.hpp"

namespace hpc::moe {

constexpr uint32_t kNineBits = 0x01FF01FF;  // of both halves of a word

// What values times `scale` are multiplied with, and the 14 bits of their scale: the largest is `largest` times
// `scale`. Nothing below 2^-117 is kept: with a scale of 0 any code is 0. NaN stays.
__device__ __forceinline__ float compact_inverse(float largest, float scale, uint32_t& bits) {
  const float size = largest * fabsf(scale);
  bits = size < 0x1p-117f ? 0 : (__float_as_uint(size * (1.0f / 255.0f)) + 0x1FFFF) >> 17;
  return __fdividef(scale, __uint_as_float(bits << 17));
}

// Two values as 256 + value * inverse, rounded, in the halves of a word: the last bits of a sum with 1.5 * 2^23.
__device__ __forceinline__ uint32_t compact_pair(float first, float second, float inverse) {
  constexpr float kLift = 12582912.0f + 256.0f;
  const uint32_t low = __float_as_uint(fmaf(first, inverse, kLift));
  const uint32_t high = __float_as_uint(fmaf(second, inverse, kLift));
  return __byte_perm(low, high, 0x5410);
}

// Eight pairs and their scale as five words: five pairs in their place, the others' bits in the seven that are free in
// each half.
__device__ __forceinline__ void compact_words(const uint32_t (&pair)[8], uint32_t scale, uint32_t (&word)[5]) {
  word[0] = (pair[0] & kNineBits) | (pair[5] << 9 & 0xFE00FE00);
  word[1] = (pair[1] & kNineBits) | (pair[5] << 2 & 0x06000600) | (pair[7] << 11 & 0xF800F800);
  word[2] = (pair[2] & kNineBits) | (pair[6] << 9 & 0xFE00FE00);
  word[3] = (pair[3] & kNineBits) | (pair[6] << 2 & 0x06000600) | (pair[7] << 6 & 0x78007800);
  word[4] = (pair[4] & kNineBits) | (scale << 9 & 0x0000FE00) | (scale << 18 & 0xFE000000);
}

// The same back; each half is an fp16 of 1024 + the value.
constexpr float kCompactZero = 1280.0f;
__device__ __forceinline__ void compact_pairs(const uint32_t (&word)[5], uint32_t (&pair)[8]) {
  constexpr uint32_t kLift = 0x64006400;
#pragma unroll
  for (int i = 0; i < 5; ++i) pair[i] = (word[i] & kNineBits) | kLift;
  pair[5] = (word[0] >> 9 & 0x007F007F) | (word[1] >> 2 & 0x01800180) | kLift;
  pair[6] = (word[2] >> 9 & 0x007F007F) | (word[3] >> 2 & 0x01800180) | kLift;
  pair[7] = (word[1] >> 11 & 0x001F001F) | (word[3] >> 6 & 0x01E001E0) | kLift;
}
__device__ __forceinline__ float compact_scale(uint32_t fifth) {
  return __uint_as_float((fifth << 8 & 0x00FE0000) | (fifth >> 1 & 0x7F000000));
}
__device__ __forceinline__ float2 compact_values(uint32_t pair) {
  __half2 halves;
  memcpy(&halves, &pair, sizeof(halves));
  return __half22float2(halves);
}

// A thread's pieces of a unit of a row.
struct CompactPieces {
  uint32_t word[2][5];
};

// Of 32 sums, of columns 32 i + 8 t + k in the order of i and k.
__device__ __forceinline__ CompactPieces compact_pieces(const float (&v)[32], float scale) {
  CompactPieces pieces;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float* of = &v[16 * i];
    float largest[2] = {fabsf(of[0]), fabsf(of[1])};  // not one long chain
#pragma unroll
    for (int j = 2; j < 16; ++j) largest[j % 2] = max_nan(largest[j % 2], fabsf(of[j]));
    uint32_t bits, pair[8];
    const float inverse = compact_inverse(max_nan(largest[0], largest[1]), scale, bits);
#pragma unroll
    for (int j = 0; j < 8; ++j) pair[j] = compact_pair(of[2 * j], of[2 * j + 1], inverse);
    compact_words(pair, bits, pieces.word[i]);
  }
  return pieces;
}

// Stores the lane's pieces of two units of a row, or of one. Lanes of two neighbouring rows tell each other a half, so
// that eight lanes store a line at a time. `even`: the first of the two rows; `live`: how many of them exist.
template <int kUnits>
__device__ __forceinline__ void store_compact(uint8_t* even, int64_t row_bytes, int live, int columns, int unit,
                                              const CompactPieces (&pieces)[kUnits]) {
  const int t = threadIdx.x % 4;
  const bool odd = threadIdx.x & 4;
  uint8_t* lines = even + unit * 128 + (odd ? 64 : 0) + t * 16;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    uint32_t first[4], second[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t low = pieces[u].word[0][i], high = pieces[u].word[1][i];
      const uint32_t other = __shfl_xor_sync(~0u, odd ? low : high, 4);
      first[i] = odd ? other : low;
      second[i] = odd ? high : other;
    }
    if (live > 0) *reinterpret_cast<uint4*>(lines + u * 128) = make_uint4(first[0], first[1], first[2], first[3]);
    if (live > 1) {
      *reinterpret_cast<uint4*>(lines + row_bytes + u * 128) = make_uint4(second[0], second[1], second[2], second[3]);
    }
  }
  if (live <= (odd ? 1 : 0)) return;
  uint8_t* fifth = even + (odd ? row_bytes : 0) + (columns + 255) / 256 * 256 + unit / 2 * 64 + t * 16;
  if constexpr (kUnits == 2) {
    *reinterpret_cast<uint4*>(fifth) =
        make_uint4(pieces[0].word[0][4], pieces[0].word[1][4], pieces[1].word[0][4], pieces[1].word[1][4]);
  } else {
    *reinterpret_cast<uint2*>(fifth + unit % 2 * 8) = make_uint2(pieces[0].word[0][4], pieces[0].word[1][4]);
  }
}

}  // namespace hpc::moe

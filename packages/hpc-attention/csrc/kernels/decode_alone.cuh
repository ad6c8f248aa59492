// Decode for a plan's one request of few tokens, whose every (request, KV head) pair has a cluster of 16 or 8 CTAs
// (plain calls: see plain_params()). decode.cuh's kernels walk over any map; here a CTA has at most 256 tokens, which
// it finds from the request's length, and before the wait all of them are in registers, ready to be multiplied. A warp
// has
//
//   the keys of its 32 tokens (operand A: straight from memory, see mma.cuh), and
//   of all tokens 16 elements of the values (operand A, through shared memory).
//
// Behind the wait come the query, scores, the rows' largest through shared memory to all warps, and weights relative to
// these the same way. A thread then holds one vector of the CTA's result (decode_merge.cuh), and pushes it to its owner
// (decode_cluster.cuh).
//
// Keys of e4m3 become bf16 (exactly), so the query is multiplied as it is. Tokens of this step are read behind the
// wait: their lines are brought into L2 before. A CTA's tokens end at the end of its places, so they lie in the last 16
// alone.
#pragma once

#include "decode_cluster.cuh"
#include "decode_pieces.cuh"
#include "hpc/pdl.cuh"

namespace hpc::attention {

template <KvKind kKind, int kCluster>
class AloneDecode {
 public:
  static constexpr int kDim = 128, kTokens = kDecodeAloneTokens, kGroups = kTokens / 8, kSlots = kTokens / 16;
  static constexpr bool kFp8 = kKind == KvKind::kE4m3;
  static constexpr Half kWeights = kFp8 ? Half::kFp16 : Half::kBf16;
  static constexpr int kRowBytes = kDim * kv_bytes(kKind), kLanes = kRowBytes / 16, kRows = 32 / kLanes;
  static constexpr int kPitch = decode_alone_pitch(kKind);
  static constexpr DecodeAloneSmem kSmem = decode_alone_smem(kKind, kCluster);
  static constexpr float kShift = 7.0f;  // as in decode_attend.cuh

  __device__ __forceinline__ AloneDecode(const DecodeParams& p, char* smem)
      : p_(p),
        warp_(__shfl_sync(kAllLanes, static_cast<int32_t>(threadIdx.x) / 32, 0)),
        lane_(static_cast<int32_t>(threadIdx.x) % 32),
        g_(lane_ >> 2),
        t_(lane_ & 3),
        base_(shared_address(smem)),
        kv_head_(static_cast<int32_t>(blockIdx.x) / kCluster) {}

  __device__ __forceinline__ void run() {
    const bool early = p_.early_slices > 0;
    if (!early) pdl_wait();
    pdl_trigger();
    const auto thread = static_cast<int32_t>(threadIdx.x), rank = static_cast<int32_t>(cluster_rank());
    length_ = p_.batch > 0 ? min(min(ld_global32(&p_.requests[0].seq_len), p_.capacity), kTokens * kCluster) : 0;
    // Groups of 8 tokens: as many a CTA, an even number; the last ones of its places.
    const int32_t groups = (length_ + 7) / 8, each = max(((groups + kCluster - 1) / kCluster + 1) & -2, 2);
    const int32_t count = min(max(groups - rank * each, 0), each);
    begin_ = 8 * rank * each;
    first_ = begin_ + 8 * (count - kGroups);
    end_ = min(begin_ + 8 * count, length_);
    old_ = max(min(end_, length_ - p_.q_len), begin_);
    ClusterRun own = {};
    own.pair = kv_head_;
    own.pieces = (groups + each - 1) / each;
    const ClusterSum<kDim, kCluster> cluster(p_, base_ + kSmem.cluster, base_ + kSmem.barrier, own);
    if (thread == 0) {
      mbarrier_init(base_ + kSmem.barrier, 1);
      mbarrier_init_fence();
      cluster.expect();
    }
    cluster.begin();

    uint32_t ids[4];  // pages of this warp's groups of 8
#pragma unroll
    for (int i = 0; i < 4; ++i) ids[i] = page_id(first_ + 32 * warp_ + 8 * i);
    const int32_t fresh = old_ + thread / kLanes;  // a token of this step whose values this thread brings, 16 bytes
    const char* fresh_value = row_at(p_.v, page_id(fresh), fresh) + thread % kLanes * 16;
    const uint32_t fresh_at = values_at(fresh - first_) + thread % kLanes * 16;
    const bool brings = fresh < end_;
    // Keys of this warp's tokens, rows g and g + 8 of each half, in the order of k, two elements a word.
    uint32_t keys[2][2][16];
    const char* rows[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int32_t token = token_of(half, i);
        rows[half][i] = row_at(p_.k, ids[2 * half + i], token) + 16 * t_;
        if (half == 0) load_keys(rows[0][i], token >= begin_ && token < old_, keys[0][i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 32 / kRows; ++i) {
      const int32_t place = 32 * warp_ + i * kRows + lane_ / kLanes, token = first_ + place, column = lane_ % kLanes;
      const char* from = row_at(p_.v, ids[i * kRows / 8], token) + column * 16;
      cp_async16(values_at(place) + column * 16, from, token >= begin_ && token < old_ ? 16 : 0);
    }
    cp_async_commit();
    // What is read right behind the wait.
    if (brings && thread % 8 == 0) prefetch_l2(fresh_value);
    const bool fresh_keys = warp_ == kDecodeWarps - 1 && old_ < end_;
    if (fresh_keys) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (is_of(1, i) && t_ < kRowBytes / 128) prefetch_l2(rows[1][i] + 112 * t_);
      }
    }
    const char* query = query_row<kKind, kDim>(p_, 0, kv_head_, min(g_, p_.rows - 1));
    if (warp_ == 1 && t_ < 2) prefetch_l2(query + 128 * t_);
    const auto zero = static_cast<uint32_t>(length_ >> 31);
    const int32_t row_ends[2] = {row_end(2 * t_), row_end(2 * t_ + 1)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      convert_keys(keys[0][i]);
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        // Through an operation, so that four words of an operand lie side by side before they are wanted.
        if (!kFp8) keys[0][i][j] ^= zero;
        keys[1][i][j] = 0;
      }
    }
    const ResultPlace to = cluster.place();
    char* const outputs[2] = {p_.out + 2 * (to.rows[0].element + to.d), p_.out + 2 * (to.rows[1].element + to.d)};
    const auto owner = cluster.owner_of(thread);
    uint32_t values[kSlots][4];
    QueryRow<kDim> q;
    uint4 fresh_words = make_uint4(0, 0, 0, 0);
    // Keys of the second half, and behind the wait those that are of this step: by the same instructions, which come
    // late where they have not run before.
    const int32_t passes = 2 + static_cast<int32_t>(zero);
#pragma unroll 1
    for (int32_t pass = 0; pass < passes; ++pass) {
      if (pass == 1) {
        cp_async_wait<0>();
        __syncthreads();
        cluster.wait_for_others();
#pragma unroll
        for (int slot = 0; slot < kSlots - 1; ++slot) read_values(slot, values[slot]);  // the last may be of this step
        // A sum of all that is ready, which nothing comes of: so that none of it is left for behind the wait.
        uint32_t ready = static_cast<uint32_t>(row_ends[0] ^ row_ends[1]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const auto address = reinterpret_cast<uint64_t>(outputs[i]);
          ready ^= static_cast<uint32_t>(address) ^ static_cast<uint32_t>(address >> 32);
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) ready ^= (i < 15 ? values[i][j] : 0u) ^ keys[j >> 1][j & 1][i];
        }
        if (early || ready == 0x55aa1234u) pdl_wait();
        if (brings) fresh_words = ld_global128(fresh_value);
        read_query<kKind, kDim>(p_, [&](int offset) { return ld_global128(query + offset); }, g_ < p_.rows, t_, q);
        if (!fresh_keys) break;
      }
      uint32_t words[2][16];
#pragma unroll
      for (int i = 0; i < 2; ++i) load_keys(rows[1][i], is_of(pass, i), words[i]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (!__any_sync(kAllLanes, is_of(pass, i))) continue;
        convert_keys(words[i]);
#pragma unroll
        for (int j = 0; j < 16; ++j) keys[1][i][j] = is_of(pass, i) ? words[i][j] : keys[1][i][j];
      }
    }
    if (brings) sts128(fresh_at, fresh_words);

    float s[2][4];
    score(keys, q, s);
    float4 ml = weigh(row_ends, s);
    __syncthreads();
    read_values(kSlots - 1, values[kSlots - 1]);
    const float4 o = add_all(values, ml);
    if (count > 0) cluster.push(owner, o, ml);
    cluster.add([&](const float4& sum, const float4& sum_ml) {
      const float f0 = output_factor(p_, to.rows[0], sum_ml.x, sum_ml.y, p_.v_factor, false);
      const float f1 = output_factor(p_, to.rows[1], sum_ml.z, sum_ml.w, p_.v_factor, false);
      const uint32_t first = output_pair(p_, sum.x * f0, sum.z * f0), second = output_pair(p_, sum.y * f1, sum.w * f1);
      if (to.any[0]) *reinterpret_cast<uint32_t*>(outputs[0]) = first;
      if (to.any[1]) *reinterpret_cast<uint32_t*>(outputs[1]) = second;
      if (p_.lse == nullptr || to.d > 0) return;
      if (to.any[0]) store_lse(p_, to.rows[0], sum_ml.x, sum_ml.y);
      if (to.any[1]) store_lse(p_, to.rows[1], sum_ml.z, sum_ml.w);
    });
  }

 private:
  // The token of this warp's half, row g or g + 8 (i).
  __device__ __forceinline__ int32_t token_of(int half, int i) const {
    return first_ + 32 * warp_ + 16 * half + 8 * i + g_;
  }
  // Whether its row of keys in the second half is a token of this step (pass 1), or of those before (0).
  __device__ __forceinline__ bool is_of(int32_t pass, int i) const {
    const int32_t token = token_of(1, i);
    return token >= (pass == 0 ? begin_ : old_) && token < (pass == 0 ? old_ : end_);
  }
  // One past the last token that a query row sees.
  __device__ __forceinline__ int32_t row_end(int32_t row) const {
    return length_ - p_.q_len + 1 + row_token(p_, min(row, p_.rows - 1));
  }
  __device__ __forceinline__ uint32_t values_at(int32_t place) const { return base_ + kSmem.values + place * kPitch; }

  __device__ __forceinline__ uint32_t weights_at(int32_t warp) const {
    return base_ + kSmem.weights + warp * 512 + lane_ * 16;
  }

  // Scores in units of log2: tokens g and g + 8 of each half, rows 2t and 2t + 1.
  __device__ __forceinline__ void score(const uint32_t (&keys)[2][2][16], const QueryRow<kDim>& q,
                                        float (&s)[2][4]) const {
    float sums[2][2][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        mma_m16n8k16<Half::kBf16>(sums[half][step % 2], keys[half][0][2 * step], keys[half][1][2 * step],
                                  keys[half][0][2 * step + 1], keys[half][1][2 * step + 1], q.words[2 * step],
                                  q.words[2 * step + 1]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[half][i] = (sums[half][0][i] + sums[half][1][i]) * p_.scale;
    }
  }

  // Puts down the weights of this warp's tokens, and their sum; the reference of rows 2t and 2t + 1, all warps' the
  // same, in x and z.
  __device__ __forceinline__ float4 weigh(const int32_t (&row_ends)[2], float (&s)[2][4]) const {
    float reference[2] = {__uint_as_float(0xff800000u), __uint_as_float(0xff800000u)}, l[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int32_t token = token_of(half, i >> 1);
        if (token < begin_ || token >= row_ends[i & 1]) s[half][i] = __uint_as_float(0xff800000u);
        reference[i & 1] = fmaxf(reference[i & 1], s[half][i]);
      }
    }
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) {
      reference[0] = fmaxf(reference[0], __shfl_xor_sync(kAllLanes, reference[0], mask));
      reference[1] = fmaxf(reference[1], __shfl_xor_sync(kAllLanes, reference[1], mask));
    }
    if (g_ == 0) put_pair(base_ + kSmem.largest, reference);
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) {
      const uint2 m = lds64(base_ + kSmem.largest + w * 32 + t_ * 8);
      reference[0] = fmaxf(reference[0], __uint_as_float(m.x));
      reference[1] = fmaxf(reference[1], __uint_as_float(m.y));
    }
    uint32_t weights[2][2];
    reference[0] = fmaxf(kNoMax, reference[0] - kShift), reference[1] = fmaxf(kNoMax, reference[1] - kShift);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[half][i] = exp2_approx(s[half][i] - reference[i & 1]);
      l[0] += s[half][0] + s[half][2], l[1] += s[half][1] + s[half][3];
      weights[half][0] = transpose_8x8(pack_half2<kWeights>(s[half][0], s[half][1]));
      weights[half][1] = transpose_8x8(pack_half2<kWeights>(s[half][2], s[half][3]));
    }
    sts128(weights_at(warp_), make_uint4(weights[0][0], weights[0][1], weights[1][0], weights[1][1]));
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) {
      l[0] += __shfl_xor_sync(kAllLanes, l[0], mask);
      l[1] += __shfl_xor_sync(kAllLanes, l[1], mask);
    }
    if (g_ == 0) put_pair(base_ + kSmem.sums, l);
    return make_float4(reference[0], 0.0f, reference[1], 0.0f);
  }
  // What this warp has of rows 2t and 2t + 1.
  __device__ __forceinline__ void put_pair(uint32_t to, const float (&pair)[2]) const {
    sts32(to + warp_ * 32 + t_ * 8, __float_as_uint(pair[0]));
    sts32(to + warp_ * 32 + t_ * 8 + 4, __float_as_uint(pair[1]));
  }

  // Of all warps' tokens elements 16 w + 2g and the next one, rows 2t and 2t + 1: the CTA's vector of this thread's
  // number; and the sums.
  __device__ __forceinline__ float4 add_all(const uint32_t (&values)[kSlots][4], float4& ml) const {
    constexpr int kChains = 4;  // of them none waits for another
    float sum[kChains][4] = {};
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) {
      const uint4 b = lds128(weights_at(w));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t (&a)[4] = values[2 * w + half];
        mma_m16n8k16<kWeights>(sum[(2 * w + half) % kChains], a[0], a[1], a[2], a[3], half == 0 ? b.x : b.z,
                               half == 0 ? b.y : b.w);
      }
    }
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) {
      const uint2 l = lds64(base_ + kSmem.sums + w * 32 + t_ * 8);
      ml.y += __uint_as_float(l.x), ml.w += __uint_as_float(l.y);
    }
    return make_float4(
        (sum[0][0] + sum[1][0]) + (sum[2][0] + sum[3][0]), (sum[0][1] + sum[1][1]) + (sum[2][1] + sum[3][1]),
        (sum[0][2] + sum[1][2]) + (sum[2][2] + sum[3][2]), (sum[0][3] + sum[1][3]) + (sum[2][3] + sum[3][3]));
  }

  // The page of a token; 0 where it is none of this CTA's.
  __device__ __forceinline__ uint32_t page_id(int32_t token) const {
    if (token < begin_ || token >= end_) return 0;
    return min(static_cast<uint32_t>(p_.page_table[token >> p_.page_shift]), p_.last_page);
  }
  __device__ __forceinline__ const char* row_at(const CacheView& cache, uint32_t page, int32_t token) const {
    const uint32_t inside = static_cast<uint32_t>(token) & ((1u << p_.page_shift) - 1);
    const uint64_t units = static_cast<uint64_t>(page) * cache.page_stride +
                           static_cast<uint64_t>(inside) * cache.token_stride +
                           static_cast<uint64_t>(kv_head_) * cache.head_stride;
    return cache.data + units * 16;
  }

  // A lane's part of a row of keys as it lies in memory, zeros where it is not `any`; then as bf16.
  __device__ __forceinline__ void load_keys(const char* row, bool any, uint32_t (&words)[16]) const {
#pragma unroll
    for (int i = 0; i < kRowBytes / 64; ++i) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (any) v = ld_global128(row + 64 * i);
      words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
    }
  }
  __device__ __forceinline__ void convert_keys(uint32_t (&words)[16]) const {
    if constexpr (kFp8) {
#pragma unroll
      for (int i = kDim / 16 - 1; i >= 0; --i) e4m3x4_to_bf16x2x2(words[i], words[2 * i], words[2 * i + 1]);
    }
  }

  // Operand A of this warp's elements and the 16 tokens of a slot.
  __device__ __forceinline__ void read_values(int slot, uint32_t (&a)[4]) const {
    uint32_t words[4];  // two elements of tokens 2t, 2t + 1, 2t + 8, 2t + 9
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t row = values_at(16 * slot + 2 * t_ + 8 * (i >> 1) + (i & 1));
      if constexpr (kFp8) {
        words[i] = lds32(row + 16 * warp_ + (2 * g_ & ~3)) >> (16 * (g_ & 1));
      } else {
        words[i] = lds32(row + 32 * warp_ + 4 * g_);
      }
    }
    if constexpr (kFp8) {
      e4m3x4_to_half2x2(interleave_bytes_low(words[0], words[1]), a[0], a[1]);
      e4m3x4_to_half2x2(interleave_bytes_low(words[2], words[3]), a[2], a[3]);
    } else {
      a[0] = interleave_halves_low(words[0], words[1]), a[1] = interleave_halves_high(words[0], words[1]);
      a[2] = interleave_halves_low(words[2], words[3]), a[3] = interleave_halves_high(words[2], words[3]);
    }
  }

  const DecodeParams& p_;
  const int32_t warp_, lane_, g_, t_;
  const uint32_t base_;  // shared address
  const int32_t kv_head_;
  // Tokens: of the request; this CTA's, from begin_ to end_, before old_ not of this step; of its first place.
  int32_t length_ = 0, begin_ = 0, end_ = 0, old_ = 0, first_ = 0;
};

template <KvKind kKind, int kCluster>
__global__ void __launch_bounds__(kDecodeThreads, 1) decode_alone_kernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) char smem[];
  const DecodeParams plain = plain_params(p, false);
  AloneDecode<kKind, kCluster>(plain, smem).run();
}

}  // namespace hpc::attention

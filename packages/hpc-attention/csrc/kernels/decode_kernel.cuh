// The attention kernel itself: what a CTA asks for before anything else, then decode.cuh's worker.
#pragma once

#include "decode.cuh"

namespace hpc::attention {

template <KvKind kKind, int kDim, int kRowTiles, int kStages, bool kAbreast, int kCluster>
__device__ __forceinline__ void run_decode(const DecodeParams& p) {
  extern __shared__ __align__(128) char smem[];
  using Worker = DecodeWorker<kKind, kDim, kRowTiles, kStages, kAbreast, kCluster>;
  // The first load waits for this row; a division is left out where it can be. (`none`: as far as the compiler knows
  // threads read different rows, so what follows from them stays out of uniform registers, which are slow to reach.)
  if (p.early_slices == 0) pdl_wait();
  const auto block = static_cast<int32_t>(blockIdx.x), ctas = static_cast<int32_t>(gridDim.x);
  const int32_t cta = !Worker::kGroups || p.row_groups == 1 ? block : block / p.row_groups;
  const int32_t last = (!Worker::kGroups || p.row_groups == 1 ? ctas : ctas / p.row_groups) - 1;
  const int32_t none = static_cast<int32_t>(threadIdx.x) / kDecodeThreads;
  if constexpr (kCluster > kDecodeCouple) {
    const ClusterRun own = cluster_run<kCluster>(p, block, none);
    Worker(p, smem, own).run(own.cta, own.run, {}, false, 0, 0);
  } else {
    const DecodeCta run = load_row(p.ctas[cta + none]), after = load_row(p.ctas[min(cta + 1, last) + none]);
    const int32_t splits = Worker::kPaced ? ld_global32(&p.header->num_splits) : 0;
    const int32_t before = kCluster == kDecodeCouple ? ld_global32(&p.ctas[max(cta - 1, 0) + none].count) : 0;
    Worker(p, smem).run(cta, run, after, cta == last, splits, before);
  }
}

// kPlain: see plain_params(). kAbreast: whether whole pairs of several heads of a request, one behind the other in a
// run, go abreast.
template <KvKind kKind, int kDim, int kRowTiles, int kStages, bool kPlain = false, bool kAbreast = false,
          int kCluster = 1>
__global__ void __maxnreg__(decode_registers(kKind, kDim, kRowTiles))
    decode_kernel(const __grid_constant__ DecodeParams p) {
  if constexpr (kPlain) {
    run_decode<kKind, kDim, kRowTiles, kStages, kAbreast, kCluster>(plain_params(p, kKind == KvKind::kFp16));
  } else {
    run_decode<kKind, kDim, kRowTiles, kStages, kAbreast, kCluster>(p);
  }
}

}  // namespace hpc::attention

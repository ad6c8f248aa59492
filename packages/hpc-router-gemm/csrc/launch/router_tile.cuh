// Launcher of kernels/router_tile.cuh. Each weight type is instantiated in a file of its own, which compile in
// parallel.
#pragma once

#include <array>
#include <utility>

#include "hpc/launch.hpp"
#include "hpc/tensor_map.hpp"
#include "kernels/router_tile.cuh"
#include "kernels/router_tile_tokens.cuh"
#include "launch/router.hpp"

namespace hpc::router {

// `kernel` is of `Shape`.
template <typename Shape, typename Kernel>
void launch_shape(Kernel* kernel, const TileParams& params, const CUtensorMap& weight_map, const CUtensorMap& x_map,
                  const Config& config, cudaStream_t stream) {
  constexpr int kPair = Shape::kPair;
  LaunchConfig launch_config;
  if constexpr (Shape::kPairsExperts) {
    launch_config.grid = dim3(config.split * kPair, static_cast<unsigned>(ceil_div(params.m, config.tokens)),
                              static_cast<unsigned>(ceil_div(params.n, config.rows * kPair)));
  } else {
    launch_config.grid = dim3(config.split * kPair, static_cast<unsigned>(ceil_div(params.n, config.rows)),
                              static_cast<unsigned>(ceil_div(params.m, config.tokens * kPair)));
  }
  launch_config.block = dim3(Shape::kThreads);
  launch_config.smem_bytes = config.smem_bytes;
  launch_config.stream = stream;
  launch_config.cluster = config.split * kPair;
  launch(kernel, launch_config, params, weight_map, x_map);
}

template <Weight kWeight, int WM, int WK, int WN, int NT>
void launch_wgmma_tile(const TileParams& params, const CUtensorMap& weight_map, const CUtensorMap& x_map,
                       const Config& config, cudaStream_t stream) {
  launch_shape<TileShape<WM, WK, WN, NT, kWeight>>(router_tile_kernel<WM, WK, WN, NT, kWeight>, params, weight_map,
                                                   x_map, config, stream);
}

template <Weight kWeight, int kExperts>
void launch_token_tile(const TileParams& params, const CUtensorMap& weight_map, const CUtensorMap& x_map,
                       const Config& config, cudaStream_t stream) {
  launch_shape<TokenTileShape<kExperts, kWeight>>(router_tile_tokens_kernel<kExperts, kWeight>, params, weight_map,
                                                  x_map, config, stream);
}

using TileLauncher = void (*)(const TileParams&, const CUtensorMap&, const CUtensorMap&, const Config&, cudaStream_t);

// The launcher of a compiled tile, or null.
template <Weight kWeight>
TileLauncher tile_launcher(const Config& config) {
  static constexpr auto kTiles = [] {
    if constexpr (weight_pairs_experts(kWeight)) {
      return std::to_array(kPairedExpertTiles);
    } else if constexpr (weight_is_paired(kWeight)) {
      return std::to_array(kPairedTiles);
    } else if constexpr (weight_is_split(kWeight)) {
      return std::to_array(kTermTiles);
    } else {
      return std::to_array(kWgmmaTiles);
    }
  }();
  TileLauncher found = nullptr;
  const auto match = [&]<size_t kIndex>() {
    constexpr WgmmaTile kTile = kTiles[kIndex];
    if constexpr (kTile.takes(weight_terms(kWeight))) {
      if (kTile.rows == config.rows && kTile.k_groups == config.k_groups && kTile.tokens == config.tokens) {
        if constexpr (kTile.tokens_first()) {
          found = launch_token_tile<kWeight, kTile.rows>;
        } else {
          found = launch_wgmma_tile<kWeight, kTile.rows / 64, kTile.k_groups, kTile.token_groups(), kTile.tokens>;
        }
      }
    }
  };
  [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    (match.template operator()<kIndex>(), ...);
  }(std::make_index_sequence<kTiles.size()>());
  return found;
}

// Where k is split and terms are read, 128 bytes at a time from memory are faster (by 0 to 2 %), else 256.
template <Weight kWeight>
CUtensorMapL2promotion l2_promotion(const Config& config) {
  const bool single = weight_is_split(kWeight) && config.split > 1;
  return single ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
}

// The weight as boxes of 128 bytes x rows. With `paired` the map has chunks of 32 columns and a box has two of them.
// Terms in memory: boxes of a stage's columns, rows and all terms.
template <Weight kWeight>
CUtensorMap weight_tensor_map(const Gemm& gemm, const Config& config, bool paired) {
  constexpr uint64_t kBytes = weight_bytes(kWeight);
  const auto k = static_cast<uint64_t>(gemm.k);
  const auto n = static_cast<uint64_t>(gemm.n);
  const auto rows = static_cast<uint32_t>(config.rows);
  // A tensor of one row may have any stride: it is not used.
  const uint64_t stride = n > 1 ? static_cast<uint64_t>(gemm.weight_stride) * kBytes : (k * kBytes + 15) / 16 * 16;
  TensorMapSpec<3> spec;
  if constexpr (weight_is_split(kWeight)) {
    constexpr auto kTerms = static_cast<uint32_t>(weight_terms(kWeight));
    const auto stage_k = static_cast<uint32_t>(tile_stage_k(config.rows, config.k_groups, config.tokens, kWeight));
    if constexpr (weight_in_chunks(kWeight)) {
      const TensorMapSpec<4> chunks = {
          {64, n, kTerms, (k + 63) / 64}, {128, n * 128, kTerms * n * 128}, {stage_k, rows, kTerms, 1}};
      return make_tensor_map<4>("weight", gemm.weight, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, chunks,
                                CU_TENSOR_MAP_SWIZZLE_128B, l2_promotion<kWeight>(config));
    }
    spec = {{k, n, kTerms}, {k * 2, n * k * 2}, {stage_k, rows, kTerms}};
    return make_tensor_map<3>("weight", gemm.weight, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, spec,
                              stage_k == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                              l2_promotion<kWeight>(config));
  }
  if (paired) {
    spec = {{32, n, k / 32}, {stride, 128}, {32, rows, 2}};
  } else {
    spec = {{k, n, 1}, {stride, stride}, {static_cast<uint32_t>(128 / kBytes), rows, 1}};
  }
  return make_tensor_map<3>(
      "weight", gemm.weight,
      kWeight == Weight::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32, spec,
      CU_TENSOR_MAP_SWIZZLE_128B);
}

// Calls of more CTAs than this have no time before their predecessor's end that would be worth a prefetch to L2.
constexpr int64_t kPrefetchCtas = 264;

template <Weight kWeight>
void launch_tile(const Gemm& gemm, const Config& config, cudaStream_t stream) {
  const int stage_k = tile_stage_k(config.rows, config.k_groups, config.tokens, kWeight);
  const bool paired = kWeight != Weight::kBf16 && !weight_is_split(kWeight) && stage_k == 64 && gemm.k % 32 == 0;
  const int k_blocks = static_cast<int>(ceil_div(gemm.k, kTileBlockK));
  TileParams params;
  params.y = gemm.y;
  params.y_stride = gemm.y_stride;
  params.m = gemm.m;
  params.n = gemm.n;
  params.k_blocks = k_blocks / config.split;
  params.k_extra = k_blocks % config.split;
  params.split = config.split;
  const int sum_blocks = tile_sum_blocks(config.rows, config.k_groups, config.tokens);
  params.sum_part = tile_sum_part(config.rows, config.k_groups, config.tokens, config.split);
  params.sum_blocks = sum_blocks / config.split;
  params.sum_extra = sum_blocks % config.split;
  params.sums_offset =
      config.sums_apart ? tile_sums_offset(config.rows, config.k_groups, config.tokens, kWeight, config.stages) : 0;
  params.weight_columns = paired ? 64 : 128 / weight_bytes(kWeight);
  params.stages = config.stages;
  params.prefetch = gemm.prefetch;
  // Measured with three expert tiles: m = 1,024 and 2,048 gain 1 to 2 % (192 x 4096), those of more lose as much.
  params.token_prefetch = config.split > 1 && config.split < 8 && ceil_div(gemm.n, config.rows) <= 3 ? 4 : 0;
  params.l2_prefetch = shares_sm(config) && config.ctas <= kPrefetchCtas;
  const bool two_rings = params.l2_prefetch && tile_has_two_rings(config.rows, config.k_groups, config.tokens, kWeight);
  params.token_stages = two_rings ? config.stages / 2 : 0;
  const int token_k = two_rings ? 64 : stage_k;
  const CUtensorMap weight_map = weight_tensor_map<kWeight>(gemm, config, paired);
  const auto k = static_cast<uint64_t>(gemm.k);
  const CUtensorMap x_map = make_tensor_map<2>("x", gemm.x, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                                               {{k, static_cast<uint64_t>(gemm.m)},
                                                {gemm.m > 1 ? static_cast<uint64_t>(gemm.x_stride) * 2 : k * 2},
                                                {static_cast<uint32_t>(token_k), static_cast<uint32_t>(config.tokens)}},
                                               token_k == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                                               l2_promotion<kWeight>(config));
  const TileLauncher launcher = tile_launcher<kWeight>(config);
  if (launcher != nullptr) return launcher(params, weight_map, x_map, config, stream);
  throw std::logic_error("hpc_router_gemm: a Config with a tile that is not compiled");
}

}  // namespace hpc::router

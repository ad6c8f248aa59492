// Launcher of kernels/router_tile.cuh. Each weight type is instantiated in a file of its own, which compile in
// parallel.
#pragma once

#include "hpc/launch.hpp"
#include "hpc/tensor_map.hpp"
#include "kernels/router_tile.cuh"
#include "launch/router.hpp"

namespace hpc::router {

template <Weight kWeight, int WM, int WK, int NT>
void launch_wgmma_tile(const TileParams& params, const CUtensorMap& weight_map, const CUtensorMap& x_map,
                       const Config& config, cudaStream_t stream) {
  LaunchConfig launch_config;
  launch_config.grid = dim3(static_cast<unsigned>(config.ctas));
  launch_config.block = dim3(TileShape<WM, WK, NT, kWeight>::kThreads);
  launch_config.smem_bytes = config.smem_bytes;
  launch_config.stream = stream;
  launch_config.cluster = config.cluster();
  launch(router_tile_kernel<WM, WK, NT, kWeight>, launch_config, params, weight_map, x_map);
}

template <Weight kWeight>
void launch_tile(const Gemm& gemm, const Config& config, cudaStream_t stream) {
  TileParams params;
  params.y = gemm.y;
  params.y_stride = gemm.y_stride;
  params.m = gemm.m;
  params.n = gemm.n;
  params.k_blocks = static_cast<int>(ceil_div(gemm.k, kTileBlockK));
  params.split = config.split;
  params.token_tiles = config.token_tiles;
  params.expert_tiles = config.expert_tiles;
  params.expert_groups = static_cast<int>(ceil_div(ceil_div(gemm.n, config.rows), config.expert_tiles));
  params.stages = config.stages;
  params.prefetch = gemm.prefetch;
  constexpr bool kFloat = kWeight != Weight::kBf16;
  constexpr uint64_t kBytes = weight_bytes(kWeight);
  const auto k = static_cast<uint64_t>(gemm.k);
  // Boxes are 128 bytes wide, the swizzle's width. A tensor of one row may have any stride: it is not used.
  const CUtensorMap weight_map = make_tensor_map<2>(
      "weight", gemm.weight, kFloat ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      {{k, static_cast<uint64_t>(gemm.n)},
       {gemm.n > 1 ? gemm.weight_stride * kBytes : k * kBytes},
       {static_cast<uint32_t>(128 / kBytes), static_cast<uint32_t>(config.rows / config.token_tiles)}},
      CU_TENSOR_MAP_SWIZZLE_128B);
  const CUtensorMap x_map = make_tensor_map<2>("x", gemm.x, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                                               {{k, static_cast<uint64_t>(gemm.m)},
                                                {gemm.m > 1 ? static_cast<uint64_t>(gemm.x_stride) * 2 : k * 2},
                                                {64, static_cast<uint32_t>(config.tokens / config.expert_tiles)}},
                                               CU_TENSOR_MAP_SWIZZLE_128B);
  using Launcher = void (*)(const TileParams&, const CUtensorMap&, const CUtensorMap&, const Config&, cudaStream_t);
  static constexpr Launcher launchers[] = {
      launch_wgmma_tile<kWeight, 1, 2, 32>,  launch_wgmma_tile<kWeight, 1, 2, 64>,
      launch_wgmma_tile<kWeight, 1, 2, 104>, launch_wgmma_tile<kWeight, 1, 2, 128>,
      launch_wgmma_tile<kWeight, 1, 2, 192>, launch_wgmma_tile<kWeight, 2, 1, 64>,
      launch_wgmma_tile<kWeight, 2, 1, 128>, launch_wgmma_tile<kWeight, 2, 1, 192>};
  static_assert(std::size(launchers) == std::size(kWgmmaTiles), "in the order of kWgmmaTiles");
  for (size_t i = 0; i < std::size(kWgmmaTiles); ++i) {
    const WgmmaTile& tile = kWgmmaTiles[i];
    if (tile.rows == config.rows && tile.k_groups == config.k_groups && tile.tokens == config.tokens) {
      return launchers[i](params, weight_map, x_map, config, stream);
    }
  }
  throw std::logic_error("hpc_router_gemm: a Config with a tile that is not compiled");
}

}  // namespace hpc::router

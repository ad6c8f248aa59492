// Launcher of kernels/router_stream.cuh. Each weight type is instantiated in a file of its own, which compile in
// parallel.
#pragma once

#include "hpc/launch.hpp"
#include "kernels/router_stream.cuh"
#include "launch/router.hpp"

namespace hpc::router {

template <Weight kWeight, int R, int NB>
void launch_stream_tile(const StreamParams& params, const Config& config, cudaStream_t stream) {
  LaunchConfig launch_config;
  launch_config.grid = dim3(config.split, static_cast<unsigned>(ceil_div(params.n, config.rows)),
                            static_cast<unsigned>(ceil_div(params.m, config.tokens)));
  launch_config.block = dim3(kStreamThreads);
  launch_config.smem_bytes = config.smem_bytes;
  launch_config.stream = stream;
  launch_config.cluster = config.split;
  launch(router_stream_kernel<R, NB, kWeight>, launch_config, params);
}

template <Weight kWeight>
void launch_stream(const Gemm& gemm, const Config& config, cudaStream_t stream) {
  StreamParams params;
  params.weight = gemm.weight;
  params.x = gemm.x;
  params.y = gemm.y;
  params.weight_stride = gemm.weight_stride;
  params.x_stride = gemm.x_stride;
  params.y_stride = gemm.y_stride;
  params.m = gemm.m;
  params.n = gemm.n;
  params.k = gemm.k;
  params.split = config.split;
  params.stages = config.stages;
  params.prefetch = gemm.prefetch;
  using Launcher = void (*)(const StreamParams&, const Config&, cudaStream_t);
  static constexpr Launcher launchers[] = {
      launch_stream_tile<kWeight, 1, 1>, launch_stream_tile<kWeight, 1, 2>, launch_stream_tile<kWeight, 1, 4>,
      launch_stream_tile<kWeight, 1, 8>, launch_stream_tile<kWeight, 2, 1>, launch_stream_tile<kWeight, 2, 2>,
      launch_stream_tile<kWeight, 2, 4>, launch_stream_tile<kWeight, 2, 8>, launch_stream_tile<kWeight, 3, 1>,
      launch_stream_tile<kWeight, 3, 2>, launch_stream_tile<kWeight, 3, 4>};
  static_assert(std::size(launchers) == std::size(kStreamTiles), "in the order of kStreamTiles");
  for (size_t i = 0; i < std::size(kStreamTiles); ++i) {
    if (kStreamTiles[i].rows == config.rows && kStreamTiles[i].tokens == config.tokens) {
      return launchers[i](params, config, stream);
    }
  }
  throw std::logic_error("hpc_router_gemm: a Config with a tile that is not compiled");
}

}  // namespace hpc::router

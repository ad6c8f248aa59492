#include "launch/moe.hpp"

namespace hpc::moe {

// Instantiated in down_*.cu.
template <Quant kQuant, bool kHalf>
void launch_down_as(const CUtensorMap& map, const CUtensorMap& h_map, const GemmParams& p, bool tokens, bool clusters,
                    int widest, int grid, cudaStream_t stream);

void launch_down(Quant quant, bool half, const CUtensorMap& map, const CUtensorMap& h_map, const GemmParams& p,
                 bool tokens, bool clusters, int widest, int grid, cudaStream_t stream) {
  switch (quant) {
    case Quant::kBlock:
      return half ? launch_down_as<Quant::kBlock, true>(map, h_map, p, tokens, clusters, widest, grid, stream)
                  : launch_down_as<Quant::kBlock, false>(map, h_map, p, tokens, clusters, widest, grid, stream);
    case Quant::kTensor:
      return launch_down_as<Quant::kTensor, false>(map, h_map, p, tokens, clusters, widest, grid, stream);
    case Quant::kNone:
      return launch_down_as<Quant::kNone, false>(map, h_map, p, tokens, clusters, widest, grid, stream);
  }
}

}  // namespace hpc::moe

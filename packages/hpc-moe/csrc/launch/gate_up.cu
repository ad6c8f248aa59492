#include "launch/moe.hpp"

namespace hpc::moe {

// Instantiated in gate_up_*.cu.
template <Quant kQuant, bool kHalf>
void launch_gate_up_as(const CUtensorMap& map, const CUtensorMap& half_map, const GemmParams& p, bool tokens,
                       bool clusters, int widest, bool exact, int grid, cudaStream_t stream);

void launch_gate_up(Quant quant, bool half, const CUtensorMap& map, const CUtensorMap& half_map, const GemmParams& p,
                    bool tokens, bool clusters, int widest, bool exact, int grid, cudaStream_t stream) {
  switch (quant) {
    case Quant::kBlock:
      return half ? launch_gate_up_as<Quant::kBlock, true>(map, half_map, p, tokens, clusters, widest, exact, grid,
                                                           stream)
                  : launch_gate_up_as<Quant::kBlock, false>(map, half_map, p, tokens, clusters, widest, exact, grid,
                                                            stream);
    case Quant::kTensor:
      return launch_gate_up_as<Quant::kTensor, false>(map, half_map, p, tokens, clusters, widest, exact, grid, stream);
    case Quant::kNone:
      return launch_gate_up_as<Quant::kNone, false>(map, half_map, p, tokens, clusters, widest, exact, grid, stream);
  }
}

}  // namespace hpc::moe

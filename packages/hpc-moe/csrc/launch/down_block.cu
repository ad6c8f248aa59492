#include "launch/down.cuh"

namespace hpc::moe {

template void launch_down_as<Quant::kBlock, false>(const CUtensorMap&, const CUtensorMap&, const GemmParams&, bool,
                                                   bool, int, int, cudaStream_t);

}  // namespace hpc::moe

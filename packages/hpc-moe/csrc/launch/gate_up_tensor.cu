#include "launch/gate_up.cuh"

namespace hpc::moe {

template void launch_gate_up_as<Quant::kTensor, false>(const CUtensorMap&, const CUtensorMap&, const GemmParams&, bool,
                                                       bool, int, bool, int, cudaStream_t);

}  // namespace hpc::moe

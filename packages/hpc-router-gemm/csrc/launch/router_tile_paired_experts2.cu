#include "launch/router_tile.cuh"

template void hpc::router::launch_tile<hpc::router::Weight::kPairedExperts2>(const hpc::router::Gemm&,
                                                                             const hpc::router::Config&, cudaStream_t);

#include "launch/router_tile.cuh"

template void hpc::router::launch_tile<hpc::router::Weight::kPairedTerms3>(const hpc::router::Gemm&,
                                                                           const hpc::router::Config&, cudaStream_t);

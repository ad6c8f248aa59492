#include "launch/router_stream.cuh"

template void hpc::router::launch_stream<hpc::router::Weight::kFloat2>(const hpc::router::Gemm&,
                                                                       const hpc::router::Config&, cudaStream_t);

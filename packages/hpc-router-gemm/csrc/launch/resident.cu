#include <algorithm>

#include "hpc/launch.hpp"
#include "launch/router.hpp"

namespace hpc::router {

namespace {
__global__ void occupant() {}
}  // namespace

int resident_ctas(int cluster) {
  constexpr int kSmemBytes = 200 * 1024;  // one CTA an SM
  allow_smem(occupant, kSmemBytes);
  if (cluster > 8) {
    cuda_check(cudaFuncSetAttribute(occupant, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
               "cudaFuncSetAttribute(NonPortableClusterSizeAllowed)");
  }
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(cluster));
  config.blockDim = dim3(256);
  config.dynamicSmemBytes = kSmemBytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  cuda_check(cudaOccupancyMaxActiveClusters(&clusters, occupant, &config), "cudaOccupancyMaxActiveClusters");
  return (cluster > 8 ? clusters : std::max(1, clusters)) * cluster;
}

}  // namespace hpc::router

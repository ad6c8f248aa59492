// Grouped-GEMM tile map for tests and tools: hpc_common._core's grouped_* functions.
#include "hpc/grouped_bindings.hpp"

void bind_grouped(nanobind::module_& module) {
  hpc::grouped::bind(module);
}

// The extension module: what it was built from, and the operator's functions.
#include "hpc/build_info.hpp"

void bind_plan(nanobind::module_& module);    // plan.cpp
void bind_decode(nanobind::module_& module);  // decode.cpp

NB_MODULE(_C, module) {
  hpc::bind_build_info(module);
  bind_plan(module);
  bind_decode(module);
}

// build_info(): what an extension was built from. Include it in the file that has NB_MODULE, and nowhere else.
#pragma once

#include <nanobind/nanobind.h>

#include "hpc_build_info.generated.hpp"

namespace hpc {

// Adds `build_info() -> dict` with the commit ("-dirty" behind it where sources differed), the C++ compiler, and the
// CUDA version ("" where the extension has no device code).
inline void bind_build_info(nanobind::module_& module) {
  module.def("build_info", [] {
    nanobind::dict info;
    info["git"] = HPC_BUILD_GIT;
    info["compiler"] = HPC_BUILD_COMPILER;
    info["cuda"] = HPC_BUILD_CUDA;
    return info;
  });
}

}  // namespace hpc

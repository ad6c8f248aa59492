// The extension module: what it was built from, and the operator's functions.
#include "hpc/build_info.hpp"

NB_MODULE(_C, module) { hpc::bind_build_info(module); }

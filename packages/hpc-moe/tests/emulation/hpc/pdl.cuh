// Stand-in for hpc/pdl.cuh.
#pragma once

#include "emulation.hpp"

namespace hpc {

inline void pdl_wait() {
  emulation::predecessor_ended();
}
inline void pdl_trigger() {}

}  // namespace hpc

// The emulated extension for ctypes: decode as csrc/api/decode.cpp binds it, and the plan kernel by its launcher.
#include <exception>
#include <nanobind/nanobind.h>
#include <string>

#include "block.hpp"
#include "config/plan.hpp"
#include "launch/plan.hpp"

void bind_decode(nanobind::module_& module);  // csrc/api/decode.cpp

namespace {

void update_plan(uint64_t seq_lens, int32_t batch, uint64_t map, int32_t num_kv_heads, int32_t q_len, int32_t window,
                 int32_t max_seq_len, int32_t num_ctas, bool batch_invariant, int32_t max_batch, int32_t min_tiles) {
  const hpc::DecodeShape shape = {batch,    num_kv_heads,    q_len,     window,   max_seq_len,
                                  num_ctas, batch_invariant, max_batch, min_tiles};
  hpc::attention::launch_plan(reinterpret_cast<const int32_t*>(seq_lens), shape, reinterpret_cast<void*>(map), nullptr);
}

int32_t leaves_half(int32_t max_batch, int32_t num_kv_heads, int32_t longest, int32_t least) {
  return hpc::attention::plan_leaves_half(max_batch, num_kv_heads, longest, least);
}

const nanobind::module_& module() {
  static const nanobind::module_ bound = [] {
    nanobind::module_ empty;
    bind_decode(empty);
    empty.def("update_plan", &update_plan);
    empty.def("leaves_half", &leaves_half);
    return empty;
  }();
  return bound;
}

}  // namespace

// Calls a function (see nanobind.h). Returns its error's text, or null.
extern "C" const char* emulation_call(const char* name, const int64_t* slots, int64_t count, int64_t* result) {
  static std::string error;
  try {
    *result = module().call(name, slots, count);
    return nullptr;
  } catch (const std::exception& exception) {
    error = exception.what();
    return error.c_str();
  }
}

extern "C" void emulation_set_fault(int number) {
  emulation::fault = number;
}

extern "C" void emulation_late(void* address, int64_t bytes, int launches) {
  emulation::late(address, static_cast<size_t>(bytes), launches);
}

extern "C" void emulation_forget_late() {
  emulation::forget_late();
}

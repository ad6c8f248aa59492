// hpc_moe._C: the host planner (tile map and Config) this package was compiled with.
#include <nanobind/nanobind.h>

#include "config/config.hpp"
#include "hpc/build_info.hpp"
#include "hpc/grouped_bindings.hpp"

namespace nb = nanobind;

namespace hpc::moe {
void bind_moe(nb::module_& module);  // moe.cpp
}

namespace {

using namespace hpc::moe;

Quant quant_of(const char* name) {
  const std::string quant = name;
  if (quant == "none") return Quant::kNone;
  if (quant == "block") return Quant::kBlock;
  hpc::check(quant == "tensor", "hpc_moe.config", "quant", "none, block or tensor", quant);
  return Quant::kTensor;
}

const char* regime_name(const Config& config) {
  constexpr const char* names[] = {"low", "mid", "large"};
  return names[static_cast<int>(config.regime)];
}

void bind_config(nb::module_& module) {
  using nb::literals::operator""_a;

  nb::class_<Layout>(module, "Layout", "Byte offsets into the workspace; csrc/config/config.hpp says what lies there.")
      .def_ro("counters", &Layout::counters)
      .def_ro("offsets", &Layout::offsets)
      .def_ro("tile_offsets", &Layout::tile_offsets)
      .def_ro("slot_to_row", &Layout::slot_to_row)
      .def_ro("row_to_slot", &Layout::row_to_slot)
      .def_ro("tasks", &Layout::tasks)
      .def_ro("x_q", &Layout::x_q)
      .def_ro("x_scale", &Layout::x_scale)
      .def_ro("h", &Layout::h)
      .def_ro("h_q", &Layout::h_q)
      .def_ro("h_scale", &Layout::h_scale)
      .def_ro("y", &Layout::y)
      .def_ro("bytes", &Layout::bytes);

  nb::class_<Config>(module, "Config", "What one call was decided to be; csrc/config/config.hpp explains each field.")
      .def_prop_ro("regime", &regime_name)
      .def_prop_ro("rule",
                   [](const Config& c) { return nb::make_tuple(c.rule.max_rows, c.rule.granule, c.rule.even != 0); })
      .def_ro("act_group", &Config::act_group)
      .def_ro("x_in_workspace", &Config::x_in_workspace)
      .def_ro("h_is_bf16", &Config::h_is_bf16)
      .def_ro("h_quantised", &Config::h_quantised)
      .def_ro("num_chunks", &Config::num_chunks)
      .def_ro("chunk_tokens", &Config::chunk_tokens)
      .def_ro("chunk_rows", &Config::chunk_rows)
      .def_ro("max_tiles", &Config::max_tiles)
      .def_ro("up_columns", &Config::up_columns)
      .def_ro("down_columns", &Config::down_columns)
      .def_ro("up_grid", &Config::up_grid)
      .def_ro("down_grid", &Config::down_grid)
      .def_ro("panel_columns", &Config::panel_columns)
      .def_ro("few", &Config::few)
      .def_ro("exact", &Config::exact)
      .def_ro("guess", &Config::guess)
      .def_ro("index_ctas", &Config::index_ctas)
      .def_ro("layout", &Config::layout);

  module.def(
      "make_config",
      [](int64_t num_tokens, int32_t top_k, int32_t num_local_experts, int32_t num_experts, int32_t hidden,
         int32_t intermediate, const char* quant, bool x_is_bf16, bool batch_invariant, int32_t num_sms) {
        return make_config({num_tokens, top_k, num_local_experts, num_experts, hidden, intermediate, quant_of(quant),
                            x_is_bf16, batch_invariant, num_sms});
      },
      nb::kw_only(), "num_tokens"_a, "top_k"_a, "num_local_experts"_a, "num_experts"_a, "hidden"_a, "intermediate"_a,
      "quant"_a, "x_is_bf16"_a = true, "batch_invariant"_a = false, "num_sms"_a = 0,
      "The Config of a call; ValueError where a size is out of range.");
  module.def(
      "max_workspace_bytes",
      [](int64_t num_tokens, int32_t top_k, int32_t num_local_experts, int32_t num_experts, int32_t hidden,
         int32_t intermediate, const char* quant, bool x_is_bf16, bool batch_invariant) {
        return max_workspace_bytes({num_tokens, top_k, num_local_experts, num_experts, hidden, intermediate,
                                    quant_of(quant), x_is_bf16, batch_invariant, 0});
      },
      nb::kw_only(), "num_tokens"_a, "top_k"_a, "num_local_experts"_a, "num_experts"_a, "hidden"_a, "intermediate"_a,
      "quant"_a, "x_is_bf16"_a = true, "batch_invariant"_a = false,
      "Workspace bytes that a call of any number of tokens up to num_tokens finds enough.");
}

}  // namespace

NB_MODULE(_C, module) {
  hpc::bind_build_info(module);
  hpc::grouped::bind(module);
  bind_config(module);
  hpc::moe::bind_moe(module);
}

#include "launch/call.hpp"

#include <algorithm>

#include "kernels/panels.hpp"
#include "launch/low.hpp"
#include "launch/moe.hpp"

namespace hpc::moe {

namespace {

template <typename T>
T* at(void* workspace, int64_t offset) {
  return reinterpret_cast<T*>(static_cast<uint8_t*>(workspace) + offset);
}

const uint8_t* bytes_at(const void* base, int64_t bytes) {
  return static_cast<const uint8_t*>(base) + bytes;
}

uint32_t stride16(const char* argument, int64_t bytes, int64_t rows) {
  check(bytes >= 0 && bytes / 16 * rows < (int64_t{1} << 32), "hpc_moe.fused_moe", argument,
        "a row stride with all rows of a chunk within 64 GB", bytes);
  return static_cast<uint32_t>(bytes / 16);
}

IndexParams index_params(const Call& c, const Config& config, int64_t begin, int64_t tokens, const Routing& routing) {
  IndexParams p{};
  p.topk_ids = bytes_at(c.topk_ids, begin * c.id_token_stride * (c.ids_are_int64 ? 8 : 4));
  p.id_token_stride = c.id_token_stride;
  p.id_slot_stride = c.id_slot_stride;
  p.first_expert = static_cast<int64_t>(c.ep_rank) * c.num_local;
  p.num_pairs = static_cast<int32_t>(tokens * c.top_k);
  p.top_k = c.top_k;
  p.num_experts = c.num_local;
  p.ctas = config.index_ctas;
  p.routing = routing;
  return p;
}

QuantiseParams quantise_x_params(const Call& c, const Config& config, const void* x, int64_t tokens) {
  QuantiseParams q{};
  q.x = x;
  q.x_stride = c.x_stride;
  q.x_quant = at<uint8_t>(c.workspace, config.layout.x_q);
  q.x_quant_scale = at<float>(c.workspace, config.layout.x_scale);
  q.x_scale = c.x_scale;
  q.num_tokens = static_cast<int32_t>(tokens);
  q.hidden = c.hidden;
  return q;
}

ReduceParams reduce_params(const Call& c, int64_t begin, int64_t tokens, const void* y, const int32_t* slot_to_row) {
  ReduceParams p{};
  p.y = y;
  p.slot_to_row = slot_to_row;
  p.topk_weights = c.topk_weights + begin * c.weight_token_stride;
  p.weight_token_stride = c.weight_token_stride;
  p.weight_slot_stride = c.weight_slot_stride;
  p.shared_output = c.shared_output ? bytes_at(c.shared_output, begin * c.shared_stride * 2) : nullptr;
  p.shared_stride = c.shared_stride;
  p.out = static_cast<uint8_t*>(c.out) + begin * c.out_stride * 2;
  p.out_stride = c.out_stride;
  p.routed_scaling_factor = c.routed_scaling_factor;
  p.num_tokens = static_cast<int32_t>(tokens);
  p.hidden = c.hidden;
  p.top_k = c.top_k;
  return p;
}

// The low regime: gate-up and down, each after a step that quantises what it reads where that is bf16 and not very few
// rows. Its calls are one chunk.
void run_low(const Call& c, const Config& config, int num_sms, cudaStream_t stream) {
  const Layout& l = config.layout;
  LowParams p{};
  p.index = index_params(c, config, 0, c.tokens, {});
  p.x = static_cast<const uint8_t*>(c.x);
  p.x_stride = c.x_stride * (c.x_is_bf16 ? 2 : 1);
  p.x_scale = c.x_scale;
  p.x_scale_stride = c.x_scale_stride;
  p.x_scale_step = c.x_scale_step;
  p.w13 = static_cast<const uint8_t*>(c.w13);
  p.w2 = static_cast<const uint8_t*>(c.w2);
  p.w13_scale = c.w13_scale;
  p.w2_scale = c.w2_scale;
  p.act_scale = c.act_scale;
  p.h = at<uint8_t>(c.workspace, l.h);
  p.h_quant = p.h;
  p.h_scale = at<float>(c.workspace, l.h_scale);
  p.hidden = c.hidden;
  p.intermediate = c.intermediate;
  p.swiglu_limit = c.swiglu_limit;
  p.reduce = reduce_params(c, 0, c.tokens, nullptr, nullptr);
  if (config.x_in_workspace) {
    const QuantiseParams q = quantise_x_params(c, config, c.x, c.tokens);
    launch_low_quantise_x(c.quant, q, num_sms, stream);
    p.x = static_cast<const uint8_t*>(q.x_quant);
    p.x_stride = c.hidden;
    if (c.quant == Quant::kBlock) {
      p.x_scale = q.x_quant_scale;
      p.x_scale_stride = c.hidden / 128;
      p.x_scale_step = 1;
    }
  }
  p.x_is_predecessors = config.x_in_workspace;
  launch_low_up(c.quant, c.x_is_bf16 && !config.x_in_workspace, config.few, c.ids_are_int64, p, config.up_grid, stream);
  if (config.h_quantised) {
    QuantiseParams q{};
    q.x = p.h;
    q.x_stride = c.intermediate;
    q.x_quant = at<uint8_t>(c.workspace, l.h_q);
    q.x_quant_scale = at<float>(c.workspace, l.h_scale);
    q.num_tokens = static_cast<int32_t>(config.chunk_rows);
    q.hidden = c.intermediate;
    launch_low_quantise_h(q, config.act_group, num_sms, stream);
    p.h_quant = q.x_quant;
  }
  launch_low_down(c.quant, config.few, c.ids_are_int64, p, config.down_columns, stream);
}

// Down and the reduction of a chunk, panel after panel, all in the same place for y.
void run_panels(const Call& c, const Config& config, const GemmParams& down, const ReduceParams& reduce,
                const CUtensorMap& h_map, int num_sms, cudaStream_t stream) {
  const bool half = c.quant == Quant::kBlock && config.act_group == 64, as_m = tokens_are_m(config.rule);
  const bool drop = config.discard && reinterpret_cast<uintptr_t>(reduce.y) % 128 == 0;  // whole lines
  const int64_t rows = static_cast<int64_t>(c.num_local) * c.hidden;
  for (int32_t first = 0; first < c.hidden; first += config.panel_columns) {
    const int32_t columns = std::min(config.panel_columns, c.hidden - first);
    const uint8_t* w2 = panel_weights(c.w2, down.k_bytes, first);
    GemmParams panel = panel_of(down, c.quant, first, columns);
    panel.keep_out = config.keep_y && drop;
    if ((c.kernels & 4u) && config.short_rows) {
      const CUtensorMap map = down_short_map(w2, rows - first, down.k_bytes);
      launch_down_short(c.quant, map, h_map, panel, config.rule.max_rows, config.down_grid, stream);
    } else if (c.kernels & 4u) {
      const CUtensorMap map = down_weight_map(w2, rows - first, down.k_bytes, as_m);
      launch_down(c.quant, half, map, h_map, panel, as_m, config.down_clusters, config.rule.max_rows, config.down_grid,
                  stream);
    }
    if (c.kernels & 8u) launch_reduce(panel_of(reduce, first, columns), drop, num_sms, stream);
  }
}

// The four kernels of tokens [begin, begin + tokens), the last two for each panel.
void run_chunk(const Call& c, const Config& config, int64_t begin, int64_t tokens, const CUtensorMap& up_map,
               const CUtensorMap& half_map, const CUtensorMap& h_map, int num_sms, cudaStream_t stream) {
  const Layout& l = config.layout;
  const int element = c.quant == Quant::kNone ? 2 : 1;  // bytes of a weight, and of what it is multiplied with
  const bool half = c.quant == Quant::kBlock && config.act_group == 64;
  const bool quantise = config.x_in_workspace;

  Routing routing;
  routing.offsets = at<int32_t>(c.workspace, l.offsets);
  routing.tile_offsets = at<int32_t>(c.workspace, l.tile_offsets);
  routing.row_to_slot = at<int32_t>(c.workspace, l.row_to_slot);
  routing.slot_to_row = at<int32_t>(c.workspace, l.slot_to_row);
  routing.tiles = at<grouped::TileTask>(c.workspace, l.tasks);

  const int x_element = c.x_is_bf16 ? 2 : 1;
  const uint8_t* x = bytes_at(c.x, begin * c.x_stride * x_element);
  const IndexParams index = index_params(c, config, begin, tokens, routing);
  const QuantiseParams q = quantise ? quantise_x_params(c, config, x, tokens) : QuantiseParams{};
  if (c.kernels & 1u) launch_index(c.quant, index, q, config.rule, c.ids_are_int64, num_sms, stream);

  const int scale_block = config.act_group;
  GemmParams up{};
  up.routing = routing;
  up.b = quantise ? at<uint8_t>(c.workspace, l.x_q) : x;
  up.b_stride = quantise ? static_cast<uint32_t>(c.hidden / 16) : stride16("x", c.x_stride * x_element, tokens);
  if (c.quant == Quant::kBlock && quantise) {
    up.b_scale = at<float>(c.workspace, l.x_scale);
    up.b_scale_stride = c.hidden / 128;
    up.b_scale_step = 1;
  } else if (c.quant == Quant::kBlock) {
    up.b_scale = c.x_scale + begin * c.x_scale_stride;
    up.b_scale_stride = c.x_scale_stride;
    up.b_scale_step = c.x_scale_step;
  } else {
    up.b_scale = c.x_scale;
  }
  up.experts = c.num_local;
  up.evict_first = config.regime == Regime::kMid;
  up.guess = config.guess;
  up.b_lines = quantise || up.b_stride * 16 != static_cast<uint32_t>(c.hidden)
                   ? 0
                   : static_cast<int32_t>(tokens * c.hidden * x_element / 128);
  up.singles_first = config.regime == Regime::kMid;
  up.w_scale = c.w13_scale;
  up.w_scale_rows = 2 * c.intermediate / scale_block;
  up.w_scale_cols = c.hidden / 128;
  up.act_scale = c.act_scale;
  up.out = at<uint8_t>(c.workspace, l.h);
  up.out_scale = at<float>(c.workspace, l.h_scale);
  up.k_bytes = c.hidden * element;
  up.units = c.intermediate / 64;
  up.out_columns = c.intermediate;
  up.weight_rows = 2 * c.intermediate;
  up.top_k = c.top_k;
  up.swiglu_limit = c.swiglu_limit;
  up.threes = config.threes && config.up_clusters;
  const bool as_m = tokens_are_m(config.rule);
  if (c.kernels & 2u) {
    launch_gate_up(c.quant, half, up_map, half_map, up, as_m, config.up_clusters, config.rule.max_rows, config.exact,
                   config.up_grid, stream);
  }

  GemmParams down{};
  down.routing = routing;
  if (c.quant == Quant::kBlock) {
    down.b_scale = up.out_scale;
    down.b_scale_stride = c.intermediate / scale_block;
    down.b_scale_step = 1;
  }
  down.experts = c.num_local;
  down.evict_first = up.evict_first;
  down.w_scale = c.w2_scale;
  down.w_scale_rows = c.hidden / 128;
  down.w_scale_cols = c.intermediate / scale_block;
  down.act_scale = c.act_scale;
  down.out = at<uint8_t>(c.workspace, l.y);
  down.k_bytes = c.intermediate * element;
  down.weight_rows = c.hidden;
  down.top_k = c.top_k;
  down.pairs = config.kept_pairs;
  down.threes = config.threes && config.down_clusters;
  run_panels(c, config, down, reduce_params(c, begin, tokens, down.out, routing.slot_to_row), h_map, num_sms, stream);
}

}  // namespace

void run(const Call& c, const Config& config, int num_sms, cudaStream_t stream) {
  if (config.regime == Regime::kLow) {
    if (c.tokens > 0) run_low(c, config, num_sms, stream);
    return;
  }
  const int element = c.quant == Quant::kNone ? 2 : 1;
  const int64_t experts = c.num_local;
  const bool as_m = tokens_are_m(config.rule);
  const CUtensorMap up_map =
      gate_up_weight_map(c.w13, experts * 2 * c.intermediate, static_cast<int64_t>(c.hidden) * element, as_m);
  const CUtensorMap half_map =
      gate_up_half_map(c.w13, experts * 2 * c.intermediate, static_cast<int64_t>(c.hidden) * element, c.intermediate);
  const CUtensorMap h_map = down_row_map(at<uint8_t>(c.workspace, config.layout.h), config.chunk_rows,
                                         static_cast<int64_t>(c.intermediate) * element);
  for (int64_t begin = 0; begin < c.tokens; begin += config.chunk_tokens) {
    run_chunk(c, config, begin, std::min(config.chunk_tokens, c.tokens - begin), up_map, half_map, h_map, num_sms,
              stream);
  }
}

}  // namespace hpc::moe

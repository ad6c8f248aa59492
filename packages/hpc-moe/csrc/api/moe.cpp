// hpc_moe._C.fused_moe: one call on a GPU. Python has checked the tensors; here addresses become a Call.
#include <cuda_runtime.h>
#include <nanobind/nanobind.h>

#include "hpc/device.hpp"
#include "hpc/tensor.hpp"
#include "launch/call.hpp"

namespace nb = nanobind;

namespace hpc::moe {

void bind_moe(nb::module_& module) {
  using nb::literals::operator""_a;

  module.def(
      "fused_moe",
      [](const Config& config, int quant, int64_t tokens, int32_t top_k, int32_t num_local, int32_t hidden,
         int32_t intermediate, int32_t ep_rank, uint64_t x, int64_t x_stride, bool x_is_bf16, uint64_t w13, uint64_t w2,
         uint64_t topk_ids, bool ids_are_int64, int64_t id_token_stride, int64_t id_slot_stride, uint64_t topk_weights,
         int64_t weight_token_stride, int64_t weight_slot_stride, uint64_t w13_scale, uint64_t w2_scale,
         uint64_t x_scale, int64_t x_scale_stride, int64_t x_scale_step, uint64_t act_scale, float swiglu_limit,
         uint64_t shared_output, int64_t shared_stride, float routed_scaling_factor, uint64_t workspace, uint64_t out,
         int64_t out_stride, int device, uint64_t stream) {
        require_sm90("hpc_moe.fused_moe", device);
        check(quant >= 0 && quant <= 2, "hpc_moe.fused_moe", "quant", "0 (none), 1 (block) or 2 (tensor)", quant);
        check(config.regime != Regime::kLow || quant != 0, "hpc_moe.fused_moe", "config",
              "a regime with kernels for bf16 weights (mid or large)", "low");
        check(config.chunk_tokens > 0, "hpc_moe.fused_moe", "config", "at least one token", config.chunk_tokens);
        Call call{};
        call.quant = static_cast<Quant>(quant);
        call.tokens = tokens;
        call.top_k = top_k;
        call.num_local = num_local;
        call.hidden = hidden;
        call.intermediate = intermediate;
        call.ep_rank = ep_rank;
        call.x = pointer<const void>(x);
        call.x_stride = x_stride;
        call.x_is_bf16 = x_is_bf16;
        call.w13 = pointer<const void>(w13);
        call.w2 = pointer<const void>(w2);
        call.topk_ids = pointer<const void>(topk_ids);
        call.ids_are_int64 = ids_are_int64;
        call.id_token_stride = id_token_stride;
        call.id_slot_stride = id_slot_stride;
        call.topk_weights = pointer<const float>(topk_weights);
        call.weight_token_stride = weight_token_stride;
        call.weight_slot_stride = weight_slot_stride;
        call.w13_scale = pointer<const float>(w13_scale);
        call.w2_scale = pointer<const float>(w2_scale);
        call.x_scale = pointer<const float>(x_scale);
        call.x_scale_stride = x_scale_stride;
        call.x_scale_step = x_scale_step;
        call.act_scale = pointer<const float>(act_scale);
        call.swiglu_limit = swiglu_limit;
        call.shared_output = pointer<const void>(shared_output);
        call.shared_stride = shared_stride;
        call.routed_scaling_factor = routed_scaling_factor;
        call.workspace = pointer<void>(workspace);
        call.out = pointer<void>(out);
        call.out_stride = out_stride;
        const DeviceGuard guard(device);
        run(call, config, device_properties(device).num_sms, reinterpret_cast<cudaStream_t>(stream));
      },
      nb::kw_only(), "config"_a, "quant"_a, "tokens"_a, "top_k"_a, "num_local"_a, "hidden"_a, "intermediate"_a,
      "ep_rank"_a, "x"_a, "x_stride"_a, "x_is_bf16"_a, "w13"_a, "w2"_a, "topk_ids"_a, "ids_are_int64"_a,
      "id_token_stride"_a, "id_slot_stride"_a, "topk_weights"_a, "weight_token_stride"_a, "weight_slot_stride"_a,
      "w13_scale"_a, "w2_scale"_a, "x_scale"_a, "x_scale_stride"_a, "x_scale_step"_a, "act_scale"_a, "swiglu_limit"_a,
      "shared_output"_a, "shared_stride"_a, "routed_scaling_factor"_a, "workspace"_a, "out"_a, "out_stride"_a,
      "device"_a, "stream"_a,
      "Launches the call's kernels in `stream`. Addresses are ints (0: absent), strides count elements; "
      "csrc/launch/call.hpp says what each is.");
}

}  // namespace hpc::moe

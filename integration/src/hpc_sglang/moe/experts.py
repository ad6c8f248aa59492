"""The experts of one SGLang layer as hpc_moe takes them, and the workspace that all layers share."""

from typing import Any

import hpc_moe
import torch

from ..counters import count, made
from .rows import Rows

MAX_TOKENS = 262144  # of one call of hpc_moe.fused_moe
LEAST_TOKENS = 64


class Experts:
    """One FusedMoE layer with FP8 weights. Weights and scales are read from the layer at each call, never copied.

    layer: SGLang's FusedMoE. method: its Fp8MoEMethod. batch_invariant: a token's result must not depend on its batch.
    """

    def __init__(self, layer: Any, method: Any, batch_invariant: bool) -> None:
        self.layer = layer
        self.config = layer.moe_runner_config
        self.block = bool(method.block_quant)
        self.block_shape = method.quant_config.weight_block_size if self.block else None
        self.batch_invariant = batch_invariant
        self.rows = Rows()  # by ``norm``, for the call that follows

    @property
    def name(self) -> str:
        """hpc_moe's name of the quantisation."""
        return "block" if self.block else "tensor"

    def quant(self, x_scale: torch.Tensor | None = None) -> hpc_moe.Fp8Block | hpc_moe.Fp8Tensor:
        """The scales as they are now. All of them multiply stored values, in SGLang as in hpc_moe.

        x_scale: of an x that is quantised by groups of 128 already.
        """
        layer = self.layer
        if self.block:
            return hpc_moe.Fp8Block(layer.w13_weight_scale_inv, layer.w2_weight_scale_inv, x_scale)
        # SGLang keeps one static scale a layer, as a tensor without dimensions.
        return hpc_moe.Fp8Tensor(
            layer.w13_weight_scale,
            layer.w2_weight_scale,
            layer.w13_input_scale.reshape(1),
            layer.w2_input_scale.reshape(1),
        )

    def describe(self) -> str:
        """What runs here, in a few words."""
        experts, hidden, inner = self.sizes()
        kind = "block FP8" if self.block else "per-tensor FP8"
        invariant = ", batch-invariant" if self.batch_invariant else ""
        return f"hpc_moe.fused_moe for {kind} experts ({experts} of {inner} x {hidden} on this rank{invariant})"

    def sizes(self) -> tuple[int, int, int]:
        """(E, H, I) on this rank."""
        return self.layer.w2_weight.shape

    def why_not(self) -> str:
        """Why hpc_moe does not run this layer; "" where it does. Called once, when the weights are loaded."""
        config, layer = self.config, self.layer
        wanted = {
            "activation": ("silu", config.activation),
            "is_gated": (True, config.is_gated),
            "apply_router_weight_on_input": (False, config.apply_router_weight_on_input),
            "no_combine": (False, config.no_combine),
            "gemm1_alpha": (None, config.gemm1_alpha),
            # SGLang clamps silu(gate) here, and gate itself under swiglu_limit; hpc_moe does the latter.
            "gemm1_clamp_limit": (None, config.gemm1_clamp_limit),
            "activations": (torch.bfloat16, config.params_dtype),
        }
        for name, (can, has) in wanted.items():
            if has != can:
                return f"{name}: expected {can}, got {has}"
        for name in ("w13_weight_bias", "w2_weight_bias"):
            if getattr(layer, name, None) is not None:
                return f"{name}: experts with a bias are not supported"
        if config.num_fused_shared_experts and layer.moe_ep_size > 1:
            return "shared experts fused into the routed ones under expert parallelism are not supported"
        if self.block and list(self.block_shape or ()) != [128, 128]:
            return f"weight_block_size: expected [128, 128], got {self.block_shape}"
        if self.block and self.sizes()[2] % 128:
            return f"intermediate size on a rank: expected a multiple of the blocks' 128, got {self.sizes()[2]}"
        if not self.block and (layer.w13_input_scale is None or layer.w2_input_scale is None):
            return 'per-tensor FP8 needs static activation scales (activation_scheme "static" in the checkpoint)'
        # A call without tokens checks everything else, and launches nothing.
        hidden = self.sizes()[1]
        x = torch.empty((0, hidden), dtype=torch.bfloat16, device=layer.w13_weight.device)
        top_k = config.top_k or 1
        ids = torch.empty((0, top_k), dtype=torch.int32, device=x.device)
        try:
            self._call(x, ids, ids.float(), None)
        except (TypeError, ValueError) as error:
            return str(error)
        return ""

    def run(self, x: torch.Tensor, topk: Any, workspaces: "Workspaces") -> torch.Tensor:
        """The layer's routed experts, this rank's part of the sum.

        x: [T, H] bf16. topk: topk_ids [T, k] (global ids; others' and -1 are skipped) and topk_weights [T, k].
        Returns [T, H] bf16, a new tensor. Raises hpc_moe's errors.
        """
        ids, weights = topk.topk_ids, topk.topk_weights
        if ids.dtype not in (torch.int32, torch.int64):
            ids = ids.to(torch.int32)
        workspace = workspaces.get(self, x.shape[0], ids.shape[1], x.device)
        count(f"moe.{self.name}")
        quantised = self.rows.take(x)
        if quantised is None:
            self.rows.forget()
            return self._call(x, ids, weights.to(torch.float32), workspace)
        count("moe.quantised")
        return self._call(quantised[0], ids, weights.to(torch.float32), workspace, quantised[1])

    def _call(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        workspace: torch.Tensor | None,
        x_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        layer, factor = self.layer, self.config.routed_scaling_factor
        return hpc_moe.fused_moe(
            x,
            layer.w13_weight,
            layer.w2_weight,
            ids,
            weights,
            self.quant(x_scale),
            ep_rank=int(layer.moe_ep_rank),
            num_experts=int(layer.num_experts),
            swiglu_limit=self.config.swiglu_limit,
            routed_scaling_factor=1.0 if factor is None else float(factor),
            batch_invariant=self.batch_invariant,
            workspace=workspace,
        )


class Workspaces:
    """One buffer a device, for all layers: they run one after the other.

    It is made when weights are loaded, for the longest prefill step. A call that needs more makes a larger one, for a
    power of two of tokens; the former stays, since CUDA graphs may hold its address.
    """

    def __init__(self) -> None:
        self.buffers: dict[torch.device, list[torch.Tensor]] = {}
        self._bytes: dict[tuple[Any, ...], int] = {}

    def reserve(self, experts: Experts, tokens: int) -> None:
        """Have memory for calls of up to ``tokens`` tokens of these experts."""
        self.get(experts, tokens, experts.config.top_k or 1, experts.layer.w13_weight.device)

    def get(self, experts: Experts, tokens: int, top_k: int, device: torch.device) -> torch.Tensor:
        """uint8 memory, enough for a call of ``tokens`` tokens."""
        rounded = min(max(LEAST_TOKENS, 1 << (tokens - 1).bit_length() if tokens else 0), MAX_TOKENS)
        key = (rounded, top_k, *experts.sizes(), experts.name, int(experts.layer.num_experts), experts.batch_invariant)
        if key not in self._bytes:
            num_local, hidden, inner = experts.sizes()
            self._bytes[key] = hpc_moe.workspace_bytes(
                rounded,
                top_k,
                num_local,
                hidden,
                inner,
                experts.name,
                num_experts=int(experts.layer.num_experts),
                batch_invariant=experts.batch_invariant,
            )
        buffers = self.buffers.setdefault(device, [])
        if not buffers or buffers[-1].numel() < self._bytes[key]:
            with torch.inference_mode(False):  # what is made in inference mode could not be written outside it
                buffers.append(torch.empty(self._bytes[key], dtype=torch.uint8, device=device))
            made("moe.workspace", self._bytes[key])
        return buffers[-1]

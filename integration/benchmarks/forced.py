"""Engines that say tokens known beforehand, and the logprobs of these: what device_check and rank_check compare.

One model with random weights (Qwen3-MoE, not a model that upstream's FP8 attention knows), served by every ``Lane`` in
an engine of its own, all side by side. Requests of mixed lengths are answered with tokens known beforehand
(``probe/hpc_forced.py``), so that logprobs can be compared step by step.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

HERE = pathlib.Path(__file__).parent
MODEL = dict(
    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", torch_dtype="bfloat16", hidden_act="silu",
    attention_bias=False, attention_dropout=0.0, use_cache=True, rms_norm_eps=1e-6, rope_theta=1000000.0,
    decoder_sparse_step=1, mlp_only_layers=[],
    vocab_size=4096, hidden_size=1024, intermediate_size=1024, moe_intermediate_size=512, num_hidden_layers=6,
    num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=16, num_experts_per_tok=4,
    norm_topk_prob=True, max_position_embeddings=16384, initializer_range=0.15, tie_word_embeddings=False,
    bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
NEW_TOKENS = 48
LENGTHS = (1, 130, 511, 900, 4000, 64, 9000, 192, 1023, 256, 333, 2500, 700, 400, 4111, 640)
ENGINE = dict(
    skip_tokenizer_init=True, sampling_backend="pytorch", grammar_backend="none", max_total_tokens=40960,
    max_running_requests=16, chunked_prefill_size=32768, max_prefill_tokens=32768, disable_radix_cache=True,
    mem_fraction_static=0.9, moe_runner_backend="triton", log_level="info", disable_overlap_schedule=True,
    disable_prefill_cuda_graph=True,  # their capture takes longer than all the rest
    sleep_on_idle=True,  # many engines start side by side
)  # fmt: skip
CHECKPOINT_S = 120  # that an engine waits for its checkpoint
BLOCK = 128
E4M3_MAX = 448.0


def make_checkpoint(folder: str, settings: dict[str, Any]) -> None:
    """A random model in bf16, named as transformers names a Qwen3-MoE's tensors. config.json is written last.

    Made without transformers, whose import takes longer than all of this.
    """
    import torch
    from safetensors.torch import save_file

    config = {**MODEL, **settings}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(1)
    hidden, dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = (config[f"num_{kind}_heads"] * dim for kind in ("attention", "key_value"))
    inner = config["moe_intermediate_size"]
    tensors = {"model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16)}

    def matrix(name: str, rows: int, columns: int) -> None:
        drawn = torch.randn((rows, columns), generator=generator, device=device) * config["initializer_range"]
        tensors[f"{name}.weight"] = drawn.to(torch.bfloat16).cpu()

    matrix("model.embed_tokens", config["vocab_size"], hidden)
    matrix("lm_head", config["vocab_size"], hidden)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        for name, size in (("input_layernorm", hidden), ("post_attention_layernorm", hidden),
                           ("self_attn.q_norm", dim), ("self_attn.k_norm", dim)):  # fmt: skip
            tensors[f"{layer}.{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)
        for name, size in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            matrix(f"{layer}.self_attn.{name}_proj", size, hidden)
        matrix(f"{layer}.self_attn.o_proj", hidden, heads)
        matrix(f"{layer}.mlp.gate", config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
                matrix(f"{layer}.mlp.experts.{expert}.{name}_proj", rows, columns)
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    save_file(tensors, pathlib.Path(folder, "model.safetensors"), {"format": "pt"})
    write_config(folder, config)


def write_config(folder: str, config: dict[str, Any]) -> None:
    """config.json, whole from the moment it is there: engines that wait for a checkpoint look for it."""
    whole = pathlib.Path(folder, "config.new")
    whole.write_text(json.dumps(config))
    whole.rename(pathlib.Path(folder, "config.json"))


def to_block_fp8(weight: Any) -> tuple[Any, Any]:
    """A matrix as e4m3 with one fp32 scale a block of 128 x 128: (values, scales), weight = values * scales."""
    import torch

    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))  # [row block, row, column block, column]
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-8) / E4M3_MAX
    values = (blocks / scales[:, None, :, None]).flatten(2, 3).flatten(0, 1)[:rows, :columns]
    return values.to(torch.float8_e4m3fn).contiguous(), scales


def quantise_checkpoint(source: str, folder: str) -> None:
    """The checkpoint in ``source`` with every projection of attention and experts in block FP8."""
    from safetensors.torch import load_file, save_file

    pathlib.Path(folder).mkdir(parents=True)
    tensors = {}
    for file in pathlib.Path(source).glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            if re.search(r"layers\..*_proj\.weight$", name):
                tensors[name], tensors[f"{name}_scale_inv"] = to_block_fp8(tensor)
            else:
                tensors[name] = tensor
    save_file(tensors, pathlib.Path(folder, "model.safetensors"), {"format": "pt"})
    config = json.loads(pathlib.Path(source, "config.json").read_text())
    config["quantization_config"] = dict(
        quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[BLOCK, BLOCK]
    )
    write_config(folder, config)


@dataclass
class Lane:
    """One engine: a name, a checkpoint's folder, arguments; then what it said.

    gates: whether this package's gates are used, which is the default where it is installed.
    at: the forced token's logprob by position. calls: of this package's operators, in the first rank's process.
    """

    name: str
    model: str
    arguments: dict[str, Any]
    gates: bool
    at: dict[int, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    log: str = ""

    def start(self, out: str, lengths: list[int], port: int) -> None:
        """Start the engine's process, which waits for its checkpoint once SGLang is imported.

        port: of its own; engines that start together would take the same free one.
        """
        given = dict(model=self.model, arguments={**self.arguments, "nccl_port": port}, lengths=lengths, out=out)
        paths = os.pathsep.join(filter(None, (str(HERE / "probe"), os.environ.get("PYTHONPATH"))))
        self._out, self._lengths = out, lengths
        with open(f"{out}.log", "w") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, json.dumps(given)], stdout=log, stderr=log,
                env={**os.environ, "PYTHONPATH": paths, "HPC_SGLANG_ROUTER": "1" if self.gates else "0"},
            )  # fmt: skip

    def finish(self) -> bool:
        """Wait for the engine; False where it failed or said something else than was asked, which ``log`` ends with."""
        code = self._process.wait()
        self.log = pathlib.Path(f"{self._out}.log").read_text()
        if code:
            return False
        seen = json.loads(pathlib.Path(self._out).read_text())
        self.calls = seen["calls"]
        at = {int(position): forced for position, forced, _ in seen["rows"]}
        wanted = {length - 1 + step for length in self._lengths for step in range(NEW_TOKENS)}
        if set(at) != wanted or len(seen["rows"]) != len(wanted):
            self.log += f"\nexpected the {len(wanted)} tokens asked for, got {len(seen['rows'])}"
            return False
        if any(value != value for row in seen["rows"] for value in row):
            self.log += "\na logprob is NaN"
            return False
        self.at = at
        return True


def difference(one: Lane, other: Lane) -> float:
    """Mean over requests and steps of |difference| of the forced token's logprob."""
    return sum(abs(one.at[position] - other.at[position]) for position in one.at) / len(one.at)


def serve(given: dict[str, Any]) -> None:
    """The child's part: one engine, one batch, its logprobs as JSON in ``out``."""
    import random

    import sglang

    end = time.monotonic() + CHECKPOINT_S
    while not pathlib.Path(given["model"], "config.json").exists():
        if time.monotonic() > end:
            raise TimeoutError(f"no checkpoint in {given['model']} after {CHECKPOINT_S} s")
        time.sleep(0.1)
    source = random.Random(3)
    prompts = [[source.randrange(MODEL["vocab_size"]) for _ in range(length)] for length in given["lengths"]]
    engine = sglang.Engine(model_path=given["model"], **{**ENGINE, **given["arguments"]})
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    engine.generate(input_ids=prompts[:2], sampling_params={**sampling, "max_new_tokens": 2})
    engine.collective_rpc("hpc_forced_report", path=given["out"])
    engine.generate(input_ids=prompts, sampling_params=sampling)
    engine.collective_rpc("hpc_forced_report", path=given["out"])
    engine.shutdown()


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))

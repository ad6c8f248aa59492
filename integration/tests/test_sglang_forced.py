"""benchmarks/forced.py: the block FP8 checkpoint, and what counts as an answer."""

import json
import pathlib
from types import ModuleType

import pytest
import torch
from hpc_common.testing import load_script

SCRIPT = pathlib.Path(__file__).parents[1] / "benchmarks" / "forced.py"


@pytest.fixture(scope="module")
def forced() -> ModuleType:
    return load_script(SCRIPT, "forced")


@pytest.mark.parametrize("shape", [(256, 384), (200, 300), (4, 128)])
def test_block_fp8(shape: tuple[int, int], forced: ModuleType) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    weight[0, :64] *= 50  # one block's scale is not the others'
    values, scales = forced.to_block_fp8(weight)
    assert values.dtype == torch.float8_e4m3fn and values.shape == shape and values.is_contiguous()
    assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128)) and scales.dtype == torch.float32
    rows, columns = (torch.arange(size) // 128 for size in shape)
    scale = scales[rows][:, columns]
    assert (values.float().abs() <= 448).all()
    off = (values.float() * scale - weight.float()).abs()
    assert (off <= (weight.float().abs() * 2**-4).maximum(scale * 2**-9)).all()  # half a step of three bits


def test_projections_alone_are_quantised(forced: ModuleType, tmp_path: pathlib.Path) -> None:
    from safetensors.torch import load_file, save_file

    names = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.3.down_proj", "model.layers.0.mlp.gate")
    source = tmp_path / "bf16"
    source.mkdir()
    save_file({f"{name}.weight": torch.randn(128, 128).to(torch.bfloat16) for name in names}, source / "m.safetensors")
    (source / "config.json").write_text(json.dumps({"hidden_size": 128}))
    forced.quantise_checkpoint(str(source), str(tmp_path / "fp8"))
    made = load_file(tmp_path / "fp8" / "model.safetensors")
    assert {name for name in made if name.endswith("_scale_inv")} == {f"{name}.weight_scale_inv" for name in names[:2]}
    assert made[f"{names[2]}.weight"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"


def test_the_checkpoint_is_what_transformers_loads(forced: ModuleType, tmp_path: pathlib.Path) -> None:
    from transformers import AutoModelForCausalLM

    small = dict(vocab_size=64, hidden_size=128, moe_intermediate_size=64, num_hidden_layers=2, head_dim=32)
    small |= dict(num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2)
    forced.make_checkpoint(str(tmp_path), small)
    assert not (tmp_path / "config.new").exists()
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert type(model).__name__ == "Qwen3MoeForCausalLM" and model.dtype == torch.bfloat16
    for name, value in model.named_parameters():
        drawn = value.float().std() if value.dim() > 1 else value.float().sub(1).abs().max() + 0.15
        assert abs(drawn - 0.15) < 0.02, name


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("", ""),
        ("missing", "the 96 tokens asked for, got 95"),
        ("nan", "a logprob is NaN"),
        ("other", "got 96"),
    ],
)
def test_what_counts_as_an_answer(fault: str, said: str, forced: ModuleType, tmp_path: pathlib.Path) -> None:
    rows = [[length - 1 + step, -2.0, -1.0] for length in (1, 130) for step in range(forced.NEW_TOKENS)]
    if fault == "missing":
        rows.pop()
    if fault == "nan":
        rows[5][1] = float("nan")
    if fault == "other":
        rows[5][0] = 9999  # a position that nobody asked for
    lane = forced.Lane("hpc", "model", {}, gates=True)
    lane._out, lane._lengths = str(tmp_path / "out"), [1, 130]
    pathlib.Path(f"{lane._out}.log").write_text("words")
    pathlib.Path(lane._out).write_text(json.dumps({"rows": rows, "calls": {"attention.decode": 3}}))
    lane._process = type("Ended", (), {"wait": staticmethod(lambda: 0)})
    assert lane.finish() is (not fault) and said in lane.log and bool(lane.at) is (not fault)
    if not fault:
        assert forced.difference(lane, lane) == 0 and lane.calls == {"attention.decode": 3}

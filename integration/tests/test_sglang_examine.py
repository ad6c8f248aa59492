"""What would be used for a model's config and flags: foretold, with reasons, from config.json alone."""

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from hpc_sglang import compat, examine, plugin
from hpc_sglang.examine import GATES
from hpc_sglang.model import BadInput, Model, describe
from hpc_sglang.record import ATTENTION, MOE, ROUTER
from hpc_sglang.router import gates

QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 262144,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
}
LONGCAT = {"architectures": ["LongcatFlashForCausalLM"]}
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
BOTH = ("--attention-backend", "hpc", "--moe-runner-backend", "hpc_ops")


def verdicts(path: pathlib.Path, *arguments: str, **changes: Any) -> dict[str, tuple[bool, str]]:
    """operator -> (used, detail) for Qwen's config with changes."""
    (path / "config.json").write_text(json.dumps({**QWEN, **changes}))
    report = examine.examine(["--model-path", str(path), *arguments])
    assert report.model.startswith({**QWEN, **changes}["architectures"][0])
    found = {entry.operator: (entry.used, entry.detail) for entry in report.entries}
    asked = {ATTENTION: "hpc" in arguments, MOE: "hpc_ops" in arguments}
    assert report.refused == any(wanted and not found[name][0] for name, wanted in asked.items())
    return found


def test_used(tmp_path: pathlib.Path) -> None:
    found = verdicts(tmp_path, *BOTH, "--tp", "4", "--ep-size=2", "--some-other-flag", "--mem-fraction-static", "0.8")
    assert found == {
        ATTENTION: (True, "hpc_attention.decode, by --attention-backend hpc"),
        ROUTER: (True, "the gates of Qwen3MoeSparseMoeBlock and the choice of experts, 1 bf16 term"),
        MOE: (
            True,
            "hpc_moe.fused_moe for block FP8 experts (64 of 384 x 2048 on this rank), by --moe-runner-backend hpc_ops",
        ),
    }
    found = verdicts(tmp_path, "--decode-attention-backend", "hpc", "--enable-deterministic-inference")
    assert found[ATTENTION] == (True, "hpc_attention.decode, by --decode-attention-backend hpc")
    assert found[MOE] == (False, "--moe-runner-backend hpc_ops is not set")
    assert "per-tensor FP8" in verdicts(tmp_path, *BOTH, quantization_config=STATIC)[MOE][1]
    invariant = verdicts(tmp_path, *BOTH, "--enable-deterministic-inference")
    assert "batch-invariant" in invariant[MOE][1]


@pytest.mark.parametrize(
    ("arguments", "changes", "reason"),
    [
        (("--page-size", "48"), {}, "page_size"),
        ((), {"head_dim": 96}, "head_dim"),
        (("--tp-size", "1"), {"num_attention_heads": 68}, "num_q_heads"),
        ((), {"kv_lora_rank": 512}, "MLA"),
        ((), {"is_encoder_decoder": True}, "cross attention"),
        (("--kv-cache-dtype", "fp8_e5m2"), {}, "got torch.float8_e5m2"),
        ((), {"max_position_embeddings": 2**21}, "at most 1,048,576 tokens"),
        (("--speculative-algorithm", "EAGLE", "--speculative-eagle-topk", "4"), {}, "--speculative-eagle-topk 1"),
        (
            ("--speculative-algorithm", "EAGLE", "--speculative-num-draft-tokens", "9"),
            {},
            "at most 8 draft tokens are verified, got 9",
        ),
    ],
)
def test_attention_refused(arguments: tuple, changes: dict, reason: str, tmp_path: pathlib.Path) -> None:
    used, detail = verdicts(tmp_path, *BOTH, *arguments, **changes)[ATTENTION]
    assert not used and reason in detail


@pytest.mark.parametrize(
    ("arguments", "changes", "reason"),
    [
        ((), {"quantization_config": None}, "not FP8"),
        ((), {"quantization_config": {"quant_method": "awq"}}, "quant_method awq"),
        ((), {"quantization_config": {**QWEN["quantization_config"], "weight_block_size": [64, 128]}}, "[64, 128]"),
        ((), {"quantization_config": {"quant_method": "fp8"}}, "static activation scales"),
        (("--tp", "4"), {}, "expected a multiple of the blocks' 128, got 192"),
        ((), {"hidden_act": "gelu"}, "activation: expected silu, got gelu"),
        ((), {"swiglu_limits": [0, 7.0]}, "gemm1_clamp_limit"),
        ((), {"num_experts_per_tok": 64}, "k from 1 to 32"),
        ((), {"torch_dtype": "float16"}, "torch.float16"),
        (("--dtype", "half"), {}, "torch.float16"),
        (("--moe-a2a-backend", "deepep"), {}, "--moe-a2a-backend deepep"),
        (("--enable-lora",), {}, "LoRA on experts"),
        ((), {"num_experts": None}, "no experts"),
    ],
)
def test_moe_refused(arguments: tuple, changes: dict, reason: str, tmp_path: pathlib.Path) -> None:
    used, detail = verdicts(tmp_path, *BOTH, *arguments, **changes)[MOE]
    assert not used and reason in detail


@pytest.mark.parametrize(
    ("changes", "used", "words"),
    [
        ({"architectures": ["HYV3ForCausalLM"]}, True, "the gates of HYV3MoEFused, 3 bf16 terms"),
        ({"architectures": ["MiniMaxM2ForCausalLM"]}, True, "MiniMaxM2MoE, 3"),
        ({"architectures": ["Step3p5ForCausalLM"], "need_fp32_gate": True}, True, "Step3p5MoEMLP, 1 bf16 term"),
        ({"architectures": ["Step3p5ForCausalLM"], "need_fp32_gate": False}, False, "need_fp32_gate"),
        (LONGCAT, True, "LongcatFlashRouter, 3"),
        (
            {**LONGCAT, "hidden_size": 6144, "num_experts": 512, "zero_expert_num": 256},
            True,
            "LongcatFlashRouter, 2",
        ),
        ({**LONGCAT, "router_bias": True}, False, "has a bias"),
        ({"architectures": ["HYV3ForCausalLM"], "torch_dtype": "float16"}, False, "float16"),
    ],
)  # fmt: skip
def test_router(changes: dict, used: bool, words: str, tmp_path: pathlib.Path) -> None:
    verdict = verdicts(tmp_path, **changes)[ROUTER]
    assert verdict[0] is used and words in verdict[1]


def test_router_switches(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture = {"architectures": ["HYV3ForCausalLM"]}
    monkeypatch.setenv("HPC_SGLANG_ROUTER_TERMS", "2")
    assert "2 bf16 terms" in verdicts(tmp_path, **architecture)[ROUTER][1]
    step = {"architectures": ["Step3p5ForCausalLM"], "need_fp32_gate": True}
    assert "1 bf16 term" in verdicts(tmp_path, **step)[ROUTER][1]
    monkeypatch.setenv("HPC_SGLANG_ROUTER_TERMS", "9")
    report = examine.examine([])
    assert report.refused and report.entries[1].detail.endswith("got '9'")
    monkeypatch.setenv("HPC_SGLANG_ROUTER_TERMS", "")
    monkeypatch.setenv("HPC_SGLANG_ROUTER", "0")
    assert verdicts(tmp_path, **architecture)[ROUTER] == (False, "HPC_SGLANG_ROUTER=0 in the environment")


def test_known_gates_are_those_that_are_taken_over() -> None:
    assert set(GATES.values()) == set(gates.MAKERS)


def test_known_architectures_are_sglangs(plugged: Any) -> None:
    """Each architecture is SGLang's, and its module has the class whose gate is taken over."""
    import importlib

    modules = {
        "Step3p5MoEMLP": "step3p5",
        "HYV3MoEFused": "hunyuan_v3",
        "Glm4MoeGate": "glm4_moe",
        "MiniMaxM2MoE": "minimax_m2",
        "MiniMaxM3MoE": "minimax_m3",
        "LongcatFlashRouter": "longcat_flash",
        "Qwen3MoeSparseMoeBlock": "qwen3_moe",
    }
    others = {"Glm4vMoeForConditionalGeneration": "glm4v_moe", "Step3p7ForConditionalGeneration": "step3p7"}
    others["MiniMaxM3SparseForConditionalGeneration"] = "minimax_m3_vl"
    for architecture, gate in GATES.items():
        home = importlib.import_module(f"sglang.srt.models.{modules[gate]}")
        assert hasattr(home, gate)
        file = pathlib.Path(home.__file__).with_name(f"{others.get(architecture, modules[gate])}.py")
        assert f"class {architecture}" in file.read_text()


def test_two_terms_where_sglang_has_them(plugged: Any) -> None:
    from sglang.srt.models import longcat_flash

    assert set(longcat_flash._LONGCAT_FLASH_ROUTER_HPC_GEMM_MIN_M) == examine.LONGCAT_TWO_TERMS


def test_without_the_parts(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "installed", lambda name: None if name == "hpc-moe" else "0.1.0")
    found = verdicts(tmp_path, *BOTH)
    assert found[MOE] == (False, "not installed (pip install hpc-moe)") and found[ATTENTION][0]
    monkeypatch.setattr(compat, "sglang_version", lambda: None)
    report = examine.examine([])
    assert report.entries[0].detail == "sglang is not installed (pip install sglang)"
    assert report.versions.endswith("sglang is not installed")


def test_without_torch() -> None:
    """The package alone: it says what is missing."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from hpc_sglang import compat, examine, plugin\n"
        "plugin.installed = lambda name: None\n"
        "compat.sglang_version = lambda: None\n"
        "print(*examine.examine([]).lines(), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[1].startswith("device: cpu (") and lines[2].endswith("not installed (pip install hpc-attention)")


def test_a_newer_sglang_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "sglang_version", lambda: "0.6.1")
    report = examine.examine([])
    assert "sglang 0.6.1 is not one of the versions this was tested with, 0.5.17 to 0.5.23" in report.lines()[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model-path", "/no/such/folder"], "--model-path: expected a folder with config.json"),
        (["--page-size", "many"], "invalid int value: 'many'"),
        (["--tp", "3"], "--tp-size 3: expected a divisor of the model's 32 query heads"),
        (["--tp", "4", "--ep", "3"], "the first a multiple of the second"),
        (["--tp", "0"], "--tp-size 0"),
        (["--tp", "32", "--ep", "32"], ""),
    ],
)
def test_bad_input(arguments: list[str], words: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    arguments = ["--model-path", str(tmp_path), *arguments]
    if not words:
        examine.examine(arguments)
        return
    with pytest.raises(BadInput) as bad:
        examine.examine(arguments)
    assert words in str(bad.value)


def test_bad_config(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "model.json"
    for text, words in (("{", "is not JSON"), ("[]", "names no architectures"), ("{}", "names no architectures")):
        file.write_text(text)
        with pytest.raises(BadInput, match=words):
            examine.examine(["--model-path", str(file)])


def test_a_language_model_inside_another() -> None:
    inner = {key: value for key, value in QWEN.items() if key != "architectures"}
    model = describe(
        {"architectures": ["Some"], "text_config": {**inner, "use_sliding_window": False, "sliding_window": 9}}
    )
    assert isinstance(model, Model) and (model.hidden, model.num_experts, model.top_k) == (2048, 128, 8)
    assert model.quant == "block" and model.window is None
    assert describe({**QWEN, "sliding_window": 128}).window == 128


def test_command(tmp_path: pathlib.Path) -> None:
    """As a person calls it: SGLang is imported, every hook placed, and the exit status says what a server would do."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hpc_sglang", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=200)

    (tmp_path / "config.json").write_text(json.dumps({**QWEN, "head_dim": 96}))
    done = run("--model-path", str(tmp_path), *BOTH)
    lines = done.stdout.splitlines()
    assert done.returncode == 1, done.stderr
    assert lines[0].startswith("hpc-sglang ") and f"sglang {compat.sglang_version()}" in lines[0]
    assert lines[2] == "model: Qwen3MoeForCausalLM, hidden 2048, bfloat16, 128 experts of 768"
    assert lines[3].startswith("attention: not used: ") and lines[5].startswith("moe: used: hpc_moe.fused_moe")
    assert lines[-1] == "A server with these flags would not start."
    bad = run("--model-path", "/no/such")
    assert bad.returncode == 2 and bad.stderr.startswith("hpc_sglang: --model-path") and not bad.stdout

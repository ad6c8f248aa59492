"""What the attention backend refuses when a server starts, how it composes with a prefill backend, its page tables."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hpc_sglang.attention import pages
from hpc_sglang.attention.limits import Server, Shape, refusal, shape_of

SERVER = Server(torch.bfloat16, torch.bfloat16, "cpu", 16, 4096)


def layer(**changes: Any) -> SimpleNamespace:
    """A RadixAttention layer's fields, as far as they are read."""
    fields = dict(
        layer_id=3, tp_q_head_num=8, tp_k_head_num=2, head_dim=128, qk_head_dim=128, v_head_dim=128, logit_cap=0.0,
        sliding_window_size=-1, is_cross_attention=False, attn_type=SimpleNamespace(value="decoder"), use_irope=False,
        pos_encoding_mode="NONE", logit_capping_method="tanh", xai_temperature_len=-1,
    )  # fmt: skip
    return SimpleNamespace(**{**fields, **changes})


@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_what_is_served(page_size: int, kv_dtype: torch.dtype) -> None:
    server = replace(SERVER, page_size=page_size, kv_dtype=kv_dtype, deterministic=True)
    layers = [layer(), layer(sliding_window_size=127, logit_cap=30.0), layer(tp_q_head_num=32, head_dim=64,
              qk_head_dim=64, v_head_dim=64), layer(use_irope=True)]  # fmt: skip
    assert refusal(server, layers) == ""
    assert refusal(replace(server, speculative="EAGLE3", topk=1, draft_tokens=8), layers) == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(page_size=48), "page_size: expected one of (1, 16, 32, 64, 128, 256), got 48"),
        (dict(kv_dtype=torch.float8_e5m2), "k_cache: expected torch.bfloat16"),
        (dict(dtype=torch.float32, kv_dtype=torch.float32), "q: expected torch.bfloat16"),
        (dict(mla=True), "(MLA) is not supported"),
        (dict(encoder_decoder=True), "cross attention is not supported"),
        (dict(context_parallel_decode=2), "decode context parallelism is not supported"),
        (dict(context_len=2 << 20), "at most 1,048,576 tokens is supported, got 2,097,152"),
        (dict(speculative="EAGLE", topk=4, draft_tokens=8), "got topk 4 (EAGLE); set --speculative-eagle-topk 1"),
        (dict(speculative="EAGLE", topk=1, draft_tokens=9), "at most 8 draft tokens are verified, got 9"),
        (
            dict(speculative="EAGLE", topk=1, draft_tokens=4, draft_worker=True),
            "DRAFT_EXTEND_V2) are not supported; give the draft model another one: --speculative-draft-a",
        ),
    ],
)
def test_servers_refused(changes: dict[str, Any], reason: str) -> None:
    said = refusal(replace(SERVER, **changes, flag="--decode-attention-backend hpc"), [layer()])
    assert said.startswith("--decode-attention-backend hpc: ") and reason in said


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(head_dim=96, qk_head_dim=96, v_head_dim=96), "head_dim: expected one of (64, 128, 256), got 96"),
        (dict(v_head_dim=64), "one head_dim for queries, keys and values is supported, got 128 and 64"),
        (dict(tp_q_head_num=34), "num_q_heads: expected 1 to 16 times num_kv_heads (2), a whole ratio, got 34"),
        (dict(tp_q_head_num=7), "a whole ratio, got 7"),
        (dict(is_cross_attention=True), "got cross attention"),
        (dict(attn_type=SimpleNamespace(value="encoder_only")), "got encoder_only"),
        (dict(use_irope=True), "chunked local attention is not supported"),
        (dict(xai_temperature_len=1024), "a temperature that depends on the position is not supported"),
        (dict(pos_encoding_mode="ALIBI"), "position encodings inside attention are not supported, got ALIBI"),
        (dict(logit_cap=30.0, logit_capping_method="sigmoid"), "the logit cap is a tanh, got sigmoid"),
    ],
)
def test_layers_refused(changes: dict[str, Any], reason: str) -> None:
    said = refusal(replace(SERVER, local_attention=True), [layer(layer_id=0), layer(**changes)])
    assert said.startswith("--attention-backend hpc: layer 3: ") and reason in said


def test_window_of_a_layer_counts_the_token_itself() -> None:
    assert shape_of(layer(sliding_window_size=127)) == Shape(8, 2, 128, 128)
    assert shape_of(layer(sliding_window_size=0)).window == 1
    assert shape_of(layer(sliding_window_size=None)).window is shape_of(layer()).window is None


class Maker:
    """``factory.create`` for a runner on ``device`` whose flags ask for (prefill, decode)."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, device: str, prefill: str, decode: str, reason: str = ""
    ) -> None:
        from hpc_sglang.attention import factory
        from hpc_sglang.record import Record
        from sglang.srt.layers.attention import attention_registry, hybrid_attn_backend

        self.record, self.asked = Record(), []
        config = SimpleNamespace(context_len=4096, is_encoder_decoder=False)
        self.runner = SimpleNamespace(
            device=device, dtype=torch.bfloat16, kv_cache_dtype=torch.bfloat16, page_size=64, model_config=config,
            is_draft_worker=False, use_mla_backend=False, model=torch.nn.Module(),
        )  # fmt: skip
        monkeypatch.setattr(factory, "record", self.record)
        monkeypatch.setattr(factory, "refusal", lambda server, layers: f"{server.flag}: {reason}" if reason else "")
        plan = SimpleNamespace(workspace_bytes=2**20)
        ours = SimpleNamespace(plans={1: {"shape": plan}}, shapes={0: "shape", 1: "shape"}, needs_cpu_seq_lens=False)
        monkeypatch.setattr(factory, "HpcAttentionBackend", lambda *_: ours)
        for name, value in {
            "attention_backends": (prefill, decode), "attention_layers": [], "speculative": (None, 0, 1),
            "deterministic": False, "decode_context_parallel": 1,
        }.items():  # fmt: skip
            monkeypatch.setattr(factory.compat, name, lambda *_, value=value: value)
        monkeypatch.setitem(attention_registry.ATTENTION_BACKENDS, "fa3", lambda runner: "fa3's")
        monkeypatch.setattr(factory, "best_prefill", lambda: "fa3")
        flags = dict(spec_attn_is_decode=False, spec_attn_is_prefill=True)
        pair = lambda runner, **backends: SimpleNamespace(**backends, **flags)  # noqa: E731
        monkeypatch.setattr(hybrid_attn_backend, "HybridAttnBackend", pair)
        self.ours, self.said = ours, []
        self.record.note = self.said.append  # type: ignore[method-assign]
        self.create = lambda: factory.create(self.runner)


def test_on_a_gpu_prefill_is_the_best_installed_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Maker(monkeypatch, "cuda", "hpc", "hpc")
    made = make.create()
    assert (made.prefill_backend, made.decode_backend) == ("fa3's", make.ours)
    # Draft chains are verified by ours, whatever the flag's default.
    assert made.spec_attn_is_decode and not made.spec_attn_is_prefill and made.needs_cpu_seq_lens is False
    assert make.said == [
        "attention: decode by hpc_attention (2 layers, 1 plan(s), 1.0 MiB of workspace); prefill by fa3, the best "
        "installed: hpc_attention has no GPU kernel for it yet"
    ]


def test_what_comes_before_decode_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from hpc_sglang.attention import prologue

    make = Maker(monkeypatch, "cuda", "triton", "hpc")
    monkeypatch.setattr(prologue, "install", lambda model, backend: 2 if backend is make.ours else 0)
    make.create()
    assert ", with Q/K norm, rotation and store in one kernel in 2 of them; prefill by triton" in make.said[0]
    monkeypatch.undo()
    make = Maker(monkeypatch, "cuda", "triton", "hpc")
    del make.runner.model  # another SGLang's: the backend is made all the same
    assert make.create() is make.ours and "Q/K norm and rotation by SGLang (" in make.said[0]


def test_beside_another_prefill_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Maker(monkeypatch, "cuda", "triton", "hpc")
    assert make.create() is make.ours
    assert make.said[0].endswith("; prefill by triton")


def test_on_a_cpu_both_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Maker(monkeypatch, "cpu", "hpc", "hpc")
    assert make.create() is make.ours and make.said[0].endswith("prefill by hpc_attention")


def test_prefill_alone_on_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Maker(monkeypatch, "cuda", "hpc", "fa3")
    with pytest.raises(ValueError, match="^--prefill-attention-backend hpc: prefill has no GPU kernel yet"):
        make.create()


@pytest.mark.parametrize(
    ("prefill", "decode", "flag"),
    [("hpc", "hpc", "--attention-backend"), ("fa3", "hpc", "--decode-attention-backend")],
)
def test_refusal_names_the_flag(monkeypatch: pytest.MonkeyPatch, prefill: str, decode: str, flag: str) -> None:
    with pytest.raises(ValueError, match=f"^{flag} hpc: page_size"):
        Maker(monkeypatch, "cuda", prefill, decode, "page_size").create()


def test_best_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """fa3 where its library loads, then flashinfer, then triton."""
    from hpc_sglang.attention import factory

    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "sgl_kernel", SimpleNamespace())
    assert factory.best_prefill() == "fa3"
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", None)
    monkeypatch.setattr(factory, "find_spec", lambda name: object())
    assert factory.best_prefill() == "flashinfer"
    monkeypatch.setattr(factory, "find_spec", lambda name: None)
    assert factory.best_prefill() == "triton"


INTERPRETED = """
import json, torch
from hpc_sglang.attention import pages
torch.manual_seed(0)
bad = []
for page_size in (1, 16, 64):
    for windowed in (False, True):
        width = 9000 // page_size
        tokens = torch.randint(0, 20000, (6, 9000), dtype=torch.int32)
        rows = torch.tensor([5, 0, 3, 2])
        lengths = torch.tensor([8990, 0, 1, 1025])
        mapping = torch.randint(-1, 20000, (19000,))
        outs = []
        for fill in (pages.fill, pages._fill_cuda):
            out = [torch.full((4,), -7, dtype=torch.int32), torch.full((4, width), -7, dtype=torch.int32)]
            more = [torch.full((4, width), -7, dtype=torch.int32), mapping] if windowed else [None, None]
            source = tokens.clamp(max=18999) if windowed else tokens
            fill(source, rows, lengths, 2, page_size, *out, *more)
            outs.append([*out, more[0]])
        for request, length in enumerate(lengths + 2):
            used = -(-int(length) // page_size)
            for ours, theirs in zip(*(side[1:] for side in outs)):
                if ours is not None and not torch.equal(ours[request, :used], theirs[request, :used]):
                    bad.append((page_size, windowed, request))
            if (outs[1][1][request, used:] != -7).any():
                bad.append((page_size, windowed, request, "wrote past the request"))
        if not torch.equal(outs[0][0], outs[1][0]):
            bad.append((page_size, "lengths"))
print(json.dumps(bad))
"""


def test_page_kernel_writes_what_torch_does() -> None:
    """In Triton's interpreter: more pages than one program's block, an empty request, slots that slid out."""
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_tables_of_an_empty_batch() -> None:
    empty = torch.empty(0, dtype=torch.int32)
    pages.fill(torch.zeros(2, 8, dtype=torch.int32), empty.long(), empty.long(), 0, 4, empty, torch.empty(0, 2).int())

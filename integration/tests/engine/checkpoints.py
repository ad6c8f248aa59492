"""Tiny models with random weights, their prompts, and what transformers says to them greedily.

Weights have a standard deviation of 0.15, so that logits differ by more than bf16's rounding.
"""

import copy
import json
import pathlib
from typing import Any

import torch

VOCABULARY = 512
NEW_TOKENS = 8
CANDIDATES, FINALISTS = 16, 3
_COMMON = dict(
    vocab_size=VOCABULARY, hidden_size=128, intermediate_size=192, num_hidden_layers=2, max_position_embeddings=1024,
    initializer_range=0.15, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
_MOE = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64)
# What SGLang reads of config.json and transformers doesn't write.
_FOR_SGLANG: dict[str, dict[str, Any]] = {
    "hunyuan-v3": dict(route_norm=True, qk_norm=True, first_k_dense_replace=1),
    # Its configuration class takes rope_scaling alone, and a scaling by 1 is none.
    "longcat-flash": dict(
        rope_scaling=dict(rope_type="deepseek_yarn", factor=1.0, original_max_position_embeddings=1024, rope_theta=1e7),
        rope_parameters=None, rope_theta=1e7,
    ),
}  # fmt: skip

# name -> (class, configuration beside the common one)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", dict(num_attention_heads=4, num_key_value_heads=2, head_dim=64)),
    "qwen3-moe": (
        "Qwen3Moe",
        dict(num_attention_heads=12, num_key_value_heads=2, head_dim=128, norm_topk_prob=True, **_MOE),
    ),
    # Grouped-query attention of 8, a dense layer, then experts behind an fp32 gate.
    "hunyuan-v3": (
        "HYV3",
        dict(num_attention_heads=8, num_key_value_heads=1, head_dim=64, num_shared_experts=1, **_MOE),
    ),
    # One layer with a window and one without, of different head counts; the windowed one has a KV pool of its own.
    "laguna": (
        "Laguna",
        dict(
            num_attention_heads=4, num_key_value_heads=2, num_attention_heads_per_layer=[4, 8], head_dim=64,
            sliding_window=24, layer_types=["full_attention", "sliding_attention"],
            mlp_layer_types=["dense", "sparse"], shared_expert_intermediate_size=64, **_MOE,
        ),
    ),
    # Multi-head latent attention, which stays SGLang's; a router with fp32 weights. No zero experts: SGLang's CPU
    # experts don't know them.
    "longcat-flash": (
        "LongcatFlash",
        dict(
            num_layers=1, num_attention_heads=4, ffn_hidden_size=192, q_lora_rank=64, kv_lora_rank=64,
            head_dim=32, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, moe_topk=2, n_routed_experts=8,
            zero_expert_num=0, expert_ffn_hidden_size=64, routed_scaling_factor=1.5,
        ),
    ),
}  # fmt: skip


def make(name: str, folder: pathlib.Path) -> torch.nn.Module:
    """Save the model ``name`` to ``folder`` and return it, in bf16."""
    import transformers

    kind, settings = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**{**_COMMON, **settings})
    torch.manual_seed(1)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16).eval()
    model.save_pretrained(folder)
    file = folder / "config.json"
    kept = {**json.loads(file.read_text()), **_FOR_SGLANG.get(name, {})}
    file.write_text(json.dumps({key: value for key, value in kept.items() if value is not None}))
    return model


@torch.no_grad()
def greedy(model: torch.nn.Module, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For prompts of one length [n, length]: the tokens transformers says [n, NEW_TOKENS], and by how much (in logits)
    each leads the second choice."""
    made = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=NEW_TOKENS,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    leads = torch.stack([-step.float().topk(2).values.diff()[:, 0] for step in made.logits], 1)
    return made.sequences[:, prompts.shape[1] :], leads


def prepare(name: str, folder: pathlib.Path) -> dict[str, Any]:
    """Make the checkpoint, prompts for it and transformers' answers, also saved beside it as answers.json.

    Returns {"prompts", "tokens", "leads"}, each a list of rounds of requests. A round of mixed lengths that cross pages
    and chunks, then one that continues prompts of the first. An engine rounds to bf16 in an order of its own, which may
    turn a close call of logits or of experts. So of several candidates for a prompt's last tokens one is taken whose
    answer is the same in bf16 and in fp32, no mere repetition (which broken attention might get right) and the least
    close call.
    """
    model = make(name, folder)
    exact = copy.deepcopy(model).float()
    generator = torch.Generator().manual_seed(7)

    def choose(prefix: list[int], new: int) -> tuple[list[int], list[int], list[float]]:
        fresh = torch.randint(VOCABULARY, (CANDIDATES, new), generator=generator)
        candidates = torch.cat([torch.tensor(prefix, dtype=torch.long).expand(CANDIDATES, -1), fresh], 1)
        tokens, leads = greedy(exact, candidates)
        various = torch.tensor([len(set(answer)) >= NEW_TOKENS * 2 // 3 for answer in tokens.tolist()])
        # bf16 is slow on most CPUs: only for the best.
        best = (leads.min(1).values + various).topk(FINALISTS).indices
        rounded, rounded_leads = greedy(model, candidates[best])
        leads = torch.minimum(leads[best], rounded_leads)
        winner = int((leads.min(1).values + 2.0 * (rounded == tokens[best]).all(1)).argmax())
        return candidates[best][winner].tolist(), rounded[winner].tolist(), leads[winner].tolist()

    first = [choose([], length) for length in (1, 3, 17, 40, 64, 90, 130, 200)]
    long, longer = first[6][0], first[7][0]
    second = [choose(*case) for case in ((longer, 9), (long, 70), (longer[:150], 5), ([], 33))]
    rounds = zip(*(zip(*round_, strict=True) for round_ in (first, second)), strict=True)
    made = json.dumps(dict(zip(("prompts", "tokens", "leads"), rounds, strict=True)))
    (folder / "answers.json").write_text(made)
    return json.loads(made)


def with_another_gate(name: str, folder: pathlib.Path, prompts: list[list[int]]) -> list[list[int]]:
    """Save to ``folder`` the model of ``make`` with its experts' scores in another order, and nothing else changed.

    Returns what transformers says to ``prompts`` then.
    """
    model = make(name, folder)
    config = (folder / "config.json").read_text()
    with torch.no_grad():
        for parameter, weight in model.named_parameters():
            if parameter.endswith("mlp.gate.weight"):
                weight.copy_(weight.roll(3, 0))
    model.save_pretrained(folder)
    (folder / "config.json").write_text(config)
    return [greedy(model, torch.tensor([prompt]))[0][0].tolist() for prompt in prompts]

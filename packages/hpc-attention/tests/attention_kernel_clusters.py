"""Decode problems of CTAs in clusters: of plans for one request, whose KV heads have a cluster each, and of two."""

from dataclasses import replace

import torch
from attention_kernel_faults import ALONE, ALONE_HEADS, CLUSTER, COUPLES, COUPLES_MIXED, COUPLES_NONE, HEADS
from hpc_attention.support import FP8

BF16, FP16 = torch.bfloat16, torch.float16

CLUSTERS = {
    "alone": ALONE,
    "alone, all tokens": replace(ALONE, lengths=(4096,)),
    "alone, bf16, pages of 16": replace(ALONE, lengths=(1500,), kv_dtype=BF16, num_q_heads=8, page_size=16),
    "alone, bf16, all tokens, 8 of this step": replace(ALONE, lengths=(4089,), kv_dtype=BF16, num_q_heads=1, q_len=8),
    "alone, pages of 32, 4 of this step": replace(
        ALONE, lengths=(258,), num_q_heads=2, q_len=4, page_size=32, k_scale="float", v_scale="float"
    ),
    "alone, fewer tokens than queries": replace(ALONE, lengths=(2,), num_q_heads=2, q_len=4),
    "alone, a token": replace(ALONE, lengths=(1,), kv_dtype=BF16),
    "alone, no tokens": replace(ALONE, lengths=(0,)),
    "alone, heads": replace(HEADS, sinks=False),
    "alone, heads, bf16": replace(HEADS, lengths=(2048,), kv_dtype=BF16, num_q_heads=64, sinks=False),
    "alone, heads, pages of 32": ALONE_HEADS,
    "alone, heads, all tokens": replace(HEADS, lengths=(2048,), num_q_heads=8, sinks=False, page_size=256),
    "alone, 15 heads, no tokens": replace(
        HEADS, lengths=(0,), num_kv_heads=15, num_q_heads=15, num_ctas=120, sinks=False
    ),
    "a cluster": CLUSTER,
    "a cluster, bf16, sinks": replace(ALONE, lengths=(1500,), kv_dtype=BF16, num_q_heads=8, sinks=True),
    "a cluster, fp16, softcap, window": replace(
        ALONE, q_dtype=FP16, kv_dtype=FP16, num_q_heads=2, q_len=4, softcap=8.0, window=1000
    ),
    "a cluster, pages of 16, scales of tokens": replace(ALONE, q_dtype=FP8, page_size=16, k_scale="token"),
    "a cluster, two pieces": replace(ALONE, lengths=(129,), v_scale="head"),
    "a cluster, one piece": replace(CLUSTER, lengths=(100,)),
    "a cluster, no tokens": replace(CLUSTER, lengths=(0,)),
    "a cluster, many slices": replace(ALONE, lengths=(9000,), num_q_heads=1),
    "a cluster a head": HEADS,
    "a cluster a head, bf16": replace(HEADS, lengths=(600,), kv_dtype=BF16, num_q_heads=64),
    "a cluster a head, fp16, window, 15 heads": replace(
        HEADS, q_dtype=FP16, kv_dtype=FP16, num_kv_heads=15, num_q_heads=15, num_ctas=120, q_len=2, window=333
    ),
    "a cluster a head, two pieces, scales": replace(HEADS, lengths=(150,), v_scale="head", k_scale="token"),
    "a cluster a head, a token": replace(HEADS, lengths=(1,), v_scale="float"),
    "a cluster a head, no tokens": replace(HEADS, lengths=(0,)),
}

CLUSTERS |= {
    "couples": COUPLES,
    "couples among others": COUPLES_MIXED,
    "couples, e4m3": replace(COUPLES, lengths=(1020,) * 60, kv_dtype=FP8),
    "no couples, the last piece first": COUPLES_NONE,
    "couples of heads": replace(COUPLES, lengths=(500,) * 8, num_kv_heads=8),
}

"""The README's example runs as it stands, and gives what the reference gives."""

import re
from pathlib import Path

import torch
from hpc_common.metrics import error
from hpc_common.reference import moe as reference

README = Path(__file__).parents[1] / "README.md"


def test_the_example_of_the_readme() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    torch.manual_seed(0)
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    tensors = [names[name] for name in ("x", "w13", "w2", "topk_ids", "topk_weights")]
    want = reference.fused_moe(*tensors, quant="block", w13_scale=names["w13_scale"], w2_scale=names["w2_scale"])
    assert error(names["out"], want).relative_rms <= 0.006

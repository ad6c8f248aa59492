"""The README's example runs as it stands, and gives what the reference gives."""

import re
from pathlib import Path

import pytest
import torch
from hpc_common.reference import attention as reference

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.usefixtures("one_thread")
def test_the_example_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    torch.manual_seed(0)
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    assert "8 requests" in capsys.readouterr().out  # plan.describe()
    some = 3  # requests compared; all of them would take seconds
    arguments = [names[name] for name in ("q", "k_cache", "v_cache", "page_table", "seq_lens")]
    q, k_cache, v_cache, page_table, seq_lens = arguments
    want, _ = reference.decode(
        q[:some], k_cache, v_cache, page_table[:some], seq_lens[:some], k_scale=0.5, v_scale=0.25
    )
    torch.testing.assert_close(names["out"][:some].to(torch.float64), want, rtol=2.0**-8, atol=2.0**-16)

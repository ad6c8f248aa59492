"""The README's example runs as it stands, and gives what the reference gives."""

import re
from pathlib import Path

import pytest
import torch
from hpc_common.reference import router as reference

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.usefixtures("one_thread")
def test_the_example_of_the_readme() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    torch.manual_seed(0)
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    x, weight = names["x"], names["weight"]
    exact = reference.scores(x, weight)
    rms, largest = reference.pool(names["scores"].double() - exact, x, weight, 3)  # linear's: the last ones
    assert rms <= 1 and largest <= 1
    # Of such large scores most sigmoids are 1, so what must hold is told by ids and weights themselves.
    ids, weights = names["ids"], names["weights"]
    assert ids.shape == weights.shape == (32, 8) and all(len(set(row)) == 8 for row in ids.tolist())
    assert all(len({expert // 32 for expert in row}) <= 4 for row in ids.tolist())  # of 8 groups of 32
    torch.testing.assert_close(weights.sum(1), torch.full((32,), 2.5))

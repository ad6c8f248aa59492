"""Rows that a norm has quantised, on their way to what multiplies them next."""

import torch


class Rows:
    """The e4m3 form of at most one tensor, for one reader.

    It is known by the address of the bf16 rows, which are kept alive until then: nothing else can lie there. Whoever
    makes rows forgets the former ones first, so that a reader who never came leaves nothing to a later step.
    """

    def __init__(self) -> None:
        self._made: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def put(self, x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
        """x: [T, H] bf16, contiguous. values: [T, H] e4m3. scales: [T, H / 128] fp32."""
        self._made = (x, values, scales)

    def forget(self) -> None:
        """There are none."""
        self._made = None

    def take(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Values and scales of x, where x is what they were made of; they are gone then. Another x leaves them."""
        made = self._made
        if made is None or made[0].data_ptr() != x.data_ptr() or made[0].shape != x.shape or not x.is_contiguous():
            return None
        self._made = None
        return made[1], made[2]


# For block FP8 projections, by SGLang's own function: one at a time in a process.
linear = Rows()

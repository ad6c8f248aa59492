"""Two GPUs: a call on the one that is not current, and an expert-parallel layer that ends in an all-reduce."""

import pathlib
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hpc_common.poison import bits
from hpc_common.testing import load_script

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
CaseMaker = Callable[..., Any]
RANKS = 2
CALLS = [("block-bf16", 3), ("tensor-e4m3", 60), ("block-e4m3", 300), ("bf16", 40)]


@pytest.mark.parametrize(("name", "tokens"), CALLS)
def test_another_device_than_the_current(name: str, tokens: int, moe_case: CaseMaker) -> None:
    """Tensors on cuda:1 while cuda:0 is current: the same bits, and cuda:0 stays current."""
    first, second = (moe_case(name, tokens=tokens, device=f"cuda:{index}") for index in range(2))
    assert bits(first.run()).cpu().equal(bits(second.run()).cpu())
    assert torch.cuda.current_device() == 0


def test_tensors_of_two_devices_are_refused(moe_case: CaseMaker) -> None:
    case = moe_case("tensor-e4m3", device="cuda:0")
    with pytest.raises(ValueError, match="topk_ids: expected device cuda:0"):
        case.but(topk_ids=case.topk_ids.to("cuda:1")).run()


def rank_of_a_layer(rank: int, make_case: CaseMaker, port: int) -> None:
    """One process: this rank's experts, then the sum over ranks; every rank checks the whole."""
    torch.cuda.set_device(rank)
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("nccl", init_method=address, rank=rank, world_size=RANKS)
    try:
        for name, tokens in CALLS:
            case = make_case(name, tokens=tokens, device=f"cuda:{rank}")
            part = case.rank(rank, RANKS).run()
            parts = [torch.empty_like(part) for _ in range(RANKS)]
            torch.distributed.all_gather(parts, part)
            total = part.clone()
            torch.distributed.all_reduce(total)
            whole = case.run()
            largest = torch.stack([*parts, whole]).float().abs().amax(0)
            off = (total.double() - whole.double()).abs()
            assert (off <= (RANKS + 1) * 2**-8 * largest).all(), f"{name}, {tokens} tokens: off by {off.max()}"
            # A step of a model in a graph: the layer and the all-reduce, replayed.
            graph, out = torch.cuda.CUDAGraph(), torch.empty_like(part)
            mine = case.rank(rank, RANKS)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                mine.run(out=out)
                torch.distributed.all_reduce(out)
            for _ in range(3):
                graph.replay()
            torch.cuda.synchronize()
            assert bits(out).equal(bits(total)), f"{name}, {tokens} tokens: replay differs"
            del graph
    finally:
        torch.distributed.destroy_process_group()


def test_an_expert_parallel_layer_with_an_all_reduce(moe_case: CaseMaker) -> None:
    """Each rank in its own process; their sum is a single rank's result within ranks + 1 bf16 roundings."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(child, args=(port,), nprocs=RANKS)


def child(rank: int, port: int) -> None:
    """The spawned process finds this folder's conftest, not another's."""
    conftest = load_script(pathlib.Path(__file__).parent / "conftest.py", "moe_conftest")
    rank_of_a_layer(rank, conftest.make_case, port)

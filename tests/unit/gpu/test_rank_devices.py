"""Which device and which backend each rank gets, for any number of GPUs."""

import pytest

import outrider.lm  # noqa: F401  # before torch: it says how torch's threads wait

torch = pytest.importorskip("torch")

from outrider.errors import InvalidArgument  # noqa: E402
from outrider.lm.rank_devices import RankDevice, rank_device  # noqa: E402


@pytest.fixture
def gpus(monkeypatch):
    def have(count, nccl=True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)

    return have


CPU = RankDevice(torch.device("cpu"), "gloo")


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_every_rank_has_its_own_gpu(gpus, wanted):
    gpus(4)
    assert [rank_device(wanted, rank, 4) for rank in range(4)] == [
        RankDevice(torch.device("cuda", rank), "nccl") for rank in range(4)
    ]
    assert rank_device("cpu", 2, 4) == CPU


def test_auto_falls_back_for_all_ranks_alike(gpus):
    gpus(1)
    assert rank_device("auto", 0, 2) == rank_device("auto", 1, 2) == CPU
    gpus(2, nccl=False)
    assert rank_device("auto", 0, 2) == CPU
    gpus(0)
    assert rank_device("auto", 0, 2) == CPU


@pytest.mark.parametrize(
    ("wanted", "count", "nccl", "says"),
    [
        ("cuda", 1, True, "2 ranks need a GPU each, 1 are here"),
        ("cuda", 2, False, "no NCCL"),
        ("cuda:1", 2, True, "ranks take GPUs 0, 1, ... themselves"),
        ("tpu", 2, True, "ranks take GPUs 0, 1, ... themselves"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(gpus, wanted, count, nccl, says):
    gpus(count, nccl)
    with pytest.raises(InvalidArgument, match=says) as caught:
        rank_device(wanted, 1, 2)
    assert "device cpu" in str(caught.value)


def test_the_device_is_made_current(monkeypatch):
    used = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    RankDevice(torch.device("cuda", 1), "nccl").use()
    CPU.use()
    assert used == [torch.device("cuda", 1)]

"""`make tune`: which candidate wins, what is written, and what the engine reads. Only the device's clock is made up."""

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from benchmarks.kernels import trials, tune
from benchmarks.kernels.contest import MARGIN, Call, Choice, Contest, Point, compile_all
from nanovllm.kernels import cards
from nanovllm.kernels.linear.choice import choose_linear
from nanovllm.kernels.moe import grouped_mlp as grouped_mlp_module
from nanovllm.kernels.moe.grouped_mlp import Tile, choose_tile, grouped_mlp
from nanovllm.layers import experts as layer
from tests.kernels.as_card import as_card

CPU = torch.device("cpu")
Times = dict[str, list[float | None]]  # of a kernel, at each point; None: it does not run there


def contest(times: Times, now: str = "library", **when: Any) -> Contest:
    """Between kernels that take so many microseconds."""

    def point(i: int) -> Point:
        def run(choice: Choice) -> Call:
            time = times[dict(choice)["kernel"]][i]
            if time is None:
                raise RuntimeError("out of shared memory")
            return lambda: time

        return Point(f"point {i}", run)

    points = [point(i) for i in range(len(next(iter(times.values()))))]
    return Contest("linear", when, points, [(("kernel", name),) for name in times], (("kernel", now),))


def made_up(call: Call, calls: int) -> float:
    time: Any = call()
    return float(time)


def winner(times: Times, now: str = "library") -> str:
    (outcome,) = tune.tune([contest(times, now)], made_up)
    return str(dict(outcome.chosen)["kernel"])


def test_the_least_slowdown_wins() -> None:
    """Over all points alike: a short time counts as much as a long one."""
    assert winner({"library": [10.0, 100.0], "skinny": [5.0, 110.0]}) == "skinny"
    assert winner({"library": [10.0, 100.0], "skinny": [11.0, 60.0], "tiled": [7.0, 80.0]}) == "tiled"


def test_the_table_keeps_its_place_unless_it_clearly_costs_something() -> None:
    for now, other in ("library", "skinny"), ("skinny", "library"):
        assert winner({now: [10.0], other: [10 / (1 + MARGIN) + 0.01]}, now) == now
        assert winner({now: [10.0], other: [10 / (1 + MARGIN) - 0.01]}, now) == other


def test_what_does_not_run_on_a_card_cannot_win(capsys: pytest.CaptureFixture[str]) -> None:
    assert winner({"library": [10.0, 10.0], "skinny": [1.0, None]}) == "library"
    assert winner({"library": [None, 10.0], "skinny": [20.0, 20.0]}) == "skinny"
    capsys.readouterr()
    none, some = contest({"library": [None]}, tokens=[1, 16]), contest({"library": [3.0]}, tokens=[17, 32])
    outcomes = tune.tune([none, some], made_up)
    assert [outcome.contest for outcome in outcomes] == [some]
    assert "nothing runs for linear {'tokens': [1, 16]}: out of shared memory" in capsys.readouterr().out


def test_all_candidates_are_launched_beforehand() -> None:
    """Those that fail included: that is for the contest to find."""
    launched = []

    def run(choice: Choice) -> Call:
        if choice == (("kernel", "tiled"),):
            raise RuntimeError("out of shared memory")
        return lambda: launched.append(choice)

    names = [(("kernel", name),) for name in ("library", "skinny", "tiled")]
    now = (("kernel", "weight_prefetch"),)
    compile_all([Contest("linear", {}, [Point("first", run), Point("second", run)], names, now)])
    assert sorted(launched) == [*names[:2], now]


def test_it_says_what_was_chosen_and_what_the_table_would_have_cost() -> None:
    times: Times = {"library": [9.0], "skinny": [6.0], "tiled": [8.0], "weight_prefetch": [7.0]}
    outcomes = tune.tune([contest(times), contest({"library": [5.0]})], made_up)
    lines = str(outcomes[0]).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["1.00", "6.0", "kernel=skinny", "<-", "chosen"],
        ["1.17", "7.0", "kernel=weight_prefetch"],
        ["1.33", "8.0", "kernel=tiled"],
        ["1.50", "9.0", "kernel=library", "<-", "table"],
    ]
    said = tune.summary("linear", outcomes)
    assert said == "linear: 1 of 2 choices are not the table's; there what the table gives takes 1.50 times as long"


def test_few_rows_say_the_same(tmp_path: Path) -> None:
    """Whatever wins where, the file gives it back at every number of tokens and every size."""
    borders, kib = [(1, 16), (17, 32), (33, 64)], [(0, 100.0), (100.0, 300.0), (300.0, float("inf"))]
    names = {"l": "library", "s": "skinny"}
    wins = dict(zip(product(borders, kib), [*"lss", *"sss", *"lll"], strict=True))
    contests = [
        contest({names[name]: [1.0]}, names[name], layer=kind, hidden=[1, 2048], kib=list(size), tokens=list(tokens))
        for kind in ("plain", "gated")
        for (tokens, size), name in wins.items()
    ]
    rows = tune.rows_of(tune.tune(contests, made_up))
    assert len(rows) < len(contests) / 2
    tune.write({"linear": rows}, tmp_path / "9.0.toml", "made up")
    read = cards.read_rows(tmp_path / "9.0.toml")["linear"]
    for kind, ((tokens, size), name) in product(("plain", "gated"), wins.items()):
        for n in tokens:
            middle = min(size[1], 1000.0) - 1
            found = cards.first_fit(read, kind, tokens=n, kib=middle, hidden=1024, shared_kib=99)
            assert found == {"kernel": names[name]}, (kind, n, middle)
    with pytest.raises(StopIteration):
        cards.first_fit(read, "plain", tokens=1, kib=1, hidden=4096, shared_kib=99)


def test_the_engine_takes_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The experts' own kernels run, two of their own candidates, by a clock that favours one of them."""
    sizes = {"hidden_size": 40, "moe_intermediate_size": 24, "num_experts": 2, "num_experts_per_tok": 1}
    shape, path = tmp_path / "config.json", tmp_path / "tuning" / "8.6.toml"
    shape.write_text(json.dumps(sizes))
    favoured = Tile(16, 32, 128, 8, 3)
    every, launch, launched = trials.expert_tiles, grouped_mlp_module.grouped_linear, []

    def one(*arguments: Any) -> list[Choice]:
        return [choice for choice in every(*arguments) if Tile(**dict(choice)) == favoured]

    def noted(*arguments: Any, **how: Any) -> Tensor:
        launched.append(arguments[-1])
        return launch(*arguments, **how)

    def clock(call: Call, calls: int) -> float:
        call()
        return 1.0 if launched[-1] == favoured else 2.0

    monkeypatch.setattr(trials, "MOE", shape)
    monkeypatch.setattr(trials, "ROUTINGS", 1)
    monkeypatch.setattr(trials, "PER_EXPERT", [(4, [3], [16])])
    monkeypatch.setattr(trials, "expert_tiles", one)
    monkeypatch.setattr(grouped_mlp_module, "grouped_linear", noted)
    outcomes = tune.tune(trials.experts(CPU), clock)
    assert len(outcomes) == 2 and len(set(launched)) == 3, "the table has another tile for each product"
    tune.write({"experts": tune.rows_of(outcomes)}, path, "made up")

    with as_card((8, 6), user_file=path):
        tiles = {n: [choose_tile(CPU, 2, n, n, 2, gated) for gated in (True, False)] for n in (1, 8, 9)}
        assert tiles[1] == tiles[8] == [favoured, favoured] and favoured not in tiles[9]
        x, gate_up, down = (torch.randn(shape).half() / 8 for shape in ((3, 40), (2, 48, 40), (2, 40, 24)))
        routing = layer.route(torch.randn(3, 2), 1, normalise=True)
        torch.testing.assert_close(
            grouped_mlp(x, gate_up, down, *routing), layer.grouped_mlp(x, gate_up, down, *routing)
        )
        assert launched[-2:] == [favoured, favoured]
    assert choose_tile(CPU, 2, 1, 1, 2, gated=True) != favoured, "elsewhere nothing has changed"


def linear_on(card: tuple[int, int], path: Path, num_tokens: int = 8) -> Any:
    with as_card(card, user_file=path):
        return choose_linear(num_tokens, torch.empty(1024, 1024, dtype=torch.float16, device="meta"))


def test_rows_of_the_user_come_first_and_the_rest_is_the_tables(tmp_path: Path) -> None:
    path = tmp_path / "8.9.toml"
    assert linear_on((8, 9), path).func.__name__ == "skinny_linear", "there is no file yet"
    tile = "columns = 32, inner = 128, num_stages = 2, swapped = false"
    path.write_text(f"linear = [ {{ layer = 'plain', tokens = [5, 16], kernel = 'tiled', {tile} }} ]")
    assert linear_on((8, 9), path).keywords["tile"].num_stages == 2
    assert linear_on((8, 9), path, num_tokens=4).func.__name__ == "skinny_linear"
    path.write_text(path.read_text().replace("{ layer", "{ cards = ['9.0'], layer"))
    assert linear_on((8, 9), path).func.__name__ == "skinny_linear", "the row is for another card"
    with as_card((8, 9), user_file=path):
        assert choose_tile(CPU, 2, 1, 8, 128, gated=True).pairs == 16


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cards.user_file((12, 0)) == tmp_path / "nanovllm" / "tuning" / "12.0.toml"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cards.user_file((8, 6)) == tmp_path / ".cache" / "nanovllm" / "tuning" / "8.6.toml"


SKINNY = "kernel = 'skinny'"
BAD = [
    ("linear = [", "Invalid"),
    ("linear = 3", "'linear' with 3"),
    ("linear = [3]", r"'linear' with \[3\]"),
    ("experts = [ { pairs = 16 } ]", "columns, inner_bytes, num_stages, num_warps missing"),
    (f"linears = [ {{ {SKINNY} }} ]", "linears"),
    ("linear = [ { tokens = [1, 2] } ]", "no kernel None"),
    ("linear = [ { kernel = 'fast' } ]", "no kernel 'fast'"),
    ("linear = [ { kernel = 'experts' } ]", "no kernel 'experts'"),
    ("linear = [ { kernel = ['skinny'] } ]", "no kernel"),
    (f"linear = [ {{ {SKINNY}, token = [1, 2] }} ]", "token missing or unknown"),
    (f"linear = [ {{ {SKINNY}, head_dim = [1, 2] }} ]", "head_dim missing or unknown"),
    ("linear = [ { kernel = 'weight_prefetch' } ]", "most missing or unknown"),
    ("linear = [ { kernel = 'weight_prefetch', most = 48 } ]", "most cannot be 48"),
    ("linear = [ { kernel = 'weight_prefetch', most = true } ]", "most cannot be True"),
    (f"linear = [ {{ {SKINNY}, tokens = [1] }} ]", "tokens cannot be"),
    (f"linear = [ {{ {SKINNY}, tokens = 16 }} ]", "tokens cannot be 16"),
    (f"linear = [ {{ {SKINNY}, tokens = ['1', '2'] }} ]", "tokens cannot be"),
    (f"linear = [ {{ {SKINNY}, layer = 'wide' }} ]", "layer cannot be 'wide'"),
    (f"linear = [ {{ {SKINNY}, cards = '9.0' }} ]", "cards cannot be '9.0'"),
    ("linear = [ { kernel = 'weight_prefetch', most = 0 } ]", "most cannot be 0"),
    ("decode = [ { tile_kib = 16, num_warps = 3, num_stages = 3, programs_per_sm = 3 } ]", "num_warps cannot be 3"),
    ("prefill = [ { rows = 64, tile_kib = 16, num_warps = 4, num_stages = 3, tma = 1 } ]", "tma cannot be 1"),
]


@pytest.mark.parametrize(("text", "said"), BAD)
def test_a_file_that_is_wrong(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "8.9.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=said) as raised:
        linear_on((8, 9), path)
    assert str(path) in str(raised.value) and "write it anew with `make tune`, or delete it" in str(raised.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "8.9.toml"
    path.mkdir()
    with pytest.raises(ValueError, match=r"8.9.toml is no table of kernels: .*directory.*make tune"):
        linear_on((8, 9), path)
    path.rmdir()
    path.write_bytes(b"linear = [] # \xff")
    with pytest.raises(ValueError, match=r"8.9.toml is no table of kernels: .*utf-8.*make tune"):
        linear_on((8, 9), path)


def test_the_table_has_a_row_for_everything() -> None:
    """On cards that exist, on cards to come, and where there is no GPU."""
    for card in None, (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1), (13, 0):
        rows = cards.rows_for(card)
        for tokens, size in product((1, 16, 17, 64, 65, 256), (1, 2**14, 2**20)):
            for kind, hidden in product(cards.LAYERS, (128, 2048, 2049)):
                sizes: dict[str, Any] = {"tokens": tokens, "kib": size, "hidden": hidden}
                small, found = (cards.first_fit(rows["linear"], kind, **sizes, shared_kib=n) for n in (99, 227))
                assert small["kernel"] != "tiled", "it does not fit"
                assert found["kernel"] != "weight_prefetch" or card == (9, 0)
                assert found["kernel"] == "library" or card != (7, 5)
            for kind in ("gated", "plain"):
                assert cards.first_fit(rows["experts"], kind, tokens=tokens, per_expert=tokens / 8, itemsize=2)["pairs"]
        for head_dim, itemsize, block_size in product((16, 64, 128, 256), (2, 4), (16, 64, 256)):
            assert cards.first_fit(rows["decode"], None, head_dim=head_dim, itemsize=itemsize)
            found = cards.first_fit(rows["prefill"], None, head_dim=head_dim, itemsize=itemsize, block_size=block_size)
            assert not found.get("tma") or card == (9, 0)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["tune"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as raised:
        tune.main()
    assert raised.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("this measures a GPU, and this machine has none")

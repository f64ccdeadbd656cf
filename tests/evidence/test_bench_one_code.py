"""bench_one_code.py: its models of the forms, itself at toy size, and the committed figures."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import hotcore  # noqa: E402
from evidence import bench_one_code as bench  # noqa: E402
from evidence import bench_storage  # noqa: E402
from evidence.bench_one_code import FIXED, TOKEN4  # noqa: E402
from timing import RESULTS  # noqa: E402

pytestmark = pytest.mark.usefixtures("seeded_torch")
ALL, ROWS_95, COLUMNS_95, BIAS = (
    bench.FIGURES.index(name) for name in ("all", "rows: 95 %", "columns: 95 %", "bias")
)


@pytest.mark.parametrize("form", [replace(TOKEN4, scale="bf16"), TOKEN4])
def test_what_is_kept_comes_back_unbiased(form: bench.Form) -> None:
    """Within half a step and half a 16th of u, in the mean u.

    Groups of zeros and lone features come back, too.
    """
    u = torch.randn(5, 80) * torch.tensor([[1.0], [1e-3], [1e4], [1.0], [0.0]])
    u[3, 32:64] = 0
    u[0, 64:] *= 1e-8  # below the smallest scale of a group, 2^-15 of the token's
    draws = torch.stack([bench.kept(u, form) for _ in range(4000)])
    step = torch.nn.functional.pad(u, (0, 16)).view(5, 3, 32).abs().amax(-1, keepdim=True) / 7.5
    if form.scale == "byte":
        step = torch.maximum(step, step.amax(1, keepdim=True) * 2.0**-15 * (step > 0))
    step = (step * (1 + 2**-4) * (1 + 2**-7)).expand(5, 3, 32).reshape(5, 96)[:, :80]
    assert bool(((draws - u).abs() <= step * (1 / 2 + 1 / 34)).all())
    # Uniform errors have sqrt(1/12) of a step.
    assert bool(((draws.mean(0) - u).abs() <= 5 * step / math.sqrt(12 * 4000)).all())
    assert not draws[:, 4].any() and not draws[:, 3, 32:64].any()


def test_shared_bytes() -> None:
    """Sixteen neighbours have sixteen different sixteenths; every byte is as likely."""
    found = bench.shared_bytes(20_000, 40)
    assert found.shape == (20_000, 40) and int(found.min()) == 0 and int(found.max()) == 255
    for part in (found[:, :16], found[:, 16:32]):
        assert bool(((part // 16).sort(1).values == torch.arange(16)).all())
    counts = torch.bincount(found[:, 5], minlength=256).double()
    assert float(((counts - 20_000 / 256) ** 2).sum() / (20_000 / 256)) < 255 + 5 * 510**0.5


def test_rounding_of_contributions_is_unbiased() -> None:
    x = torch.randn(6, 48)
    for kind in ("byte", "independent"):
        mean = sum(bench.contributions(x, kind) for _ in range(4000)) / 4000
        step = x.abs().amax(1, keepdim=True) / 127
        assert bool(((mean - x).abs() <= step * (1 / 512 + 5 * 0.5 / 4000**0.5)).all())
    assert bool(((bench.contributions(x, "nearest") - x).abs() <= 0.501 * step).all())


def test_sizes_of_features() -> None:
    """Powers of two near the root of the size, beyond a factor of 4 of the geometric mean."""
    v = torch.randn(400, 256)
    v[:, 0] *= 64
    v[:, 1] /= 64
    v[:, 2] *= 2.5
    v[:, 3] = 0
    v *= torch.randn(400, 1).exp()
    v[7] = 0
    band = bench.feature_sizes(v, TOKEN4)
    assert band[0] == 8 and band[1] == 1 / 8
    assert band[2] == 1 and band[3] == 1 and bool((band[4:] == 1).all())
    again = bench.feature_sizes(v * 2.0 ** torch.randint(-20, 20, (400, 1)), TOKEN4)
    assert torch.equal(again, band)  # tokens' own sizes do not count
    assert bench.feature_sizes(v, replace(TOKEN4, sizes="round"))[2] == 2
    assert bench.feature_sizes(v, replace(TOKEN4, sizes="truncate"))[2] == 1
    assert bench.feature_sizes(v, replace(TOKEN4, exponent=1))[0] == 64
    assert bool((bench.feature_sizes(v, replace(TOKEN4, sizes="none")) == 1).all())
    assert bool((bench.feature_sizes(torch.zeros(4, 8), TOKEN4) == 1).all())


def test_transform_of_any_width_is_undone() -> None:
    blocks = {48: 16, 64: 64, 96: 32, 100: 16, 114: 64, 144: 32, 170: 16, 171: 64}
    for width, n in blocks.items():
        assert bench.block_of(width, TOKEN4) == n, width
        v = torch.randn(3, width)
        back = bench.turned_back(bench.rotated(v, FIXED, n), FIXED, n, width)
        assert torch.allclose(back, v, atol=1e-5)


def test_half_of_the_tokens() -> None:
    """So many as it says, and in the mean all of them."""
    codes, x = torch.randn(64, 8), torch.randn(64, 5) * torch.randn(64, 1).exp()
    exact, total = codes.T @ x, torch.zeros(8, 5)
    for _ in range(3000):
        some, part = bench.half_of(codes, x)
        assert abs(len(some) - 32) <= 1
        total += some.T @ part
    assert float((total / 3000 - exact).norm() / exact.norm()) < 0.06
    codes[10:] = 0  # few enough: all that count
    some, part = bench.half_of(codes, x)
    assert torch.allclose(some.T @ part, codes.T @ x, atol=1e-5)


@pytest.mark.parametrize("case", ["Gauss", "log-normal token sizes"])
def test_models_of_today(case: str) -> None:
    """Errors as libhot's own, g_w with x in 4 and in 8 bits and g_x."""
    gy, x = (v.astype(np.float32) for v in bench_storage.cases(np.random.default_rng(0))[case])
    w = np.random.default_rng(1).standard_normal((gy.shape[1], x.shape[1])).astype(np.float32)
    exact = gy.astype(np.float64).T @ x, gy.astype(np.float64) @ w
    gy_t, w_t, x_t = map(torch.from_numpy, (gy, w, x))
    for bits in (8, 4):
        config = hotcore.HotConfig(storage=f"int{bits}")
        square = [0.0, 0.0]
        for key in range(4):
            found = hotcore.backward_linear(gy, w, x, config=config, key=key)
            for at, value in enumerate((found.gw, found.gx)):
                square[at] += float(((value - exact[at]) ** 2).sum()) / float(
                    (exact[at] ** 2).sum()
                )
        draws = bench.today(bits, gy_t, x_t), bench.today_input(gy_t, w_t)
        for at, draw in enumerate(draws):
            mine = bench.measured(draw, torch.from_numpy(exact[at]), 4)[ALL]
            assert mine == pytest.approx((square[at] / 4) ** 0.5, rel=0.06), (bits, at)


WORSE = {"x of mean 10, g_y adding up to 0": 1.4, "one token × 1000, with its gradient": 1.1}
"""Cases in which 4 bits have more error than `default`, and how many times at most."""


def check_order(report: dict[str, Any], slack: float) -> None:
    """What the choices rest on, on every set of captured layers; slack for few draws."""
    assert set(report["layers"]) == set(bench.SETS)
    for name, choices in report["layers"].items():
        today, chosen = choices["today"], choices["chosen"]
        four = chosen["token4"]
        assert chosen["token8"][ALL] < four[ALL] < slack * today["default"][ALL], name
        assert choices["scales"]["groups of 16, a byte"][ALL] < slack * four[ALL], name
        assert four[ALL] < slack * choices["scales"]["groups of 64, bf16"][ALL], name
        assert four[ALL] < choices["not built"]["x in 2 bits"][ALL], name
        for choice in ("dither", "contributions", "signs"):  # cheaper, not worse
            for title, row in choices[choice].items():
                base = chosen["token8" if "token8" in title else "token4"]
                assert base[ALL] < (1.07 if "token8" in title else 1.02) * slack * row[ALL], title
    outliers = report["layers"]["GPT, outliers"]
    assert outliers["chosen"]["token4"][ALL] < 0.1 * outliers["today"]["default"][ALL]
    assert outliers["chosen"]["token8"][ALL] < 0.1 * outliers["today"]["accurate"][ALL]
    four = outliers["chosen"]["token4"]
    assert 2 * four[COLUMNS_95] < outliers["sizes"]["none"][COLUMNS_95]
    for name, rows in report["gx"].items():
        assert rows["one code"][ALL] < rows["today"][ALL], name


def test_at_toy_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one-code.json"
    bench.main(["--quick", "--processes", "1", "--json", str(path)])
    report = json.loads(path.read_text())
    check_order(report, slack=1.1)
    assert capsys.readouterr().out.count("g_w: ") == len(bench.SETS) + len(bench.QUICK_CASES)
    logs = report["cases"]["features log-normal 1.5"]
    assert logs["chosen"]["token4"][ALL] < 0.8 * logs["sizes"]["none"][ALL]
    with pytest.raises(SystemExit):
        bench.main(["--at", "300", "--json", str(path)])


def test_committed_figures() -> None:
    report = json.loads((RESULTS / "one-code.json").read_text())
    check_order(report, slack=1.0)
    for name, choices in report["layers"].items():  # what comes off has 16 levels, and no bias
        sixteen = choices["dither"]["16 levels, shared by 16 features"]
        assert sixteen[BIAS] > 0.05 * sixteen[ALL], name
        assert choices["chosen"]["token4"][BIAS] < sixteen[BIAS] / 2, name
    assert set(report["cases"]) == set(bench.cases(torch.Generator()))
    for name, of in report["cases"].items():
        assert {choice: list(rows) for choice, rows in of.items()} == {
            "today": list(bench.TODAY),
            "chosen": list(bench.CHOSEN),
            **{choice: list(rows) for choice, rows in bench.CHOICES.items()},
        }
        worse = WORSE.get(name, 1)
        assert of["chosen"]["token4"][ALL] < worse * of["today"]["default"][ALL], name
        assert of["chosen"]["token8"][ALL] < 1.1 * of["today"]["accurate"][ALL], name
